// SPDX-License-Identifier: Apache-2.0
// The rules, each a function of the state. Their names are the rules' names (shardplan/verifier/verifier.h,
// docs/reference/verifier.md); each answers what breaks its rule, and nothing, false or kHolds where the rule
// holds. Nothing here changes the state or has words for people: verifier_interpreter, verifier_memory and
// verifier_gradients make the state and ask, words/verifier_words says the answer. The rule `reference` is in
// verifier_references, `collective_order` and the deadlock of several ranks are in verifier_collectives and
// verifier_deadlock.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "shardplan/schemas/plan.h"
#include "shardplan/schemas/program.h"
#include "verifier/clocks.h"
#include "verifier/state.h"

namespace shardplan::verifier {

// ---- what is alive: rules.cc ----

// An instruction uses a buffer that is not alive, and was not freed in this step.
bool UseUnallocated(const Lifetime& buffer, std::int32_t step);
// ... that was freed in this step.
bool UseAfterFree(const Lifetime& buffer, std::int32_t step);
// ... of which parts were freed. A copy (`other` is the other buffer, else -1) touches only the parameters
// that both hold.
bool UseAfterFreeOfParts(const Plan& plan, const Allocation& memory, BufferId buffer, BufferId other);
// The unit whose parameters are views of a buffer that is freed; -1: none.
UnitId UseAfterFreeOfBound(const Plan& plan, const std::vector<BufferId>& bound, BufferId freed);
// A buffer that is freed was freed in this step already.
bool DoubleFree(const Lifetime& buffer, std::int32_t step);
// The elements of `parts` that were freed before.
std::vector<std::int32_t> DoubleFreeOfParts(const Allocation& memory, const std::vector<std::int32_t>& parts);
// A buffer that is allocated is alive already.
bool DoubleAllocate(const Lifetime& buffer);

// ---- what is written and visible ----

enum class ReadFault : std::uint8_t { kHolds, kTooLittle, kNotOrdered };
// `reader` needs `needed` of the memory: it is there, and its last write happens before.
ReadFault ReadBeforeWrite(const Allocation& memory, Content needed, const Work& reader, const Clocks& clocks);
// The earlier accesses of the memory that do not happen before `writer`.
std::vector<Work> WriteRace(const Allocation& memory, const Work& writer, const Clocks& clocks);
// Uses that do not happen before `first_use`, among those of memory freed into the pool that its memory comes
// from (see [Note: when is a free too early?]).
std::vector<Debt> FreeBeforeLastUse(const std::vector<Debt>& pool, const Work& first_use,
                                    const Clocks& clocks);
// A segment reads the parameters of a unit whose parameters are the shard. Whether those of an unsharded one
// are written and visible is ReadBeforeWrite of the buffer that they are views of.
bool UseBeforeUnshard(const std::vector<BufferId>& bound, UnitId unit);

// ---- what is waited for ----

// A wait for an event that nothing has recorded before in host order.
bool WaitBeforeRecord(const Clocks& clocks, EventId event);
// The host waits for an event of a stream that waits for ever.
bool Deadlock(const Clocks& clocks, EventId event);

// ---- the end of the steps that repeat ----

enum class LeakFault : std::uint8_t { kHolds, kNotFreed, kNotUsed };
// A buffer is alive after the steps that repeat but not before, or stays alive and no such step uses it.
LeakFault Leak(const BufferState& before, const BufferState& after, bool persistent, bool used);
enum class SteadyFault : std::uint8_t { kHolds, kGone, kContent, kGradients };
// A buffer that lives on is gone, or holds something else. (What is there in excess is Leak's.)
SteadyFault SteadyState(const BufferState& before, const BufferState& after);
// The units whose parameters are views of something else.
std::vector<UnitId> SteadyStateOfUnits(const Snapshot& before, const Snapshot& after);

// ---- what is read: pieces of parameters ----

// The pieces in `memory` are cut over other ranks than those that gather them.
bool WrongValueOfPieces(const Plan& plan, const Allocation& memory, CommunicatorId gathers);
// An unshard or reshard moves parameters from `memory` to `to` that the optimizer has stepped since they were
// in a shard. A unit that stays unsharded over a step is another matter: PyTorch reads it as it is.
bool WrongValueOfOutdated(const Plan& plan, const Allocation& memory, BufferId to);
// The buffer that a unit's parameters are views of does not hold all of them, whole.
bool WrongValueOfBound(const Plan& plan, UnitId unit, BufferId bound);
// ... or holds a flat unit in another dtype than it computes in. `evaluates`: the model may be in evaluation.
bool WrongValueOfDType(const Plan& plan, UnitId unit, BufferId bound, bool evaluates);
// The gradient of a flat unit is made in another dtype than its parameters have.
bool WrongValueOfGradient(const Plan& plan, UnitId unit, BufferId bound, BufferId grad);

// ---- the model's compute: compute.cc ----

// The segment is not what comes next in the pass that `call` runs, of which `done` is behind.
bool ComputeOrderOfModel(const Segment& segment, std::int32_t microbatch, const PassCall& call,
                         std::int32_t done);
// The segments that no step runs.
std::vector<SegmentId> ComputeOrderOfUnused(const std::vector<char>& used);
// A gradient of a unit that is gathered for the model, and that no forward of the micro-batch has read.
bool ComputeOrderOfGradient(bool is_gathered, std::int32_t read_in_step, std::int32_t step);
// A segment reads a tensor of the model that another stream has `written`, and nothing orders the two.
bool ReadBeforeWriteOfTensor(const Work& written, const Work& reader, const Clocks& clocks);
// A segment writes or frees a tensor of the model: the uses that are not ordered before it.
std::vector<Work> WriteRaceOfTensor(const std::vector<Work>& uses, const Work& writer, const Clocks& clocks);
// A segment of a forward runs while the host is in the forward of another unit.
bool ComputeOrderOfForward(const Segment& segment, const std::vector<UnitId>& entered);

// ---- the optimizer: optimizer.cc ----

// The parameters whose reduced gradient goes before the optimizer has stepped them with it.
std::vector<std::int32_t> OptimizerStepOfDropped(const Gradient& gradient);
// A parameter is stepped with a gradient that it was stepped with before.
bool OptimizerStepTwice(const Gradient& gradient, std::int32_t parameter);
// fsdp1: whether the optimizer gets in the original dtype what every unit keeps in a lower one.
bool OptimizerStepInOtherDType(const Plan& plan, BufferId grad);
// The optimizer has buffers of its own for the step, and none of them is alive. `alive`: of each.
bool OptimizerStepWithoutMemory(const std::vector<char>& alive);
// It has states of other units and none of the one that is stepped, of which the first rank has a piece that
// trains. `states`: by unit.
bool OptimizerStepWithoutStates(const Plan& plan, const std::vector<std::vector<BufferId>>& states,
                                UnitId unit);
// A state of the optimizer is allocated in the step, and no optimizer step follows that fills it.
bool OptimizerStepBeforeState(const Allocation& state);
// The buffers of the optimizer that nothing allocates.
std::vector<BufferId> OptimizerStepOfNothing(const Plan& plan);

// ---- gradients: gradient_rules.cc ----

// The parameters that the optimizer or a reduction takes of a unit's gradient and that no segment has made.
std::vector<std::int32_t> ReadBeforeWriteOfGradient(const Plan& plan, const Gradient& gradient,
                                                    const std::vector<std::int32_t>& parameters);

// The parameters whose gradient is added to a part of a reduction's input that nothing has filled.
std::vector<std::int32_t> ReadBeforeWriteOfSum(const Plan& plan, const Gradient& into, const Gradient& value,
                                               BufferRole role);
// A value that has moved on is used again: added to, taken, reduced or scaled.
bool GradNotReducedButMoved(const Gradient& gradient);
// A value that has not moved on is freed or overwritten.
bool GradNotReducedButLost(const Gradient& gradient);
enum class ReductionFault : std::uint8_t { kHolds, kTwice, kOtherRanks };
// A gradient is reduced once over the unit's shards and once over its replicas. `over_shards`: which of them
// this reduction over `communicator` is.
ReductionFault GradNotReducedRight(const Plan& plan, const Gradient& gradient, CommunicatorId communicator,
                                   bool over_shards);
// Two gradients that are added are of one unit and reduced alike.
bool GradNotReducedAlike(const Gradient& into, const Gradient& value);
enum class MissingReduction : std::uint8_t { kNone, kShards, kReplicas };
// The optimizer reads gradients that are reduced over all of the unit's ranks.
MissingReduction GradNotReduced(const Plan& plan, const Gradient& gradient);

// The product of all divisors is not what the strategy asks for.
bool GradDivision(const Plan& plan, const Gradient& gradient);
// The divisor that the strategy asks for.
double ExpectedDivisor(const Plan& plan, const Unit& unit);
// Two gradients that are added are divided differently.
bool GradDivisionOfSum(const Gradient& into, const Gradient& value);

// ---- what the gradient rules and the state that they judge have in common ----

bool IsLong(const Plan& plan, CommunicatorId communicator);  // of more than one rank
bool SameGroups(const Plan& plan, CommunicatorId a, CommunicatorId b);
bool Near(double a, double b);

}  // namespace shardplan::verifier
