#include "shardplan/executor/replayer.h"

#include <fmt/format.h>

#include <algorithm>
#include <exception>
#include <optional>

#include "replay/program.h"
#include "shardplan/schemas/alive_buffers.h"
#include "shardplan/schemas/assert.h"
#include "shardplan/schemas/layout.h"
#include "shardplan/schemas/on_demand.h"
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

// LibTorch's messages go on with a stack trace.
std::string FirstLine(const std::exception& exception) {
  const std::string text = exception.what();
  return text.substr(0, text.find('\n'));
}

}  // namespace

class Replayer::Impl {
 public:
  Impl(const Plan& plan, Program program, Device& device, Collectives& collectives, Model* model)
      : plan_(plan),
        program_(std::move(program)),
        device_(device),
        collectives_(collectives),
        model_(model),
        model_runs_itself_(model != nullptr && model->RunsItself()),
        alive_(plan.buffers.size(), 0),
        freed_parts_(plan.buffers.size()),
        filled_(plan.buffers.size(), 0),
        grads_made_(plan.buffers.size()),
        bound_(plan.units.size(), -1) {
    for (std::size_t b = 0; b < plan.buffers.size(); ++b) alive_[b] = filled_[b] = plan.buffers[b].persistent;
    for (std::size_t b = 0; b < plan.buffers.size(); ++b) {
      const Buffer& buffer = plan.buffers[b];
      if (buffer.role != BufferRole::kGradUnsharded || buffer.unit < 0) continue;
      grads_made_[b].resize(plan.units[buffer.unit].parameters.size());
    }
  }

  Status Begin(const TriggerKey& key);
  Result<bool> Advance();
  std::string Where() const;
  void Abort(const std::string& reason);

  Status Prepare(std::int64_t rank);
  const TriggerKey& Expected() const { return program_.triggers[trigger_].key; }
  std::int64_t steps_completed() const { return steps_completed_; }
  std::int64_t instructions_issued() const { return instructions_issued_; }
  std::int32_t step_index() const { return program_.triggers[trigger_].step; }
  std::int32_t trigger_index() const { return program_.triggers[trigger_].trigger; }
  bool AtStepBegin() const { return !in_trigger_ && program_.triggers[trigger_].trigger == 0; }
  void SetObserver(Observer* observer) { observer_ = observer; }
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
  Status MakeGradient(GradTarget& target, StreamId stream);
  Status ZeroGrad(UnitId unit);
  Status RequireAlive(BufferId buffer) const;
  Status RequireReadable(const Op& op) const;
  Status NotAlive(BufferId buffer) const;
  Status Fail(Error error, bool aborts = true);
  const Instruction& CurrentInstruction() const;
  void EndTrigger();

  const Plan& plan_;
  const Program program_;
  Device& device_;
  Collectives& collectives_;
  Model* const model_;
  const bool model_runs_itself_;
  Observer* observer_ = nullptr;

  std::int32_t trigger_ = 0;  // the next one, or the one under way
  std::int32_t op_ = 0;       // the next one in it
  bool in_trigger_ = false;
  std::int32_t procedure_ = -1;  // the one that is called; -1: none
  bool op_begun_ = false;        // a host wait that has not returned yet
  std::int64_t steps_completed_ = 0;
  std::int64_t instructions_issued_ = 0;
  std::optional<Error> failure_;
  bool collectives_aborted_ = false;

