// SPDX-License-Identifier: Apache-2.0
// The elements of a box of a tensor, wherever the checkpoint has them.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "checkpoints/files/input_file.h"
#include "checkpoints/layouts/part_boxes.h"
#include "shardplan/checkpoints/checkpoint.h"

namespace shardplan {

class BoxReader {
 public:
  // Files that are other ones than when the checkpoint was read: kBadInput.
  static Result<BoxReader> Open(const Checkpoint& checkpoint);

  // The elements of the box in row-major order, to `bytes`.
  Status Read(std::int32_t tensor, const PartBox& box, char* bytes);
  // kBadInput: a file has changed since Open.
  Status CheckUnchanged() const;

 private:
  // A tensor's pieces, to find those that meet a box.
  struct Pieces {
    std::vector<HeldPart> parts;
    std::unique_ptr<BoxIndex> index;
  };
  explicit BoxReader(const Checkpoint& checkpoint);
  const Pieces& PiecesOf(std::int32_t tensor);
  // The loops of a copy from the given one on.
  Status ReadLoops(const InputFile& file, std::int64_t offset, const ReshardCopy& copy, std::size_t loop,
                   char* bytes);

  const Checkpoint* checkpoint_;
  std::vector<InputFile> files_;
  std::vector<Pieces> pieces_;
  std::vector<char> span_;  // what lies between scattered runs is read with them
};

// Calls visit(box) for slabs of the box, in row-major order, that have at most `most_bytes` (at least an
// element); false: visit returned false.
template <typename Visit>
bool ForEachSlab(const PartBox& box, std::size_t dims, std::int64_t element_bytes, std::int64_t most_bytes,
                 const Visit& visit) {
  std::int64_t bytes = element_bytes;
  std::size_t cut = dims;
  for (std::size_t d = dims; d-- > 0;) {
    bytes *= box.high[d] - box.low[d];
    if (box.high[d] - box.low[d] > 1) cut = d;
  }
  if (bytes <= most_bytes || cut == dims) return visit(box);
  const std::int64_t row = bytes / (box.high[cut] - box.low[cut]);
  const std::int64_t rows = std::max<std::int64_t>(1, most_bytes / row);
  for (std::int64_t low = box.low[cut]; low < box.high[cut]; low += rows) {
    PartBox slab = box;
    slab.low[cut] = low;
    slab.high[cut] = std::min(box.high[cut], low + rows);
    if (!ForEachSlab(slab, dims, element_bytes, most_bytes, visit)) return false;
  }
  return true;
}

}  // namespace shardplan
