// SPDX-License-Identifier: Apache-2.0
// The engine: one step of a plan as compact arrays, and the discrete-event simulation that runs them.
//
// [Note: rates and fairness]
// Active work shares resources. Kernels (the model's operators, copies, the optimizer) share the compute
// engine equally; collectives of different communicators share each link that they use: one that needs less
// than an equal share of it has what it needs, the others have equal shares of the rest, and a collective
// goes as fast as the link where it gets least of its need lets it; the collectives of one communicator run
// one at a time in the order in which the host issued them. While any collective is in flight, kernels go at
// compute_rate_while_communicating_ppm, and the reverse. Rates are integers (kFullRate and exact fractions of
// it up to six sharers), remaining work is counted in rate x nanoseconds, and whatever finishes between two
// nanoseconds finishes at the later one: no floating point, the same bytes on every machine.
//
//   compute     |==== A, rate 1 ====|== A, 1/2 ==|== A, 1 ==|     A and B share the compute engine
//   copy                            |== B, 1/2 ==|                while both are active
//   all_gather  .................|=============================|  a collective is in flight: all kernels
//                                                                 go at compute_rate_while_communicating_ppm
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "shardplan/schemas/cluster.h"
#include "shardplan/schemas/dtype.h"
#include "shardplan/schemas/error.h"
#include "shardplan/schemas/plan.h"
#include "shardplan/schemas/quantity.h"
#include "shardplan/simulator/cost_model.h"

