// SPDX-License-Identifier: Apache-2.0
#include "virtual/poison_marks.h"

#include <algorithm>

namespace shardplan::executor {

void PoisonMarks::Mark(std::int64_t begin, std::int64_t end) {
  if (begin >= end) return;
  auto range = ranges_.upper_bound(begin);
  if (range != ranges_.begin() && std::prev(range)->second >= begin) {
    --range;
    begin = range->first;
  }
  while (range != ranges_.end() && range->first <= end) {
    end = std::max(end, range->second);
    range = ranges_.erase(range);
  }
  ranges_.emplace_hint(range, begin, end);
}

void PoisonMarks::Clear(std::int64_t begin, std::int64_t end) {
  if (begin >= end || ranges_.empty()) return;
  auto range = ranges_.upper_bound(begin);
  if (range != ranges_.begin() && std::prev(range)->second > begin) --range;
  while (range != ranges_.end() && range->first < end) {
    const auto [from, to] = *range;
    range = ranges_.erase(range);
    if (from < begin) ranges_.emplace_hint(range, from, begin);
    if (to > end) range = ranges_.emplace_hint(range, end, to);
  }
}

}  // namespace shardplan::executor
