// SPDX-License-Identifier: Apache-2.0
// The directories of torch.distributed.checkpoint: .metadata says which file has which box of which tensor.
#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <map>
#include <unordered_map>

#include "checkpoints/files/readers.h"
#include "shardplan/schemas/printable.h"

namespace shardplan {
namespace {

using Kind = PickleValue::Kind;

constexpr std::string_view kZipBegin("PK\x03\x04", 4);
constexpr std::string_view kModule = "torch.distributed.checkpoint.metadata ";

struct StoredAt {
  std::string file;
  std::int64_t offset = 0, length = 0;
};

class DistributedReader {
 public:
  explicit DistributedReader(const std::string& folder)
      : folder_(folder), metadata_path_((std::filesystem::path(folder) / ".metadata").string()) {
    checkpoint_.format = CheckpointFormat::kDistributed;
    checkpoint_.path = folder;
  }

  Result<Checkpoint> Run() {
    Result<InputFile> file = InputFile::Open(metadata_path_);
    if (!file) return std::unexpected(file.error());
    const Result<std::string> bytes = file->Read(0, file->size());
    if (!bytes) return std::unexpected(bytes.error());
    Result<Pickle> pickle = ReadPickle(*bytes);
    if (!pickle) {
      pickle.error().file = metadata_path_;
      return std::unexpected(pickle.error());
    }
    if (Status status = ReadRoot(*pickle->root); !status) return std::unexpected(status.error());
    (void)AddFile(checkpoint_, *file);
    return std::move(checkpoint_);
  }

 private:
  std::unexpected<Error> Wrong(const PickleValue& value, std::string message, std::string found = {},
                               std::string expected = {}) const {
    return std::unexpected(Error{.code = ErrorCode::kBadInput,
                                 .message = std::move(message),
                                 .file = metadata_path_,
                                 .pointer = fmt::format("byte {}", value.position),
                                 .found = std::move(found),
                                 .expected = std::move(expected)});
  }

  static bool IsOf(const PickleValue& value, std::string_view name) {
    return value.kind == Kind::kObject && value.items[0]->text == fmt::format("{}{}", kModule, name);
  }
  // A field of an object, or nullptr.
  static const PickleValue* Field(const PickleValue& object, std::string_view name) {
    if (object.kind != Kind::kObject || object.state == nullptr || !IsMapping(*object.state)) return nullptr;
    return Find(*object.state, name);
  }

  Status ReadRoot(const PickleValue& root) {
    const PickleValue* entries = Field(root, "state_dict_metadata");
    const PickleValue* storage = Field(root, "storage_data");
    if (!IsOf(root, "Metadata") || entries == nullptr || !IsMapping(*entries) || storage == nullptr ||
        !IsMapping(*storage))
      return Wrong(root, "no metadata of torch.distributed.checkpoint", {},
                   "a Metadata with state_dict_metadata and storage_data");
    if (Status status = ReadStorage(*storage); !status) return status;
    if (const PickleValue* planner = Field(root, "planner_data"); planner != nullptr && IsMapping(*planner))
      ReadKeys(*planner);
    Status status;
    ForEachPair(*entries, [&](const PickleValue& name, const PickleValue& entry) {
      if (name.kind != Kind::kString) {
        status = Wrong(name, "a name that is no string");
      } else if (IsOf(entry, "BytesStorageMetadata")) {
        status = AddObject(name, entry);
      } else {
        status = AddTensor(name, entry);
      }
      return status.has_value();
    });
    return status;
  }

