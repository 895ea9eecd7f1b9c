// SPDX-License-Identifier: Apache-2.0
// Recordings of programs that nobody would write: a few streams, threads and addresses, so that much
// collides.
#pragma once

#include <cstdint>

#include "shardplan/schemas/recording.h"

namespace shardplan::test {

inline constexpr std::int64_t kArenaBytes = 96;

Recording RandomRaces(std::uint64_t seed, std::size_t events);

}  // namespace shardplan::test
