// SPDX-License-Identifier: Apache-2.0
// Lifetimes and accesses of buffers: what allocate, free, reads and writes make of the memory's state. At
// each of them the rules are asked (rules.h) before the state changes.
#pragma once

#include <vector>

#include "shardplan/schemas/assert.h"
#include "shardplan/schemas/plan.h"
#include "verifier/clocks.h"
#include "verifier/state.h"
#include "verifier/words/words.h"

namespace shardplan::verifier {

class Memory {
 public:
  // Persistent buffers are alive; those that keep something from step to step are filled.
  Memory(const Plan& plan, const Clocks& clocks, Words& words);

  // A new step: "freed" in the rules means freed in this step.
  void BeginStep() { ++step_; }
  std::int32_t step() const { return step_; }

  void Allocate(BufferId buffer, std::int32_t pool, Position at);
  // True if the buffer's memory went away with it (false: it was not alive, or an alias still holds it).
  bool Free(BufferId buffer, const std::vector<StreamId>& safe_after, Position at);
  // These parts go, for all names of the memory; the buffer is alive, but they may not be used, until it is
  // freed.
  void FreeParts(BufferId buffer, const std::vector<std::int32_t>& parts,
                 const std::vector<StreamId>& safe_after, Position at);
  // `alias` becomes another name of the memory of `buffer`; the memory lives until both are freed.
  void MakeAlias(BufferId alias, BufferId buffer);

  // `work` reads / writes the buffer. False if it is not alive (reported). `rule` is the one that a read
  // breaks when the buffer holds less than `needed` or its last write is not ordered before. A copy touches
  // the parameters that the buffer has in common with `other`; without `other` (-1) all are touched.
  bool Read(BufferId buffer, const Work& work, Content needed = Content::kEverything,
            Rule rule = Rule::kReadBeforeWrite, BufferId other = -1);
  bool Write(BufferId buffer, const Work& work);
  // The model's own compute allocates and frees on its stream without instructions of the plan.
  void UsePool(const Work& work);

  bool IsAlive(BufferId buffer) const { return lifetimes_[buffer].slot >= 0; }
  // The memory behind a living buffer, and its index, which gradients key by.
  std::int32_t Slot(BufferId buffer) const { return lifetimes_[buffer].slot; }
  const Allocation& Of(BufferId buffer) const {
    SHARDPLAN_ASSERT(IsAlive(buffer), "only a living buffer has memory");
    return slots_[Slot(buffer)];
  }
  Content ContentOf(BufferId buffer) const { return Of(buffer).content; }
  void SetContent(BufferId buffer, Content content) { At(buffer).content = content; }
  void SetCut(BufferId buffer, CommunicatorId over) { At(buffer).cut_over = over; }
  // A copy from `source` was written to the buffer: it has this content as soon as such copies have brought
  // all of its parameters.
  void FillFrom(BufferId source, BufferId buffer, Content content);
  // The optimizer steps a parameter of the buffer's unit.
  void Outdate(BufferId buffer, std::int32_t parameter, Position at);
  // Parameters go from `source` to `buffer`: what comes is as old as it was there.
  void PassAge(BufferId source, BufferId buffer);

 private:
  Allocation& At(BufferId buffer) {
    SHARDPLAN_ASSERT(IsAlive(buffer), "only a living buffer has memory");
    return slots_[Slot(buffer)];
  }
  std::int32_t NewSlot();
  bool IsUsable(BufferId buffer, BufferId other, Position at);
  bool IsFreeable(BufferId buffer, Position at);
  // Notes who may still use the memory, behind what it is handed out for next.
  void GiveBack(BufferId buffer, const Allocation& memory, const std::vector<StreamId>& safe_after,
                Position at);
  void SettleDebt(BufferId buffer, Allocation& memory, const Work& first_use);
  // Whether the allocator hands this memory out again without looking at the streams that use it.
  bool IsPooled(const Allocation& memory) const;

  const Plan& plan_;
  const Clocks& clocks_;
  Words& words_;
  std::int32_t step_ = 0;
  std::vector<Lifetime> lifetimes_;  // by buffer
  std::vector<Allocation> slots_;
  std::vector<std::int32_t> unused_slots_;
  std::vector<std::vector<Debt>> pools_;  // by stream
};

}  // namespace shardplan::verifier
