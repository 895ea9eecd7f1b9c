#include "verifier/verifier_references.h"

#include <fmt/format.h>

#include <array>
#include <initializer_list>

#include "shardplan/schemas/program.h"

namespace shardplan::verifier {
namespace {

template <typename List>
bool Names(const List& list, std::int64_t id) {
  return id >= 0 && id < static_cast<std::int64_t>(list.size());
}
template <typename List>
bool NamesOrNone(const List& list, std::int64_t id) {
  return id == -1 || Names(list, id);
}

using RoleSet = std::uint32_t;
constexpr RoleSet Set(std::initializer_list<BufferRole> roles) {
  RoleSet set = 0;
  for (const BufferRole role : roles) set |= 1U << static_cast<unsigned>(role);
  return set;
}
constexpr RoleSet kAny = ~0U;
constexpr RoleSet kNone = 0;

using enum BufferRole;
constexpr RoleSet kShards = Set({kParamSharded, kAllGatherInput, kParamPostForwardShard});
constexpr RoleSet kUnreduced = Set({kGradUnsharded, kGradUnshardedAccumulated, kReduceScatterInput});
constexpr RoleSet kReduced = Set({kReduceScatterOutput, kPartialReduceOutput, kGradSharded, kGradHost});
constexpr RoleSet kGradients = kUnreduced | kReduced;
// FSDP1 gathers right into the unsharded flat parameter.
constexpr RoleSet kGathered = Set({kAllGatherOutput, kParamUnsharded});

enum class StreamNeed : std::uint8_t { kNone, kStream, kStreamOrHost };

// What an instruction of a kind must have.
struct Shape {
  StreamNeed stream = StreamNeed::kNone;
  RoleSet src = kNone;
  RoleSet dst = kNone;
  bool event = false;
  bool communicator = false;
  bool segment = false;
};

Shape ShapeOf(InstructionKind kind) {
  using enum InstructionKind;
  using enum StreamNeed;
  switch (kind) {
    case kCompute:
      return {.stream = kStream, .segment = true};
    case kAllocate:
      return {.stream = kStreamOrHost, .dst = kAny};
    case kFree:
      return {.src = kAny};
    case kBindUnsharded:
      return {.src = kGathered | Set({kParamSharded})};
    case kBindSharded:
      return {.src = Set({kParamSharded, kParamPostForwardShard})};
    case kCopyIn:
      return {.stream = kStream,
              .src = kShards | Set({kModelBuffer}),
              .dst = Set({kAllGatherInput, kModelBuffer}) | kGathered};
    case kAllGather:
      return {.stream = kStream,
              .src = kShards | kGathered | Set({kOrderCheck, kGradSharded}),
              .dst = kGathered | Set({kOrderCheck, kGradUnshardedAccumulated}),
              .communicator = true};
    case kCopyOut:
      return {.stream = kStream, .src = kShards | kGathered, .dst = Set({kParamUnsharded})};
    case kReshardPostForward:
      return {.stream = kStream, .src = kGathered, .dst = Set({kParamPostForwardShard})};
    case kGradCopyIn:
      return {.stream = kStream, .src = kUnreduced, .dst = kGradients};
    case kGradScale:
      return {.stream = kStreamOrHost, .src = kGradients};
    case kReduceScatter:
      return {.stream = kStream, .src = kUnreduced, .dst = kReduced, .communicator = true};
    case kAllReduce:
      return {.stream = kStream, .src = kGradients | Set({kOrderCheck}), .communicator = true};
    case kGradCast:
      return {.stream = kStreamOrHost, .src = kGradients, .dst = kGradients};
    case kGradAccumulate:
      return {.stream = kStreamOrHost, .src = kGradients, .dst = kGradients};
    case kCopyToHost:
    case kCopyToDevice:
      return {.stream = kStreamOrHost, .src = kAny, .dst = kAny};
    case kRecord:
    case kWait:
      return {.stream = kStream, .event = true};
    case kHostWait:
      return {.event = true};
    case kOptimizerStep:
      return {.stream = kStreamOrHost};
    case kZeroGrad:
      return {};
  }
  return {};
}

class InstructionCheck {
 public:
  InstructionCheck(const Plan& plan, const Instruction& instruction, Position at, Reporter& reporter)
      : plan_(plan), i_(instruction), at_(at), reporter_(reporter) {}

