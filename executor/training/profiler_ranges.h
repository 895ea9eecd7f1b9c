// SPDX-License-Identifier: Apache-2.0
// Ranges of a plan (schemas/plan_ranges.h) as at::RecordFunctions of the scope of
// torch.profiler.record_function: torch.profiler records them, torch.autograd.profiler.emit_nvtx hands them
// to NVTX.
#pragma once

#include <ATen/record_function.h>

#include <array>
#include <optional>
#include <string>
#include <string_view>

#include "shardplan/executor/replayer.h"
#include "shardplan/schemas/plan.h"
#include "shardplan/schemas/plan_ranges.h"
#include "training/instruction_ranges.h"

namespace shardplan::executor {

class ProfilerRanges final : public Observer, private PlanRanges {
 public:
  // `plan` outlives this. Names are made when somebody listens for the first time.
  explicit ProfilerRanges(const Plan& plan) : PlanRanges(plan), instruction_(plan) {}

  // Whether anybody listens on this thread. The later functions are called only then.
  static bool On() { return at::getStepCallbacksUnlessEmpty(at::RecordScope::USER_SCOPE).has_value(); }

  // The replayer's next trigger, or procedure, is watched as long as this lives. `outermost`: the unit is
  // entered first in its forward.
  class Watch {
   public:
    Watch(ProfilerRanges& ranges, Replayer& replayer, TriggerKind kind, UnitId unit, bool outermost)
        : ranges_(ranges), replayer_(replayer) {
      replayer.SetObserver(&ranges);
      ranges.EnterTrigger(kind, unit, outermost);
    }
    Watch(ProfilerRanges& ranges, Replayer& replayer, ProcedureKind kind, UnitId unit)
        : ranges_(ranges), replayer_(replayer) {
      replayer.SetObserver(&ranges);
      ranges.EnterProcedure(kind, unit);
    }
    ~Watch() {
      ranges_.instruction_.End();  // of one that failed
      ranges_.Leave();
      replayer_.SetObserver(nullptr);
    }
    Watch(const Watch&) = delete;
    Watch& operator=(const Watch&) = delete;

   private:
    ProfilerRanges& ranges_;
    Replayer& replayer_;
  };

  // ---- Observer ----
  void BeforeInstruction(const Instruction& instruction) override {
    EnterInstruction(instruction);
    instruction_.Begin(instruction);
  }
  void AfterInstruction(const Instruction&) override { instruction_.End(); }

 private:
  // ---- PlanRanges ----
  void Opened(std::size_t level, const std::string& name) override {
    records_[level].emplace(at::RecordScope::USER_SCOPE);
    records_[level]->before(std::string_view(name));
  }
  void Closed(std::size_t level) override { records_[level].reset(); }

  std::array<std::optional<at::RecordFunction>, kLevels> records_;
  InstructionRanges instruction_;  // inside of them
};

// A range as long as this lives, if anybody listens. `name` outlives it.
class ProfilerRange {
 public:
  explicit ProfilerRange(const char* name) {
    if (ProfilerRanges::On()) [[unlikely]] {
      record_.emplace(at::RecordScope::USER_SCOPE);
      record_->before(std::string_view(name));
    }
  }

 private:
  std::optional<at::RecordFunction> record_;
};

}  // namespace shardplan::executor
