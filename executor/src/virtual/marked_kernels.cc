// SPDX-License-Identifier: Apache-2.0
#include "virtual/marked_kernels.h"

#include <utility>
#include <vector>

#include "shardplan/schemas/dtype.h"

namespace shardplan::executor {
namespace {

// The marks of one row of elements. A conversion makes a whole element of any poison in one.
struct Row {
  const PoisonMarks& src;
  std::int64_t src_begin;  // bytes
  PoisonMarks& dst;
  std::int64_t dst_begin;
  std::int64_t numel;
};

void CombineRow(const Row& row, std::int64_t src_size, std::int64_t dst_size, bool clear) {
  // Read before anything is written: a block that was freed too early may be both.
  std::vector<std::pair<std::int64_t, std::int64_t>> elements;
  row.src.ForEach(row.src_begin, row.src_begin + row.numel * src_size,
                  [&](std::int64_t begin, std::int64_t end) {
                    elements.emplace_back((begin - row.src_begin) / src_size,
                                          (end - row.src_begin + src_size - 1) / src_size);
                  });
  if (clear) row.dst.Clear(row.dst_begin, row.dst_begin + row.numel * dst_size);
  for (const auto& [first, last] : elements) {
    row.dst.Mark(row.dst_begin + first * dst_size, row.dst_begin + last * dst_size);
  }
}

void Combine(const CopySpec& copy, PartPlaces src, PartPlaces dst, bool clear) {
  const std::int64_t src_size = SizeBytes(copy.src_dtype);
  const std::int64_t dst_size = SizeBytes(copy.dst_dtype);
  for (const CopyRun& run : copy.runs) {
    const Place& from = src[run.src_part];
    const Place& to = dst[run.dst_part];
    const bool one_piece = run.src_stride == run.row_numel && run.dst_stride == run.row_numel;
    const std::int64_t rows = one_piece ? 1 : run.rows;
    const std::int64_t numel = one_piece ? run.rows * run.row_numel : run.row_numel;
    // Nothing is marked on either side: nothing changes, however many rows there are.
    if (from.block->marks.empty() && (!clear || to.block->marks.empty())) continue;
    for (std::int64_t r = 0; r < rows; ++r) {
      const Row row = {from.block->marks, from.offset + (run.src_offset + r * run.src_stride) * src_size,
                       to.block->marks, to.offset + (run.dst_offset + r * run.dst_stride) * dst_size, numel};
      CombineRow(row, src_size, dst_size, clear);
    }
  }
}

}  // namespace

void CopyMarks(const CopySpec& copy, PartPlaces src, PartPlaces dst) {
  Combine(copy, src, dst, true);
  const std::int64_t size = SizeBytes(copy.dst_dtype);
  for (const ZeroRun& zero : copy.zeros) {
    const Place& to = dst[zero.part];
    to.block->marks.Clear(to.offset + zero.offset * size, to.offset + (zero.offset + zero.numel) * size);
  }
}

void AccumulateMarks(const CopySpec& copy, PartPlaces src, PartPlaces dst) { Combine(copy, src, dst, false); }

void AddMarks(const PoisonMarks& src, std::int64_t src_offset, std::int64_t bytes, PoisonMarks& dst,
              std::int64_t dst_offset) {
  src.ForEach(src_offset, src_offset + bytes, [&](std::int64_t begin, std::int64_t end) {
    dst.Mark(begin - src_offset + dst_offset, end - src_offset + dst_offset);
  });
}

}  // namespace shardplan::executor