  bool Run() {
    const Shape shape = ShapeOf(i_.kind);
    CheckStream(shape.stream);
    CheckBuffer("src", i_.src, shape.src);
    CheckBuffer("dst", i_.dst, shape.dst);
    CheckId("event", plan_.events, i_.event, shape.event);
    CheckId("communicator", plan_.communicators, i_.communicator, shape.communicator);
    CheckId("segment", plan_.segments, i_.segment, shape.segment);
    if (!NamesOrNone(plan_.units, i_.unit)) Fail(fmt::format("unit {} does not exist", i_.unit));
    for (const StreamId stream : i_.safe_after) {
      if (!Names(plan_.streams, stream)) Fail(fmt::format("safe_after stream {} does not exist", stream));
    }
    CheckParts();
    CheckDivisor();
    CheckPool();
    const bool has_parameter =
        i_.unit >= 0 && Names(plan_.units, i_.unit) && Names(plan_.units[i_.unit].parameters, i_.parameter);
    if (i_.parameter != -1 && !has_parameter) Fail(fmt::format("parameter {} does not exist", i_.parameter));
    if (i_.src >= 0 && i_.src == i_.dst && i_.kind != InstructionKind::kAllGather) {
      Fail("src and dst are the same buffer");
    }
    if (good_) CheckUnits();
    return good_;
  }

 private:
  void CheckParts() {
    if (i_.parts.empty()) return;
    if (i_.kind != InstructionKind::kFree) return Fail("only a free has parts");
    if (!Names(plan_.buffers, i_.src)) return;
    for (std::size_t k = 0; k < i_.parts.size(); ++k) {
      if (!Names(plan_.buffers[i_.src].parts_bytes, i_.parts[k]))
        return Fail(fmt::format("part {} does not exist", i_.parts[k]));
      if (k > 0 && i_.parts[k] <= i_.parts[k - 1]) return Fail("parts are not ascending");
    }
  }

  void CheckPool() {
    if (i_.kind != InstructionKind::kAllocate || i_.stream >= 0 || !Names(plan_.buffers, i_.dst)) return;
    const Buffer& buffer = plan_.buffers[i_.dst];
    if (buffer.memory == MemoryKind::kDevice) Fail(fmt::format("{} is allocated on no stream", buffer.name));
  }

  void CheckDivisor() {
    const bool reduces = i_.kind == InstructionKind::kReduceScatter || i_.kind == InstructionKind::kAllReduce;
    if (!reduces && i_.kind != InstructionKind::kGradScale) return;
    if (!(i_.divisor > 0)) Fail(fmt::format("divisor {} is not a positive number", i_.divisor));
    if (i_.reduce_op == ReduceOp::kAverage && i_.divisor != 1) {
      Fail(fmt::format("an average has no divisor of its own ({})", i_.divisor));
    }
  }

  void Fail(std::string what) {
    good_ = false;
    reporter_.Add(Rule::kReference, at_, subject_++, fmt::format("{}: {}", Name(i_.kind), what));
  }

  void CheckStream(StreamNeed need) {
    if (need == StreamNeed::kStream ? !Names(plan_.streams, i_.stream)
                                    : !NamesOrNone(plan_.streams, i_.stream)) {
      Fail(fmt::format("stream {} does not exist", i_.stream));
    }
  }

  template <typename List>
  void CheckId(const char* what, const List& list, std::int64_t id, bool needed) {
    if (needed ? !Names(list, id) : !NamesOrNone(list, id))
      Fail(fmt::format("{} {} does not exist", what, id));
  }

  void CheckBuffer(const char* what, BufferId id, RoleSet roles) {
    CheckId(what, plan_.buffers, id, roles != kNone);
    if (roles == kNone || !Names(plan_.buffers, id)) return;
    const Buffer& buffer = plan_.buffers[id];
    if ((roles & Set({buffer.role})) == 0) {
      Fail(fmt::format("{} {} has the role {}, which makes no sense here", what, buffer.name,
                       Name(buffer.role)));
    }
  }

  // An instruction works on one unit: its own, src's and dst's are the same where they are given.
  void CheckUnits() {
    UnitId unit = i_.unit;
    for (const BufferId buffer : {i_.src, i_.dst}) {
      if (buffer < 0 || plan_.buffers[buffer].unit < 0) continue;
      if (unit >= 0 && plan_.buffers[buffer].unit != unit) {
        Fail(fmt::format("{} belongs to {}, not to {}", plan_.buffers[buffer].name,
                         reporter_.UnitName(plan_.buffers[buffer].unit), reporter_.UnitName(unit)));
        return;
      }
      unit = plan_.buffers[buffer].unit;
    }
    const bool binds = i_.kind == InstructionKind::kBindUnsharded || i_.kind == InstructionKind::kBindSharded;
    if (binds && unit < 0) Fail("neither the instruction nor its buffer says which unit");
    if (i_.kind == InstructionKind::kAllGather && unit >= 0) CheckGatherRanks(plan_.units[unit]);
  }

