// SPDX-License-Identifier: Apache-2.0
// The abstract state that the rules are statements about: what lives where, which gradients it holds, and
// what each unit's parameters are views of. clocks.h has the rest of it, what happens before what.
//
// [Note: when is a free too early?]
// `free` takes effect in host order, while work that uses the buffer may still be waiting on some stream.
// That alone is no mistake: the block goes back to the pool of the stream S that it was allocated on, and
// only the next allocation from that pool can overwrite it. So what has to hold is that the first use of any
// later allocation from S's pool starts after every access of the freed buffer. PyTorch relies on exactly
// this: FSDP2 frees an HSDP all-reduce's buffer, allocated on the reduce-scatter stream, when only the
// compute stream has waited for the all-reduce; the reduce-scatter stream waits for compute before it next
// allocates. We therefore keep, per pool, a "debt": for each stream the last tick at which it uses memory
// freed into the pool. An allocation takes the debt over, and its first use must be ordered after it. Streams
// in `safe_after` (record_stream) add no debt: the allocator itself holds the block back until their work is
// done.
//
//   host     allocate x on S | use x on T | free x | allocate y on S (takes x's block) | use y on S
//   S        ..................................... wait(T) ...........................| write y |
//   T        ........................|==== use x ====| record
//            The free comes before the use has run. It is safe: S waits for T before it writes y.
//
// [Note: gradients move]
// A gradient is a value that moves: grad_copy_in, reduce_scatter, grad_cast, grad_accumulate and copy_to_host
// leave a value in dst and a used-up one in src. Using a used-up value again counts a gradient twice;
// dropping one that is not used up loses it.
#pragma once

#include <cstdint>
#include <vector>

#include "shardplan/schemas/plan.h"
#include "verifier/clocks.h"

namespace shardplan::verifier {

// How much of a buffer holds a value.
enum class Content : std::uint8_t {
  kNothing,
  kOwnSlot,  // an all-gather output that holds this rank's part only
  kEverything,
};

// The last use by one stream of memory that was freed into a pool.
struct Debt {
  Work use;
  Position freed;
  BufferId buffer = -1;
};

// A piece of memory, from its allocation until all buffers that refer to it are freed.
struct Allocation {
  std::int32_t names = 0;  // buffers that refer to it; 0: the slot is free
  BufferId owner = -1;
  std::int32_t pool = -1;
  Position allocated;
  Content content = Content::kNothing;
  std::vector<std::int32_t> filled_parameters;  // while it holds nothing: what copies have brought
  CommunicatorId cut_over = -1;  // the ranks that have the other pieces of the parameters in it; -1: none
  std::vector<std::int32_t>
      outdated;          // parameters in it that the optimizer has stepped since they were a shard
  Position outdated_at;  // ... the latest such step
  bool debt_settled = true;
  std::vector<std::int32_t> freed_parts;
  Position freed_parts_at;  // the latest free of parts
  std::int32_t used_step = -1;
  Work last_write;
  std::vector<Work> last_access;  // by stream
  std::vector<Debt> debt;         // by stream
};

// Whether and when a buffer lives.
struct Lifetime {
  std::int32_t slot = -1;        // its memory; -1: not alive
  std::int32_t freed_step = -1;  // the step, counted as run, of the latest free; -1: never
  Position freed_at;
};

// The gradients of one unit in one piece of memory.
struct Gradient {
  UnitId unit = -1;                 // -1: none
  std::vector<std::int32_t> count;  // per parameter of the unit: gradients of how many segments are summed
  std::vector<char> zero;           // ... whether zeros stand in its place (grad_zero)
  std::vector<char> stepped;        // ... whether the optimizer has stepped it with this sum
  bool used_up = false;             // it has moved on
  bool inner = false;               // reduced over the inner ranks, where its unit has two levels
  bool sharded = false;             // reduce-scattered, over all shards
  bool replicated = false;          // all-reduced over the replicas
  bool checked = false;             // its divisor was found right or reported
  double divisor = 1.0;             // the product of all divisors on its way
  std::vector<Position> history;

  bool IsThere() const { return unit >= 0 && !used_up; }
  bool Has(std::size_t parameter) const { return count[parameter] > 0 || zero[parameter] != 0; }
};

// Facts of a buffer that are the same before and after the steps that repeat.
struct BufferState {
  bool alive = false;
  Content content = Content::kNothing;
  std::vector<std::int32_t> gradients;
  bool operator==(const BufferState&) const = default;
};
struct Snapshot {
  std::vector<BufferState> buffers;
  std::vector<BufferId> bound;  // by unit
};

}  // namespace shardplan::verifier
