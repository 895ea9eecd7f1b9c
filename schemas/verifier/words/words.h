// SPDX-License-Identifier: Apache-2.0
// The violations of one rank's plan in words: a function for each thing that can be wrong. The rules decide
// (rules.h); here stands what a person reads, and the chain of instructions that was broken.
#pragma once

#include <string>
#include <vector>

#include "verifier/rules.h"
#include "verifier/state.h"
#include "verifier/words/report.h"

namespace shardplan::verifier {

class Words {
 public:
  Words(const Plan& plan, Reporter& reporter) : plan_(plan), reporter_(reporter) {}

  // ---- lifetimes ----
  void AllocatedTwice(BufferId buffer, Position first, Position again);
  void FreedTwice(BufferId buffer, Position first, Position again);
  void PartFreedTwice(BufferId buffer, std::int32_t part, Position first, Position again);
  void FreedUnallocated(BufferId buffer, Position at);
  void UsedUnallocated(BufferId buffer, Position at);
  void UsedAfterFree(BufferId buffer, Position freed, Position used);
  void UsedAfterFreeOfParts(BufferId buffer, Position freed, Position used);
  void FreedWhileBound(UnitId unit, BufferId buffer, Position bound, Position freed);

  // ---- accesses ----
  // `rule`: read_before_write or use_before_unshard, by what the reader is.
  void ReadTooLittle(Rule rule, BufferId buffer, const Allocation& memory, const Work& reader);
  void ReadNotOrdered(Rule rule, BufferId buffer, const Work& writer, const Work& reader);
  void WrittenInRace(BufferId buffer, const Work& other, const Work& writer);
  // ... of a tensor of the model.
  void TensorReadNotOrdered(StorageId storage, const Work& writer, const Work& reader);
  void TensorWrittenInRace(StorageId storage, const Work& other, const Work& writer);
  // ... of activations that are copied or freed as a whole.
  void StorageIsMissing(BufferId buffer, StorageId storage, Position at);
  // The content of `host` is of micro-batch `microbatch`; -1: of another step.
  void BringsBackOthers(BufferId host, std::int32_t microbatch, Position at);
  // `reused_as`: the buffer that the memory is handed out for, -1 for the model's own; from the pool of
  // stream `pool`.
  void FreedTooEarly(std::int32_t pool, const Debt& debt, const Work& first_use, BufferId reused_as);
  void ReadWhileSharded(UnitId unit, Position sharded, Position read);
  // The pieces in `buffer` are cut over the ranks of `cut`, and the all-gather is not over those.
  void GatheredOverOthers(BufferId buffer, CommunicatorId cut, Position at);
  // The content of `buffer` was a shard before the optimizer stepped it.
  void MovesOutdated(BufferId buffer, Position stepped, Position at);
  void ReadsOtherThanParameters(UnitId unit, BufferId bound, Position bound_at, Position at);
  void ReadsInOtherDType(UnitId unit, BufferId bound, Position bound_at, Position at);
  void GradientInOtherDType(UnitId unit, BufferId grad, BufferId bound, Position at);

  // ---- waits ----
  void WaitedForNothing(EventId event, Position at);
  void HostWaitsForever(EventId event, Position blocked, Position waits);

  // ---- the end of the steps that repeat ----
  void NotFreed(BufferId buffer, Position allocated);
  void NeverUsed(BufferId buffer, Position allocated);
  void GoneAtEnd(BufferId buffer);
  void OtherContentAtEnd(BufferId buffer, Content before);
  void OtherGradientsAtEnd(BufferId buffer);
  void OtherBindingAtEnd(UnitId unit, BufferId before, BufferId after);

  // ---- gradients ----
  void GradientHasNoBuffer(const SegmentGrad& grad, Position at);
  void GradientNotMade(const Gradient& gradient, std::int32_t parameter, BufferId buffer, Position at);
  void AddedToMovedGradient(const Gradient& gradient, BufferId buffer, Position at);
  void TakenAgain(const Gradient& gradient, BufferId buffer, Position at);
  void ChangedAfterMove(const Gradient& gradient, BufferId buffer, Position at);
  void Dropped(const Gradient& gradient, BufferId buffer, Position at);
  void Overwritten(const Gradient& gradient, BufferId buffer, Position at);
  void ReducedTwice(const Gradient& gradient, Position at);
  void ReducedOverOtherRanks(const Gradient& gradient, Position at);
  void AddedToUnlike(const Gradient& gradient, BufferId dst, Position at);
  void NotReduced(const Gradient& gradient, MissingReduction missing, BufferId buffer, Position at);
  void SteppedWithout(BufferId own, UnitId unit, Position at);
  void SteppedWithoutStates(UnitId unit, Position at);
  void SteppedWithoutGradient(UnitId unit, std::int32_t parameter, Position at);
  void NeverAllocated(BufferId own);
  void AllocatedBehindStep(BufferId state, Position allocated);
  void SteppedOutOfReach(BufferId shard, bool on_host, Position at);
  void SteppedInOtherDType(BufferId grad, Position at);
  void StillOnItsWay(const Gradient& gradient, BufferId buffer, Position at);
  void DroppedBeforeStep(const Gradient& gradient, std::int32_t parameter, BufferId buffer, Position at);
  void SteppedTwice(const Gradient& gradient, std::int32_t parameter, BufferId buffer, Position at);
  void InTwoBuffers(UnitId unit, std::int32_t parameter, BufferId first, BufferId second, Position at);
  void DividedWrongly(const Gradient& gradient, double expected, BufferId buffer, Position at);
  void AddedToDividedUnlike(const Gradient& into, const Gradient& gradient, BufferId dst, Position at);

 private:
  std::string Buffer(BufferId buffer) const { return reporter_.BufferName(buffer); }
  std::string Instruction(Position at) const { return reporter_.Instruction(at); }
  std::string Describe(Position at) const { return reporter_.Describe(at); }
  // "earlier: ...", "later: ...", and the record and wait that would order them.
  std::vector<std::string> OrderChain(const Work& earlier, const Work& later) const;
  // "made: ...", "then: ..." up to `at`.
  std::vector<std::string> HistoryChain(const Gradient& gradient, Position at) const;
  const std::string& CycleName() const { return plan_.steps[plan_.steady_step].name; }
  Position EndOfCycle() const { return {static_cast<std::int32_t>(plan_.steps.size()) - 1, -1, -1}; }

  const Plan& plan_;
  Reporter& reporter_;
};

}  // namespace shardplan::verifier
