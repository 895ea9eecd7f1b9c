// SPDX-License-Identifier: Apache-2.0
// Ranges of a plan in a profiler: around its triggers and instructions, under FSDP2's names.
//
//   FSDP::pre_backward (layers.2)
//   |--- FSDP::all_gather_copy_out (layers.2)
//   |--- FSDP::backward_prefetch for layers.1
//   |    |--- FSDP::all_gather (layers.1)
//
// Who replays a plan (executor) and who writes a trace of a simulated one (simulator) walk through the same
// ranges.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "shardplan/schemas/plan.h"

namespace shardplan {

// Derive from it to open and close ranges. They are nested: of a level only one is open, inside those of the
// levels before it.
class PlanRanges {
 public:
  static constexpr std::size_t kLevels = 3;

  // `plan` outlives this. Names are made when the first trigger is entered.
  explicit PlanRanges(const Plan& plan) : plan_(plan) {}
  virtual ~PlanRanges() = default;
  PlanRanges(const PlanRanges&) = delete;
  PlanRanges& operator=(const PlanRanges&) = delete;

  // `outermost`: the unit is entered first in its forward.
  void EnterTrigger(TriggerKind kind, UnitId unit, bool outermost);
  void EnterProcedure(ProcedureKind kind, UnitId unit);
  void EnterInstruction(const Instruction& instruction);
  // Ends the range of a trigger or procedure.
  void Leave() { Close(0); }

 protected:
  // The range of that level begins. `name` lives as long as this.
  virtual void Opened(std::size_t level, const std::string& name) = 0;
  // It ends. Inner ones have ended.
  virtual void Closed(std::size_t level) = 0;

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
  enum Level : std::uint8_t { kOfTrigger, kOfPrefetch, kOfInstructions };
  struct Open {
    Range range = Range::kNone;
    UnitId unit = -1;
  };

  void Begin(TriggerKind kind, UnitId unit);
  void MakeNames();
  static Range RangeOf(TriggerKind kind);
  const std::string& NameOf(Range range, UnitId unit) const;
  void Set(Level level, Range range, UnitId unit);
  void Close(std::size_t level);
  bool InBackward() const {
    return trigger_ == TriggerKind::kPostBackward || trigger_ == TriggerKind::kBackwardEnd;
  }
  bool MovesActivation(const Instruction& instruction) const;
  Range RangeOf(const Instruction& instruction) const;
  Range RangeOfMemory(BufferId buffer, bool allocates) const;

  const Plan& plan_;
  std::vector<std::array<std::string, kRanges>> names_;  // by unit; the last of no unit
  std::array<Open, kLevels> open_;
  TriggerKind trigger_ = TriggerKind::kStepBegin;
  UnitId unit_ = -1;         // of the trigger
  UnitId not_reduced_ = -1;  // its backward is over, its gradients are not reduced yet
};

}  // namespace shardplan
