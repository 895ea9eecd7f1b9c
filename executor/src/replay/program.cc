// SPDX-License-Identifier: Apache-2.0
#include "replay/program.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <numeric>
#include <tuple>

#include "replay/copy_resolver.h"
#include "shardplan/schemas/alive_buffers.h"
#include "shardplan/schemas/exchanges.h"
#include "shardplan/schemas/instruction_set.h"
#include "shardplan/schemas/layout.h"

namespace shardplan::executor {
namespace {

class Builder {
 public:
  Builder(const Plan& plan, std::int64_t rank, ModelTraits model)
      : plan_(plan), rank_(rank), model_(model), copies_(plan, rank) {}

  Result<Program> Build() {
    FindAdded();
    FindActivations();
    for (std::size_t s = 0; s < plan_.steps.size(); ++s) {
      program_.step_begin.push_back(static_cast<std::int32_t>(program_.triggers.size()));
      for (std::size_t t = 0; t < plan_.steps[s].triggers.size(); ++t) {
        pointer_ = fmt::format("/steps/{}/triggers/{}", s, t);
        if (Status status = AddTrigger(static_cast<std::int32_t>(s), static_cast<std::int32_t>(t)); !status) {
          return std::unexpected(status.error());
        }
      }
    }
    program_.step_begin.push_back(static_cast<std::int32_t>(program_.triggers.size()));
    ResolveGradTargets();
    FindGroups(plan_, program_);
    for (std::size_t p = 0; p < plan_.procedures.size(); ++p) {
      pointer_ = fmt::format("/procedures/{}", p);
      if (Status status = AddProcedure(plan_.procedures[p]); !status) return std::unexpected(status.error());
    }
    return std::move(program_);
  }

 private:
  using TargetOf = std::vector<std::vector<GradTarget>>;  // by unit and parameter

  void SetTargets(BufferId id, TargetOf& targets, bool only_first) const {
    const Buffer& buffer = plan_.buffers[id];
    if (buffer.role != BufferRole::kGradUnsharded || buffer.unit < 0) return;
    const std::vector<std::int32_t> parameters = ParametersOf(plan_, buffer);
    const bool joined = buffer.parts_bytes.size() == 1;
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      GradTarget& target = targets[buffer.unit][parameters[i]];
      if (only_first && target.buffer >= 0) continue;
      target = {id, joined ? 0 : static_cast<std::int32_t>(i), buffer.unit, parameters[i], false};
    }
  }

  // A parameter's gradient may have several buffers (a step in which others of its unit get none has a buffer
  // of its own): it goes to the one that it is taken from next.
  void ResolveGradTargets() {
    TargetOf targets(plan_.units.size());
    for (std::size_t u = 0; u < plan_.units.size(); ++u) targets[u].resize(plan_.units[u].parameters.size());
    for (std::size_t b = 0; b < plan_.buffers.size(); ++b) {
      SetTargets(static_cast<BufferId>(b), targets, true);
    }
    const auto steady =
        static_cast<std::size_t>(program_.triggers[program_.step_begin[plan_.steady_step]].first);
    for (const std::size_t first : {steady, std::size_t{0}}) {  // what follows the end is the steady step
      for (std::size_t o = program_.ops.size(); o-- > first;) {
        Op& op = program_.ops[o];
        if (op.code == OpCode::kCompute) {
          if (first == 0) AddTargets(op, targets);
        } else if (op.code == OpCode::kCopy || op.code == OpCode::kGradCast ||
                   op.code == OpCode::kAccumulate || op.code == OpCode::kCollective ||
                   op.code == OpCode::kScale) {
          SetTargets(op.src, targets, false);
        }
      }
    }
  }

  void AddTargets(Op& op, const TargetOf& targets) {
    op.src = static_cast<BufferId>(program_.grad_targets.size());
    std::vector<GradTarget>& of_op = program_.grad_targets.emplace_back();
    for (const SegmentGrad& grad : plan_.segments[op.a].grads) {
      const GradTarget& target = targets[grad.unit][grad.parameter];
      if (target.buffer >= 0) of_op.push_back(target);
    }
  }

