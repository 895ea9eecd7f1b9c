// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <set>
#include <string_view>
#include <tuple>

#include "shardplan/simulator/memory_profile.h"

namespace shardplan {
namespace {

constexpr std::int32_t kNone = -1;

class RowReader {
 public:
  RowReader(const Plan& plan, const MemoryProfile& profile, std::int32_t step)
      : plan_(plan), samples_(profile.samples), step_(step) {
    now_.by_category.resize(MemoryCategories().size());
  }

  MemoryRows Read() {
    const std::vector<Trigger>& triggers = plan_.steps[static_cast<std::size_t>(step_)].triggers;
    AdvanceTo({step_, 0, kNone, kNone});
    Row("step_begin");
    in_step_ = true;
    NotePeak(nullptr);
    for (std::size_t t = 0; t < triggers.size(); ++t) {
      trigger_ = static_cast<std::int32_t>(t);
      AdvanceTo({step_, trigger_, kNone, kNone});
      ReadTrigger(triggers[t]);
    }
    AdvanceTo({step_ + 1, kNone, kNone, kNone});
    Row("step_end");
    return std::move(result_);
  }

 private:
  // Everything that happened before `end`.
  void AdvanceTo(const MemoryPoint& end) {
    const auto key = [](std::int32_t step, std::int32_t trigger, std::int32_t instruction,
                        std::int32_t entry) { return std::tuple(step, trigger, instruction, entry); };
    const auto limit = key(end.step, end.trigger, end.instruction, end.entry);
    for (; next_ < samples_.size(); ++next_) {
      const MemorySample& sample = samples_[next_];
      if (key(sample.step, sample.trigger, sample.instruction, sample.entry) >= limit) return;
      now_.by_category[static_cast<std::size_t>(sample.category)] = sample.category_bytes;
      now_.total_bytes = sample.total_bytes;
      now_.action = sample.action;
      if (in_step_ && sample.total_bytes > result_.peak.total_bytes) NotePeak(&sample);
    }
  }

  void Row(std::string_view event) {
    result_.rows.push_back(now_);
    result_.rows.back().event = event;
  }
  void RowOf(std::string_view event, UnitId unit) {
    Row(event);
    result_.rows.back().unit = unit;
  }

  const Segment* SegmentOf(const Instruction& instruction) const {
    if (instruction.kind != InstructionKind::kCompute || instruction.segment < 0) return nullptr;
    return &plan_.segments[static_cast<std::size_t>(instruction.segment)];
  }

  void ReadTrigger(const Trigger& trigger) {
    now_.microbatch = trigger.microbatch;
    if (trigger.unit >= 0 && HasRow(trigger)) unit_ = trigger.unit;
    const std::string name(Name(trigger.kind));
    const bool hook = trigger.kind == TriggerKind::kPreForward || trigger.kind == TriggerKind::kPostForward ||
                      trigger.kind == TriggerKind::kPreBackward ||
                      trigger.kind == TriggerKind::kPostBackward || trigger.kind == TriggerKind::kBackwardEnd;
    if (hook) SetPhase(trigger.kind);
    hook_open_ = hook && HasRow(trigger);
    hook_begun_ = false;
    if (hook_open_ && !IsOfAutograd(trigger, 0)) BeginHook(trigger, name);
    if (trigger.kind == TriggerKind::kPostBackward) reduced_.insert(trigger.unit);
    if (trigger.kind == TriggerKind::kBackwardEnd) FindLateUnits();
    if (trigger.kind == TriggerKind::kOptimizerStep) {
      phase_ = "optimizer";
      unit_ = -1;
    }
    for (std::size_t i = 0; i < trigger.instructions.size(); ++i) {
      AdvanceTo({step_, trigger_, static_cast<std::int32_t>(i), kNone});
      const bool autograd = IsOfAutograd(trigger, i);
      if (hook_open_ && hook_begun_ && autograd) CloseHook(trigger, name);
      if (hook_open_ && !hook_begun_ && !autograd) BeginHook(trigger, name);
      ReadInstruction(trigger, trigger.instructions[i], name);
    }
    AdvanceTo({step_, trigger_ + 1, kNone, kNone});
    CloseReduction();
    if (trigger.kind == TriggerKind::kBackwardEnd) PassLateUnits(-1);
    CloseRecomputation();
    if (hook_open_) CloseHook(trigger, name);
    if (trigger.kind == TriggerKind::kBackwardEnd) Row("backward_returned");
    if (phase_ == "loss") EndLoss();
    if (trigger.kind == TriggerKind::kOptimizerStep) Row("optimizer_step_end");
    if (trigger.kind == TriggerKind::kZeroGrad) Row("zero_grad_end");
  }

