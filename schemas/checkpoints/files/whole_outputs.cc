// SPDX-License-Identifier: Apache-2.0
// Files of whole tensors: torch.save and safetensors.
#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <tuple>

#include "checkpoints/files/little_endian.h"
#include "checkpoints/files/outputs.h"
#include "checkpoints/files/readers.h"
#include "checkpoints/files/safetensors_dtypes.h"
#include "checkpoints/files/zip_writer.h"
#include "shardplan/schemas/printable.h"

namespace shardplan {
namespace {

constexpr std::size_t kMostNestedKeys = 150;
constexpr std::int64_t kMostListIndex = 1'000'000;

std::int64_t BytesOf(const CheckpointTensor& tensor) {
  return CheckedNumel(tensor.shape, tensor.dtype) * SizeBytes(tensor.dtype);
}

// ---- torch.save ----

// A dict, a list, a tuple, a tensor or an object of the nested state.
struct StateNode {
  std::int32_t tensor = -1, object = -1;
  std::vector<std::pair<CheckpointKey, StateNode>> children;  // in the order of the checkpoint
  std::map<std::pair<int, std::string>, std::size_t> by_key;
};

class TorchSaveOutput final : public CheckpointOutput {
 public:
  TorchSaveOutput(const Checkpoint& checkpoint, std::string name)
      : checkpoint_(checkpoint), name_(std::move(name)) {}

  Status Nest(bool tensors_only) {
    for (std::size_t t = 0; t < checkpoint_.tensors.size(); ++t) {
      const Result<StateNode*> node = NodeOf(checkpoint_.tensors[t].name);
      if (!node) return std::unexpected(node.error());
      (*node)->tensor = static_cast<std::int32_t>(t);
    }
    for (std::size_t o = 0; o < checkpoint_.objects.size() && !tensors_only; ++o) {
      const Result<StateNode*> node = NodeOf(checkpoint_.objects[o].name);
      if (!node) return std::unexpected(node.error());
      (*node)->object = static_cast<std::int32_t>(o);
    }
    PickleWriter pickle;
    if (Status status = Write(root_, pickle); !status) return status;
    pickle_ = pickle.Finish();
    return {};
  }

  std::int32_t files() const override { return 1; }
  Result<OutputFile> Make(std::int32_t /*file*/) override {
    OutputFile output{.name = name_};
    ZipWriter zip(output);
    BeginTorchArchive(zip, pickle_);
    for (std::size_t s = 0; s < storages_.size(); ++s) {
      const CheckpointTensor& tensor = checkpoint_.tensors[storages_[s]];
      zip.AddData(fmt::format("data/{}", s), storages_[s], std::vector<std::int64_t>(tensor.shape.size(), 0),
                  tensor.shape, BytesOf(tensor));
    }
    EndTorchArchive(zip);
    return output;
  }

 private:
  // The kind of a node with that key: in a dict all keys are text but places.
  static CheckpointKey::Kind KindOf(const CheckpointKey& key) {
    return key.IsPlace() ? key.kind : CheckpointKey::Kind::kText;
  }
  static CheckpointKey::Kind KindOf(const StateNode& node) { return KindOf(node.children.front().first); }

  // A new place in the nested state.
  Result<StateNode*> NodeOf(const std::string& name) {
    const auto known = checkpoint_.keys.find(name);
    const std::vector<CheckpointKey> keys =
        known != checkpoint_.keys.end() ? known->second
                                        : std::vector<CheckpointKey>{{CheckpointKey::Kind::kText, name}};
    if (keys.size() > kMostNestedKeys) return MakeInputError({}, "nested too deep", Printable(name));
    StateNode* node = &root_;
    for (const CheckpointKey& key : keys) {
      const bool other = !node->children.empty() && KindOf(*node) != KindOf(key);
      if (node->tensor >= 0 || node->object >= 0 || other || (node == &root_ && key.IsPlace()))
        return MakeInputError({}, "two values need one place in the nested state", Printable(name));
      const auto [at, is_new] =
          node->by_key.try_emplace({static_cast<int>(key.kind), key.text}, node->children.size());
      if (is_new) node->children.push_back({key, {}});
      node = &node->children[at->second].second;
    }
    if (node->tensor >= 0 || node->object >= 0 || !node->children.empty())
      return MakeInputError({}, "two values need one place in the nested state", Printable(name));
    return node;
  }