  static constexpr std::uint8_t kInPart = 2;
  std::vector<std::uint8_t> alive_;                     // by buffer; kInPart: parts of it were freed ...
  std::vector<std::vector<std::int32_t>> freed_parts_;  // ... these
  std::vector<std::uint8_t> filled_;                    // something was written since it was allocated
  std::vector<std::vector<std::uint8_t>> grads_made_;   // grad_unsharded: by parameter of the unit
  std::vector<BufferId> bound_;      // by unit: what its parameters are views of, -1: the shards
  std::vector<GradTarget> targets_;  // of the compute instruction under way
};

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
  std::string at = fmt::format("step {}, {}", steps_completed_, Describe(plan_, trigger.key));
  if (procedure_ >= 0) {
    const Procedure& procedure = plan_.procedures[procedure_];
    return fmt::format("{} of {} on demand (before {}), instruction {}: {}", Name(procedure.kind),
                       DisplayName(plan_.units[procedure.unit].fqn), at, op_,
                       shardplan::Describe(plan_, CurrentInstruction()));
  }
  if (!in_trigger_) return fmt::format("before {}", at);
  if (op_ >= trigger.count) return at;
  return fmt::format("{}, instruction {}: {}", at, op_, shardplan::Describe(plan_, CurrentInstruction()));
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
  in_trigger_ = true;
  op_ = 0;
  if (expected.count == 0) EndTrigger();
  return {};
}

void Replayer::Impl::EndTrigger() {
  in_trigger_ = false;
  op_ = 0;
  const std::int32_t step = program_.triggers[trigger_].step;
  SHARDPLAN_ASSERT(trigger_ < program_.step_begin[step + 1], "a trigger is one of its step");
  ++trigger_;
  if (trigger_ < program_.step_begin[step + 1]) return;
  ++steps_completed_;
  const bool last = step + 1 == std::ssize(plan_.steps);
  trigger_ = program_.step_begin[last ? plan_.steady_step : step + 1];
}

Result<bool> Replayer::Impl::Advance() {
  if (failure_) [[unlikely]] {
    return std::unexpected(*failure_);
  }
  if (!in_trigger_) return true;
  const ProgramTrigger& trigger = program_.triggers[trigger_];
  SHARDPLAN_ASSERT(op_ < trigger.count, "Begin and Advance end a trigger after its last instruction");
  if (observer_ != nullptr && !op_begun_) observer_->BeforeInstruction(CurrentInstruction());
  op_begun_ = true;
  bool blocked = false;
  if (Status status = RunCaught(program_.ops[trigger.first + op_], blocked); !status) [[unlikely]] {
    const bool aborts = program_.ops[trigger.first + op_].code != OpCode::kAllocate;
    return std::unexpected(Fail(std::move(status.error()), aborts).error());
  }
  if (blocked) return false;
  op_begun_ = false;
  ++instructions_issued_;
  if (observer_ != nullptr) observer_->AfterInstruction(CurrentInstruction());
  if (++op_ < trigger.count) return false;
  EndTrigger();
  return true;
}

Status Replayer::Impl::RunProcedure(std::int32_t procedure) {
  const ProgramProcedure& entry = program_.procedures[procedure];
  for (const BufferId buffer : entry.supplied) alive_[buffer] = filled_[buffer] = 1;
  for (; op_ < entry.count; ++op_) {
    const Op& op = program_.ops[entry.first + op_];
    if (observer_ != nullptr) observer_->BeforeInstruction(CurrentInstruction());
    for (bool blocked = true; blocked;) {
      blocked = false;
      if (Status status = RunCaught(op, blocked); !status) {
        return Fail(std::move(status.error()), op.code != OpCode::kAllocate);
      }
    }
    ++instructions_issued_;
    if (observer_ != nullptr) observer_->AfterInstruction(CurrentInstruction());
  }
  return {};
}

Status Replayer::Impl::Call(ProcedureKind kind, UnitId unit) {
  if (failure_) return std::unexpected(*failure_);
  if (in_trigger_) return MakeError(ErrorCode::kUsage, "a procedure is called inside a trigger: " + Where());
  const Procedure* found = FindProcedure(plan_, kind, unit);
  if (found == nullptr) {
    return MakeError(ErrorCode::kUsage, fmt::format("the plan does not say how to {} {} on demand: it has no "
                                                    "such procedure; plan the model again",
                                                    Name(kind), DisplayName(plan_.units[unit].fqn)));
  }
  procedure_ = static_cast<std::int32_t>(found - plan_.procedures.data());
  op_ = 0;
  const Status status = RunProcedure(procedure_);
  procedure_ = -1;
  op_ = 0;
  return status;
}

