// SPDX-License-Identifier: Apache-2.0
#include "races/shadow.h"

#include <algorithm>

namespace shardplan {
namespace {

bool HasGaps(const RacingAccess& access) { return !access.region.strides.empty(); }

bool MayRace(const RacingAccess& a, const RacingAccess& b) { return a.writes || b.writes; }

// Two accesses that are in a stretch: do they have a byte of it in common?
bool Meet(const RacingAccess& a, const RacingAccess& b, std::int64_t begin, std::int64_t end) {
  return (!HasGaps(a) && !HasGaps(b)) || OverlapIn(a.region, b.region, begin, end);
}

// Is `later`, of the same stream, in the place of `earlier` for every access to come?
bool Replaces(const Access& later, const Access& earlier) {
  if (later.stream != earlier.stream || later.what.writes != earlier.what.writes) return false;
  return !HasGaps(later.what) || later.what.region == earlier.what.region;
}

}  // namespace

void Shadow::Cut(std::int64_t at) {
  auto found = stretches_.upper_bound(at);
  if (found == stretches_.begin()) return;
  --found;
  if (found->first == at || found->second.end <= at) return;
  Stretch rest = found->second;
  found->second.end = at;
  stretches_.emplace(at, std::move(rest));
}

Shadow::Stretches::const_iterator Shadow::FirstIn(std::int64_t begin) const {
  auto found = stretches_.upper_bound(begin);
  if (found != stretches_.begin() && std::prev(found)->second.end > begin) --found;
  return found;
}

void Shadow::Add(const Access& access, const Visit& visit) {
  const std::int64_t begin = access.what.region.address, end = begin + SpanBytes(access.what.region);
  if (begin >= end) return;
  Cut(begin);
  Cut(end);
  std::int64_t at = begin;
  auto next = stretches_.lower_bound(begin);
  while (at < end) {
    if (next == stretches_.end() || next->first > at) {
      const std::int64_t gap_end = next == stretches_.end() ? end : std::min(end, next->first);
      next = stretches_.emplace_hint(next, at, Stretch{gap_end, {}});
    }
    std::vector<Access>& accesses = next->second.accesses;
    for (const Access& earlier : accesses) {
      if (earlier.stream != access.stream && MayRace(earlier.what, access.what)) {
        visit(earlier, next->first, next->second.end);
      }
    }
    if (access.what.writes && !HasGaps(access.what)) {
      accesses.clear();
    } else {
      std::erase_if(accesses, [&](const Access& earlier) { return Replaces(access, earlier); });
    }
    accesses.push_back(access);
    at = next->second.end;
    ++next;
  }
}

void Shadow::Look(const RacingAccess& access, const Visit& visit) const {
  const std::int64_t begin = access.region.address, end = begin + SpanBytes(access.region);
  for (auto next = FirstIn(begin); next != stretches_.end() && next->first < end; ++next) {
    for (const Access& earlier : next->second.accesses) {
      const std::int64_t from = std::max(begin, next->first), to = std::min(end, next->second.end);
      if (MayRace(earlier.what, access) && Meet(earlier.what, access, from, to)) visit(earlier, from, to);
    }
  }
}

void Shadow::ForEach(std::int64_t begin, std::int64_t end,
                     const std::function<void(const Access&)>& visit) const {
  for (auto next = FirstIn(begin); next != stretches_.end() && next->first < end; ++next) {
    for (const Access& access : next->second.accesses) visit(access);
  }
}

void Shadow::Forget(std::int64_t begin, std::int64_t end) {
  Cut(begin);
  Cut(end);
  stretches_.erase(stretches_.lower_bound(begin), stretches_.lower_bound(end));
}

}  // namespace shardplan