  Status ReadStorage(const PickleValue& storage) {
    Status status;
    ForEachPair(storage, [&](const PickleValue& index, const PickleValue& info) {
      status = ReadStored(index, info);
      return status.has_value();
    });
    return status;
  }
  Status ReadStored(const PickleValue& index, const PickleValue& info) {
    const PickleValue* name = Field(index, "fqn");
    const PickleValue* box = Field(index, "offset");
    const PickleValue* path = Field(info, "relative_path");
    const PickleValue* offset = Field(info, "offset");
    const PickleValue* length = Field(info, "length");
    std::vector<std::int64_t> low;
    StoredAt at;
    if (name == nullptr || name->kind != Kind::kString || path == nullptr || path->kind != Kind::kString ||
        offset == nullptr || length == nullptr || !ToInteger(*offset, at.offset) ||
        !ToInteger(*length, at.length) ||
        (box != nullptr && box->kind != Kind::kNone && !ToIntegers(*box, low)))
      return Wrong(info, "an entry of storage_data that does not say where its bytes are");
    if (const PickleValue* transforms = Field(info, "transform_descriptors");
        transforms != nullptr && transforms->kind != Kind::kNone && !transforms->items.empty())
      return Wrong(*transforms, "transformed (compressed) files are not supported");
    at.file = path->text;
    const std::filesystem::path relative(at.file);
    if (at.file.empty() || relative.is_absolute() || std::ranges::find(relative, "..") != relative.end())
      return Wrong(*path, "a file outside of the checkpoint", Printable(at.file));
    stored_[KeyOf(name->text, low)] = std::move(at);
    return {};
  }
  static std::string KeyOf(const std::string& name, const std::vector<std::int64_t>& low) {
    return fmt::format("{}\n{}", name, fmt::join(low, ","));
  }

  void ReadKeys(const PickleValue& planner) {
    ForEachPair(planner, [&](const PickleValue& name, const PickleValue& path) {
      std::vector<CheckpointKey> keys;
      for (const PickleValue* key : path.items) {
        if (key->kind == Kind::kString) keys.push_back({CheckpointKey::Kind::kText, key->text});
        if (key->kind == Kind::kInt)
          keys.push_back({CheckpointKey::Kind::kIndex, fmt::format("{}", key->integer)});
      }
      if (name.kind == Kind::kString && !keys.empty()) checkpoint_.keys[name.text] = std::move(keys);
      return true;
    });
  }

  Result<const StoredAt*> Stored(const PickleValue& at, const std::string& name,
                                 const std::vector<std::int64_t>& low) const {
    const auto found = stored_.find(KeyOf(name, low));
    if (found != stored_.end()) return &found->second;
    return Wrong(at, "storage_data does not say where a piece is",
                 fmt::format("{} at [{}]", Printable(name), fmt::join(low, ", ")));
  }

  Result<std::int32_t> FileOf(const StoredAt& at) {
    if (const auto known = file_index_.find(at.file); known != file_index_.end()) return known->second;
    Result<InputFile> file = InputFile::Open((std::filesystem::path(folder_) / at.file).string());
    if (!file) return std::unexpected(file.error());
    const std::int32_t index = AddFile(checkpoint_, *file);
    files_.push_back(std::move(*file));
    file_index_.emplace(at.file, index);
    return index;
  }

  Status AddObject(const PickleValue& name, const PickleValue& entry) {
    const Result<const StoredAt*> at = Stored(entry, name.text, {});
    if (!at) return std::unexpected(at.error());
    const Result<std::int32_t> file = FileOf(**at);
    if (!file) return std::unexpected(file.error());
    Result<std::string> archive = files_[*file].Read((*at)->offset, (*at)->length);
    if (!archive) return std::unexpected(archive.error());
    if (archive->starts_with(kZipBegin)) {  // else a planner of the job's own has written it
      const Result<ZipReader> zip = ZipReader::Open(files_[*file], (*at)->offset, (*at)->length);
      if (!zip) return std::unexpected(zip.error());
    }
    checkpoint_.objects.push_back({name.text, std::move(*archive)});
    return {};
  }