Status Replayer::Impl::Provide(BufferId buffer) {
  if (alive_[buffer]) return MakeError(ErrorCode::kUsage, plan_.buffers[buffer].name + " is there already");
  alive_[buffer] = filled_[buffer] = 1;
  return device_.Allocate(buffer, 0);
}

Status Replayer::Impl::Release(BufferId buffer) {
  alive_[buffer] = filled_[buffer] = 0;
  freed_parts_[buffer].clear();
  std::ranges::fill(grads_made_[buffer], 0);
  const bool models = model_runs_itself_ && plan_.buffers[buffer].role == BufferRole::kGradUnsharded;
  return models ? Status() : device_.Free(buffer, {});
}

// Neither parameters that somebody computes with nor gradients.
bool Replayer::Impl::IsOnItsWay(BufferId id) const {
  const Buffer& buffer = plan_.buffers[id];
  switch (buffer.role) {
    case BufferRole::kParamUnsharded:
      return bound_[buffer.unit] != id;
    case BufferRole::kExtensionGathered:
    case BufferRole::kExtensionUnsharded:
      return bound_[buffer.unit] < 0;
    case BufferRole::kGradUnsharded:
    case BufferRole::kGradUnshardedAccumulated:
    case BufferRole::kPartialReduceOutput:
    case BufferRole::kGradSharded:
    case BufferRole::kGradHost:
    case BufferRole::kOptimizerState:
    case BufferRole::kOptimizerTemp:
      return false;
    default:
      return true;
  }
}

// What is not persistent: all of it, or what is on its way.
Status Replayer::Impl::FreeTransient(bool all) {
  if (Result<bool> done = device_.Synchronize(); !done) return std::unexpected(std::move(done.error()));
  for (std::size_t b = 0; b < plan_.buffers.size(); ++b) {
    const auto buffer = static_cast<BufferId>(b);
    if (!alive_[buffer] || plan_.buffers[b].persistent || !(all || IsOnItsWay(buffer))) continue;
    if (Status status = Release(buffer); !status) return status;
  }
  return {};
}

Status Replayer::Impl::Leave() {
  if (failure_) return std::unexpected(*failure_);
  return FreeTransient(/*all=*/false);
}

Status Replayer::Impl::Restart() {
  if (collectives_aborted_) return std::unexpected(*failure_);
  failure_.reset();
  in_trigger_ = op_begun_ = false;
  trigger_ = op_ = 0;
  procedure_ = -1;
  std::ranges::fill(bound_, -1);
  for (std::size_t b = 0; b < plan_.buffers.size(); ++b) std::ranges::fill(grads_made_[b], 0);
  return FreeTransient(/*all=*/true);
}

Status Replayer::Impl::RequireAlive(BufferId buffer) const {
  if (alive_[buffer] == 1) [[likely]] {
    return {};
  }
  return NotAlive(buffer);
}

Status Replayer::Impl::NotAlive(BufferId buffer) const {
  return MakeError(ErrorCode::kBadInput,
                   fmt::format("{} is used while it is not allocated", plan_.buffers[buffer].name));
}

// A copy may use what is left of a buffer of which parts were freed.
Status Replayer::Impl::RequireReadable(const Op& op) const {
  if (alive_[op.src] != kInPart || op.code != OpCode::kCopy) return RequireAlive(op.src);
  const std::vector<std::int32_t>& freed = freed_parts_[op.src];
  const bool touched = std::ranges::any_of(program_.copies[op.a].runs, [&](const CopyRun& run) {
    return std::ranges::find(freed, run.src_part) != freed.end();
  });
  return touched ? NotAlive(op.src) : Status();
}