  void FindAdded() {
    for (const PlanStep& step : plan_.steps) {
      for (const Trigger& trigger : step.triggers) {
        for (const Instruction& i : trigger.instructions) {
          const bool adds =
              i.kind == InstructionKind::kGradAccumulate && i.src >= 0 && i.src < std::ssize(plan_.buffers);
          if (adds && IsFinalGradient(plan_.buffers[i.src].role)) added_to_another_.push_back(i.src);
        }
      }
    }
  }

  void FindActivations() {
    for (const std::vector<ActivationTouch>& touched : ActivationsTouched(plan_)) {
      std::vector<ActivationUse>& uses = program_.activations.emplace_back();
      for (const ActivationTouch& touch : touched) {
        uses.push_back({touch.buffer, static_cast<std::int32_t>(touch.made.size()),
                        static_cast<std::int32_t>(touch.freed.size())});
      }
    }
  }

  Status AddTrigger(std::int32_t step, std::int32_t index) {
    const Trigger& trigger = plan_.steps[step].triggers[index];
    ProgramTrigger entry = {{trigger.kind, trigger.unit, trigger.microbatch},
                            static_cast<std::int32_t>(program_.ops.size()),
                            static_cast<std::int32_t>(trigger.instructions.size()),
                            step,
                            index};
    program_.triggers.push_back(entry);
    trigger_microbatch_ = trigger.microbatch;
    bool computed = false;
    for (std::size_t i = 0; i < trigger.instructions.size(); ++i) {
      const Instruction& instruction = trigger.instructions[i];
      if (Status status = CheckOperands(plan_, instruction); !status) return Located(status.error(), i);
      const bool is_compute = instruction.kind == InstructionKind::kCompute && !IsOptimizers(instruction);
      if (computed && !is_compute && model_.runs_itself) {
        return Located(
            MakeInputError("",
                           "an instruction follows a compute instruction in its trigger: the model has "
                           "not computed yet when it is issued")
                .error(),
            i);
      }
      computed = computed || is_compute;
      Result<Op> op = Resolve(instruction);
      if (!op) return Located(op.error(), i);
      program_.ops.push_back(*op);
    }
    return {};
  }

  Status AddProcedure(const Procedure& procedure) {
    ProgramProcedure entry = {static_cast<std::int32_t>(program_.ops.size()),
                              static_cast<std::int32_t>(procedure.instructions.size()),
                              {}};
    for (std::size_t i = 0; i < procedure.instructions.size(); ++i) {
      const Instruction& instruction = procedure.instructions[i];
      if (instruction.kind == InstructionKind::kCompute) {
        return Located(MakeInputError("", "a procedure runs no segment").error(), i);
      }
      if (Status status = CheckOperands(plan_, instruction); !status) return Located(status.error(), i);
      Result<Op> op = Resolve(instruction);
      if (!op) return Located(op.error(), i);
      program_.ops.push_back(*op);
      const bool supplies = instruction.src >= 0 &&
                            plan_.buffers[instruction.src].role == BufferRole::kGradUnsharded &&
                            std::ranges::find(entry.supplied, instruction.src) == entry.supplied.end();
      if (supplies) entry.supplied.push_back(instruction.src);
    }
    program_.procedures.push_back(std::move(entry));
    return {};
  }

  std::unexpected<Error> Located(Error error, std::size_t instruction) const {
    if (error.pointer.empty()) error.pointer = fmt::format("{}/instructions/{}", pointer_, instruction);
    return std::unexpected(std::move(error));
  }

  // Work of the optimizer, which is the user's where the model runs itself.
  bool IsOptimizers(const Instruction& i) const {
    return i.segment >= 0 && plan_.segments[i.segment].phase == SegmentPhase::kOptimizer;
  }

