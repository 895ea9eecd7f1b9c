// SPDX-License-Identifier: Apache-2.0
// The state of a replayer and its parts: replayer.cc steps through the plan, replayer_operations.cc runs one
// instruction, replayer_off_step.cc does what is beside the steps, replayer_recording.cc tells a recorder.
#pragma once

#include <cstdint>
#include <exception>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "replay/program.h"
#include "shardplan/executor/replayer.h"
#include "shardplan/executor/step_recorder.h"
#include "shardplan/schemas/program.h"

namespace shardplan::executor {

class Replayer::Impl {
 public:
  Impl(const Plan& plan, Program program, Device& device, Collectives& collectives, Model* model);

  Status Begin(const TriggerKey& key);
  Result<bool> Advance();
  std::string Where() const;
  void Abort(const std::string& reason);

  Status Prepare(std::int64_t rank);
  const TriggerKey& Expected() const { return program_.triggers[trigger_].key; }
  std::int64_t steps_completed() const { return steps_completed_; }
  std::int64_t step() const { return steps_completed_ + steps_left_; }
  void CountFrom(std::int64_t step) { steps_left_ = step - steps_completed_; }
  std::int64_t instructions_issued() const { return instructions_issued_; }
  std::int32_t step_index() const { return program_.triggers[trigger_].step; }
  std::int32_t trigger_index() const { return program_.triggers[trigger_].trigger; }
  bool AtStepBegin() const { return !in_trigger_ && program_.triggers[trigger_].trigger == 0; }
  std::exception_ptr thrown() const { return thrown_; }
  void SetObserver(Observer* observer) { observer_ = observer; }
  Status SetRecorder(StepRecorder* recorder);
  bool Has(ProcedureKind kind, UnitId unit) const { return FindProcedure(plan_, kind, unit) != nullptr; }
  Status Call(ProcedureKind kind, UnitId unit);
  bool IsAlive(BufferId buffer) const { return alive_[buffer] != 0; }
  Status Provide(BufferId buffer);
  Status Release(BufferId buffer);
  Status Leave();
  Status Restart();

 private:
  Status RunProcedure(std::int32_t procedure);
  bool IsOnItsWay(BufferId buffer) const;
  Status FreeTransient(bool all);
  Status RunCaught(const Op& op, bool& blocked);
  Status Run(const Op& op, bool& blocked);
  Status RunMemory(const Op& op);
  Status RunMove(const Op& op);
  Status IssueCollective(const Op& op);
  Status RunModel(const Op& op);
  Status RunOrder(const Op& op, bool& blocked);
  Status Compute(const Op& op);
  Status MakeActivations(const ActivationUse& use, StreamId stream);
  Status EndActivations(const ActivationUse& use);
  std::int32_t Microbatch() const { return program_.triggers[trigger_].key.microbatch; }
  Status MakeGradient(GradTarget& target, StreamId stream);
  Status ZeroGrad(UnitId unit);
  Status RequireAlive(BufferId buffer) const;
  Status RequireReadable(const Op& op) const;
  Status NotAlive(BufferId buffer) const;
  Status Fail(Error error, bool aborts = true);
  const Instruction& CurrentInstruction() const;
  Status EndTrigger();
  void BeginRecordedStep();
  Status BeginRecordedTrigger(std::int32_t trigger);
  void NoteGradients();
  void NoteBuffer(BufferId buffer);
  Bytes AliveBytes(BufferId buffer) const;
  void AbandonRecording();

  const Plan& plan_;
  const Program program_;
  Device& device_;
  Collectives& collectives_;
  Model* const model_;
  const bool model_makes_gradients_;
  const bool model_holds_activations_;
  Observer* observer_ = nullptr;
  StepRecorder* recorder_ = nullptr;
  StepRecorder* recording_ = nullptr;  // the same in a step that it records

  std::int32_t trigger_ = 0;  // the next one, or the one under way
  std::int32_t op_ = 0;       // the next one in it
  bool in_trigger_ = false;
  std::int32_t procedure_ = -1;  // the one that is called; -1: none
  bool op_begun_ = false;        // a host wait that has not returned yet
  std::int64_t steps_completed_ = 0;
  std::int64_t steps_left_ = 0;  // that the host left or gave up, and what CountFrom added
  std::int64_t instructions_issued_ = 0;
  std::optional<Error> failure_;
  bool collectives_aborted_ = false;
  std::exception_ptr thrown_;

  static constexpr std::uint8_t kInPart = 2;
  std::vector<std::uint8_t> alive_;                     // by buffer; kInPart: parts of it were freed ...
  std::vector<std::vector<std::int32_t>> freed_parts_;  // ... these
  std::vector<std::uint8_t> filled_;                    // something was written since it was allocated
  std::vector<std::vector<std::uint8_t>> grads_made_;   // grad_unsharded: by parameter of the unit
  std::vector<std::int32_t> storages_left_;             // by buffer: of activations, that are there
  std::vector<BufferId> alias_of_;         // by buffer: the one whose memory it is a name of; -1: none
  std::vector<BufferId> alias_by_owner_;   // ... and the reverse
  std::vector<BufferId> made_in_segment_;  // gradients of the segment under way, while recorded
  std::vector<Bytes> inherited_;     // by buffer: memory that it was an alias of, and has now; 0: its own
  std::vector<BufferId> bound_;      // by unit: what its parameters are views of, -1: the shards
  std::vector<GradTarget> targets_;  // of the compute instruction under way
};

}  // namespace shardplan::executor