// LibTorch, and models written against it, throw (out of memory, say). This is where that ends.
Status Replayer::Impl::RunCaught(const Op& op, bool& blocked) {
  try {
    return Run(op, blocked);
  } catch (const std::exception& exception) {
    return MakeError(ErrorCode::kEnvironment, FirstLine(exception));
  }
}

Status Replayer::Impl::Run(const Op& op, bool& blocked) {
  switch (op.code) {
    case OpCode::kNothing:
      return {};
    case OpCode::kAllocate:
    case OpCode::kFree:
    case OpCode::kDropGradients:
      return RunMemory(op);
    case OpCode::kCopy:
    case OpCode::kGradCast:
    case OpCode::kAccumulate:
    case OpCode::kCollective:
    case OpCode::kScale:
      return RunMove(op);
    case OpCode::kRecord:
    case OpCode::kWait:
    case OpCode::kHostWait:
      return RunOrder(op, blocked);
    default:
      return RunModel(op);
  }
}

Status Replayer::Impl::RunMemory(const Op& op) {
  const BufferId buffer = op.a;
  if (op.code == OpCode::kAllocate) {
    if (alive_[buffer]) {
      return MakeError(ErrorCode::kBadInput,
                       fmt::format("{} is allocated while it is alive", plan_.buffers[buffer].name));
    }
    alive_[buffer] = 1;
    filled_[buffer] = 0;
    return device_.Allocate(buffer, op.stream);
  }
  if (!alive_[buffer]) return NotAlive(buffer);
  const FreeSpec& free = program_.frees[op.b];
  const UnitId unit = plan_.buffers[buffer].unit;
  if (unit >= 0 && bound_[unit] == buffer) {
    return MakeError(ErrorCode::kBadInput,
                     fmt::format("{} is freed while the parameters of {} are views of it",
                                 plan_.buffers[buffer].name, plan_.units[unit].fqn));
  }
  alive_[buffer] = free.parts.empty() ? 0 : kInPart;
  if (free.parts.empty()) {
    freed_parts_[buffer].clear();
  } else {
    freed_parts_[buffer].insert(freed_parts_[buffer].end(), free.parts.begin(), free.parts.end());
  }
  filled_[buffer] = 0;
  std::ranges::fill(grads_made_[buffer], 0);
  if (Status status = free.parts.empty() ? device_.Free(buffer, free.safe_after)
                                         : device_.FreeParts(buffer, free.parts, free.safe_after);
      !status) {
    return status;
  }
  return op.code == OpCode::kFree ? Status() : model_->DropGradients(unit, buffer, free.parts);
}

Status Replayer::Impl::RunMove(const Op& op) {
  if (Status status = RequireReadable(op); !status) return status;
  if (op.reads_shard && model_ != nullptr) {
    if (Status status = model_->ShardedParametersRead(plan_.buffers[op.src].unit); !status) return status;
  }
  if (op.takes_gradients) {
    if (Status status = model_->TakeGradients(plan_.buffers[op.src].unit, op.src); !status) return status;
  }
  Status status;
  const bool alias =
      op.code == OpCode::kGradCast && MakesView(plan_, CurrentInstruction(), alive_[op.dst] != 0);
  if (alias) {
    alive_[op.dst] = 1;
    status = device_.MakeAlias(op.a);
  } else if (op.code == OpCode::kScale) {
    return device_.Scale(op.a, program_.divisors[op.b], op.stream);
  } else {
    if (Status alive = RequireAlive(op.dst); !alive) return alive;
    Result<bool> moved = op.extended && model_ != nullptr ? model_->MoveExtended(op.src, op.dst, op.stream)
                                                          : Result<bool>(false);
    if (!moved) return std::unexpected(std::move(moved.error()));
    if (*moved) {
      status = {};
    } else if (op.code == OpCode::kCollective) {
      status = IssueCollective(op);
    } else if (op.code == OpCode::kAccumulate && filled_[op.dst]) {
      status = device_.Accumulate(op.a, op.stream);
    } else {
      status = device_.Copy(op.a, op.stream);
    }
  }
  if (!status) return status;
  filled_[op.dst] = 1;
  if (op.last_reduction && model_ != nullptr) {
    return model_->GradientsReduced(plan_.buffers[op.dst].unit, op.dst, op.stream);
  }
  if (op.final_gradient && model_ != nullptr) {
    return model_->ShardedGradientsReady(plan_.buffers[op.dst].unit, op.dst);
  }
  return {};
}