  Result<Op> Resolve(const Instruction& i) {
    Op op = {.stream = i.stream, .src = i.src, .dst = i.dst};
    if (model_.runs_itself && (i.exchange >= 0 || IsOptimizers(i))) return op;
    switch (DescriptionOf(i.kind).family) {
      case InstructionFamily::kCompute:
        return Simple(op, OpCode::kCompute, i.segment, trigger_microbatch_ + i.microbatch_offset);
      case InstructionFamily::kMemory:
        if (DescriptionOf(i.kind).lifetime == LifetimeEffect::kEnds) return ResolveFree(op, i);
        return IsModels(i.dst) ? op : Simple(op, OpCode::kAllocate, i.dst);
      case InstructionFamily::kBind:
        return Simple(op,
                      i.kind == InstructionKind::kBindSharded ? OpCode::kBindSharded : OpCode::kBindUnsharded,
                      i.unit >= 0 ? i.unit : plan_.buffers[i.src].unit, i.src);
      case InstructionFamily::kCopy:
      case InstructionFamily::kScale:
        return ResolveArithmetic(op, i);
      case InstructionFamily::kCollective:
        return ResolveCollective(op, i);
      case InstructionFamily::kOrder:
        return ResolveOrder(op, i);
      case InstructionFamily::kOptimizer:
        if (i.exchange >= 0) return ResolveUpdate(op, i);
        return IsWork(i.kind) ? Simple(op, OpCode::kOptimizerStep, i.unit, i.parameter)
                              : Simple(op, OpCode::kZeroGrad, i.unit);
    }
    return MakeError(ErrorCode::kInternal, "unknown instruction");
  }

  Result<Op> ResolveArithmetic(Op op, const Instruction& i) {
    switch (DescriptionOf(i.kind).arithmetic) {
      case Arithmetic::kMove:
        return ResolveCopy(op, OpCode::kCopy, i);
      case Arithmetic::kCast:
        return ResolveCopy(op, OpCode::kGradCast, i);
      case Arithmetic::kAdd:
        return ResolveCopy(op, OpCode::kAccumulate, i);
      case Arithmetic::kScale:
        program_.divisors.push_back(i.divisor);
        return Simple(op, OpCode::kScale, i.src, static_cast<std::int32_t>(program_.divisors.size()) - 1);
      case Arithmetic::kZero:
        op.src = i.dst;
        return Simple(op, OpCode::kCopy, AddZeros(i.dst));
      case Arithmetic::kNone:
        break;
    }
    return MakeError(ErrorCode::kInternal, "a copy without arithmetic");
  }

  Result<Op> ResolveUpdate(Op op, const Instruction& i) const {
    const Exchange& exchange = plan_.exchanges[i.exchange];
    const bool is_others =
        i.matrix >= 0 && HasOwners(exchange) &&
        exchange.matrices[i.matrix].owner != RankInGroup(plan_.communicators[exchange.communicator], rank_);
    return is_others ? op : Simple(op, OpCode::kUpdate, i.dst >= 0 ? i.dst : i.src);
  }

  Result<Op> ResolveOrder(Op op, const Instruction& i) {
    switch (DescriptionOf(i.kind).order) {
      case OrderEffect::kRecords:
        return Simple(op, OpCode::kRecord, i.event);
      case OrderEffect::kWaits:
        return Simple(op, OpCode::kWait, i.event);
      case OrderEffect::kHostWaits:
        return Simple(op, OpCode::kHostWait, i.event);
      case OrderEffect::kNone:
      case OrderEffect::kMeets:
        break;
    }
    return MakeError(ErrorCode::kInternal, "an instruction that orders nothing");
  }

  static Op Simple(Op op, OpCode code, std::int32_t a, std::int32_t b = -1) {
    op.code = code;
    op.a = a;
    op.b = b;
    return op;
  }

  bool IsModels(BufferId buffer) const {
    const BufferRole role = plan_.buffers[buffer].role;
    return role == BufferRole::kGradUnsharded ? model_.makes_gradients
                                              : model_.runs_itself && IsOptimizersOwn(role);
  }

  bool IsActivation(BufferId buffer) const { return plan_.buffers[buffer].role == BufferRole::kActivation; }
  bool IsHeldActivation(BufferId buffer) const { return model_.holds_activations && IsActivation(buffer); }

  bool IsShard(BufferId buffer) const { return plan_.buffers[buffer].role == BufferRole::kParamSharded; }

  // A gradient that came to the host while an earlier one is there is only on its way to that one.
  bool IsAddedToAnother(BufferId buffer) const {
    return std::ranges::find(added_to_another_, buffer) != added_to_another_.end();
  }