  Status Write(const StateNode& node, PickleWriter& pickle) {
    if (node.tensor >= 0) {
      const CheckpointTensor& tensor = checkpoint_.tensors[node.tensor];
      WriteTorchTensor(pickle, tensor.dtype, tensor.shape, fmt::format("{}", StorageOf(node.tensor)));
      return {};
    }
    if (node.object >= 0) return WriteObject(checkpoint_.objects[node.object], pickle);
    if (!node.children.empty() && node.children.front().first.IsPlace()) return WriteSequence(node, pickle);
    pickle.Op('}');
    for (const auto& [key, child] : node.children) {
      pickle.Mark();
      if (key.kind == CheckpointKey::Kind::kNumber) {
        pickle.Int(std::stoll(key.text));
      } else {
        pickle.String(key.text);
      }
      if (Status status = Write(child, pickle); !status) return status;
      pickle.Op('u');
    }
    return {};
  }

  Status WriteSequence(const StateNode& node, PickleWriter& pickle) {
    std::map<std::int64_t, const StateNode*> items;
    for (const auto& [key, child] : node.children) items.emplace(std::stoll(key.text), &child);
    if (items.begin()->first < 0 || items.rbegin()->first > kMostListIndex)
      return MakeInputError({}, "no index of a list", fmt::format("{}", items.rbegin()->first));
    const bool is_tuple = KindOf(node) == CheckpointKey::Kind::kItem;
    if (!is_tuple) pickle.Op(']');
    pickle.Mark();
    std::int64_t next = 0;
    for (const auto& [index, child] : items) {
      for (; next < index; ++next) pickle.None();  // as torch.distributed.checkpoint fills gaps
      if (Status status = Write(*child, pickle); !status) return status;
      ++next;
    }
    pickle.Op(is_tuple ? 't' : 'e');
    return {};
  }

  Status WriteObject(const CheckpointObject& object, PickleWriter& pickle) const {
    const InputFile bytes = InputFile::OfBytes(
        fmt::format("{} (value {})", checkpoint_.path, Printable(object.name)), object.archive);
    const Result<TorchArchive> archive = TorchArchive::Open(bytes, 0, bytes.size());
    if (!archive) return std::unexpected(archive.error());
    Status status = pickle.Value(archive->root());
    if (!status) status.error().found = Printable(object.name);
    return status;
  }

  // Tensors that are the same elements of a file have one storage.
  std::int32_t StorageOf(std::int32_t index) {
    const CheckpointTensor& tensor = checkpoint_.tensors[index];
    if (tensor.pieces.size() == 1 && BytesOf(tensor) > 0) {
      const CheckpointPiece& piece = tensor.pieces[0];
      const auto [found, is_new] =
          known_.try_emplace({piece.file, piece.offset, tensor.dtype, tensor.shape, piece.strides},
                             static_cast<std::int32_t>(storages_.size()));
      if (!is_new) return found->second;
    }
    storages_.push_back(index);
    return static_cast<std::int32_t>(storages_.size()) - 1;
  }

  const Checkpoint& checkpoint_;
  const std::string name_;
  StateNode root_;
  std::string pickle_;
  std::vector<std::int32_t> storages_;  // the tensor of each
  std::map<
      std::tuple<std::int32_t, std::int64_t, DType, std::vector<std::int64_t>, std::vector<std::int64_t>>,
      std::int32_t>
      known_;
};

// ---- safetensors ----

class SafetensorsOutput final : public CheckpointOutput {
 public:
  SafetensorsOutput(const Checkpoint& checkpoint, std::string name, std::int64_t files)
      : checkpoint_(checkpoint), name_(std::move(name)) {
    tensors_.resize(static_cast<std::size_t>(std::max<std::int64_t>(1, files)));
    const std::int64_t of_file = std::max<std::int64_t>(1, TensorBytes(checkpoint) / std::ssize(tensors_));
    std::int64_t before = 0;
    for (std::size_t t = 0; t < checkpoint.tensors.size(); ++t) {
      const auto file = static_cast<std::size_t>(before / of_file);
      tensors_[std::min(file, tensors_.size() - 1)].push_back(static_cast<std::int32_t>(t));
      before += BytesOf(checkpoint.tensors[t]);
    }
    std::erase_if(tensors_, [](const std::vector<std::int32_t>& of) { return of.empty(); });
    if (tensors_.empty()) tensors_.emplace_back();
  }

