// SPDX-License-Identifier: Apache-2.0
#include "checkpoints/files/box_reader.h"

#include <algorithm>
#include <cstring>

#include "shardplan/checkpoints/reshard.h"
#include "shardplan/schemas/printable.h"

namespace shardplan {
namespace {

// Runs are read together with what lies between them where that is at most so much, and so many times theirs.
constexpr std::int64_t kSpanBytes = std::int64_t{4} << 20;
constexpr std::int64_t kMostWaste = 16;
constexpr std::int64_t kLongRun = std::int64_t{256} << 10;

// Copies the runs of the loops out of the bytes of their span.
void Gather(const ReshardCopy& copy, std::size_t loop, const char* from, char* to) {
  if (loop == copy.loops.size()) {
    std::memcpy(to, from, static_cast<std::size_t>(copy.run_bytes.value));
    return;
  }
  const CopyLoop& here = copy.loops[loop];
  for (std::int64_t i = 0; i < here.count; ++i)
    Gather(copy, loop + 1, from + i * here.source_stride, to + i * here.target_stride);
}

PartBox BoxOfPiece(const CheckpointPiece& piece) {
  PartBox box;
  if (piece.low.empty()) box.high[0] = box.strides[0] = 1;
  for (std::size_t d = 0; d < piece.low.size(); ++d) {
    box.low[d] = piece.low[d];
    box.high[d] = piece.low[d] + piece.size[d];
    box.strides[d] = piece.strides[d];
  }
  return box;
}

}  // namespace

BoxReader::BoxReader(const Checkpoint& checkpoint)
    : checkpoint_(&checkpoint), pieces_(checkpoint.tensors.size()) {}

Result<BoxReader> BoxReader::Open(const Checkpoint& checkpoint) {
  BoxReader reader(checkpoint);
  for (const CheckpointFile& file : checkpoint.files) {
    Result<InputFile> open = InputFile::Open(file.path);
    if (!open) return std::unexpected(open.error());
    reader.files_.push_back(std::move(*open));
  }
  if (Status status = reader.CheckUnchanged(); !status) return std::unexpected(status.error());
  return reader;
}

Status BoxReader::CheckUnchanged() const {
  for (std::size_t f = 0; f < files_.size(); ++f) {
    const Result<InputFile> now = InputFile::Open(checkpoint_->files[f].path);
    if (!now) return std::unexpected(now.error());
    if (now->size() != checkpoint_->files[f].size_bytes ||
        now->modified_ns() != checkpoint_->files[f].modified_ns)
      return std::unexpected(Error{.code = ErrorCode::kBadInput,
                                   .message = "the file was changed while the checkpoint was read",
                                   .file = now->path()});
  }
  return {};
}

const BoxReader::Pieces& BoxReader::PiecesOf(std::int32_t tensor) {
  Pieces& pieces = pieces_[tensor];
  if (pieces.index != nullptr) return pieces;
  for (const CheckpointPiece& piece : checkpoint_->tensors[tensor].pieces)
    pieces.parts.push_back({{}, {BoxOfPiece(piece)}});
  const std::size_t dims = std::max<std::size_t>(1, checkpoint_->tensors[tensor].shape.size());
  pieces.index = std::make_unique<BoxIndex>(pieces.parts, dims);
  return pieces;
}

Status BoxReader::Read(std::int32_t tensor, const PartBox& box, char* bytes) {
  const CheckpointTensor& of = checkpoint_->tensors[tensor];
  const std::size_t dims = std::max<std::size_t>(1, of.shape.size());
  const std::int64_t element = SizeBytes(of.dtype);
  PartBox target = box;
  target.at = 0;
  std::int64_t wanted = element;
  for (std::size_t d = dims; d-- > 0;) {
    target.strides[d] = wanted / element;
    wanted *= box.high[d] - box.low[d];
  }
  const Pieces& pieces = PiecesOf(tensor);
  std::int64_t found = 0;
  Status status;
  pieces.index->ForEachNear(target, [&](const BoxIndex::Entry& entry) {
    ReshardCopy copy;
    if (!status || !Meet(pieces.parts[entry.part].boxes[0], target, dims, element, copy)) return;
    const CheckpointPiece& piece = of.pieces[entry.part];
    found += MovedBytes(copy).value;
    status =
        ReadLoops(files_[piece.file], piece.offset + copy.source_offset, copy, 0, bytes + copy.target_offset);
  });
  if (status && found != wanted)
    return MakeError(ErrorCode::kInternal, fmt::format("{} bytes of {} were found, and {} are needed", found,
                                                       Printable(of.name), wanted));
  return status;
}

Status BoxReader::ReadLoops(const InputFile& file, std::int64_t offset, const ReshardCopy& copy,
                            std::size_t loop, char* bytes) {
  if (loop == copy.loops.size()) return file.Read(offset, bytes, copy.run_bytes.value);
  std::int64_t span = copy.run_bytes.value;
  std::int64_t used = copy.run_bytes.value;
  for (std::size_t l = loop; l < copy.loops.size(); ++l) {
    span += (copy.loops[l].count - 1) * copy.loops[l].source_stride;
    used *= copy.loops[l].count;
  }
  if (copy.run_bytes.value < kLongRun && span <= kSpanBytes && span / kMostWaste <= used) {
    span_.resize(static_cast<std::size_t>(kSpanBytes));
    if (Status status = file.Read(offset, span_.data(), span); !status) return status;
    Gather(copy, loop, span_.data(), bytes);
    return {};
  }
  // A loop whose whole span is too long may have parts that are not.
  const CopyLoop& here = copy.loops[loop];
  const std::int64_t inner = span - (here.count - 1) * here.source_stride;
  const std::int64_t at_once = copy.run_bytes.value < kLongRun && here.source_stride > 0 &&
                                       inner < kSpanBytes &&
                                       here.source_stride / kMostWaste <= used / here.count
                                   ? std::max<std::int64_t>(1, (kSpanBytes - inner) / here.source_stride)
                                   : 1;
  for (std::int64_t i = 0; i < here.count; i += at_once) {
    ReshardCopy part = copy;
    part.loops[loop].count = std::min(at_once, here.count - i);
    const bool one = part.loops[loop].count == 1;
    if (Status status = ReadLoops(file, offset + i * here.source_stride, part, one ? loop + 1 : loop,
                                  bytes + i * here.target_stride);
        !status)
      return status;
  }
  return {};
}

}  // namespace shardplan
