// The model's own compute: which segments run, in which order, for which micro-batch. A plan says it three
// times over, and the three have to agree: what a segment reads, makes and frees (storages of the model, by
// micro-batch), the triggers that the host passes, and other steps with the same calls of the user.
#pragma once

#include <cstdint>
#include <map>
#include <vector>

#include "shardplan/schemas/plan.h"
#include "verifier/verifier_clocks.h"
#include "verifier/verifier_state.h"
#include "verifier/words/verifier_report.h"

namespace shardplan::verifier {

class Compute {
 public:
  // `plan` has passed CheckTables.
  Compute(const Plan& plan, Reporter& reporter);

  // Once: what the steps say of each other, and segments that none runs.
  void CheckSteps();

  void BeginStep();
  void Pass(const Trigger& trigger);
  // The segment runs.
  void Pass(const Instruction& compute, const Trigger& trigger, Position at);
  // Whether the user's calls of the step may run the micro-batch with the model in evaluation.
  bool MayEvaluate(std::int32_t microbatch, Position at) const;

 private:
  enum class Life : std::uint8_t { kAbsent, kThere };

  std::vector<Run> RunsOf(std::int32_t step) const;
  const StepProgram* ProgramOf(std::int32_t step) const;
  std::int32_t CallsOf(std::int32_t step, SegmentPhase phase, std::int32_t microbatch) const;
  void CheckAlike(const std::vector<Run>& earlier, const std::vector<Run>& later, std::int32_t step,
                  bool cut_alike);
  bool PassSameTriggers(std::int32_t a, std::int32_t b) const;
  // Forwards of the same trace, of several micro-batches in a step, run the same.
  void CheckForwards(const std::vector<Run>& runs, std::int32_t step);
  void CheckGradients(SegmentId id, std::int32_t microbatch, Position at);
  void CheckStorages(SegmentId id, std::int32_t microbatch, Position at);
  void Add(Position at, SegmentId segment, std::string what);
  Life* Of(StorageId storage, std::int32_t microbatch);

  const Plan& plan_;
  Reporter& reporter_;
  std::vector<UnitId> entered_;       // units whose forward is under way, innermost last
  std::vector<Life> lives_;           // by storage and micro-batch
  std::vector<char> from_outside_;    // by storage: an input, a buffer of the model, a gradient
  std::vector<SegmentPhase> phases_;  // by micro-batch: of the latest segment
  struct RunsInStep {
    std::int32_t step = -1;  // counted as run
    std::int32_t count = 0;
  };
  std::vector<RunsInStep> runs_in_step_;    // by segment and micro-batch
  std::vector<char> is_gathered_;           // by unit: for the model
  std::vector<std::int32_t> read_in_step_;  // by unit and micro-batch: by a forward
  std::int32_t microbatches_ = 1;
  std::int32_t step_ = 0;            // counted as run
  bool joins_microbatches_ = false;  // a backward of several, and its segments say one
  std::vector<char> forwards_say_;   // by unit: forwards say where they read it
  bool follows_storages_ = true;
};

}  // namespace shardplan::verifier
