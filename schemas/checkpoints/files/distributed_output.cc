// SPDX-License-Identifier: Apache-2.0
// torch.distributed.checkpoint: a file of torch.save streams for each rank, and .metadata.
#include <fmt/format.h>

#include <algorithm>
#include <unordered_map>

#include "checkpoints/files/outputs.h"
#include "checkpoints/files/pickle.h"
#include "checkpoints/files/zip_writer.h"
#include "shardplan/schemas/printable.h"

namespace shardplan {
namespace {

constexpr std::string_view kMetadataModule = "torch.distributed.checkpoint.metadata";

// A box of a tensor, or an object, in the file of a rank.
struct StoredItem {
  std::int32_t index = 0;  // of the tensor, or of the object
  bool is_object = false;
  std::int64_t rank = 0;
  std::vector<std::int64_t> low, size;
  std::int64_t offset = 0, length = 0;  // in the file, once it has been made
};

class DistributedOutput final : public StateOutput {
 public:
  explicit DistributedOutput(StateDescription state) : state_(std::move(state)) {
    std::int64_t ranks = 1;
    std::size_t box = 0;
    for (std::size_t t = 0; t < state_.tensors.size(); ++t) {
      const std::vector<std::int64_t>& shape = state_.tensors[t].shape;
      const auto tensor = static_cast<std::int32_t>(t);
      const std::size_t before = items_.size();
      for (; box < state_.boxes.size() && state_.boxes[box].tensor == tensor; ++box) {
        const StateBox& of = state_.boxes[box];
        items_.push_back({.index = tensor, .rank = of.rank, .low = of.low, .size = of.size});
        ranks = std::max(ranks, of.rank + 1);
      }
      if (items_.size() == before)  // no elements
        items_.push_back({.index = tensor, .low = std::vector<std::int64_t>(shape.size(), 0), .size = shape});
    }
    for (std::size_t o = 0; o < state_.objects.size(); ++o)
      items_.push_back({.index = static_cast<std::int32_t>(o), .is_object = true});
    items_of_rank_.resize(static_cast<std::size_t>(ranks));
    for (std::size_t i = 0; i < items_.size(); ++i) items_of_rank_[items_[i].rank].push_back(i);
    for (std::size_t rank = 0; rank < items_of_rank_.size(); ++rank) {
      if (!items_of_rank_[rank].empty()) ranks_.push_back(static_cast<std::int64_t>(rank));
    }
  }

  std::int32_t FileOf(std::int64_t rank) const override {
    const auto found = std::ranges::find(ranks_, rank);
    return found == ranks_.end() ? -1 : static_cast<std::int32_t>(found - ranks_.begin());
  }

  std::int32_t files() const override { return static_cast<std::int32_t>(ranks_.size()) + 1; }

  Result<OutputFile> Make(std::int32_t file) override {
    if (file == static_cast<std::int32_t>(ranks_.size())) return MakeMetadata();
    const std::int64_t rank = ranks_[file];
    OutputFile output{.name = FileName(rank)};
    for (const std::size_t i : items_of_rank_[rank]) {
      StoredItem& item = items_[i];
      item.offset = output.size_bytes;
      if (item.is_object) {
        output.Append(state_.objects[item.index].archive);
      } else {
        AppendPiece(item, output);
      }
      item.length = output.size_bytes - item.offset;
    }
    return output;
  }

 private:
  static std::string FileName(std::int64_t rank) { return fmt::format("__{}_0.distcp", rank); }

  void AppendPiece(const StoredItem& item, OutputFile& output) const {
    const CheckpointTensor& tensor = state_.tensors[item.index];
    PickleWriter pickle;
    WriteTorchTensor(pickle, tensor.dtype, item.size, "0");
    std::int64_t bytes = SizeBytes(tensor.dtype);
    for (const std::int64_t extent : item.size) bytes *= extent;
    ZipWriter zip(output);
    BeginTorchArchive(zip, pickle.Finish());
    zip.AddData("data/0", item.index, item.low, item.size, bytes);
    EndTorchArchive(zip);
  }

  // ---- .metadata ----

  static void Class(PickleWriter& pickle, std::string_view name) {
    pickle.Global(fmt::format("{} {}", kMetadataModule, name));
    pickle.EmptyTuple();
    pickle.Op('\x81');
  }
  static void EndState(PickleWriter& pickle) {
    pickle.Op('u');
    pickle.Op('b');
  }

  OutputFile MakeMetadata() const {
    PickleWriter pickle;
    Class(pickle, "Metadata");
    pickle.Op('}');
    pickle.Mark();
    pickle.String("state_dict_metadata");
    WriteEntries(pickle);
    pickle.String("planner_data");
    WriteKeys(pickle);
    pickle.String("storage_data");
    WriteStorage(pickle);
    pickle.String("storage_meta");
    pickle.None();
    pickle.String("version");
    pickle.String("1.0.0");
    EndState(pickle);
    OutputFile output{.name = ".metadata"};
    output.Append(pickle.Finish());
    return output;
  }

  void WriteEntries(PickleWriter& pickle) const {
    pickle.Op('}');
    for (std::size_t i = 0; i < items_.size();) {
      pickle.Mark();
      if (items_[i].is_object) {
        pickle.String(state_.objects[items_[i++].index].name);
        Class(pickle, "BytesStorageMetadata");
        pickle.Op('u');
        continue;
      }
      const std::int32_t tensor = items_[i].index;
      pickle.String(state_.tensors[tensor].name);
      Class(pickle, "TensorStorageMetadata");
      pickle.Op('}');
      pickle.Mark();
      pickle.String("properties");
      WriteProperties(pickle, state_.tensors[tensor].dtype);
      pickle.String("size");
      pickle.Size(state_.tensors[tensor].shape);
      pickle.String("chunks");
      pickle.Op(']');
      pickle.Mark();
      for (; i < items_.size() && !items_[i].is_object && items_[i].index == tensor; ++i) {
        Class(pickle, "ChunkStorageMetadata");
        pickle.Op('}');
        pickle.Mark();
        pickle.String("offsets");
        pickle.Size(items_[i].low);
        pickle.String("sizes");
        pickle.Size(items_[i].size);
        EndState(pickle);
      }
      pickle.Op('e');
      EndState(pickle);
      pickle.Op('u');
    }
  }

