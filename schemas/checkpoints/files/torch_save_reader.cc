// SPDX-License-Identifier: Apache-2.0
// A torch.save file of nested dicts, lists and tuples, flattened as torch.distributed.checkpoint flattens
// state dicts.
#include <fmt/format.h>

#include <algorithm>
#include <set>

#include "checkpoints/files/readers.h"
#include "checkpoints/files/zip_writer.h"
#include "shardplan/schemas/printable.h"

namespace shardplan {
namespace {

using Kind = PickleValue::Kind;
constexpr std::size_t kMostKeyDepth = 64;

class StateFlattener {
 public:
  StateFlattener(const TorchArchive& archive, Checkpoint& checkpoint)
      : archive_(archive), checkpoint_(checkpoint), most_entries_(4 * archive.values() + 16) {}

  Status Run() {
    const PickleValue& root = archive_.root();
    if (!IsMapping(root)) return archive_.ErrorAt(root, "the file's value is no state dict", {}, "a dict");
    return Visit(root);
  }

 private:
  static bool IsSequence(const PickleValue& value) {
    return value.kind == Kind::kList || value.kind == Kind::kTuple;
  }
  // Lists and tuples stay whole unless there are tensors or dicts in them.
  static bool IsLeaf(const PickleValue& value, int depth = 0) {
    if (IsMapping(value)) return false;
    if (!IsSequence(value) || depth > static_cast<int>(kMostKeyDepth)) return true;
    return std::ranges::none_of(value.items, [&](const PickleValue* item) {
      return TorchArchive::IsTensor(*item) || !IsLeaf(*item, depth + 1);
    });
  }

  Status Visit(const PickleValue& value) {
    if (keys_.size() > kMostKeyDepth) return archive_.ErrorAt(value, "dicts are nested too deep");
    if (TorchArchive::IsTensor(value)) return AddTensor(value);
    if (IsLeaf(value)) return AddObject(value);
    Status status;
    if (IsSequence(value)) {
      const auto place = value.kind == Kind::kList ? CheckpointKey::Kind::kIndex : CheckpointKey::Kind::kItem;
      for (std::size_t i = 0; i < value.items.size() && status; ++i)
        status = Under({place, fmt::format("{}", i)}, *value.items[i]);
      return status;
    }
    ForEachPair(value, [&](const PickleValue& key, const PickleValue& of) {
      if (key.kind == Kind::kString) {
        status = Under({CheckpointKey::Kind::kText, key.text}, of);
      } else if (key.kind == Kind::kInt) {
        status = Under({CheckpointKey::Kind::kNumber, fmt::format("{}", key.integer)}, of);
      } else {
        status = archive_.ErrorAt(key, "a key of a dict that is neither a string nor a number");
      }
      return status.has_value();
    });
    return status;
  }

  Status Under(CheckpointKey key, const PickleValue& value) {
    keys_.push_back(std::move(key));
    Status status = Visit(value);
    keys_.pop_back();
    return status;
  }

  Result<std::string> NewName(const PickleValue& value) {
    std::string name = JoinKeys(keys_);
    if (!names_.insert(name).second)
      return archive_.ErrorAt(value, "two values have one name when their keys are joined", Printable(name));
    if (names_.size() > most_entries_) return archive_.ErrorAt(value, "one dict under ever more keys");
    checkpoint_.keys.emplace(name, keys_);
    return name;
  }

  Status AddTensor(const PickleValue& value) {
    Result<std::string> name = NewName(value);
    if (!name) return std::unexpected(name.error());
    Result<TorchTensor> tensor = archive_.Tensor(value);
    if (!tensor) return std::unexpected(tensor.error());
    if (CheckedNumel(tensor->size, tensor->dtype) < 0 || std::ssize(tensor->size) > kMostTensorDims)
      return archive_.ErrorAt(value, "no shape of a tensor",
                              fmt::format("[{}]", fmt::join(tensor->size, ", ")),
                              fmt::format("at most {} dimensions", kMostTensorDims));
    CheckpointPiece piece{0, tensor->offset, std::vector<std::int64_t>(tensor->size.size(), 0), tensor->size,
                          std::move(tensor->strides)};
    checkpoint_.tensors.push_back(
        {std::move(*name), tensor->dtype, std::move(tensor->size), {std::move(piece)}});
    return {};
  }

  Status AddObject(const PickleValue& value) {
    Result<std::string> name = NewName(value);
    if (!name) return std::unexpected(name.error());
    PickleWriter pickle;
    if (Status status = pickle.Value(value); !status)
      return archive_.ErrorAt(value, status.error().message, Printable(*name));
    checkpoint_.objects.push_back({std::move(*name), TorchArchiveOf(pickle.Finish())});
    return {};
  }

  const TorchArchive& archive_;
  Checkpoint& checkpoint_;
  const std::size_t most_entries_;
  std::vector<CheckpointKey> keys_;
  std::set<std::string> names_;
};

}  // namespace

Result<Checkpoint> ReadTorchSave(const std::string& path) {
  const Result<InputFile> file = InputFile::Open(path);
  if (!file) return std::unexpected(file.error());
  const Result<TorchArchive> archive = TorchArchive::Open(*file, 0, file->size());
  if (!archive) return std::unexpected(archive.error());
  Checkpoint checkpoint{.format = CheckpointFormat::kTorchSave, .path = path};
  (void)AddFile(checkpoint, *file);
  if (Status status = StateFlattener(*archive, checkpoint).Run(); !status)
    return std::unexpected(status.error());
  return checkpoint;
}

}  // namespace shardplan
