#include "shardplan/executor/engine.h"

#include <fmt/format.h>

#include <algorithm>
#include <exception>
#include <optional>

#include "replay/program.h"
#include "shardplan/schemas/alive_buffers.h"
#include "shardplan/schemas/layout.h"
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

class Engine::Impl {
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

 private:
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
  Status Fail(Error error);
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
  bool op_begun_ = false;  // a host wait that has not returned yet
  std::int64_t steps_completed_ = 0;
  std::int64_t instructions_issued_ = 0;
  std::optional<Error> failure_;

  static constexpr std::uint8_t kInPart = 2;
  std::vector<std::uint8_t> alive_;                     // by buffer; kInPart: parts of it were freed ...
  std::vector<std::vector<std::int32_t>> freed_parts_;  // ... these
  std::vector<std::uint8_t> filled_;                    // something was written since it was allocated
  std::vector<std::vector<std::uint8_t>> grads_made_;   // grad_unsharded: by parameter of the unit
  std::vector<BufferId> bound_;      // by unit: what its parameters are views of, -1: the shards
  std::vector<GradTarget> targets_;  // of the compute instruction under way
};

Status Engine::Impl::Prepare(std::int64_t rank) {
  if (Status status = device_.Prepare(plan_); !status) return status;
  if (Status status = collectives_.Prepare(plan_, rank); !status) return status;
  for (const CopySpec& copy : program_.copies) {
    if (Result<CopyId> id = device_.PrepareCopy(copy); !id) return std::unexpected(id.error());
  }
  for (const CollectiveSpec& collective : program_.collectives) {
    if (Result<CollectiveId> id = collectives_.PrepareCollective(collective); !id) {
      return std::unexpected(id.error());
    }
  }
  return {};
}

const Instruction& Engine::Impl::CurrentInstruction() const {
  const ProgramTrigger& trigger = program_.triggers[trigger_];
  return plan_.steps[trigger.step].triggers[trigger.trigger].instructions[op_];
}

std::string Engine::Impl::Where() const {
  const ProgramTrigger& trigger = program_.triggers[trigger_];
  std::string at = fmt::format("step {}, {}", steps_completed_, Describe(plan_, trigger.key));
  if (!in_trigger_) return fmt::format("before {}", at);
  if (op_ >= trigger.count) return at;
  return fmt::format("{}, instruction {}: {}", at, op_, shardplan::Describe(plan_, CurrentInstruction()));
}

Status Engine::Impl::Fail(Error error) {
  error.message = fmt::format("{} (at {})", error.message, Where());
  failure_ = std::move(error);
  collectives_.Abort(failure_->message);
  return std::unexpected(*failure_);
}

void Engine::Impl::Abort(const std::string& reason) {
  if (!failure_) (void)Fail(Error{ErrorCode::kEnvironment, reason, {}, {}, {}, {}});
}

Status Engine::Impl::Begin(const TriggerKey& key) {
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
    return Fail(std::move(error));
  }
  in_trigger_ = true;
  op_ = 0;
  if (expected.count == 0) EndTrigger();
  return {};
}

void Engine::Impl::EndTrigger() {
  in_trigger_ = false;
  op_ = 0;
  const std::int32_t step = program_.triggers[trigger_].step;
  ++trigger_;
  if (trigger_ < program_.step_begin[step + 1]) return;
  ++steps_completed_;
  const bool last = step + 1 == std::ssize(plan_.steps);
  trigger_ = program_.step_begin[last ? plan_.steady_step : step + 1];
}

Result<bool> Engine::Impl::Advance() {
  if (failure_) [[unlikely]] {
    return std::unexpected(*failure_);
  }
  if (!in_trigger_) return true;
  const ProgramTrigger& trigger = program_.triggers[trigger_];
  if (observer_ != nullptr && !op_begun_) observer_->BeforeInstruction(CurrentInstruction());
  op_begun_ = true;
  bool blocked = false;
  if (Status status = RunCaught(program_.ops[trigger.first + op_], blocked); !status) [[unlikely]] {
    return std::unexpected(Fail(std::move(status.error())).error());
  }
  if (blocked) return false;
  op_begun_ = false;
  ++instructions_issued_;
  if (observer_ != nullptr) observer_->AfterInstruction(CurrentInstruction());
  if (++op_ < trigger.count) return false;
  EndTrigger();
  return true;
}

