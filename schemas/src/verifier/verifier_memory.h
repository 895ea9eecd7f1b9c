// Lifetimes and accesses of buffers: allocated before use, freed once and after the last use, written before
// read, no two unordered accesses of which one writes.
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
#pragma once

#include <vector>

#include "shardplan/schemas/plan.h"
#include "verifier/verifier_clocks.h"
#include "verifier/verifier_report.h"

namespace shardplan::verifier {

// How much of a buffer holds a value.
enum class Content : std::uint8_t {
  kNothing,
  kOwnSlot,  // an all-gather output that holds this rank's part only
  kEverything,
};

class Memory {
 public:
  Memory(const Plan& plan, const Clocks& clocks, Reporter& reporter);

  // A new step: "freed" in messages means freed in this step.
  void BeginStep() { ++step_; }

  void Allocate(BufferId buffer, std::int32_t pool, Position at);
  // True if the buffer's memory went away with it (false: it was not alive, or an alias still holds it).
  bool Free(BufferId buffer, const std::vector<StreamId>& safe_after, Position at);
  // These parts go, for all names of the memory; the buffer is alive, but they may not be used, until it is
  // freed.
  void FreeParts(BufferId buffer, const std::vector<std::int32_t>& parts,
                 const std::vector<StreamId>& safe_after, Position at);
  // `alias` becomes another name of the memory of `buffer`; the memory lives until both are freed.
  void MakeAlias(BufferId alias, BufferId buffer);

  bool IsAlive(BufferId buffer) const { return slot_[buffer] >= 0; }
  // The memory behind a living buffer: an index that gradients and others may key by.
  std::int32_t Slot(BufferId buffer) const { return slot_[buffer]; }
  // Of a buffer that is alive: how many buffers refer to its memory.
  std::int32_t Names(BufferId buffer) const { return slots_[slot_[buffer]].names; }
  Content ContentOf(BufferId buffer) const { return slots_[slot_[buffer]].content; }
  void SetContent(BufferId buffer, Content content) { slots_[slot_[buffer]].content = content; }
  // A copy from `source` was written to the buffer: it has this content as soon as such copies have brought
  // all of its parameters.
  void FillFrom(BufferId source, BufferId buffer, Content content);
  Position AllocatedAt(BufferId buffer) const { return slots_[slot_[buffer]].allocated; }
  bool WasUsedSince(BufferId buffer, std::int32_t step) const {
    return slots_[slot_[buffer]].used_step >= step;
  }
  std::int32_t step() const { return step_; }

  // `work` reads / writes the buffer. False if it is not alive (reported). `invisible` is the rule that a
  // read breaks when the buffer holds less than `needed` or its last write is not ordered before. A copy
  // touches the parameters that the buffer has in common with `other`; without `other` (-1) all are touched.
  bool Read(BufferId buffer, const Work& work, Content needed = Content::kEverything,
            Rule invisible = Rule::kReadBeforeWrite, BufferId other = -1);
  bool Write(BufferId buffer, const Work& work);
  // The model's own compute allocates and frees on its stream without instructions of the plan.
  void UsePool(const Work& work);

 private:
  // The last use by one stream of memory that was freed into a pool.
  struct Debt {
    Work use;
    Position freed;
    BufferId buffer = -1;
  };
  struct Allocation {
    std::int32_t names = 0;  // buffers that refer to it; 0: the slot is free
    BufferId owner = -1;
    std::int32_t pool = -1;
    Position allocated;
    Content content = Content::kNothing;
    std::vector<std::int32_t> filled_parameters;  // while it holds nothing: what copies have brought
    bool debt_settled = true;
    std::vector<std::int32_t> freed_parts;
    Position freed_parts_at;  // the latest free of parts
    std::int32_t used_step = -1;
    Work last_write;
    std::vector<Work> last_access;  // by stream
    std::vector<Debt> debt;         // by stream
  };

  std::int32_t NewSlot();
  bool CheckAlive(BufferId buffer, BufferId other, Position at);
  bool TouchesFreedPart(BufferId buffer, BufferId other) const;
  bool CheckFreeable(BufferId buffer, Position at);
  void GiveBack(BufferId buffer, const Allocation& memory, const std::vector<StreamId>& safe_after,
                Position at);
  void CheckDebt(std::int32_t pool, const std::vector<Debt>& debt, const Work& work, BufferId reused_as);
  Allocation& Touch(BufferId buffer, const Work& work);
  std::vector<std::string> Chain(const Work& earlier, const Work& later) const;

  const Plan& plan_;
  const Clocks& clocks_;
  Reporter& reporter_;
  std::int32_t step_ = 0;
  std::vector<std::int32_t> slot_;        // by buffer; -1: not alive
  std::vector<std::int32_t> freed_step_;  // by buffer: step_ of the latest free, -1: never
  std::vector<Position> freed_at_;
  std::vector<Allocation> slots_;
  std::vector<std::int32_t> unused_slots_;
  std::vector<std::vector<Debt>> pools_;  // by stream
};

}  // namespace shardplan::verifier