  bool IsLastReduction(const Instruction& i) const {
    const std::optional<CollectiveKind> collective = DescriptionOf(i.kind).collective;
    if (collective == CollectiveKind::kAllReduce) return true;
    if (collective != CollectiveKind::kReduceScatter) return false;
    const UnitId unit = plan_.buffers[i.src].unit;
    const bool first_level = IsInnerReduced(plan_.buffers[i.dst].role);
    return !first_level && (unit < 0 || plan_.units[unit].replicate_communicator < 0);
  }

  Op ResolveFree(Op op, const Instruction& i) {
    const bool models = IsModels(i.src);
    if (models && plan_.buffers[i.src].role != BufferRole::kGradUnsharded) return op;
    const FreeSpec spec = {i.safe_after, i.parts};
    const auto found = std::ranges::find(program_.frees, spec);
    const auto index = static_cast<std::int32_t>(found - program_.frees.begin());
    if (found == program_.frees.end()) program_.frees.push_back(spec);
    const OpCode code = models                    ? OpCode::kDropGradients
                        : IsHeldActivation(i.src) ? OpCode::kDropActivations
                                                  : OpCode::kFree;
    return Simple(op, code, i.src, index);
  }

  CommunicatorId SlotCommunicator(const Instruction& i, const Unit& unit) const {
    switch (DescriptionOf(i.kind).movement) {
      case Movement::kFromSlots: {
        const auto found = gathered_by_.find(i.src);
        return found == gathered_by_.end() ? unit.shard_communicator : found->second;
      }
      case Movement::kToPostForward:
        return unit.post_forward_communicator;
      case Movement::kToSlot: {
        const std::int64_t slots = copies_.SlotsForShard(plan_.buffers[i.src]);
        return slots == ShardCount(plan_, unit) ? unit.shard_communicator : unit.post_forward_communicator;
      }
      case Movement::kToSlots:
      case Movement::kWithin:
      case Movement::kNone:
        return IsInnerReduced(plan_.buffers[i.src].role) ? unit.outer_reduce_communicator
                                                         : unit.shard_communicator;
    }
    return unit.shard_communicator;
  }

  // The smaller mesh is meant where its shard is: the buffer it comes from, or the all_gather that came
  // before.
  std::int64_t SlotsOf(const Instruction& i, std::int64_t& slot) {
    const Unit& unit = plan_.units[plan_.buffers[i.src].unit];
    const CommunicatorId communicator = i.communicator >= 0 ? i.communicator : SlotCommunicator(i, unit);
    slot = communicator < 0 ? 0 : RankInGroup(plan_.communicators[communicator], rank_);
    return communicator < 0 ? 1 : plan_.communicators[communicator].size;
  }

  Result<Op> ResolveCopy(Op op, OpCode code, const Instruction& i) {
    const Buffer& from = plan_.buffers[i.src];
    if (!from.storages.empty()) return CopyActivations(op, code, i);
    if (from.unit < 0 || ArrangementOf(from.role) == Arrangement::kNone) return PlainCopy(op, code, i);
    std::int64_t slot = 0;
    const std::int64_t slots = SlotsOf(i, slot);
    op.takes_gradients = IsModels(i.src);
    op.reads_shard = IsShard(i.src);
    const Movement moves = DescriptionOf(i.kind).movement;
    op.extended = (moves == Movement::kToSlot || moves == Movement::kFromSlots) &&
                  std::ranges::any_of(plan_.units[plan_.buffers[i.src].unit].parameters,
                                      [](const UnitParameter& p) { return !p.gathered.empty(); });
    op.final_gradient = IsFinalGradient(plan_.buffers[i.dst].role) && !IsAddedToAnother(i.dst);
    const auto key = std::tuple(i.kind, i.src, i.dst, slots, slot);
    const auto known = copy_ids_.find(key);
    if (known != copy_ids_.end()) return Simple(op, code, known->second);
    Result<CopySpec> copy = copies_.Copy(i, slots, slot);
    if (!copy) return std::unexpected(copy.error());
    return Simple(op, code, copy_ids_[key] = AddCopy(std::move(*copy)));
  }

