// SPDX-License-Identifier: Apache-2.0
#include "shardplan/executor/replayer.h"

#include <fmt/format.h>

#include <algorithm>
#include <exception>

#include "replay/first_line.h"
#include "replay/replayer_impl.h"
#include "shardplan/schemas/assert.h"
#include "shardplan/schemas/checks.h"
#include "shardplan/schemas/exchanges.h"
#include "shardplan/schemas/plan_text.h"

namespace shardplan::executor {
namespace {

std::string Describe(const Plan& plan, const TriggerKey& key) {
  Trigger trigger;
  trigger.kind = key.kind;
  trigger.unit = key.unit >= 0 && key.unit < std::ssize(plan.units) ? key.unit : -1;
  trigger.microbatch = key.microbatch;
  return shardplan::Describe(plan, trigger);
}

ModelTraits TraitsOf(const Model* model) {
  if (model == nullptr) return {};
  return {.runs_itself = model->RunsItself(),
          .makes_gradients = model->MakesGradients(),
          .holds_activations = model->HoldsActivations()};
}

}  // namespace

Replayer::Impl::Impl(const Plan& plan, Program program, Device& device, Collectives& collectives,
                     Model* model)
    : plan_(plan),
      program_(std::move(program)),
      device_(device),
      collectives_(collectives),
      model_(model),
      model_makes_gradients_(model != nullptr && model->MakesGradients()),
      model_holds_activations_(model != nullptr && model->HoldsActivations()),
      alive_(plan.buffers.size(), 0),
      freed_parts_(plan.buffers.size()),
      filled_(plan.buffers.size(), 0),
      grads_made_(plan.buffers.size()),
      storages_left_(plan.buffers.size(), 0),
      alias_of_(plan.buffers.size(), -1),
      alias_by_owner_(plan.buffers.size(), -1),
      inherited_(plan.buffers.size()),
      bound_(plan.units.size(), -1) {
  for (std::size_t b = 0; b < plan.buffers.size(); ++b) alive_[b] = filled_[b] = plan.buffers[b].persistent;
  for (std::size_t b = 0; b < plan.buffers.size(); ++b) {
    const Buffer& buffer = plan.buffers[b];
    if (buffer.role != BufferRole::kGradUnsharded || buffer.unit < 0) continue;
    grads_made_[b].resize(plan.units[buffer.unit].parameters.size());
  }
}

Status Replayer::Impl::Prepare(std::int64_t rank) {
  if (Status status = device_.Prepare(plan_); !status) return status;
  if (Status status = collectives_.Prepare(plan_, rank); !status) return status;
  for (CopyId expected = 0; const CopySpec& copy : program_.copies) {
    const Result<CopyId> id = device_.PrepareCopy(copy);
    if (!id) return std::unexpected(id.error());
    SHARDPLAN_ASSERT(*id == expected, "a device numbers copies in the order in which they are prepared");
    ++expected;
  }
  for (CollectiveId expected = 0; const CollectiveSpec& collective : program_.collectives) {
    const Result<CollectiveId> id = collectives_.PrepareCollective(collective);
    if (!id) return std::unexpected(id.error());
    SHARDPLAN_ASSERT(*id == expected, "collectives are numbered in the order in which they are prepared");
    ++expected;
  }
  return {};
}

const Instruction& Replayer::Impl::CurrentInstruction() const {
  if (procedure_ >= 0) return plan_.procedures[procedure_].instructions[op_];
  const ProgramTrigger& trigger = program_.triggers[trigger_];
  return plan_.steps[trigger.step].triggers[trigger.trigger].instructions[op_];
}

std::string Replayer::Impl::Where() const {
  const ProgramTrigger& trigger = program_.triggers[trigger_];
  std::string at = fmt::format("step {}, {}", step(), Describe(plan_, trigger.key));
  if (procedure_ >= 0) {
    const Procedure& procedure = plan_.procedures[procedure_];
    return fmt::format("{} of {} on demand (before {}), instruction {}: {}", Name(procedure.kind),
                       DisplayName(plan_.units[procedure.unit].fqn), at, op_,
                       shardplan::Describe(plan_, CurrentInstruction()));
  }
  if (!in_trigger_) return fmt::format("before {}", at);
  if (op_ >= trigger.count) return at;
  const Trigger& planned = plan_.steps[trigger.step].triggers[trigger.trigger];
  return fmt::format("{}, instruction {}: {}", at, op_,
                     shardplan::Describe(plan_, planned, CurrentInstruction()));
}

// A rank that cannot go on ends the others' collectives, too. One that deviates, or finds no memory, can
// (Restart), if all ranks do alike.
Status Replayer::Impl::Fail(Error error, bool aborts) {
  error.message = fmt::format("{} (at {})", error.message, Where());
  failure_ = std::move(error);
  collectives_aborted_ = collectives_aborted_ || aborts;
  if (aborts) collectives_.Abort(failure_->message);
  return std::unexpected(*failure_);
}

void Replayer::Impl::Abort(const std::string& reason) {
  if (!failure_) (void)Fail(Error{ErrorCode::kEnvironment, reason, {}, {}, {}, {}});
}

Status Replayer::Impl::Begin(const TriggerKey& key) {
  if (failure_) [[unlikely]] {
    return std::unexpected(*failure_);
  }
  const ProgramTrigger& expected = program_.triggers[trigger_];
  if (in_trigger_) return MakeError(ErrorCode::kUsage, "a trigger is fired inside another one: " + Where());
  if (!(key == expected.key)) [[unlikely]] {
    Error error = {ErrorCode::kNegative, "the model deviates from the plan", {}, {}, {}, {}};
    error.pointer = fmt::format("/steps/{}/triggers/{}", expected.step, expected.trigger);
    error.found = Describe(plan_, key);
    error.expected = Describe(plan_, expected.key);
    return Fail(std::move(error), /*aborts=*/false);
  }
  if (recorder_ != nullptr) [[unlikely]] {
    if (expected.trigger == 0) BeginRecordedStep();
    if (recording_ != nullptr) {
      if (Status status = BeginRecordedTrigger(expected.trigger); !status)
        return Fail(std::move(status.error()));
    }
  }
  in_trigger_ = true;
  op_ = 0;
  return expected.count == 0 ? EndTrigger() : Status();
}

Status Replayer::Impl::EndTrigger() {
  if (recording_ != nullptr) [[unlikely]] {
    if (Status status = recording_->EndTrigger(); !status) return Fail(std::move(status.error()));
  }
  in_trigger_ = false;
  op_ = 0;
  const std::int32_t step = program_.triggers[trigger_].step;
  SHARDPLAN_ASSERT(trigger_ < program_.step_begin[step + 1], "a trigger is one of its step");
  ++trigger_;
  if (trigger_ < program_.step_begin[step + 1]) return {};
  ++steps_completed_;
  const bool last = step + 1 == std::ssize(plan_.steps);
  trigger_ = program_.step_begin[last ? plan_.steady_step : step + 1];
  return {};
}

Result<bool> Replayer::Impl::Advance() {
  if (failure_) [[unlikely]] {
    return std::unexpected(*failure_);
  }
  if (!in_trigger_) return true;
  const ProgramTrigger& trigger = program_.triggers[trigger_];
  SHARDPLAN_ASSERT(op_ < trigger.count, "Begin and Advance end a trigger after its last instruction");
  const Op& op = program_.ops[trigger.first + op_];
  if (observer_ != nullptr && !op_begun_) observer_->BeforeInstruction(CurrentInstruction());
  Status status;
  if (recording_ != nullptr && !op_begun_) [[unlikely]] {
    status = recording_->BeforeInstruction(op_, op);
  }
  op_begun_ = true;
  bool blocked = false;
  if (status) status = RunCaught(op, blocked);
  if (blocked) return false;
  if (recording_ != nullptr && status) [[unlikely]] {
    status = recording_->AfterInstruction(op);
  }
  if (!status) [[unlikely]] {
    return std::unexpected(Fail(std::move(status.error()), op.code != OpCode::kAllocate).error());
  }
  op_begun_ = false;
  ++instructions_issued_;
  if (observer_ != nullptr) observer_->AfterInstruction(CurrentInstruction());
  if (++op_ < trigger.count) return false;
  if (Status ended = EndTrigger(); !ended) return std::unexpected(std::move(ended.error()));
  return true;
}

// ---- Replayer ----

Replayer::Replayer(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Replayer::~Replayer() = default;

Result<std::unique_ptr<Replayer>> Replayer::Create(const Plan& plan, std::int64_t rank, Device& device,
                                                   Collectives& collectives, Model* model) {
  if (rank < 0 || rank >= plan.world_size) {
    Error error = {ErrorCode::kUsage, "this rank is not in the plan's world", {}, "/world_size", {}, {}};
    error.found = fmt::format("rank {}", rank);
    error.expected = fmt::format("0 to {}", plan.world_size - 1);
    return std::unexpected(std::move(error));
  }
  if (Status status = CheckCommunicators(plan); !status) return std::unexpected(std::move(status.error()));
  if (plan.steps.empty() || plan.steady_step < 0 || plan.steady_step >= std::ssize(plan.steps)) {
    return MakeInputError("/steady_step", "the plan has no step to repeat", std::to_string(plan.steady_step));
  }
  for (std::size_t s = 0; s < plan.steps.size(); ++s) {
    if (plan.steps[s].triggers.empty())
      return MakeInputError(fmt::format("/steps/{}", s), "the step has no trigger");
  }
  if (Status status = CheckOwners(plan); !status) return std::unexpected(std::move(status.error()));
  if (Status status = CheckExchanges(plan); !status) return std::unexpected(std::move(status.error()));
  Result<Program> program = BuildProgram(plan, rank, TraitsOf(model));
  if (!program) return std::unexpected(std::move(program.error()));
  auto impl = std::make_unique<Impl>(plan, std::move(*program), device, collectives, model);
  try {
    if (Status status = impl->Prepare(rank); !status) return std::unexpected(std::move(status.error()));
  } catch (const std::exception& exception) {
    return MakeError(ErrorCode::kEnvironment, FirstLine(exception));
  }
  return std::unique_ptr<Replayer>(new Replayer(std::move(impl)));
}

Status Replayer::Begin(const TriggerKey& trigger) { return impl_->Begin(trigger); }
Result<bool> Replayer::Advance() { return impl_->Advance(); }
Status Replayer::Fire(const TriggerKey& trigger) {
  if (Status status = impl_->Begin(trigger); !status) return status;
  while (true) {
    Result<bool> done = impl_->Advance();
    if (!done) return std::unexpected(std::move(done.error()));
    if (*done) return {};
  }
}
const TriggerKey& Replayer::Expected() const { return impl_->Expected(); }
std::int64_t Replayer::steps_completed() const { return impl_->steps_completed(); }
std::int64_t Replayer::step() const { return impl_->step(); }
void Replayer::CountFrom(std::int64_t step) { impl_->CountFrom(step); }
std::int64_t Replayer::instructions_issued() const { return impl_->instructions_issued(); }
std::int32_t Replayer::step_index() const { return impl_->step_index(); }
std::int32_t Replayer::trigger_index() const { return impl_->trigger_index(); }
bool Replayer::AtStepBegin() const { return impl_->AtStepBegin(); }
bool Replayer::Has(ProcedureKind kind, UnitId unit) const { return impl_->Has(kind, unit); }
Status Replayer::Call(ProcedureKind kind, UnitId unit) { return impl_->Call(kind, unit); }
bool Replayer::IsAlive(BufferId buffer) const { return impl_->IsAlive(buffer); }
Status Replayer::Provide(BufferId buffer) { return impl_->Provide(buffer); }
Status Replayer::Release(BufferId buffer) { return impl_->Release(buffer); }
Status Replayer::Leave() { return impl_->Leave(); }
Status Replayer::Restart() { return impl_->Restart(); }
std::exception_ptr Replayer::thrown() const { return impl_->thrown(); }
std::string Replayer::Where() const { return impl_->Where(); }
void Replayer::SetObserver(Observer* observer) { impl_->SetObserver(observer); }
Status Replayer::SetRecorder(StepRecorder* recorder) { return impl_->SetRecorder(recorder); }
void Replayer::Abort(const std::string& reason) { impl_->Abort(reason); }

}  // namespace shardplan::executor
