// torch.distributed.checkpoint: a file of torch.save streams for each rank, and .metadata.
#include <fmt/format.h>

#include <algorithm>
#include <unordered_map>

#include "checkpoint/outputs.h"
#include "checkpoint/pickle.h"
#include "checkpoint/zip_writer.h"
#include "shardplan/schemas/part_boxes.h"
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

class DistributedOutput final : public CheckpointOutput {
 public:
  DistributedOutput(const Checkpoint& checkpoint, const CheckpointRewrite& how)
      : checkpoint_(checkpoint), how_(how) {}

  Status Place() {
    std::unordered_map<std::string_view, const StateTensor*> placed;
    for (const StateTensor& tensor : how_.layout.tensors) placed.emplace(tensor.name, &tensor);
    bytes_of_rank_.assign(static_cast<std::size_t>(RanksOf(how_.layout)), 0);
    for (std::size_t t = 0; t < checkpoint_.tensors.size(); ++t) {
      const CheckpointTensor& tensor = checkpoint_.tensors[t];
      const auto found = placed.find(tensor.name);
      if (found == placed.end())
        return MakeInputError("/tensors", "the layout lacks a tensor of the checkpoint",
                              Printable(tensor.name));
      if (found->second->shape != tensor.shape || found->second->dtype != tensor.dtype)
        return MakeInputError(
            "/tensors", fmt::format("{} is another tensor in the layout", Printable(tensor.name)),
            fmt::format("{} [{}]", Name(found->second->dtype), fmt::join(found->second->shape, ", ")),
            fmt::format("{} [{}]", Name(tensor.dtype), fmt::join(tensor.shape, ", ")));
      PlaceTensor(static_cast<std::int32_t>(t), *found->second);
    }
    if (!how_.tensors_only) {
      for (std::size_t o = 0; o < checkpoint_.objects.size(); ++o)
        items_.push_back({.index = static_cast<std::int32_t>(o), .is_object = true});
    }
    items_of_rank_.resize(bytes_of_rank_.size());
    for (std::size_t i = 0; i < items_.size(); ++i) items_of_rank_[items_[i].rank].push_back(i);
    for (std::size_t rank = 0; rank < items_of_rank_.size(); ++rank) {
      if (!items_of_rank_[rank].empty()) ranks_.push_back(static_cast<std::int64_t>(rank));
    }
    return {};
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
        output.Append(checkpoint_.objects[item.index].stream);
      } else {
        AppendPiece(item, output);
      }
      item.length = output.size_bytes - item.offset;
    }
    return output;
  }

 private:
  static std::string FileName(std::int64_t rank) { return fmt::format("__{}_0.distcp", rank); }

  // Of ranks that hold the same the one with the fewest bytes so far writes it.
  void PlaceTensor(std::int32_t index, const StateTensor& tensor) {
    const std::size_t dims = tensor.shape.size();
    const std::size_t before = items_.size();
    for (const HeldPart& part : HeldPartsOf(how_.layout, tensor)) {
      const std::int64_t rank = *std::ranges::min_element(
          part.ranks, {}, [&](std::int64_t r) { return bytes_of_rank_[static_cast<std::size_t>(r)]; });
      for (const PartBox& box : part.boxes) {
        StoredItem item{.index = index, .rank = rank};
        std::int64_t bytes = SizeBytes(tensor.dtype);
        for (std::size_t d = 0; d < dims; ++d) {
          item.low.push_back(box.low[d]);
          item.size.push_back(box.high[d] - box.low[d]);
          bytes *= item.size.back();
        }
        bytes_of_rank_[static_cast<std::size_t>(rank)] += bytes;
        items_.push_back(std::move(item));
      }
    }
    if (items_.size() == before)  // no elements
      items_.push_back({.index = index, .low = std::vector<std::int64_t>(dims, 0), .size = tensor.shape});
  }

  void AppendPiece(const StoredItem& item, OutputFile& output) const {
    const CheckpointTensor& tensor = checkpoint_.tensors[item.index];
    PickleWriter pickle;
    WriteTorchTensor(pickle, tensor.dtype, item.size, "0");
    std::int64_t bytes = SizeBytes(tensor.dtype);
    for (const std::int64_t extent : item.size) bytes *= extent;
    ZipWriter zip(output);
    BeginTorchStream(zip, pickle.Finish());
    zip.AddData("data/0", item.index, item.low, item.size, bytes);
    EndTorchStream(zip);
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
        pickle.String(checkpoint_.objects[items_[i++].index].name);
        Class(pickle, "BytesStorageMetadata");
        pickle.Op('u');
        continue;
      }
      const std::int32_t tensor = items_[i].index;
      pickle.String(checkpoint_.tensors[tensor].name);
      Class(pickle, "TensorStorageMetadata");
      pickle.Op('}');
      pickle.Mark();
      pickle.String("properties");
      WriteProperties(pickle, checkpoint_.tensors[tensor].dtype);
      pickle.String("size");
      pickle.Size(checkpoint_.tensors[tensor].shape);
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
      const auto keys = checkpoint_.keys.find(name);
      pickle.Mark();
      pickle.String(name);
      pickle.Mark();
      if (keys == checkpoint_.keys.end()) {
        pickle.String(name);
      } else {
        for (const CheckpointKey& key : keys->second) {
          if (key.kind == CheckpointKey::Kind::kIndex) {
            pickle.Int(std::stoll(key.text));
          } else {
            pickle.String(key.text);
          }
        }
      }
      pickle.Op('t');
      pickle.Op('u');
    };
    for (const CheckpointTensor& tensor : checkpoint_.tensors) write(tensor.name);
    if (how_.tensors_only) return;
    for (const CheckpointObject& object : checkpoint_.objects) write(object.name);
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
      pickle.String(item.is_object ? checkpoint_.objects[item.index].name
                                   : checkpoint_.tensors[item.index].name);
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

  const Checkpoint& checkpoint_;
  const CheckpointRewrite& how_;
  std::vector<StoredItem> items_;  // those of a tensor side by side, objects behind
  std::vector<std::vector<std::size_t>> items_of_rank_;
  std::vector<std::int64_t> bytes_of_rank_;
  std::vector<std::int64_t> ranks_;  // that have anything
};

}  // namespace

Result<std::unique_ptr<CheckpointOutput>> MakeDistributedOutput(const Checkpoint& checkpoint,
                                                                const CheckpointRewrite& how) {
  auto output = std::make_unique<DistributedOutput>(checkpoint, how);
  if (Status status = output->Place(); !status) return std::unexpected(status.error());
  return output;
}

}  // namespace shardplan
