// SPDX-License-Identifier: Apache-2.0
// A static arena: every buffer of a plan at an address of its own, the same in every step.
//
// [Note: what may share an address]
// Two buffers share memory when they are never alive at the same time, in any step, and were allocated on the
// same stream: the rule of a caching allocator's pools, so that what holds of a plan there holds here. Where
// a plan's free names further streams (safe_after), whoever gets the address next waits for what they were
// given until then.
//
// Not in the arena: what outlives the plan's frees because a user may hold it (sharded gradients and the
// reduced ones that become them), what autograd allocates, the persistent shards, and host memory.
#pragma once

#include <cstdint>
#include <vector>

#include "shardplan/schemas/plan.h"

namespace shardplan::executor {

enum class MemorySource : std::uint8_t {
  kAllocator,  // LibTorch's caching allocator
  kArena,
};

struct ArenaLayout {
  std::int64_t size_bytes = 0;
  // By BufferId: the buffer's first byte in the arena, -1: it is not in it. Its parts follow one another,
  // each at a multiple of kArenaAlignment.
  std::vector<std::int64_t> offsets;
  // By BufferId: the buffers whose memory overlaps with it, ascending.
  std::vector<std::vector<BufferId>> sharers;
};

inline constexpr std::int64_t kArenaAlignment = 512;

// Bytes of the arena that a buffer takes, and where in them its part begins.
std::int64_t ArenaBytes(const Buffer& buffer);
std::int64_t ArenaPartOffset(const Buffer& buffer, std::int32_t part);

// Deterministic. About as large as what of each stream is alive at once.
ArenaLayout LayOutArena(const Plan& plan);

}  // namespace shardplan::executor
