// SPDX-License-Identifier: Apache-2.0
#include "checkpoints/layouts/part_boxes.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <set>
#include <tuple>

#include "shardplan/checkpoints/reshard.h"

namespace shardplan {
namespace {

// The elements [first, last) in row-major order of a box, as boxes: at most two for each dimension but one.
class RangeBoxes {
 public:
  RangeBoxes(const LocalPart& part, std::vector<PartBox>& boxes) : part_(part), boxes_(boxes) {
    std::int64_t stride = 1;
    for (std::size_t d = part.size.size(); d-- > 0;) {
      strides_[d] = stride;
      stride *= part.size[d];
    }
  }
  void Add() { Add(0, BoxCoordinates{}, part_.first, part_.first + part_.count); }

 private:
  // `before`: coordinates in the dimensions before `dim`; the range counts from there.
  void Add(std::size_t dim, BoxCoordinates before, std::int64_t first, std::int64_t last) {
    if (first == last) return;
    const std::int64_t stride = strides_[dim];
    std::int64_t begin = first / stride;
    const std::int64_t end = last / stride;
    if (first % stride != 0) {
      before[dim] = begin;
      if (begin == end) return Add(dim + 1, before, first % stride, last % stride);
      Add(dim + 1, before, first % stride, stride);
      ++begin;
    }
    if (begin < end) AddRows(dim, before, begin, end);
    if (last % stride == 0) return;
    before[dim] = end;
    Add(dim + 1, before, 0, last % stride);
  }

  void AddRows(std::size_t dim, const BoxCoordinates& before, std::int64_t begin, std::int64_t end) {
    PartBox box;
    box.at = part_.offset - part_.first;
    for (std::size_t d = 0; d < part_.size.size(); ++d) {
      const std::int64_t low = d < dim ? before[d] : d == dim ? begin : 0;
      const std::int64_t high = d < dim ? before[d] + 1 : d == dim ? end : part_.size[d];
      box.low[d] = part_.low[d] + low;
      box.high[d] = part_.low[d] + high;
      box.strides[d] = strides_[d];
      box.at += low * strides_[d];
    }
    boxes_.push_back(box);
  }

  const LocalPart& part_;
  std::vector<PartBox>& boxes_;
  BoxCoordinates strides_ = {};
};

}  // namespace

std::vector<HeldPart> HeldPartsOf(const StateLayout& layout, const StateTensor& tensor) {
  using Key = std::tuple<std::vector<std::int64_t>, std::vector<std::int64_t>, std::int64_t, std::int64_t>;
  std::map<Key, std::size_t> known;
  std::vector<HeldPart> parts;
  const std::int64_t ranks = RanksOf(layout);
  for (std::int64_t rank = 0; rank < ranks; ++rank) {
    const LocalPart part = PartOf(layout, tensor, rank);
    if (part.count == 0) continue;
    const auto [found, is_new] =
        known.try_emplace(Key(part.low, part.size, part.first, part.count), parts.size());
    if (is_new) {
      parts.emplace_back();
      RangeBoxes(part, parts.back().boxes).Add();
    }
    parts[found->second].ranks.push_back(rank);
  }
  return parts;
}

BoxIndex::BoxIndex(const std::vector<HeldPart>& parts, std::size_t dims) {
  for (std::size_t p = 0; p < parts.size(); ++p) {
    for (std::size_t b = 0; b < parts[p].boxes.size(); ++b)
      entries_.push_back({static_cast<std::int32_t>(p), static_cast<std::int32_t>(b)});
  }
  const auto box_of = [&](const Entry& entry) -> const PartBox& {
    return parts[entry.part].boxes[entry.box];
  };
  std::size_t most = 0;
  for (std::size_t d = 0; d < dims; ++d) {
    std::set<std::int64_t> places;
    for (const Entry& entry : entries_) places.insert(box_of(entry).low[d]);
    if (places.size() <= most) continue;
    most = places.size();
    dim_ = d;
  }
  std::ranges::stable_sort(entries_, {}, [&](const Entry& entry) { return box_of(entry).low[dim_]; });
  for (const Entry& entry : entries_) {
    lows_.push_back(box_of(entry).low[dim_]);
    highs_.push_back(box_of(entry).high[dim_]);
    reach_.push_back(reach_.empty() ? highs_.back() : std::max(reach_.back(), highs_.back()));
  }
}

std::size_t BoxIndex::Before(std::int64_t high) const {
  return static_cast<std::size_t>(std::ranges::lower_bound(lows_, high) - lows_.begin());
}

bool Meet(const PartBox& source, const PartBox& target, std::size_t dims, std::int64_t element_bytes,
          ReshardCopy& copy) {
  BoxCoordinates extent = {};
  std::int64_t from = source.at;
  std::int64_t to = target.at;
  for (std::size_t d = 0; d < dims; ++d) {
    const std::int64_t low = std::max(source.low[d], target.low[d]);
    extent[d] = std::min(source.high[d], target.high[d]) - low;
    if (extent[d] <= 0) return false;
    from += (low - source.low[d]) * source.strides[d];
    to += (low - target.low[d]) * target.strides[d];
  }
  copy.source_offset = from * element_bytes;
  copy.target_offset = to * element_bytes;
  copy.loops.clear();  // innermost first, until it is turned around
  std::int64_t run = 1;
  for (std::size_t d = dims; d-- > 0;) {
    if (extent[d] == 1) continue;
    const std::int64_t there = source.strides[d];
    const std::int64_t here = target.strides[d];
    CopyLoop* inner = copy.loops.empty() ? nullptr : &copy.loops.back();
    if (inner == nullptr && there == run && here == run) {
      run *= extent[d];
    } else if (inner != nullptr && there * element_bytes == inner->source_stride * inner->count &&
               here * element_bytes == inner->target_stride * inner->count) {
      inner->count *= extent[d];
    } else {
      copy.loops.push_back({extent[d], there * element_bytes, here * element_bytes});
    }
  }
  copy.run_bytes = Bytes{run * element_bytes};
  std::ranges::reverse(copy.loops);
  return true;
}

}  // namespace shardplan
