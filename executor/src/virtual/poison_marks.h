// SPDX-License-Identifier: Apache-2.0
// Which bytes of a block are poison, where a run looks at nothing else (VirtualContent::kMarks).
#pragma once

#include <cstdint>
#include <iterator>
#include <map>

namespace shardplan::executor {

// Disjoint ranges of bytes that do not touch. A block that is all poison, or all zero, takes one entry or
// none.
class PoisonMarks {
 public:
  void Mark(std::int64_t begin, std::int64_t end);
  void Clear(std::int64_t begin, std::int64_t end);
  bool empty() const { return ranges_.empty(); }

  // Calls visit(begin, end) for every marked range of [begin, end), cut to it.
  template <typename Visit>
  void ForEach(std::int64_t begin, std::int64_t end, Visit&& visit) const {
    if (begin >= end) return;
    auto range = ranges_.upper_bound(begin);
    if (range != ranges_.begin() && std::prev(range)->second > begin) --range;
    for (; range != ranges_.end() && range->first < end; ++range) {
      visit(range->first < begin ? begin : range->first, range->second > end ? end : range->second);
    }
  }

 private:
  std::map<std::int64_t, std::int64_t> ranges_;  // begin -> end
};

}  // namespace shardplan::executor