namespace shardplan {

enum class EngineOp : std::uint8_t {
  kHostOnly,  // a trigger, an allocation, a binding, work of the host itself
  kWork,      // one piece of work on a stream
  kSegment,   // the operators of a segment, each not before the host has issued it
  kRecord,
  kWait,      // the stream waits
  kHostWait,  // the host waits
};

enum class WorkClass : std::uint8_t {
  kCompute,  // the model's operators and the optimizer
  kCopy,     // kernels that move memory: they use the compute engine, but are not the model's compute
  kCollective,
  kToHost,  // one direction of the host link each
  kToDevice,
};

enum class Phase : std::uint8_t { kForward, kBackward, kOptimizer };
inline constexpr std::size_t kPhases = 3;

// Activity of the device at a moment. If it does several things at once, the first of this list counts, so
// that the times of a step add up to it.
enum class DeviceActivity : std::uint8_t {
  kForward,  // the model's compute, by phase; loss in the forward, recomputation in the backward
  kBackward,
  kOptimizer,
  kCopies,  // kernels that move memory
  kAllGather,
  kReduceScatter,
  kAllReduce,
  kAllToAll,
  kSendReceive,
  kOtherCollective,  // with one root: broadcast, reduce, gather, scatter
  kHostLink,
  kIdle,
};
inline constexpr std::size_t kDeviceActivities = 12;
// The one that a collective is.
DeviceActivity ActivityOf(CollectiveKind kind);
// "forward", "all_gather", "idle".
std::string_view Name(DeviceActivity activity);

// Millions of them are stepped through a second.
struct EngineInstruction {
  EngineOp op = EngineOp::kHostOnly;
  WorkClass work = WorkClass::kCompute;
  std::int8_t stream = -1;
  std::int8_t loads = -1;  // a collective: index into EngineProgram::loads
  // kRecord: its slot. kWait, kHostWait: slot of the record it refers to, -1 when nothing was recorded in
  // this step. kSegment: index into EngineProgram::segments. A collective: index into EngineStep::groups.
  std::int32_t operand = -1;
  std::int32_t sequence = 0;  // a collective: how many its communicator was given before it
  std::int16_t unit = -1;     // whom waiting and computing is accounted to
  std::uint16_t phase = 0;    // index into EngineStep::phases
  Nanoseconds duration_ns;    // alone, at full rate
  Nanoseconds host_ns;        // what it takes the host to issue it, or to do it (kSegment: one operator)
};

// A run of operators: [first, first + count) in EngineProgram::operators. A segment with collectives of the
// model is cut there: it is several of them, behind those of the plan's segments.
struct EngineSegment {
  std::int32_t first = 0;
  std::int32_t count = 0;
  std::int32_t of = -1;  // index into the plan's segments
};

// Matrix work of a segment by dtype, its recomputation included.
struct SegmentFlops {
  DType dtype = DType::kFloat32;
  std::int64_t flops = 0;
};

// Operator k of a segment, with what lets the engine run the rest of the segment in one piece as soon as the
// host is far enough ahead.
struct EngineOperator {
  Nanoseconds duration_ns;
  Nanoseconds rest_ns;  // durations of this and all later operators of the segment
  // If this operator starts at this time after the host began to issue the segment, or later, no later
  // operator waits for the host: max over j >= k of (issue of j) - (durations of k .. j-1).
  Nanoseconds lag_ns;
};

struct CollectiveGroup {
  CollectiveKind kind = CollectiveKind::kAllGather;
  CommunicatorId communicator = -1;
  std::string cost_source;
  std::int64_t count = 0;  // in the step
  Bytes full_tensor_bytes;
};

struct InstructionOrigin {
  std::int32_t trigger = -1;
  std::int32_t instruction = -1;  // -1: the trigger itself
  std::int32_t entry = -1;        // of its segment: a collective of the model, and what waits for it
};

// Work that one rank of each group does, and the others pass over.
struct OwnedWork {
  CommunicatorId communicator = -1;
  std::int32_t owner = 0;  // place in the group
};

// One step of a plan, lowered.
struct EngineStep {
  std::vector<EngineInstruction> code;        // host order
  std::vector<InstructionOrigin> origins;     // one for each of `code`
  std::vector<std::int32_t> next_in_stream;   // of each: the next of its stream, -1
  std::vector<std::int32_t> first_in_stream;  // by stream, -1
  std::vector<CollectiveGroup> groups;
  std::vector<Phase> phases;  // in host order; neighbours differ
  // By instruction, where the host waits for streams (otherwise empty): the host issues it when its stream
  // has passed this instruction. -1: at once.
  std::vector<std::int32_t> queued_behind;
  std::int32_t record_slots = 0;
  std::int64_t plan_instructions = 0;                // triggers not counted
  Nanoseconds host_work_ns;                          // of all host_ns: the host itself computes
  std::map<std::int32_t, Nanoseconds> host_work_of;  // ... by index into the code, where it does
  std::map<std::int32_t, OwnedWork> owned;           // by index into the code
};

struct EngineProgram {
  std::vector<EngineStep> steps;
  std::vector<EngineSegment> segments;  // the plan's, then parts of those with collectives
  std::vector<EngineOperator> operators;
  std::int32_t streams = 0;
  std::int32_t communicators = 0;
  std::vector<LinkLoads> loads;  // the different ones
  std::int32_t units = 0;
  bool host_runs_kernels = false;                   // Host::runs_kernels
  std::int64_t compute_rate_ppm = 1'000'000;        // while communicating
  std::int64_t communication_rate_ppm = 1'000'000;  // while computing
  std::vector<std::string> notes;                   // what was assumed
  std::int64_t measured_operators = 0;              // of all segments: their durations are the plan's
  std::int64_t modelled_operators = 0;
  std::set<std::string> dtypes_without_rate;  // of matrix work among the modelled
  std::vector<std::vector<SegmentFlops>> segment_flops;
  bool recomputes = false;  // some segment makes what a recomputation makes
  // The rank that stands for all, where ranks own different work: the one with the most of it.
  std::int32_t rank = 0;
  std::vector<Communicator> groups;  // the plan's communicators, where steps have owned work
};

// The streams of a plan's steps, by name: the plan's own, then one for each communicator that collectives of
// the model use ("model tp"; trace.h, [Note: collectives of the model]).
std::vector<std::string> EngineStreams(const Plan& plan);

// kBadInput: ids out of range, more than 100 streams or 30'000 units, or costs that the cluster lacks.
Result<EngineProgram> LowerPlan(const Plan& plan, const Cluster& cluster, const CostModel& costs);
// Lowers the last step only.
Result<EngineProgram> LowerLastStep(const Plan& plan, const Cluster& cluster, const CostModel& costs);

struct GroupResult {
  Nanoseconds busy_ns;
  Nanoseconds exposed_ns;
};

struct EngineResult {
  Nanoseconds end_ns;        // host and device are done (the step begins at 0)
  Nanoseconds host_busy_ns;  // host not blocked
  Nanoseconds host_work_ns;  // ... of it: the host itself computes
  Nanoseconds compute_ns;    // the model's compute or the optimizer is running
  Nanoseconds communication_ns;
  Nanoseconds exposed_ns;  // a collective in flight, and no compute
  std::vector<Nanoseconds> stream_busy_ns;
  std::vector<std::int64_t> stream_operations;
  std::vector<Nanoseconds> phase_end_ns;
  std::vector<GroupResult> groups;
  // Elapsed on streams[0], by unit: compute of forward and backward phases, and waiting for the unit's
  // communication.
  std::vector<Nanoseconds> unit_forward_ns;
  std::vector<Nanoseconds> unit_backward_ns;
  std::vector<Nanoseconds> unit_exposed_ns;
  // Filled if RunOptions asks for them. By DeviceActivity; they add up to end_ns.
  std::array<Nanoseconds, kDeviceActivities> activity_ns{};
  // By Phase: streams running the model's compute or the optimizer, each counted.
  std::array<Nanoseconds, kPhases> compute_busy_ns{};
};

struct EngineSpan {
  std::int32_t instruction = -1;  // index into EngineStep::code
  std::int8_t stream = -1;        // -1: the host
  Nanoseconds start_ns;
  Nanoseconds end_ns;
};

struct EngineFlow {
  std::int32_t recorded = -1;  // indices into EngineTimeline::spans
  std::int32_t waiter = -1;
};

struct EngineTimeline {
  std::vector<EngineSpan> spans;
  std::vector<EngineFlow> flows;
  // By index into the code.
  std::vector<Nanoseconds> host_start_ns;  // when the host began it
  std::vector<Nanoseconds> host_end_ns;    // when it went on
  std::vector<Nanoseconds> issued_ns;      // when the host had issued it (a segment: began to)
  std::vector<Nanoseconds> begin_ns;       // on its stream: when it began ...
  std::vector<Nanoseconds> end_ns;         // ... and when it was done or passed
  std::vector<std::int32_t> paced_by;      // of a segment: the last operator that the host was late with, -1
};

struct RunOptions {
  // The host waits for the device before each phase begins, as one does to time forward and backward apart.
  bool synchronize_phases = false;
  // Record the device's activity at each moment. A search, which asks for the step's length alone, goes
  // without.
  bool activities = false;
};

// Runs one step from an idle machine. `timeline` may be null (faster). kNegative: a wait can never finish;
// the message names the instruction's index in the code as "/code/N".
Result<EngineResult> RunStep(const EngineProgram& program, std::int32_t step, EngineTimeline* timeline,
                             const RunOptions& options = {});

// Newton-Schulz iterations by rank, alone on the device. A matrix that several replicas compute counts for
// each.
struct OwnedTimes {
  std::int64_t matrices = 0;  // that a rank orthogonalises
  std::int64_t owners = 0;    // ranks that have one
  std::int64_t ranks = 0;
  Nanoseconds most_ns;  // of a rank
  Nanoseconds in_all_ns;
};
OwnedTimes TimesOfOwners(const EngineProgram& program, const EngineStep& step);

// A step with every rank simulated by itself: slow ranks, chance, and what the others wait for them
// (docs/internals/simulator.md, "Ranks apart").

struct Straggler {
  std::int32_t rank = 0;
  std::int64_t kernels_ppm = 1'000'000;  // of the time that its kernels take; not below a million
};

struct RanksApartOptions {
  std::vector<Straggler> stragglers;
  std::int64_t jitter_ppm = 0;  // each kernel takes up to so much longer, evenly distributed
  std::uint64_t seed = 1;
};

struct RankTimes {
  Nanoseconds end_ns;     // host and device are done
  Nanoseconds waited_ns;  // between coming to collectives and their begin
};

struct RanksApart {
  Nanoseconds step_ns;  // of the last rank
  std::vector<RankTimes> ranks;
};

// Runs the last step of a lowered plan. Without stragglers and jitter every rank is as RunStep. kBadInput: a
// straggler that is no rank of the plan, or too many ranks; kNegative: a wait can never finish.
Result<RanksApart> RunRanksApart(const Plan& plan, const EngineProgram& program,
                                 const RanksApartOptions& options);

// Lines for a person: the step next to that of one rank that stands for all, and who waits.
std::string RanksApartText(const RanksApart& apart, Nanoseconds alike_ns);

}  // namespace shardplan
