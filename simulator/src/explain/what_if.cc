// SPDX-License-Identifier: Apache-2.0
// The step again, without single causes.
#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <optional>
#include <utility>

#include "shardplan/schemas/printable.h"
#include "shardplan/simulator/critical_path.h"
#include "shardplan/simulator/memory_history.h"
#include "text/instruction_text.h"

namespace shardplan {
namespace {

constexpr std::int64_t kWholeRate = 1'000'000;

class Trials {
 public:
  Trials(const Plan& plan, const EngineProgram& program) : plan_(plan), program_(program) {
    program_.steps = {program.steps.back()};
  }

  Result<std::vector<WhatIf>> Run() {
    EngineTimeline timeline;
    const Result<EngineResult> run = RunStep(program_, 0, &timeline);
    if (!run) return std::unexpected(run.error());
    step_ns_ = run->end_ns;
    TryWaits(timeline);
    TryResources();
    if (failed_) return std::unexpected(*failed_);
    std::ranges::stable_sort(made_, {}, &WhatIf::step_ns);
    return std::move(made_);
  }

 private:
  static std::size_t Index(std::int32_t i) { return static_cast<std::size_t>(i); }
  EngineStep& Step() { return program_.steps[0]; }

  // Keeps what `change` of a copy makes of the step, where that is shorter.
  template <typename Change>
  void Try(std::string without, std::string knob, Change change) {
    if (failed_) return;
    EngineProgram other = program_;
    change(other);
    const Result<EngineResult> run = RunStep(other, 0, nullptr);
    if (!run) {
      failed_ = run.error();
      return;
    }
    if (run->end_ns < step_ns_) made_.push_back({std::move(without), std::move(knob), run->end_ns});
  }

  struct Awaited {
    InstructionKind kind = InstructionKind::kCompute;
    std::string of_model;  // its own collective: "all_to_all on ep"
    UnitId unit = -1;
    bool by_host = false;
    Phase phase = Phase::kForward;
    auto operator<=>(const Awaited&) const = default;
  };

  const Instruction* InstructionAt(std::int32_t i) {
    const InstructionOrigin& origin = Step().origins[Index(i)];
    if (origin.instruction < 0) return nullptr;
    return &plan_.steps.back().triggers[Index(origin.trigger)].instructions[Index(origin.instruction)];
  }

  // By record slot: the work that was given to its stream last.
  std::vector<std::int32_t> WorkBeforeRecords() {
    std::vector<std::int32_t> work_of(Index(Step().record_slots), -1);
    std::vector<std::int32_t> last(Index(program_.streams), -1);
    for (std::int32_t i = 0; i < std::ssize(Step().code); ++i) {
      const EngineInstruction& code = Step().code[Index(i)];
      if (code.stream < 0) continue;
      std::int32_t& of_stream = last[Index(std::int32_t{code.stream})];
      if (code.op == EngineOp::kRecord) work_of[Index(code.operand)] = of_stream;
      if (code.op == EngineOp::kWork || code.op == EngineOp::kSegment) of_stream = i;
    }
    return work_of;
  }

  // Waits of the model and of the host, those for the same thing together.
  void TryWaits(const EngineTimeline& timeline) {
    const std::vector<std::int32_t> work_of = WorkBeforeRecords();
    std::map<Awaited, std::vector<std::int32_t>> waits;
    std::int32_t before = -1;  // on the compute stream
    for (std::int32_t i = 0; i < std::ssize(Step().code); ++i) {
      const EngineInstruction& code = Step().code[Index(i)];
      const bool by_host = code.op == EngineOp::kHostWait;
      const bool waits_here =
          (by_host || (code.op == EngineOp::kWait && code.stream == 0)) && code.operand >= 0;
      if (waits_here && work_of[Index(code.operand)] >= 0 && Stands(timeline, i, before)) {
        if (const Instruction* awaited = InstructionAt(work_of[Index(code.operand)])) {
          const std::int32_t entry = Step().origins[Index(work_of[Index(code.operand)])].entry;
          const bool own = internal::ModelCollectiveAt(plan_, *awaited, entry) != nullptr;
          const std::string of_model =
              own ? internal::EntryText(plan_, *awaited, program_.streams, entry) : "";
          waits[{awaited->kind, of_model, code.unit, by_host, Step().phases[code.phase]}].push_back(i);
        }
      }
      if (code.stream == 0) before = i;
    }
    for (const auto& [awaited, code] : waits) {
      const auto drop = [&code](EngineProgram& other) {
        for (const std::int32_t i : code) other.steps[0].code[Index(i)].operand = -1;
      };
      Try(Words(awaited), KnobOf(awaited), drop);
    }
  }

