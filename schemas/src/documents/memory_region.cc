// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstdint>
#include <vector>

#include "shardplan/schemas/dtype.h"
#include "shardplan/schemas/recording.h"

namespace shardplan {
namespace {

// A region as equal runs of bytes: `dims` says how they repeat, the largest step first.
struct Runs {
  struct Dim {
    std::int64_t count = 1;
    std::int64_t step_bytes = 0;
    std::int64_t inner_bytes = 0;  // from the first byte of one of them to behind its last
  };
  std::int64_t begin = 0;
  std::int64_t run_bytes = 0;
  std::vector<Dim> dims;
};

std::int64_t Elements(const MemoryRegion& region) {
  std::int64_t elements = 1;
  for (const std::int64_t size : region.shape) elements *= size;
  return elements;
}

Runs RunsOf(const MemoryRegion& region) {
  Runs runs{.begin = region.address, .run_bytes = SizeBytes(region.dtype)};
  if (region.strides.empty()) {
    runs.run_bytes *= Elements(region);
    return runs;
  }
  std::vector<Runs::Dim> dims;
  for (std::size_t d = 0; d < region.shape.size(); ++d) {
    const bool repeats =
        region.shape[d] > 1 && region.strides[d] > 0;  // an expanded dimension is one element
    if (repeats) dims.push_back({region.shape[d], region.strides[d] * SizeBytes(region.dtype), 0});
  }
  std::ranges::sort(dims, {}, &Runs::Dim::step_bytes);
  std::int64_t inner = runs.run_bytes;
  for (Runs::Dim& dim : dims) {
    dim.inner_bytes = inner;
    inner += (dim.count - 1) * dim.step_bytes;
    const bool has_gaps = dim.step_bytes > dim.inner_bytes || !runs.dims.empty();
    if (has_gaps) {
      runs.dims.push_back(dim);
    } else {
      runs.run_bytes = inner;
    }
  }
  std::ranges::reverse(runs.dims);
  return runs;
}

// Does a run of the dimensions from `depth` on, of which the first begins at `base`, have a byte of [begin,
// end)?
bool Touches(const Runs& runs, std::size_t depth, std::int64_t base, std::int64_t begin, std::int64_t end) {
  if (depth == runs.dims.size()) return base < end && begin < base + runs.run_bytes;
  const Runs::Dim& dim = runs.dims[depth];
  // base + i * step < end, and base + i * step + inner > begin
  const std::int64_t last = (end - base - 1 >= 0 ? (end - base - 1) / dim.step_bytes : -1);
  const std::int64_t behind = begin - base - dim.inner_bytes;
  const std::int64_t first = behind < 0 ? 0 : behind / dim.step_bytes + 1;
  for (std::int64_t i = first; i <= std::min(last, dim.count - 1); ++i) {
    if (Touches(runs, depth + 1, base + i * dim.step_bytes, begin, end)) return true;
  }
  return false;
}

struct Window {
  std::int64_t begin = 0, end = 0;
};

bool AnyRunTouches(const Runs& a, std::size_t depth, std::int64_t base, const Runs& b, Window window) {
  if (depth == a.dims.size()) {
    const std::int64_t begin = std::max(base, window.begin), end = std::min(base + a.run_bytes, window.end);
    return begin < end && Touches(b, 0, b.begin, begin, end);
  }
  for (std::int64_t i = 0; i < a.dims[depth].count; ++i) {
    if (AnyRunTouches(a, depth + 1, base + i * a.dims[depth].step_bytes, b, window)) return true;
  }
  return false;
}

std::int64_t Count(const Runs& runs) {
  std::int64_t count = 1;
  for (const Runs::Dim& dim : runs.dims) count *= dim.count;
  return count;
}

}  // namespace

std::int64_t SpanBytes(const MemoryRegion& region) {
  const std::int64_t size = SizeBytes(region.dtype), elements = Elements(region);
  if (elements == 0 || region.strides.empty()) return elements * size;
  std::int64_t last = 0;
  for (std::size_t d = 0; d < region.shape.size(); ++d) last += (region.shape[d] - 1) * region.strides[d];
  return (last + 1) * size;
}

bool OverlapIn(const MemoryRegion& a, const MemoryRegion& b, std::int64_t begin, std::int64_t end) {
  const Window window = {std::max({begin, a.address, b.address}),
                         std::min({end, a.address + SpanBytes(a), b.address + SpanBytes(b)})};
  if (window.begin >= window.end) return false;
  const Runs a_runs = RunsOf(a), b_runs = RunsOf(b);
  return Count(a_runs) <= Count(b_runs) ? AnyRunTouches(a_runs, 0, a_runs.begin, b_runs, window)
                                        : AnyRunTouches(b_runs, 0, b_runs.begin, a_runs, window);
}

bool Overlap(const MemoryRegion& a, const MemoryRegion& b) {
  return OverlapIn(a, b, std::min(a.address, b.address),
                   std::max(a.address + SpanBytes(a), b.address + SpanBytes(b)));
}

}  // namespace shardplan