Status Engine::Impl::RequireAlive(BufferId buffer) const {
  if (alive_[buffer] == 1) [[likely]] {
    return {};
  }
  return NotAlive(buffer);
}

Status Engine::Impl::NotAlive(BufferId buffer) const {
  return MakeError(ErrorCode::kBadInput,
                   fmt::format("{} is used while it is not allocated", plan_.buffers[buffer].name));
}

// A copy may use what is left of a buffer of which parts were freed.
Status Engine::Impl::RequireReadable(const Op& op) const {
  if (alive_[op.src] != kInPart || op.code != OpCode::kCopy) return RequireAlive(op.src);
  const std::vector<std::int32_t>& freed = freed_parts_[op.src];
  const bool touched = std::ranges::any_of(program_.copies[op.a].runs, [&](const CopyRun& run) {
    return std::ranges::find(freed, run.src_part) != freed.end();
  });
  return touched ? NotAlive(op.src) : Status();
}

// LibTorch, and models written against it, throw (out of memory, say). This is where that ends.
Status Engine::Impl::RunCaught(const Op& op, bool& blocked) {
  try {
    return Run(op, blocked);
  } catch (const std::exception& exception) {
    return MakeError(ErrorCode::kEnvironment, FirstLine(exception));
  }
}

Status Engine::Impl::Run(const Op& op, bool& blocked) {
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

Status Engine::Impl::RunMemory(const Op& op) {
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

Status Engine::Impl::RunMove(const Op& op) {
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

Status Engine::Impl::IssueCollective(const Op& op) {
  if (op.begins_group) {
    if (Status status = collectives_.BeginGroup(); !status) return status;
  }
  Status status = collectives_.Issue(op.a, op.stream);
  return status && op.ends_group ? collectives_.EndGroup() : status;
}

Status Engine::Impl::RunModel(const Op& op) {
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

Status Engine::Impl::RunOrder(const Op& op, bool& blocked) {
  if (op.code == OpCode::kRecord) return device_.Record(op.a, op.stream);
  if (op.code == OpCode::kWait) return device_.Wait(op.a, op.stream);
  Result<bool> reached = device_.HostWait(op.a);
  if (!reached) return std::unexpected(std::move(reached.error()));
  blocked = !*reached;
  return collectives_.Check();
}

Status Engine::Impl::MakeGradient(GradTarget& target, StreamId stream) {
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

Status Engine::Impl::Compute(const Op& op) {
  targets_ = program_.grad_targets[op.src];
  for (GradTarget& target : targets_) {
    if (Status status = MakeGradient(target, op.stream); !status) return status;
  }
  if (model_ == nullptr) return {};
  ComputeCall call = {op.a, op.b, op.stream, steps_completed_, {}};
  if (!model_runs_itself_) call.grads = targets_;
  return model_->Compute(call);
}

Status Engine::Impl::ZeroGrad(UnitId unit) {
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

// ---- Engine ----

Engine::Engine(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Engine::~Engine() = default;

Result<std::unique_ptr<Engine>> Engine::Create(const Plan& plan, std::int64_t rank, Device& device,
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
  return std::unique_ptr<Engine>(new Engine(std::move(impl)));
}

Status Engine::Begin(const TriggerKey& trigger) { return impl_->Begin(trigger); }
Result<bool> Engine::Advance() { return impl_->Advance(); }
Status Engine::Fire(const TriggerKey& trigger) {
  if (Status status = impl_->Begin(trigger); !status) return status;
  while (true) {
    Result<bool> done = impl_->Advance();
    if (!done) return std::unexpected(std::move(done.error()));
    if (*done) return {};
  }
}
const TriggerKey& Engine::Expected() const { return impl_->Expected(); }
std::int64_t Engine::steps_completed() const { return impl_->steps_completed(); }
std::int64_t Engine::instructions_issued() const { return impl_->instructions_issued(); }
std::int32_t Engine::step_index() const { return impl_->step_index(); }
std::int32_t Engine::trigger_index() const { return impl_->trigger_index(); }
bool Engine::AtStepBegin() const { return impl_->AtStepBegin(); }
std::string Engine::Where() const { return impl_->Where(); }
void Engine::SetObserver(Observer* observer) { impl_->SetObserver(observer); }
void Engine::Abort(const std::string& reason) { impl_->Abort(reason); }

}  // namespace shardplan::executor