  Status AddTensor(const PickleValue& name, const PickleValue& entry) {
    const PickleValue* properties = Field(entry, "properties");
    const PickleValue* size = Field(entry, "size");
    const PickleValue* chunks = Field(entry, "chunks");
    CheckpointTensor tensor{.name = name.text};
    if (!IsOf(entry, "TensorStorageMetadata") || properties == nullptr || size == nullptr ||
        !ToIntegers(*size, tensor.shape) || chunks == nullptr || chunks->kind != Kind::kList)
      return Wrong(entry, "no entry of a tensor", Printable(name.text), "properties, size and chunks");
    const PickleValue* state = properties->kind == Kind::kObject ? properties->state : nullptr;
    const std::string dtype = state != nullptr && !state->items.empty() ? state->items[0]->text : "";
    const std::optional<DType> known = DTypeFromName(std::string_view(dtype).substr(dtype.find(' ') + 1));
    if (!known) return Wrong(*properties, "a dtype that is not supported", Printable(dtype));
    tensor.dtype = *known;
    if (CheckedNumel(tensor.shape, tensor.dtype) < 0 || std::ssize(tensor.shape) > kMostTensorDims)
      return Wrong(*size, "no shape of a tensor", fmt::format("[{}]", fmt::join(tensor.shape, ", ")),
                   fmt::format("at most {} dimensions", kMostTensorDims));
    for (const PickleValue* chunk : chunks->items) {
      if (Status status = AddPiece(*chunk, tensor); !status) return status;
    }
    checkpoint_.tensors.push_back(std::move(tensor));
    return {};
  }

  Status AddPiece(const PickleValue& chunk, CheckpointTensor& tensor) {
    const PickleValue* offsets = Field(chunk, "offsets");
    const PickleValue* sizes = Field(chunk, "sizes");
    CheckpointPiece piece;
    if (offsets == nullptr || sizes == nullptr || !ToIntegers(*offsets, piece.low) ||
        !ToIntegers(*sizes, piece.size) || piece.low.size() != tensor.shape.size() ||
        piece.size.size() != tensor.shape.size())
      return Wrong(chunk, "no chunk of a tensor", Printable(tensor.name), "offsets and sizes");
    for (std::size_t d = 0; d < tensor.shape.size(); ++d) {
      if (piece.low[d] < 0 || piece.size[d] < 0 || piece.low[d] > tensor.shape[d] ||
          piece.size[d] > tensor.shape[d] - piece.low[d])
        return Wrong(chunk, fmt::format("a chunk outside of its tensor {}", Printable(tensor.name)),
                     fmt::format("[{}] at [{}]", fmt::join(piece.size, ", "), fmt::join(piece.low, ", ")),
                     fmt::format("within [{}]", fmt::join(tensor.shape, ", ")));
    }
    const bool is_empty = std::ranges::find(piece.size, 0) != piece.size.end();
    if (is_empty && tensor.shape != piece.size) return {};
    const Result<const StoredAt*> at = Stored(chunk, tensor.name, piece.low);
    if (!at) return std::unexpected(at.error());
    const Result<std::int32_t> file = FileOf(**at);
    if (!file) return std::unexpected(file.error());
    const Result<TorchArchive> archive = TorchArchive::Open(files_[*file], (*at)->offset, (*at)->length);
    if (!archive) return std::unexpected(archive.error());
    if (!TorchArchive::IsTensor(archive->root()))
      return archive->ErrorAt(archive->root(), fmt::format("no tensor where {} is", Printable(tensor.name)));
    Result<TorchTensor> found = archive->Tensor(archive->root());
    if (!found) return std::unexpected(found.error());
    if (found->dtype != tensor.dtype || found->size != piece.size)
      return archive->ErrorAt(archive->root(),
                              fmt::format("another piece of {} than .metadata says", Printable(tensor.name)),
                              fmt::format("{} [{}]", Name(found->dtype), fmt::join(found->size, ", ")),
                              fmt::format("{} [{}]", Name(tensor.dtype), fmt::join(piece.size, ", ")));
    piece.file = *file;
    piece.offset = found->offset;
    piece.strides = std::move(found->strides);
    tensor.pieces.push_back(std::move(piece));
    return {};
  }

  const std::string folder_, metadata_path_;
  Checkpoint checkpoint_;
  std::unordered_map<std::string, StoredAt> stored_;
  std::map<std::string, std::int32_t> file_index_;
  std::vector<InputFile> files_;  // as checkpoint_.files
};

}  // namespace

Result<Checkpoint> ReadDistributed(const std::string& folder) { return DistributedReader(folder).Run(); }

}  // namespace shardplan