  // In the backward a unit without parameters has no hooks of its own: it gathers and reduces nothing.
  bool HasRow(const Trigger& trigger) const {
    const bool forward =
        trigger.kind == TriggerKind::kPreForward || trigger.kind == TriggerKind::kPostForward;
    return forward || trigger.unit < 0 ||
           !plan_.units[static_cast<std::size_t>(trigger.unit)].parameters.empty();
  }

  void SetPhase(TriggerKind kind) {
    phase_ = kind == TriggerKind::kPreForward || kind == TriggerKind::kPostForward ? "forward" : "backward";
  }

  // fsdp1: what autograd does before it calls the hook, and after.
  static bool IsOfAutograd(const Trigger& trigger, std::size_t instruction) {
    return instruction < trigger.instructions.size() &&
           (trigger.instructions[instruction].reason == "accumulate_grad" ||
            trigger.instructions[instruction].reason == "hook_returned");
  }
  void BeginHook(const Trigger& trigger, const std::string& name) {
    hook_begun_ = true;
    RowOf(name + ".before", trigger.unit);
  }

  // The model's own work follows a hook's own instructions.
  void CloseHook(const Trigger& trigger, const std::string& name) {
    if (!hook_begun_) BeginHook(trigger, name);
    hook_open_ = false;
    RowOf(name + ".after", trigger.unit);
    const bool root = trigger.unit >= 0 && plan_.units[static_cast<std::size_t>(trigger.unit)].fqn.empty();
    if (trigger.kind == TriggerKind::kPostForward && root) {
      Row("forward_end");
      phase_ = "loss";
    }
  }
  // Without a unit whose output the loss depends on (a root that is no unit) no hook precedes the backward.
  void BeginBackward() {
    if (phase_ == "loss") EndLoss();
    if (phase_ == "forward") unit_ = -1;
    phase_ = "backward";
  }
  void EndLoss() {
    Row("loss_end");
    phase_ = "backward";
  }

  void ReadInstruction(const Trigger& trigger, const Instruction& instruction, const std::string& name) {
    const Segment* segment = SegmentOf(instruction);
    if (segment != nullptr) {
      CloseReduction();
      PassLateUnits(-1);
      if (hook_open_) CloseHook(trigger, name);
      if (segment->phase == SegmentPhase::kBackward) BeginBackward();
      const bool again = segment->phase == SegmentPhase::kRecompute;
      if (!again) CloseRecomputation();
      if (again && !recomputing_) {
        RowOf("recompute.before", unit_);
        recomputing_ = true;
      }
    } else if (hook_open_ && trigger.kind == TriggerKind::kPreBackward &&
               instruction.reason == "prefetch_backward_explicit") {
      CloseHook(trigger, name);
    } else if (trigger.kind == TriggerKind::kBackwardEnd) {
      ReadFinalInstruction(instruction);
    }
  }

  void CloseRecomputation() {
    if (!recomputing_) return;
    recomputing_ = false;
    RowOf("recompute.after", unit_);
  }

  // The end of the backward runs the post-backwards of the units that autograd did not come to; "finalize" is
  // what the runtime does for every unit after that.
  void ReadFinalInstruction(const Instruction& instruction) {
    const bool reduces = instruction.reason == "final" && instruction.unit >= 0;
    if (reducing_ >= 0 && (instruction.reason == "finalize" || (reduces && instruction.unit != reducing_))) {
      CloseReduction();
    }
    if (instruction.reason != "final") PassLateUnits(-1);
    if (!reduces || reducing_ >= 0) return;
    PassLateUnits(instruction.unit);
    reducing_ = unit_ = instruction.unit;
    RowOf("post_backward.before", reducing_);
  }