Status Replayer::Impl::IssueCollective(const Op& op) {
  if (op.begins_group) {
    if (Status status = collectives_.BeginGroup(); !status) return status;
  }
  Status status = collectives_.Issue(op.a, op.stream);
  return status && op.ends_group ? collectives_.EndGroup() : status;
}

Status Replayer::Impl::RunModel(const Op& op) {
  switch (op.code) {
    case OpCode::kCompute:
      return Compute(op);
    case OpCode::kBindUnsharded:
    case OpCode::kBindSharded:
      if (Status status = RequireAlive(op.b); !status) return status;
      bound_[op.a] = op.code == OpCode::kBindUnsharded ? op.b : -1;
      if (model_ == nullptr) return {};
      return op.code == OpCode::kBindUnsharded ? model_->BindUnsharded(op.a, op.b)
                                               : model_->BindSharded(op.a, op.b);
    case OpCode::kOptimizerStep:
      return model_ == nullptr ? Status() : model_->OptimizerStep(op.a, op.b, op.stream);
    case OpCode::kZeroGrad:
      return ZeroGrad(op.a);
    default:
      return MakeError(ErrorCode::kInternal, "unknown operation");
  }
}

Status Replayer::Impl::RunOrder(const Op& op, bool& blocked) {
  if (op.code == OpCode::kRecord) return device_.Record(op.a, op.stream);
  if (op.code == OpCode::kWait) return device_.Wait(op.a, op.stream);
  Result<bool> reached = device_.HostWait(op.a);
  if (!reached) return std::unexpected(std::move(reached.error()));
  blocked = !*reached;
  return collectives_.Check();
}

Status Replayer::Impl::MakeGradient(GradTarget& target, StreamId stream) {
  if (!alive_[target.buffer]) {
    alive_[target.buffer] = 1;
    if (!model_runs_itself_) {
      if (Status status = device_.Allocate(target.buffer, stream); !status) return status;
    }
  }
  filled_[target.buffer] = 1;
  std::uint8_t& made = grads_made_[target.buffer][target.parameter];
  target.adds = made != 0;
  made = 1;
  return {};
}

Status Replayer::Impl::Compute(const Op& op) {
  targets_ = program_.grad_targets[op.src];
  for (GradTarget& target : targets_) {
    if (Status status = MakeGradient(target, op.stream); !status) return status;
  }
  if (model_ == nullptr) return {};
  ComputeCall call = {op.a, op.b, op.stream, steps_completed_, {}};
  if (!model_runs_itself_) call.grads = targets_;
  return model_->Compute(call);
}

Status Replayer::Impl::ZeroGrad(UnitId unit) {
  if (model_ != nullptr) {
    if (Status status = model_->ZeroGrad(unit); !status) return status;
  }
  for (std::size_t b = 0; b < plan_.buffers.size(); ++b) {
    const Buffer& buffer = plan_.buffers[b];
    if (!alive_[b] || !ZeroGradTakes(unit, buffer)) continue;
    filled_[b] = 0;
    if (buffer.persistent) continue;
    alive_[b] = 0;
    if (Status status = device_.Free(static_cast<BufferId>(b), {}); !status) return status;
  }
  return {};
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
  Result<Program> program = BuildProgram(plan, rank, model != nullptr && model->RunsItself());
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
std::string Replayer::Where() const { return impl_->Where(); }
void Replayer::SetObserver(Observer* observer) { impl_->SetObserver(observer); }
void Replayer::Abort(const std::string& reason) { impl_->Abort(reason); }

}  // namespace shardplan::executor