  // Buffers without parameters (checks of the execution order, states): part by part what both have room for.
  Result<Op> PlainCopy(Op op, OpCode code, const Instruction& i) {
    const Buffer& from = plan_.buffers[i.src];
    const Buffer& to = plan_.buffers[i.dst];
    if (from.parts_bytes.size() != to.parts_bytes.size()) {
      return MakeInputError(fmt::format("/buffers/{}/parts_bytes", i.dst),
                            fmt::format("{} is copied to {} part by part", from.name, to.name),
                            fmt::format("{} parts", to.parts_bytes.size()),
                            fmt::format("{} parts", from.parts_bytes.size()));
    }
    CopySpec copy = {i.src, i.dst, from.dtype, to.dtype, {}, {}};
    for (std::size_t p = 0; p < from.parts_bytes.size(); ++p) {
      const auto part = static_cast<std::int32_t>(p);
      const std::int64_t numel = std::min(PartNumel(from, part), PartNumel(to, part));
      copy.runs.push_back({part, part, 0, 0, 1, numel, numel, numel});
    }
    return Simple(op, code, AddCopy(std::move(copy)));
  }

  // Storage by storage, as they are.
  Result<Op> CopyActivations(Op op, OpCode code, const Instruction& i) {
    const Buffer& from = plan_.buffers[i.src];
    const Buffer& to = plan_.buffers[i.dst];
    if (from.parts_bytes != to.parts_bytes || from.dtype != to.dtype) {
      return MakeInputError(fmt::format("/buffers/{}/parts_bytes", i.dst),
                            fmt::format("{} and {} hold different activations", from.name, to.name));
    }
    op.takes_activations = IsHeldActivation(i.src);
    op.gives_activations = IsHeldActivation(i.dst);
    CopySpec copy = {i.src, i.dst, from.dtype, to.dtype, {}, {}};
    for (std::size_t p = 0; p < from.parts_bytes.size(); ++p) {
      const auto part = static_cast<std::int32_t>(p);
      const std::int64_t numel = PartNumel(from, part);
      copy.runs.push_back({part, part, 0, 0, 1, numel, numel, numel});
    }
    return Simple(op, code, AddCopy(std::move(copy)));
  }

  // A copy of nothing that fills all of the buffer.
  std::int32_t AddZeros(BufferId buffer) {
    const Buffer& filled = plan_.buffers[buffer];
    CopySpec copy = {buffer, buffer, filled.dtype, filled.dtype, {}, {}};
    for (std::size_t part = 0; part < filled.parts_bytes.size(); ++part) {
      const auto p = static_cast<std::int32_t>(part);
      copy.zeros.push_back({p, 0, PartNumel(filled, p)});
    }
    return AddCopy(std::move(copy));
  }

  std::int32_t AddCopy(CopySpec copy) {
    program_.copies.push_back(std::move(copy));
    return static_cast<std::int32_t>(program_.copies.size()) - 1;
  }

  Result<Op> ResolveCollective(Op op, const Instruction& i) {
    const Communicator& group = plan_.communicators[i.communicator];
    const BufferId dst = Has(DescriptionOf(i.kind).dst) ? i.dst : i.src;
    const Buffer& from = plan_.buffers[i.src];
    const Buffer& to = plan_.buffers[dst];
    const CollectiveKind kind = *DescriptionOf(i.kind).collective;
    for (const BufferId id : {i.src, dst}) {
      const std::size_t parts = plan_.buffers[id].parts_bytes.size();
      if (parts != 1) {
        return MakeInputError(fmt::format("/buffers/{}/parts_bytes", id),
                              fmt::format("{} takes part in a collective", plan_.buffers[id].name),
                              fmt::format("{} parts", parts), "1 part");
      }
    }
    if (from.dtype != to.dtype) {
      return MakeInputError(fmt::format("/buffers/{}/dtype", dst), "a collective does not convert",
                            std::string(Name(to.dtype)), std::string(Name(from.dtype)));
    }
    const std::int64_t src_numel = PartNumel(from, 0);
    const std::int64_t dst_numel = PartNumel(to, 0);
    CollectiveSpec spec = {kind,      i.communicator, i.src,       dst,      0,
                           dst_numel, from.dtype,     i.reduce_op, i.divisor};
    std::int64_t small = dst_numel;
    std::int64_t large = src_numel;
    if (kind == CollectiveKind::kAllToAll) {
      if (Status status = AddParts(spec, i, src_numel, dst_numel); !status)
        return std::unexpected(std::move(status.error()));
      large = small * group.size;
    } else if (kind == CollectiveKind::kAllGather) {
      gathered_by_[dst] = i.communicator;
      spec.slot_numel = dst_numel / group.size;
      if (i.src == dst) spec.src_offset = RankInGroup(group, rank_) * spec.slot_numel;
      small = i.src == dst ? spec.slot_numel : src_numel;
      large = dst_numel;
    } else if (kind == CollectiveKind::kAllReduce) {
      large = small * group.size;
    }
    if (small * group.size != large) {
      return MakeInputError("",
                            fmt::format("{} on {} ranks: the sizes of {} and {} do not fit", Name(i.kind),
                                        group.size, from.name, to.name),
                            fmt::format("{} and {} elements", small, large),
                            fmt::format("{} and {}", small, small * group.size));
    }
    op.takes_gradients = IsModels(i.src);
    op.reads_shard = IsShard(i.src);
    op.dst = dst;
    op.last_reduction = IsLastReduction(i);
    if (group.size == 1) return SingleRank(op, spec);
    program_.collectives.push_back(spec);
    return Simple(op, OpCode::kCollective, static_cast<std::int32_t>(program_.collectives.size()) - 1);
  }

