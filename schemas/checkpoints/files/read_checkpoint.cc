// SPDX-License-Identifier: Apache-2.0
// The kind of checkpoint that a path holds, told from its bytes.
#include <fmt/format.h>

#include <algorithm>
#include <filesystem>

#include "checkpoints/files/readers.h"
#include "checkpoints/layouts/part_boxes.h"
#include "json/fields.h"
#include "shardplan/schemas/printable.h"

namespace shardplan {
namespace {

namespace fs = std::filesystem;
constexpr std::string_view kZipSign("PK\x03\x04", 4);
// torch.save before 1.6 began with a pickled number.
constexpr std::string_view kOldTorchSign("\x80\x02\x8a\x0a", 4);

std::unexpected<Error> Unknown(const std::string& path, std::string message, std::string found) {
  return std::unexpected(Error{
      .code = ErrorCode::kBadInput,
      .message = std::move(message),
      .file = path,
      .found = std::move(found),
      .expected = "a folder of torch.distributed.checkpoint (with .metadata) or of safetensors, or a file "
                  "of torch.save or safetensors"});
}

Result<Checkpoint> ReadFolder(const std::string& path) {
  std::error_code error;
  if (fs::exists(fs::path(path) / ".metadata", error)) return ReadDistributed(path);
  std::string first;
  for (const fs::directory_entry& entry : fs::directory_iterator(path, error)) {
    const std::string name = entry.path().filename().string();
    if (name.ends_with(".safetensors")) return ReadSafetensors(path);
    if (first.empty() || name < first) first = name;
  }
  if (error)
    return std::unexpected(Error{.code = ErrorCode::kBadInput,
                                 .message = fmt::format("cannot list the folder: {}", error.message()),
                                 .file = path});
  return Unknown(path, "the folder has no checkpoint that is known",
                 first.empty() ? "no files" : Printable(first) + ", ...");
}

Result<Checkpoint> ReadOneFile(const std::string& path) {
  if (path.ends_with(".json")) return ReadSafetensors(path);
  const Result<InputFile> file = InputFile::Open(path);
  if (!file) return std::unexpected(file.error());
  const std::int64_t begin_bytes = std::min<std::int64_t>(file->size(), 9);
  const Result<std::string> begin = file->Read(0, begin_bytes);
  if (!begin) return std::unexpected(begin.error());
  if (begin->starts_with(kZipSign)) return ReadTorchSave(path);
  if (begin->starts_with(kOldTorchSign))
    return Unknown(path, "a file of torch.save before PyTorch 1.6: load and save it again", {});
  if (path.ends_with(".safetensors") || (begin->size() == 9 && begin->back() == '{'))
    return ReadSafetensors(path);
  if (path.ends_with(".pt") || path.ends_with(".pth") || path.ends_with(".bin"))
    return file->ErrorAt(0, "no file of torch.save", {}, "the bytes PK\\x03\\x04");
  return Unknown(path, "no checkpoint that is known", {});
}

PartBox BoxOf(const CheckpointPiece& piece) {
  PartBox box;
  for (std::size_t d = 0; d < piece.low.size(); ++d) {
    box.low[d] = piece.low[d];
    box.high[d] = piece.low[d] + piece.size[d];
  }
  if (piece.low.empty()) box.high[0] = 1;
  return box;
}

std::int64_t NumelOf(const std::vector<std::int64_t>& size) {
  std::int64_t numel = 1;
  for (const std::int64_t extent : size) numel *= extent;
  return numel;
}

// Every element is in one piece. The same piece twice is kept once.
Status CheckPieces(CheckpointTensor& tensor) {
  std::ranges::sort(tensor.pieces, [](const CheckpointPiece& a, const CheckpointPiece& b) {
    return std::tie(a.low, a.size, a.file, a.offset) < std::tie(b.low, b.size, b.file, b.offset);
  });
  const auto same = std::ranges::unique(
      tensor.pieces,
      [](const CheckpointPiece& a, const CheckpointPiece& b) { return a.low == b.low && a.size == b.size; });
  tensor.pieces.erase(same.begin(), same.end());
  std::int64_t held = 0;
  std::vector<HeldPart> parts;
  for (const CheckpointPiece& piece : tensor.pieces) {
    held += NumelOf(piece.size);
    parts.push_back({{}, {BoxOf(piece)}});
  }
  const std::int64_t numel = NumelOf(tensor.shape);
  if (held != numel)
    return MakeInputError({},
                          fmt::format("the pieces of {} are not the whole tensor", Printable(tensor.name)),
                          fmt::format("{} elements", held), fmt::format("{}", numel));
  if (parts.size() < 2) return {};
  const std::size_t dims = std::max<std::size_t>(1, tensor.shape.size());
  const BoxIndex index(parts, dims);
  for (const HeldPart& part : parts) {
    std::int64_t meets = 0;
    ReshardCopy copy;
    index.ForEachNear(part.boxes[0], [&](const BoxIndex::Entry& entry) {
      if (Meet(parts[entry.part].boxes[0], part.boxes[0], dims, 1, copy)) ++meets;
    });
    if (meets > 1) return MakeInputError({}, fmt::format("two pieces of {} overlap", Printable(tensor.name)));
  }
  return {};
}

}  // namespace

std::string JoinKeys(const std::vector<CheckpointKey>& keys) {
  std::string name;
  for (const CheckpointKey& key : keys) name += (name.empty() && &key == keys.data() ? "" : ".") + key.text;
  return name;
}

std::int32_t AddFile(Checkpoint& checkpoint, const InputFile& file) {
  checkpoint.files.push_back({file.path(), file.size(), file.modified_ns()});
  return static_cast<std::int32_t>(checkpoint.files.size()) - 1;
}

std::vector<std::int64_t> RowMajorStrides(const std::vector<std::int64_t>& size) {
  std::vector<std::int64_t> strides(size.size(), 1);
  for (std::size_t d = size.size(); d-- > 1;)
    strides[d - 1] = strides[d] * std::max<std::int64_t>(1, size[d]);
  return strides;
}

std::int64_t CheckedNumel(const std::vector<std::int64_t>& shape, DType dtype) {
  std::int64_t numel = 1;
  for (const std::int64_t extent : shape) {
    if (extent < 0) return -1;
    if (extent > 0 && numel > kMaxExact / SizeBytes(dtype) / extent) return -1;
    numel *= std::max<std::int64_t>(1, extent);
  }
  return std::ranges::find(shape, 0) == shape.end() ? numel : 0;
}

std::int64_t TensorBytes(const Checkpoint& checkpoint) {
  std::int64_t bytes = 0;
  for (const CheckpointTensor& tensor : checkpoint.tensors)
    bytes += NumelOf(tensor.shape) * SizeBytes(tensor.dtype);
  return bytes;
}

Result<Checkpoint> ReadCheckpoint(const std::string& path) {
  std::error_code error;
  Result<Checkpoint> checkpoint = fs::is_directory(path, error) ? ReadFolder(path) : ReadOneFile(path);
  if (!checkpoint) return checkpoint;
  for (CheckpointTensor& tensor : checkpoint->tensors) {
    Status status = CheckPieces(tensor);
    if (!status) {
      status.error().file = path;
      return std::unexpected(status.error());
    }
  }
  return checkpoint;
}

}  // namespace shardplan