  std::int32_t files() const override {
    return static_cast<std::int32_t>(tensors_.size()) + (tensors_.size() > 1 ? 1 : 0);
  }

  Result<OutputFile> Make(std::int32_t file) override {
    if (file == static_cast<std::int32_t>(tensors_.size())) return MakeIndex();
    OutputFile output{.name = NameOf(file)};
    nlohmann::ordered_json header;
    header["__metadata__"] = {{"format", "pt"}};
    std::int64_t end = 0;
    for (const std::int32_t t : tensors_[file]) {
      const CheckpointTensor& tensor = checkpoint_.tensors[t];
      const std::int64_t begin = end;
      end += BytesOf(tensor);
      header[tensor.name] = {
          {"dtype", SafetensorsName(tensor.dtype)}, {"shape", tensor.shape}, {"data_offsets", {begin, end}}};
    }
    std::string text = header.dump();
    text.append((8 - text.size() % 8) % 8, ' ');  // tensors begin at a multiple of 8
    std::string length;
    AppendLittleEndian(length, text.size(), 8);
    output.Append(length);
    output.Append(text);
    for (const std::int32_t t : tensors_[file]) {
      const CheckpointTensor& tensor = checkpoint_.tensors[t];
      if (BytesOf(tensor) == 0) continue;
      (void)output.AppendData(t, std::vector<std::int64_t>(tensor.shape.size(), 0), tensor.shape,
                              BytesOf(tensor));
    }
    return output;
  }

 private:
  std::string NameOf(std::int32_t file) const {
    if (!name_.empty()) return name_;
    if (tensors_.size() == 1) return "model.safetensors";
    return fmt::format("model-{:05}-of-{:05}.safetensors", file + 1, tensors_.size());
  }
  OutputFile MakeIndex() const {
    nlohmann::ordered_json index;
    index["metadata"]["total_size"] = TensorBytes(checkpoint_);
    nlohmann::ordered_json& map = index["weight_map"];
    map = nlohmann::ordered_json::object();
    for (std::size_t file = 0; file < tensors_.size(); ++file) {
      for (const std::int32_t t : tensors_[file])
        map[checkpoint_.tensors[t].name] = NameOf(static_cast<std::int32_t>(file));
    }
    OutputFile output{.name = "model.safetensors.index.json"};
    output.Append(index.dump(2) + "\n");
    return output;
  }

  const Checkpoint& checkpoint_;
  const std::string name_;
  std::vector<std::vector<std::int32_t>> tensors_;  // of each file
};

}  // namespace

Result<std::unique_ptr<CheckpointOutput>> MakeTorchSaveOutput(const Checkpoint& checkpoint,
                                                              const CheckpointRewrite& how,
                                                              const std::string& name) {
  auto output = std::make_unique<TorchSaveOutput>(checkpoint, name);
  Status status = output->Nest(how.tensors_only);
  if (!status) {
    if (status.error().file.empty()) status.error().file = checkpoint.path;
    return std::unexpected(status.error());
  }
  return output;
}

Result<std::unique_ptr<CheckpointOutput>> MakeSafetensorsOutput(const Checkpoint& checkpoint,
                                                                const CheckpointRewrite& how,
                                                                const std::string& name) {
  const auto wrong = [&](std::string message, std::string found) {
    return std::unexpected(Error{.code = ErrorCode::kBadInput,
                                 .message = std::move(message),
                                 .file = checkpoint.path,
                                 .found = std::move(found)});
  };
  if (!checkpoint.objects.empty() && !how.tensors_only)
    return wrong(
        fmt::format("safetensors holds tensors alone, and {} values of the checkpoint are none: leave "
                    "them out (--tensors-only), or choose another format",
                    checkpoint.objects.size()),
        Printable(checkpoint.objects.front().name));
  for (const CheckpointTensor& tensor : checkpoint.tensors) {
    if (SafetensorsName(tensor.dtype).empty())
      return wrong(fmt::format("safetensors has no dtype for {}", Printable(tensor.name)),
                   std::string(Name(tensor.dtype)));
    if (!IsUtf8(tensor.name) || tensor.name == "__metadata__")
      return wrong("no name that safetensors can have", Printable(tensor.name));
  }
  return std::make_unique<SafetensorsOutput>(checkpoint, name, name.empty() ? RanksOf(how.layout) : 1);
}

}  // namespace shardplan