  Status AddParts(CollectiveSpec& spec, const Instruction& i, std::int64_t src_numel,
                  std::int64_t dst_numel) const {
    const ExchangeLayout layout(plan_, plan_.exchanges[i.exchange]);
    const ExchangeDirection direction = DirectionOf(plan_, i);
    const std::int64_t rank = RankInGroup(plan_.communicators[i.communicator], rank_);
    spec.slot_numel = 0;
    for (std::int64_t peer = 0; peer < layout.ranks(); ++peer) {
      spec.sends.push_back(
          {layout.SentFirst(direction, rank, peer), layout.SentNumel(direction, rank, peer)});
      spec.receive_numel.push_back(layout.SentNumel(direction, peer, rank));
    }
    std::int64_t sent = 0;
    for (const SentElements& part : spec.sends) sent = std::max(sent, part.first + part.numel);
    if (Status status = HasRoomFor(spec.src, src_numel, sent); !status) return status;
    const std::vector<std::int64_t>& parts = spec.receive_numel;
    return HasRoomFor(spec.dst, dst_numel, std::accumulate(parts.begin(), parts.end(), std::int64_t{0}));
  }

  Status HasRoomFor(BufferId buffer, std::int64_t numel, std::int64_t needed) const {
    if (needed <= numel) return {};
    return MakeInputError(
        fmt::format("/buffers/{}/parts_bytes", buffer),
        fmt::format("{} is too small for what rank {} exchanges", plan_.buffers[buffer].name, rank_),
        fmt::format("{} elements", numel), fmt::format("{}", needed));
  }

  // Alone, a collective moves its input to its output.
  Op SingleRank(Op op, const CollectiveSpec& spec) {
    if (spec.src == spec.dst) return op;
    const std::int64_t numel = spec.sends.empty() ? spec.slot_numel : spec.sends.front().numel;
    CopySpec copy = {spec.src, spec.dst, spec.dtype, spec.dtype, {}, {}};
    copy.runs.push_back({0, 0, 0, 0, 1, numel, numel, numel});
    return Simple(op, OpCode::kCopy, AddCopy(std::move(copy)));
  }

  const Plan& plan_;
  const std::int64_t rank_;
  const ModelTraits model_;
  CopyResolver copies_;
  Program program_;
  std::int32_t trigger_microbatch_ = 0;  // of the trigger that is added
  std::string pointer_;
  std::map<BufferId, CommunicatorId> gathered_by_;
  std::vector<BufferId> added_to_another_;
  std::map<std::tuple<InstructionKind, BufferId, BufferId, std::int64_t, std::int64_t>, CopyId> copy_ids_;
};

}  // namespace

Result<Program> BuildProgram(const Plan& plan, std::int64_t rank, ModelTraits model) {
  return Builder(plan, rank, model).Build();
}

}  // namespace shardplan::executor
