// SPDX-License-Identifier: Apache-2.0
// The last accesses to each byte: stretches of memory in which all bytes have the same.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <vector>

#include "shardplan/races/races.h"

namespace shardplan {

struct Access {
  RecordedId stream = -1;
  std::int32_t tick = 0;  // of the stream
  RacingAccess what;
};

class Shadow {
 public:
  // Asked for each earlier access to the same stretch [begin, end) of which one writes. Two accesses with
  // gaps may share no byte of it (OverlapIn).
  using Visit = std::function<void(const Access& earlier, std::int64_t begin, std::int64_t end)>;

  // Visits what the access may race with, and remembers it. A write of every byte of a stretch forgets what
  // was before it: what is not ordered with that either races with the write, or is behind it.
  void Add(const Access& access, const Visit& visit);
  // Visits what an access of the host may race with.
  void Look(const RacingAccess& access, const Visit& visit) const;
  // Visits every access in the stretch.
  void ForEach(std::int64_t begin, std::int64_t end, const std::function<void(const Access&)>& visit) const;
  void Forget(std::int64_t begin, std::int64_t end);

 private:
  struct Stretch {
    std::int64_t end = 0;
    std::vector<Access> accesses;
  };
  using Stretches = std::map<std::int64_t, Stretch>;
  // A stretch begins here, if one covers it.
  void Cut(std::int64_t at);
  Stretches::const_iterator FirstIn(std::int64_t begin) const;

  Stretches stretches_;
};

}  // namespace shardplan
