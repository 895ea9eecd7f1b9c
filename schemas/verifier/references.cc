// SPDX-License-Identifier: Apache-2.0
#include "verifier/references.h"

#include <fmt/format.h>

#include "shardplan/schemas/collective_kinds.h"
#include "shardplan/schemas/instruction_set.h"
#include "shardplan/schemas/program.h"
#include "verifier/activations.h"

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

std::string WhatIsWrongWithCollective(const Plan& plan, const ModelCollective& collective) {
  if (!Names(plan.communicators, collective.communicator))
    return fmt::format("communicator {} does not exist", collective.communicator);
  const Communicator& among = plan.communicators[collective.communicator];
  const bool transfers = DescriptionOf(collective.kind).movement == CollectiveMovement::kTransfer;
  if (transfers == (collective.peer >= 1 && collective.peer < among.size)) return {};
  if (!transfers && collective.peer < 0) return {};
  return fmt::format("peer {} is no place for a {} among {} ranks", collective.peer, Name(collective.kind),
                     among.size);
}

class InstructionCheck {
 public:
  InstructionCheck(const Plan& plan, const Instruction& instruction, Position at, Reporter& reporter)
      : plan_(plan), i_(instruction), at_(at), reporter_(reporter) {}

  bool Run() {
    if (const Status operands = CheckOperands(plan_, i_); !operands) {
      Fail(ToString(operands.error()));
      return false;
    }
    const InstructionDescription& is = DescriptionOf(i_.kind);
    CheckRole("src", i_.src, is.src);
    CheckRole("dst", i_.dst, is.dst);
    if (good_) CheckUnits();
    if (good_) CheckActivations();
    return good_;
  }

 private:
  void Fail(std::string what) {
    good_ = false;
    reporter_.Add(Rule::kReference, at_, subject_++, std::move(what));
  }

  void CheckRole(const char* what, BufferId id, const BufferOperand& operand) {
    if (!Has(operand) || Has(operand.roles, plan_.buffers[id].role)) return;
    const Buffer& buffer = plan_.buffers[id];
    Fail(fmt::format("{}: {} {} has the role {}, which makes no sense here", Name(i_.kind), what, buffer.name,
                     Name(buffer.role)));
  }

  // An instruction works on one unit: its own, src's and dst's are the same where they are given.
  void CheckUnits() {
    UnitId unit = i_.unit;
    for (const BufferId buffer : {i_.src, i_.dst}) {
      if (buffer < 0 || plan_.buffers[buffer].unit < 0) continue;
      if (unit >= 0 && plan_.buffers[buffer].unit != unit) {
        Fail(fmt::format("{}: {} belongs to {}, not to {}", Name(i_.kind), plan_.buffers[buffer].name,
                         reporter_.UnitName(plan_.buffers[buffer].unit), reporter_.UnitName(unit)));
        return;
      }
      unit = plan_.buffers[buffer].unit;
    }
    if (i_.kind == InstructionKind::kAllGather && unit >= 0) CheckGatherRanks(plan_.units[unit]);
  }

  // Segments free an activation's storages one by one, on the stream that computes.
  void CheckActivations() {
    if (i_.kind != InstructionKind::kFree || !IsActivation(plan_.buffers[i_.src].role)) return;
    if (!i_.parts.empty())
      Fail(fmt::format("{}: activations are freed as a whole, and not in parts", Name(i_.kind)));
    if (!i_.safe_after.empty())
      Fail(
          fmt::format("{}: the stream that computes waits for copies of activations, and not their free "
                      "(safe_after)",
                      Name(i_.kind)));
  }

  void CheckGatherRanks(const Unit& unit) {
    const Communicator& used = plan_.communicators[i_.communicator];
    for (const CommunicatorId id : {unit.shard_communicator, unit.post_forward_communicator}) {
      if (id < 0) continue;
      if (SameRanks(plan_.communicators[id], used)) return;
    }
    Fail(fmt::format("{}: communicator {} does not join the ranks that the unit is sharded over",
                     Name(i_.kind), used.name));
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
          unit.post_forward_communicator, unit.inner_reduce_communicator, unit.outer_reduce_communicator,
          unit.hook_communicator}) {
      if (!NamesOrNone(plan.communicators, c))
        fail(fmt::format("unit {}: communicator {} does not exist", unit.fqn, c));
    }
    if (!good) continue;  // cut into how many pieces?
    const std::string wrong = WhatIsWrongWithUnit(plan, unit);
    if (!wrong.empty()) fail(fmt::format("unit {}: {}", DisplayName(unit.fqn), wrong));
  }
  for (const Segment& segment : plan.segments) {
    for (const SegmentEntry& entry : segment.entries) {
      const auto* op = std::get_if<OperatorEvent>(&entry);
      if (op == nullptr || !op->collective) continue;
      const std::string wrong = WhatIsWrongWithCollective(plan, *op->collective);
      if (!wrong.empty()) fail(fmt::format("segment {}: {}: {}", segment.name, op->name, wrong));
    }
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
    if (const std::string wrong = WhatIsWrongWithStorages(plan, buffer); !wrong.empty()) {
      fail(fmt::format("buffer {}: {}", buffer.name, wrong));
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
  for (const PlanStep& step : plan.steps) {
    for (const Trigger& trigger : step.triggers) {
      if (NamesOrNone(plan.units, trigger.unit)) continue;
      fail(fmt::format("step {}: {} is of unit {}, which does not exist", step.name, Name(trigger.kind),
                       trigger.unit));
    }
  }
  for (const Segment& segment : plan.segments) {
    if (!NamesOrNone(plan.units, segment.unit)) {
      fail(fmt::format("segment {}: unit {} does not exist", segment.name, segment.unit));
    }
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
