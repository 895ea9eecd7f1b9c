// SPDX-License-Identifier: Apache-2.0
// Races by definition: a graph of what orders what, searched for each pair of accesses to each byte. Shares
// nothing with what it judges.
#pragma once

#include <cstdint>
#include <set>
#include <utility>

#include "shardplan/schemas/recording.h"

namespace shardplan::test {

struct NaiveRaces {
  std::set<std::pair<std::int64_t, std::int64_t>> pairs;  // events
  std::set<std::int64_t> bytes;                           // that some pair races for
};

NaiveRaces FindNaively(const Recording& recording);

// Every byte of the region.
std::set<std::int64_t> BytesOf(const MemoryRegion& region);

}  // namespace shardplan::test
