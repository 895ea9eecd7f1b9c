// What a profiler sees of a plan: ranges around its triggers and instructions, under FSDP2's names.
//
//   FSDP::pre_backward (layers.2)
//   |--- FSDP::all_gather_copy_out (layers.2)
//   |--- FSDP::backward_prefetch for layers.1
//   |    |--- FSDP::all_gather (layers.1)
//
// Ranges are at::RecordFunctions of the scope of torch.profiler.record_function: torch.profiler records them,
// torch.autograd.profiler.emit_nvtx hands them to NVTX.
#pragma once

#include <ATen/record_function.h>

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "instruction_ranges.h"
#include "shardplan/executor/replayer.h"
#include "shardplan/schemas/plan.h"

namespace shardplan::python {

class ProfilerRanges final : public executor::Observer {
 public:
  // `plan` outlives this. Names are made when somebody listens for the first time.
  explicit ProfilerRanges(const Plan& plan) : plan_(plan), instruction_(plan) {}

  // Whether anybody listens on this thread. What follows is called only then.
  static bool On() { return at::getStepCallbacksUnlessEmpty(at::RecordScope::USER_SCOPE).has_value(); }

  // The replayer's next trigger, or procedure, is watched as long as this lives. `outermost`: the unit is
  // entered first in its forward.
  class Watch {
   public:
    Watch(ProfilerRanges& ranges, executor::Replayer& replayer, TriggerKind kind, UnitId unit,
          bool outermost);
    Watch(ProfilerRanges& ranges, executor::Replayer& replayer, ProcedureKind kind, UnitId unit);
    ~Watch();
    Watch(const Watch&) = delete;
    Watch& operator=(const Watch&) = delete;

   private:
    ProfilerRanges& ranges_;
    executor::Replayer& replayer_;
  };

  // ---- executor::Observer ----
  void BeforeInstruction(const Instruction& instruction) override;
  void AfterInstruction(const Instruction&) override { instruction_.End(); }

 private:
  enum class Range : std::uint8_t {
    kNone,
    kRootPreForward,
    kPreForward,
    kPostForward,
    kPreBackward,
    kBackwardEnd,
    kForwardPrefetch,
    kBackwardPrefetch,
    kAllGather,
    kCopyOut,
    kReshard,  // in a backward
    kReduceScatterWait,
    kReduce,
    kUserCall,
    kLazyInit,
    kOnDemand,
  };
  static constexpr std::size_t kRanges = static_cast<std::size_t>(Range::kOnDemand) + 1;
  // Which ranges are inside which.
  enum Level : std::uint8_t { kOfTrigger, kOfPrefetch, kOfInstructions, kLevels };
  struct Open {
    Range range = Range::kNone;
    UnitId unit = -1;
    std::optional<at::RecordFunction> record;
  };

  void Begin(TriggerKind kind, UnitId unit);
  void MakeNames();
  static Range RangeOf(TriggerKind kind);
  const std::string& NameOf(Range range, UnitId unit) const;
  void Set(Level level, Range range, UnitId unit);
  void Close(Level level);
  bool InBackward() const {
    return trigger_ == TriggerKind::kPostBackward || trigger_ == TriggerKind::kBackwardEnd;
  }
  Range RangeOf(const Instruction& instruction) const;
  void SetRange(const Instruction& instruction);
  Range RangeOfMemory(BufferId buffer, bool allocates) const;

  const Plan& plan_;
  std::vector<std::array<std::string, kRanges>> names_;  // by unit; the last of no unit
  std::array<Open, kLevels> open_;
  InstructionRanges instruction_;  // inside of them
  TriggerKind trigger_ = TriggerKind::kStepBegin;
  UnitId unit_ = -1;         // of the trigger
  UnitId not_reduced_ = -1;  // its backward is over, its gradients are not reduced yet
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

}  // namespace shardplan::python