  bool Stands(const EngineTimeline& timeline, std::int32_t i, std::int32_t before) {
    const EngineInstruction& code = Step().code[Index(i)];
    if (code.op == EngineOp::kHostWait) return true;  // only a longer step counts
    const Nanoseconds free = before >= 0 ? timeline.end_ns[Index(before)] : Nanoseconds{0};
    return timeline.end_ns[Index(i)] > std::max(free, timeline.issued_ns[Index(i)]);
  }

  std::string Words(const Awaited& awaited) const {
    const std::string_view phase = awaited.phase == Phase::kForward    ? "forward"
                                   : awaited.phase == Phase::kBackward ? "backward"
                                                                       : "optimizer";
    const std::string unit = awaited.unit < 0 ? "" : " " + Printable(UnitText(plan_, awaited.unit));
    return fmt::format("the {}wait for {}{} in the {}", awaited.by_host ? "host's " : "",
                       awaited.of_model.empty() ? Name(awaited.kind) : awaited.of_model, unit, phase);
  }

  static std::string KnobOf(const Awaited& awaited) {
    if (awaited.by_host && awaited.kind == InstructionKind::kCompute) return "limit_all_gathers";
    if (awaited.kind != InstructionKind::kAllGather && awaited.kind != InstructionKind::kCopyOut) return "";
    if (awaited.by_host) return "limit_all_gathers";
    return awaited.phase == Phase::kForward ? "forward_prefetch" : "backward_prefetch";
  }

  template <typename Which>
  void TryFree(std::string without, std::string knob, Which which) {
    Try(std::move(without), std::move(knob), [&](EngineProgram& other) {
      for (EngineInstruction& code : other.steps[0].code) {
        if (code.op == EngineOp::kWork && which(code)) code.duration_ns = {};
      }
    });
  }

  void TryResources() {
    const auto is = [this](const EngineInstruction& code, CollectiveKind kind) {
      return code.work == WorkClass::kCollective && Step().groups[Index(code.operand)].kind == kind;
    };
    const auto in = [this](Phase phase, const EngineInstruction& code) {
      return Step().phases[code.phase] == phase;
    };
    using enum CollectiveKind;
    TryFree("the time of all_gathers in the forward", "",
            [&](const EngineInstruction& c) { return is(c, kAllGather) && in(Phase::kForward, c); });
    TryFree("the time of all_gathers in the backward", "reshard_after_forward",
            [&](const EngineInstruction& c) { return is(c, kAllGather) && in(Phase::kBackward, c); });
    TryFree("the time of all_gathers in the optimizer", "",
            [&](const EngineInstruction& c) { return is(c, kAllGather) && in(Phase::kOptimizer, c); });
    TryFree("the time of reduce_scatters", "",
            [&](const EngineInstruction& c) { return is(c, kReduceScatter); });
    TryFree("the time of all_reduces", "", [&](const EngineInstruction& c) { return is(c, kAllReduce); });
    TryFree("the time of all_to_alls", "", [&](const EngineInstruction& c) { return is(c, kAllToAll); });
    TryFree("the time of sends", "",
            [&](const EngineInstruction& c) { return is(c, kSend) || is(c, kReceive); });
    TryFree("the time of copies", "", [](const EngineInstruction& c) { return c.work == WorkClass::kCopy; });
    TryFree("the time of copies over the host link", "offload", [](const EngineInstruction& c) {
      return c.work == WorkClass::kToHost || c.work == WorkClass::kToDevice;
    });
    const auto leave_out = [this](SegmentPhase phase, EngineProgram& other) {
      for (EngineSegment& segment : other.segments) {
        if (plan_.segments[Index(segment.of)].phase == phase) segment.count = 0;
      }
    };
    Try("the time of the optimizer", "optimizer", [&](EngineProgram& other) {
      for (EngineInstruction& code : other.steps[0].code) {
        if (code.op == EngineOp::kWork && code.work == WorkClass::kCompute) code.duration_ns = {};
      }
      leave_out(SegmentPhase::kOptimizer, other);
    });
    Try("the recomputation", "checkpoint",
        [&](EngineProgram& other) { leave_out(SegmentPhase::kRecompute, other); });
    Try("the slowing of kernels by collectives", "",
        [](EngineProgram& other) { other.compute_rate_ppm = kWholeRate; });
    Try("the slowing of collectives by kernels", "",
        [](EngineProgram& other) { other.communication_rate_ppm = kWholeRate; });
    Try("the host's time", "", [](EngineProgram& other) {
      for (EngineInstruction& code : other.steps[0].code) code.host_ns = {};
      for (EngineOperator& op : other.operators) op.lag_ns = {};
    });
  }

  const Plan& plan_;
  EngineProgram program_;  // the last step alone
  Nanoseconds step_ns_;
  std::vector<WhatIf> made_;
  std::optional<Error> failed_;
};

}  // namespace

Result<std::vector<WhatIf>> WithoutEach(const Plan& plan, const EngineProgram& program) {
  return Trials(plan, program).Run();
}

}  // namespace shardplan