  // Units whose post-backward the end of the backward runs, in its order: the root first.
  void FindLateUnits() {
    late_.clear();
    for (std::size_t u = 0; u < plan_.units.size(); ++u) {
      if (plan_.units[u].parameters.empty() || reduced_.contains(static_cast<UnitId>(u))) continue;
      late_.insert(plan_.units[u].fqn.empty() ? late_.begin() : late_.end(), static_cast<UnitId>(u));
    }
    reduced_.clear();
  }
  // The post-backwards of late units that have nothing to do, up to `unit` (-1: all).
  void PassLateUnits(UnitId unit) {
    while (!late_.empty()) {
      const UnitId late = late_.front();
      if (late == unit) {
        late_.erase(late_.begin());
        return;
      }
      if (unit >= 0 && std::ranges::find(late_, unit) == late_.end()) return;
      late_.erase(late_.begin());
      unit_ = late;
      RowOf("post_backward.before", late);
      RowOf("post_backward.after", late);
    }
  }
  void CloseReduction() {
    if (reducing_ < 0) return;
    RowOf("post_backward.after", reducing_);
    reducing_ = -1;
  }

  void NotePeak(const MemorySample* sample) {
    MemoryPeak& peak = result_.peak;
    peak.total_bytes = now_.total_bytes;
    peak.by_category = now_.by_category;
    peak.phase = recomputing_ ? "recompute" : phase_;
    peak.unit = unit_;
    peak.allocation.clear();
    peak.module = -1;
    if (sample == nullptr) return;
    peak.at = {sample->step, sample->trigger, sample->instruction, sample->entry};
    if (sample->instruction < 0 || sample->trigger < 0) return;
    const Trigger& trigger =
        plan_.steps[static_cast<std::size_t>(step_)].triggers[static_cast<std::size_t>(sample->trigger)];
    const Instruction& instruction = trigger.instructions[static_cast<std::size_t>(sample->instruction)];
    if (const Segment* segment = SegmentOf(instruction)) {
      // In the forward the enclosing unit computes again when an inner one is done.
      const UnitId owner = plan_.segments[static_cast<std::size_t>(instruction.segment)].unit;
      if (phase_ == "forward" && owner >= 0) peak.unit = owner;
      NoteOperator(*segment, sample->entry);
    } else {
      if (instruction.unit >= 0) peak.unit = instruction.unit;
      if (instruction.dst >= 0) {
        peak.allocation = plan_.buffers[static_cast<std::size_t>(instruction.dst)].name;
      }
    }
  }

  // An operator's allocations stand before it.
  void NoteOperator(const Segment& segment, std::int32_t entry) {
    for (auto e = static_cast<std::size_t>(std::max(entry, 0)); e < segment.entries.size(); ++e) {
      if (const auto* op = std::get_if<OperatorEvent>(&segment.entries[e])) {
        result_.peak.allocation = op->name;
        result_.peak.module = op->module;
        return;
      }
    }
  }

  const Plan& plan_;
  const std::vector<MemorySample>& samples_;
  const std::int32_t step_;
  MemoryRows result_;
  MemoryRow now_;
  std::size_t next_ = 0;
  std::int32_t trigger_ = 0;
  std::string phase_ = "forward";
  UnitId unit_ = -1;
  UnitId reducing_ = -1;
  std::set<UnitId> reduced_;  // units whose post-backward ran in this backward
  std::vector<UnitId> late_;  // those that its end runs
  bool recomputing_ = false;
  bool hook_open_ = false;
  bool hook_begun_ = false;  // of a hook that is open: its first row is there
  bool in_step_ = false;
};

}  // namespace

MemoryRows RowsOf(const Plan& plan, const MemoryProfile& profile, std::int32_t step) {
  if (step < 0 || static_cast<std::size_t>(step) >= plan.steps.size()) return {};
  return RowReader(plan, profile, step).Read();
}

}  // namespace shardplan