  static void WriteProperties(PickleWriter& pickle, DType dtype) {
    Class(pickle, "TensorProperties");
    pickle.Mark();
    pickle.Global(fmt::format("torch {}", Name(dtype)));
    pickle.Global("torch.serialization _get_layout");
    pickle.String("torch.strided");
    pickle.Op('\x85');
    pickle.Op('R');
    pickle.Bool(false);  // requires_grad
    pickle.Global("__builtin__ getattr");
    pickle.Global(fmt::format("{} _MEM_FORMAT_ENCODING", kMetadataModule));
    pickle.String("TORCH_CONTIGUOUS_FORMAT");
    pickle.Op('\x86');
    pickle.Op('R');
    pickle.Bool(false);  // pin_memory
    pickle.Op('t');
    pickle.Op('b');
  }

  void WriteKeys(PickleWriter& pickle) const {
    pickle.Op('}');
    const auto write = [&](const std::string& name) {
      const auto keys = state_.keys.find(name);
      pickle.Mark();
      pickle.String(name);
      pickle.Mark();
      if (keys == state_.keys.end()) {
        pickle.String(name);
      } else {
        for (const CheckpointKey& key : keys->second) {
          if (key.IsPlace()) {
            pickle.Int(std::stoll(key.text));
          } else {
            pickle.String(key.text);
          }
        }
      }
      pickle.Op('t');
      pickle.Op('u');
    };
    for (const CheckpointTensor& tensor : state_.tensors) write(tensor.name);
    for (const CheckpointObject& object : state_.objects) write(object.name);
  }

  void WriteStorage(PickleWriter& pickle) const {
    pickle.Op('}');
    std::int64_t chunk = 0;
    for (std::size_t i = 0; i < items_.size(); ++i) {
      const StoredItem& item = items_[i];
      const bool goes_on = i > 0 && !item.is_object && items_[i - 1].index == item.index;
      chunk = goes_on ? chunk + 1 : 0;
      pickle.Mark();
      Class(pickle, "MetadataIndex");
      pickle.Op('}');
      pickle.Mark();
      pickle.String("fqn");
      pickle.String(item.is_object ? state_.objects[item.index].name : state_.tensors[item.index].name);
      pickle.String("offset");
      if (item.is_object) {
        pickle.None();
      } else {
        pickle.Size(item.low);
      }
      pickle.String("index");
      if (item.is_object) {
        pickle.None();
      } else {
        pickle.Int(chunk);
      }
      EndState(pickle);
      pickle.Global("torch.distributed.checkpoint.filesystem _StorageInfo");
      pickle.EmptyTuple();
      pickle.Op('\x81');
      pickle.Op('}');
      pickle.Mark();
      pickle.String("relative_path");
      pickle.String(FileName(item.rank));
      pickle.String("offset");
      pickle.Int(item.offset);
      pickle.String("length");
      pickle.Int(item.length);
      EndState(pickle);
      pickle.Op('u');
    }
  }

  const StateDescription state_;
  std::vector<StoredItem> items_;  // those of a tensor side by side, objects behind
  std::vector<std::vector<std::size_t>> items_of_rank_;
  std::vector<std::int64_t> ranks_;  // that have anything
};

// The layout's tensors in the order of the checkpoint's.
Result<StateLayout> LayoutInOrder(const Checkpoint& checkpoint, const StateLayout& layout) {
  std::unordered_map<std::string_view, const StateTensor*> placed;
  for (const StateTensor& tensor : layout.tensors) placed.emplace(tensor.name, &tensor);
  StateLayout ordered{.name = layout.name, .mesh = layout.mesh, .flats = layout.flats, .tensors = {}};
  for (const CheckpointTensor& tensor : checkpoint.tensors) {
    const auto found = placed.find(tensor.name);
    if (found == placed.end())
      return MakeInputError("/tensors", "the layout lacks a tensor of the checkpoint",
                            Printable(tensor.name));
    if (found->second->shape != tensor.shape || found->second->dtype != tensor.dtype)
      return MakeInputError(
          "/tensors", fmt::format("{} is another tensor in the layout", Printable(tensor.name)),
          fmt::format("{} [{}]", Name(found->second->dtype), fmt::join(found->second->shape, ", ")),
          fmt::format("{} [{}]", Name(tensor.dtype), fmt::join(tensor.shape, ", ")));
    ordered.tensors.push_back(*found->second);
  }
  return ordered;
}

}  // namespace

std::unique_ptr<StateOutput> MakeStateOutput(StateDescription state) {
  return std::make_unique<DistributedOutput>(std::move(state));
}

Result<std::unique_ptr<CheckpointOutput>> MakeDistributedOutput(const Checkpoint& checkpoint,
                                                                const CheckpointRewrite& how) {
  const Result<StateLayout> layout = LayoutInOrder(checkpoint, how.layout);
  if (!layout) return std::unexpected(layout.error());
  StateDescription state = DescribeState(*layout);
  state.keys = checkpoint.keys;
  if (!how.tensors_only) state.objects = checkpoint.objects;
  return MakeStateOutput(std::move(state));
}

}  // namespace shardplan