  void CheckGatherRanks(const Unit& unit) {
    const Communicator& used = plan_.communicators[i_.communicator];
    for (const CommunicatorId id : {unit.shard_communicator, unit.post_forward_communicator}) {
      if (id < 0) continue;
      if (SameRanks(plan_.communicators[id], used)) return;
    }
    Fail(fmt::format("communicator {} does not join the ranks that the unit is sharded over", used.name));
  }

  const Plan& plan_;
  const Instruction& i_;
  Position at_;
  Reporter& reporter_;
  bool good_ = true;
  std::int64_t subject_ = 0;
};

}  // namespace

bool CheckTables(const Plan& plan, Reporter& reporter) {
  bool good = true;
  std::int64_t subject = 0;
  const auto fail = [&](std::string message) {
    good = false;
    reporter.Add(Rule::kReference, {}, subject++, std::move(message));
  };
  for (const Communicator& c : plan.communicators) {
    if (Divides(c, plan.world_size)) continue;
    fail(fmt::format("communicator {} (size {}, stride {}) does not divide {} ranks", c.name, c.size,
                     c.stride, plan.world_size));
  }
  for (const Unit& unit : plan.units) {
    for (const CommunicatorId c :
         {unit.shard_communicator, unit.reduce_scatter_communicator, unit.replicate_communicator,
          unit.post_forward_communicator, unit.hook_communicator}) {
      if (!NamesOrNone(plan.communicators, c))
        fail(fmt::format("unit {}: communicator {} does not exist", unit.fqn, c));
    }
    if (!good) continue;  // cut into how many pieces?
    const std::string wrong = WhatIsWrongWithUnit(plan, unit);
    if (!wrong.empty()) fail(fmt::format("unit {}: {}", DisplayName(unit.fqn), wrong));
  }
  for (const Buffer& buffer : plan.buffers) {
    if (!NamesOrNone(plan.units, buffer.unit)) {
      fail(fmt::format("buffer {}: unit {} does not exist", buffer.name, buffer.unit));
      continue;
    }
    if (buffer.role == BufferRole::kOrderCheck && buffer.unit >= 0) {
      fail(fmt::format("buffer {}: what ranks compare is no unit's", buffer.name));
    }
    if (!NamesOrNone(plan.communicators, buffer.pool)) {
      fail(fmt::format("buffer {}: communicator {} does not exist", buffer.name, buffer.pool));
    }
    for (std::size_t k = 0; k < buffer.parameters.size(); ++k) {
      const std::int32_t p = buffer.parameters[k];
      if (buffer.unit < 0 || !Names(plan.units[buffer.unit].parameters, p)) {
        fail(fmt::format("buffer {}: parameter {} does not exist", buffer.name, p));
      } else if (k > 0 && p <= buffer.parameters[k - 1]) {
        fail(fmt::format("buffer {}: parameters are not ascending", buffer.name));
      }
    }
  }
  for (const Segment& segment : plan.segments) {
    for (const UnitId unit : segment.reads) {
      if (!Names(plan.units, unit))
        fail(fmt::format("segment {}: unit {} does not exist", segment.name, unit));
    }
    for (const SegmentGrad& grad : segment.grads) {
      if (!Names(plan.units, grad.unit) || !Names(plan.units[grad.unit].parameters, grad.parameter)) {
        fail(fmt::format("segment {}: gradient of parameter {} of unit {} does not exist", segment.name,
                         grad.parameter, grad.unit));
      }
    }
  }
  for (const Segment& segment : plan.segments) {
    if (segment.pass < 0) continue;
    const bool backward = IsBackward(segment.phase);
    const std::vector<std::int32_t>& lengths = backward ? plan.passes.backwards : plan.passes.forwards;
    if (!Names(lengths, segment.pass)) {
      fail(fmt::format("segment {}: {} {} does not exist", segment.name, backward ? "backward" : "forward",
                       segment.pass));
    } else if (segment.begin < 0 || segment.begin > segment.end ||
               segment.end > lengths[static_cast<std::size_t>(segment.pass)]) {
      fail(fmt::format("segment {}: from {} to {} is not in its pass of {}", segment.name, segment.begin,
                       segment.end, lengths[static_cast<std::size_t>(segment.pass)]));
    }
  }
  if (plan.steps.empty() ? plan.steady_step != 0 : !Names(plan.steps, plan.steady_step)) {
    fail(fmt::format("steady_step {} does not exist", plan.steady_step));
  }
  return good;
}

bool CheckInstruction(const Plan& plan, const Instruction& instruction, Position at, Reporter& reporter) {
  return InstructionCheck(plan, instruction, at, reporter).Run();
}

}  // namespace shardplan::verifier
