// SPDX-License-Identifier: Apache-2.0
#include "tests/executor/virtual/checked_model.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <set>

#include "executor/src/replay/host_kernels.h"
#include "shardplan/executor/collectives.h"
#include "shardplan/schemas/alive_buffers.h"
#include "shardplan/schemas/exchanges.h"

namespace shardplan::test {

namespace {

// Taken once, and used in every step from then on: nothing is left over.
bool IsKept(const Plan& plan, BufferId buffer) {
  bool is_used = false;
  for (std::size_t s = static_cast<std::size_t>(plan.steady_step); s < plan.steps.size(); ++s) {
    for (const Trigger& trigger : plan.steps[s].triggers) {
      for (const Instruction& i : trigger.instructions) {
        if (i.src != buffer && i.dst != buffer) continue;
        if (i.kind == InstructionKind::kAllocate || i.kind == InstructionKind::kFree) return false;
        is_used = true;
      }
    }
  }
  return is_used;
}

bool IsOptimizersOwn(const Buffer& buffer) {
  return buffer.role == BufferRole::kOptimizerState || buffer.role == BufferRole::kOptimizerTemp;
}

}  // namespace

CheckedModel::CheckedModel(ExpectedValues& expected, NumberMemory& memory, std::int64_t rank,
                           Findings& findings, const Plan* runs)
    : expected_(expected),
      plan_(expected.plan()),
      runs_(runs != nullptr ? *runs : plan_),
      memory_(memory),
      rank_(rank),
      findings_(findings),
      bound_(plan_.units.size(), -1),
      shard_of_(plan_.units.size(), -1),
      gradients_(plan_.units.size()),
      versions_(plan_.units.size()),
      made_(plan_.units.size()),
      reads_(static_cast<std::size_t>(expected.steps())) {
  for (std::size_t u = 0; u < plan_.units.size(); ++u) {
    versions_[u].resize(plan_.units[u].parameters.size());
    made_[u].resize(plan_.units[u].parameters.size());
  }
  WalkPlan();
  for (std::size_t b = 0; b < plan_.buffers.size(); ++b) {
    const Buffer& buffer = plan_.buffers[b];
    if (buffer.role == BufferRole::kParamSharded) shard_of_[buffer.unit] = static_cast<BufferId>(b);
    if (!IsOptimizersOwn(buffer)) continue;
    for (const Bytes bytes : buffer.parts_bytes) {
      scratch_.resize(std::max(scratch_.size(), static_cast<std::size_t>(bytes.value)), std::byte{0x5A});
    }
  }
}

// A unit's parameters may differ in dtype.
DType CheckedModel::DTypeOf(const Buffer& buffer, std::int32_t p) const {
  const Unit& unit = plan_.units[buffer.unit];
  const UnitParameter& parameter = unit.parameters[p];
  if (unit.layout == LayoutKind::kFlat) return buffer.dtype;
  if (buffer.role == BufferRole::kParamSharded) return parameter.dtype;
  if (buffer.role != BufferRole::kParamUnsharded) return buffer.dtype;
  if (!parameter.gathered.empty()) return parameter.gathered.front().dtype;
  return parameter.param_dtype.value_or(unit.param_dtype);
}

std::string CheckedModel::NameOf(UnitId unit, std::int32_t parameter) const {
  return plan_.units[unit].parameters[parameter].fqn;
}

void CheckedModel::Fail(std::string message) {
  if (findings_.failure.empty()) findings_.failure = fmt::format("rank {}: {}", rank_, message);
}

CheckedModel::Piece CheckedModel::ShardPiece(const ShardRun& run, UnitId unit, BufferId id,
                                             std::span<const std::byte> whole) {
  const Buffer& buffer = plan_.buffers[id];
  const DType dtype = DTypeOf(buffer, run.parameter);
  const std::int64_t size = SizeBytes(dtype);
  std::int32_t part = 0;
  if (plan_.units[unit].layout == LayoutKind::kPerParameter && !buffer.parameters.empty()) {
    part = static_cast<std::int32_t>(std::ranges::find(buffer.parameters, run.parameter) -
                                     buffer.parameters.begin());
  }
  Piece piece = {.dtype = dtype, .unit = unit, .parameter = run.parameter, .first = run.in_whole};
  piece.at = {id, part, run.in_shard * size};
  piece.expected = whole.subspan(static_cast<std::size_t>(run.in_whole * size),
                                 static_cast<std::size_t>(run.numel * size));
  return piece;
}

Status CheckedModel::SetInitialShards() {
  NumberWork work;
  for (std::size_t u = 0; u < plan_.units.size(); ++u) {
    if (shard_of_[u] < 0) continue;
    const auto unit = static_cast<UnitId>(u);
    for (const ShardRun& run : expected_.Shard(unit, rank_)) {
      const DType dtype = DTypeOf(plan_.buffers[shard_of_[u]], run.parameter);
      const Piece piece =
          ShardPiece(run, unit, shard_of_[u], expected_.Parameter(unit, run.parameter, rank_, 0, dtype));
      work.writes.push_back({piece.at, piece.expected, dtype});
    }
  }
  return memory_.Enqueue(-1, std::move(work));
}

Status CheckedModel::Enqueue(StreamId stream, Work work, const std::string& where) {
  // Parameters without elements.
  std::erase_if(work.checks, [](const Piece& piece) { return piece.expected.empty(); });
  std::erase_if(work.writes, [](const NumberWork::Write& write) { return write.value.empty(); });
  NumberWork numbers;
  for (const Piece& piece : work.checks) numbers.reads.push_back({piece.at, piece.expected.size()});
  numbers.writes = std::move(work.writes);
  numbers.check = [this, where, checks = std::move(work.checks)](std::span<const std::byte* const> found) {
    for (std::size_t i = 0; i < checks.size(); ++i) Check(checks[i], found[i], where);
  };
  return memory_.Enqueue(stream, std::move(numbers));
}

// Equal, or a parameter as it was some optimizer steps ago, or wrong.
void CheckedModel::Check(const Piece& piece, const std::byte* found, const std::string& where) {
  if (std::memcmp(found, piece.expected.data(), piece.expected.size()) == 0) return;
  if (piece.unit < 0) {
    return Fail(fmt::format("{}: part {} of {} is not what was saved", where, piece.at.part,
                            plan_.buffers[piece.at.buffer].name));
  }
  for (std::int64_t version = piece.version - 1; version >= 0; --version) {
    const std::span<const std::byte> old =
        expected_.Parameter(piece.unit, piece.parameter, rank_, version, piece.dtype);
    if (std::memcmp(found, old.data(), old.size()) != 0) continue;
    findings_.stale.insert(plan_.units[piece.unit].fqn);
    return;
  }
  const auto numel = static_cast<std::int64_t>(piece.expected.size()) / SizeBytes(piece.dtype);
  for (std::int64_t e = 0; e < numel; ++e) {
    const double is = executor::LoadElement(found, piece.dtype, e);
    const double wanted = executor::LoadElement(piece.expected.data(), piece.dtype, e);
    if (is == wanted) continue;
    return Fail(fmt::format("{}: element {} of {} is {} instead of {}", where, piece.first + e,
                            NameOf(piece.unit, piece.parameter), is, wanted));
  }
}

Status CheckedModel::BindUnsharded(UnitId unit, BufferId buffer) {
  bound_[unit] = buffer;
  const Buffer& bound = plan_.buffers[buffer];
  if (bound.memory == MemoryKind::kDevice || bound.role != BufferRole::kParamUnsharded) return {};
  // The user reads it from now on, and waits for nothing.
  Work work;
  AddReads(unit, buffer, work.checks);
  return Enqueue(-1, std::move(work), "what the user reads on the host");
}

Status CheckedModel::BindSharded(UnitId unit, BufferId) {
  bound_[unit] = -1;
  return {};
}

Status CheckedModel::ShardedGradientsReady(UnitId unit, BufferId buffer) {
  std::vector<BufferId>& known = gradients_[unit];
  if (std::ranges::find(known, buffer) == known.end()) known.push_back(buffer);
  return {};
}

Status CheckedModel::ZeroGrad(UnitId unit) {
  --zero_grads_;
  for (std::size_t u = 0; u < gradients_.size(); ++u) {
    if (unit < 0 || unit == static_cast<UnitId>(u)) gradients_[u].clear();
  }
  return {};
}

void CheckedModel::AddReads(UnitId unit, BufferId id, std::vector<Piece>& pieces) {
  const Buffer& buffer = plan_.buffers[id];
  const bool flat = plan_.units[unit].layout == LayoutKind::kFlat;
  for (std::size_t p = 0; p < plan_.units[unit].parameters.size(); ++p) {
    const UnitParameter& parameter = plan_.units[unit].parameters[p];
    const auto index = static_cast<std::int32_t>(p);
    const std::int64_t version = versions_[unit][p];
    const DType dtype = DTypeOf(buffer, index);
    const std::span<const std::byte> whole = expected_.Parameter(unit, index, rank_, version, dtype);
    const std::int64_t offset = flat ? parameter.flat_offset * SizeBytes(dtype) : 0;
    // An extension that packs several elements into one has no numbers that could be compared.
    if (!parameter.gathered.empty() && buffer.parts_bytes[p].value < std::ssize(whole)) continue;
    pieces.push_back({.at = {id, flat ? 0 : index, offset},
                      .expected = whole,
                      .dtype = dtype,
                      .unit = unit,
                      .parameter = index,
                      .version = version});
  }
}

void CheckedModel::WalkPlan() {
  AliveBuffers alive(plan_);
  const auto steps = std::ssize(plan_.steps);
  for (std::int64_t step = 0; step < expected_.steps(); ++step) {
    const auto of_plan =
        step < steps ? step : plan_.steady_step + (step - steps) % (steps - plan_.steady_step);
    auto& segments = order_.emplace_back();
    for (const Trigger& trigger : plan_.steps[of_plan].triggers) {
      for (const Instruction& i : trigger.instructions) {
        if (i.kind == InstructionKind::kZeroGrad) ++zero_grads_;
        if (i.kind == InstructionKind::kCompute) {
          const Run run(i.segment, MicrobatchOf(trigger, i));
          if (IsPoint(i.segment)) {
            points_.insert({step, run});
          } else {
            segments.push_back(run);
          }
        }
        if (i.kind == InstructionKind::kOptimizerStep) {
          std::vector<BufferId>& own = optimizers_own_.emplace_back();
          for (std::size_t b = 0; b < plan_.buffers.size(); ++b) {
            const auto id = static_cast<BufferId>(b);
            if (IsOptimizersOwn(plan_.buffers[b]) && alive.IsAlive(id)) own.push_back(id);
          }
        }
        alive.Pass(i);
      }
    }
  }
  for (std::size_t b = 0; b < plan_.buffers.size(); ++b) {
    alive_at_end_.push_back(alive.IsAlive(static_cast<BufferId>(b)) ? 1 : 0);
  }
}

// One that only reads parameters, of a trace without operators: no number depends on where in its step it
// does.
bool CheckedModel::IsPoint(SegmentId id) const {
  const Segment& segment = plan_.segments[id];
  return segment.pass >= 0 && segment.begin == segment.end;
}

// The model runs its own segments, all of them, in its own order: what the plan says is what it expects.
void CheckedModel::CheckOrder(const executor::ComputeCall& call) {
  while (step_ < call.step) {
    if (computed_ < order_[step_].size()) Fail(fmt::format("a segment is missing in step {}", step_));
    ++step_;
    computed_ = 0;
    last_ = {-1, -1};
  }
  const auto& order = order_[step_];
  const Run found(call.segment, call.microbatch);
  const bool again = std::exchange(last_, found) == found;
  if (!again && points_.contains({step_, found})) return;
  if (computed_ < order.size() && order[computed_] == found) {
    ++computed_;
    return;
  }
  Fail(fmt::format("{} of micro-batch {} runs out of the model's order", plan_.segments[call.segment].name,
                   call.microbatch));
}

std::span<const std::byte> CheckedModel::ActivationOf(StorageId storage, std::int32_t microbatch,
                                                      std::int64_t step, std::size_t bytes) {
  constexpr std::size_t kMost = 16;
  std::vector<std::byte>& value = activations_[{storage, microbatch, step}];
  while (value.size() < kMost) {
    value.push_back(static_cast<std::byte>(1 + 7 * storage + 31 * microbatch + 89 * step +
                                           3 * static_cast<std::int64_t>(value.size())));
  }
  return std::span(value).first(std::min(bytes, kMost));
}

// The segment writes the activations that it makes; those that it finds have to be what was made.
void CheckedModel::AddActivations(const executor::ComputeCall& call, Work& work) {
  for (const executor::ActivationUse& use : call.activations) {
    const Buffer& buffer = plan_.buffers[use.buffer];
    std::map<StorageId, bool> touched;  // whether it is made here
    const auto touch = [&](StorageId storage, bool made) {
      if (std::ranges::find(buffer.storages, storage) != buffer.storages.end())
        touched.try_emplace(storage, made);
    };
    for (const SegmentEntry& entry : plan_.segments[call.segment].entries) {
      if (const auto* born = std::get_if<AllocateEvent>(&entry)) {
        touch(born->storage, true);
      } else if (const auto* dead = std::get_if<FreeEvent>(&entry)) {
        touch(dead->storage, false);
      } else {
        for (const StorageId storage : std::get<OperatorEvent>(entry).reads) touch(storage, false);
      }
    }
    for (const auto& [storage, made] : touched) {
      const auto part =
          static_cast<std::int32_t>(std::ranges::find(buffer.storages, storage) - buffer.storages.begin());
      const std::span<const std::byte> value = ActivationOf(
          storage, call.microbatch, call.step, static_cast<std::size_t>(buffer.parts_bytes[part].value));
      const BytePlace at = {use.buffer, part, 0};
      if (made) {
        work.writes.push_back({at, value, DType::kUInt8});
      } else {
        work.checks.push_back({.at = at, .expected = value, .dtype = DType::kUInt8});
      }
    }
  }
}

Status CheckedModel::Compute(const executor::ComputeCall& call) {
  if (findings_.stops_at_failure && !findings_.failure.empty()) {
    return MakeError(ErrorCode::kInternal, findings_.failure);
  }
  const Segment& segment = plan_.segments[call.segment];
  CheckOrder(call);
  Work work;
  for (const UnitId unit : segment.reads) {
    if (bound_[unit] < 0) {
      return MakeError(ErrorCode::kInternal,
                       fmt::format("{} reads {}, which is not bound", segment.name, plan_.units[unit].fqn));
    }
    if (plan_.buffers[bound_[unit]].unit != unit) {
      return MakeError(ErrorCode::kInternal, fmt::format("{} reads {} in a buffer of another unit",
                                                         segment.name, plan_.units[unit].fqn));
    }
    reads_[call.step].insert({call.microbatch, unit});
    AddReads(unit, bound_[unit], work.checks);
  }
  AddActivations(call, work);
  for (const executor::GradTarget& target : call.grads) {
    const Buffer& buffer = plan_.buffers[target.buffer];
    const Unit& unit = plan_.units[target.unit];
    // One part of several parameters is the flat gradient.
    const bool joined =
        unit.layout == LayoutKind::kFlat && buffer.parts_bytes.size() < buffer.parameters.size();
    const std::int64_t offset = joined ? unit.parameters[target.parameter].flat_offset : 0;
    std::int64_t& made = made_[target.unit][target.parameter];
    work.writes.push_back({{target.buffer, target.part, offset * SizeBytes(buffer.dtype)},
                           expected_.Made(target.unit, target.parameter, rank_, made++, buffer.dtype),
                           buffer.dtype,
                           target.adds});
  }
  return Enqueue(call.stream, std::move(work), segment.name);
}

// The reduced gradient that the parameter's next step needs, where it lies.
void CheckedModel::AddReduced(UnitId unit, std::int32_t parameter, bool on_host, std::vector<Piece>& checks) {
  BufferId found = -1;
  for (const BufferId id : gradients_[unit]) {
    const std::vector<std::int32_t>& held = plan_.buffers[id].parameters;
    if (!held.empty() && std::ranges::find(held, parameter) == held.end()) continue;
    if (!memory_.IsAlive(id)) continue;
    if (found >= 0) return Fail(fmt::format("{} has two reduced gradients", NameOf(unit, parameter)));
    found = id;
  }
  if (found >= 0 && on_host == (plan_.buffers[found].memory == MemoryKind::kDevice)) {
    return Fail(fmt::format("the optimizer steps {} {} with {}", NameOf(unit, parameter),
                            on_host ? "on the host" : "on the device", plan_.buffers[found].name));
  }
  const std::int64_t version = versions_[unit][parameter];
  const DType dtype = found < 0 ? DType::kFloat32 : plan_.buffers[found].dtype;
  const std::span<const std::byte> reduced = expected_.Reduced(unit, parameter, rank_, version, dtype);
  if (found < 0) {
    if (!reduced.empty()) Fail(fmt::format("the gradient of {} did not arrive", NameOf(unit, parameter)));
    return;
  }
  // A flat gradient has zeros for parameters without one.
  static const std::vector<std::byte> kZeros(1 << 20);
  for (const ShardRun& run : expected_.Shard(unit, rank_)) {
    if (run.parameter == parameter) {
      checks.push_back(ShardPiece(run, unit, found, reduced.empty() ? std::span(kZeros) : reduced));
    }
  }
}

void CheckedModel::StepParameter(UnitId unit, std::int32_t parameter, bool on_host, Work& work) {
  const std::int64_t version = versions_[unit][parameter];
  if (version >= expected_.Versions(unit, parameter)) {
    return Fail(fmt::format("the optimizer steps {} once too often", NameOf(unit, parameter)));
  }
  AddReduced(unit, parameter, on_host, work.checks);
  ApplyUpdate(unit, parameter, work);
}

bool CheckedModel::IsExchanged(UnitId unit, std::int32_t parameter) const {
  return std::ranges::any_of(plan_.exchanges, [&](const Exchange& exchange) {
    return std::ranges::any_of(exchange.matrices, [&](const ExchangedMatrix& matrix) {
      return matrix.unit == unit && matrix.parameter == parameter;
    });
  });
}

// A rank's shard has neighbouring rows of a matrix.
CheckedModel::Stretch CheckedModel::PieceOf(const Exchange& exchange, std::size_t m,
                                            std::int64_t rank) const {
  const ExchangedMatrix& matrix = exchange.matrices[m];
  const UnitParameter& parameter = plan_.units[matrix.unit].parameters[matrix.parameter];
  const std::int64_t begin = matrix.first_row * ColumnsOf(parameter);
  const std::int64_t end = begin + RowsOf(parameter, matrix) * ColumnsOf(parameter);
  for (const ShardRun& run : expected_.Shard(matrix.unit, rank)) {
    if (run.parameter != matrix.parameter) continue;
    const std::int64_t from = std::max(begin, run.in_whole);
    const std::int64_t to = std::min(end, run.in_whole + run.numel);
    if (from < to) return {.matrix = m, .in_whole = from, .numel = to - from};
  }
  return {.matrix = m};
}

// Rank by rank, each as long as the first one, its rows of all matrices.
std::vector<CheckedModel::Stretch> CheckedModel::GatheredIn(const Exchange& exchange, bool own_rank) const {
  std::vector<Stretch> stretches;
  const std::vector<std::int64_t> group =
      executor::GroupOf(plan_.communicators[exchange.communicator], rank_);
  std::int64_t slot = 0;
  for (std::size_t m = 0; m < exchange.matrices.size(); ++m)
    slot += PieceOf(exchange, m, group.front()).numel;
  for (std::size_t r = 0; r < group.size(); ++r) {
    std::int64_t at = static_cast<std::int64_t>(r) * slot;
    for (std::size_t m = 0; m < exchange.matrices.size(); ++m) {
      Stretch piece = PieceOf(exchange, m, group[r]);
      piece.in_buffer = at;
      at += piece.numel;
      if (!own_rank || group[r] == rank_) stretches.push_back(piece);
    }
  }
  return stretches;
}

// Owner by owner this rank's rows; -1: of matrices without an owner.
std::vector<CheckedModel::Stretch> CheckedModel::PiecesIn(const Exchange& exchange) const {
  std::vector<Stretch> stretches;
  std::int64_t at = 0;
  for (std::int64_t owner = -1; owner < plan_.communicators[exchange.communicator].size; ++owner) {
    for (std::size_t m = 0; m < exchange.matrices.size(); ++m) {
      if (exchange.matrices[m].owner != owner) continue;
      Stretch& piece = stretches.emplace_back(PieceOf(exchange, m, rank_));
      piece.in_buffer = at;
      at += piece.numel;
    }
  }
  return stretches;
}

// Shard by shard the rows of this rank's matrices.
std::vector<CheckedModel::Stretch> CheckedModel::WholeIn(const Exchange& exchange) const {
  if (exchange.matrices.front().owner < 0) return GatheredIn(exchange, /*own_rank=*/false);
  std::vector<Stretch> stretches;
  std::int64_t at = 0;
  const std::int64_t own = executor::RankInGroup(plan_.communicators[exchange.communicator], rank_);
  const Unit& unit = plan_.units[exchange.matrices.front().unit];
  for (const std::int64_t rank : executor::GroupOf(plan_.communicators[unit.shard_communicator], rank_)) {
    for (std::size_t m = 0; m < exchange.matrices.size(); ++m) {
      if (exchange.matrices[m].owner != own) continue;
      Stretch& piece = stretches.emplace_back(PieceOf(exchange, m, rank));
      piece.in_buffer = at;
      at += piece.numel;
    }
  }
  return stretches;
}

void CheckedModel::ApplyUpdate(UnitId unit, std::int32_t parameter, Work& work) {
  std::int64_t& version = versions_[unit][parameter];
  const BufferId shard = shard_of_[unit];
  const DType dtype = DTypeOf(plan_.buffers[shard], parameter);
  for (const ShardRun& run : expected_.Shard(unit, rank_)) {
    if (run.parameter != parameter) continue;
    const auto piece = [&](std::int64_t of_version) {
      return ShardPiece(run, unit, shard, expected_.Parameter(unit, parameter, rank_, of_version, dtype));
    };
    work.checks.push_back(piece(version));
    const Piece stepped = piece(version + 1);
    work.writes.push_back({stepped.at, stepped.expected, dtype});
  }
  ++version;
}

Status CheckedModel::Update(const Instruction& instruction) {
  const Exchange& exchange = plan_.exchanges[instruction.exchange];
  const bool copies = instruction.kind == InstructionKind::kUpdateCopyIn;
  const bool applies = instruction.kind == InstructionKind::kUpdateApply;
  const BufferId buffer = applies ? instruction.src : instruction.dst;
  const std::int64_t size = SizeBytes(exchange.dtype);
  Work work;
  std::set<std::pair<UnitId, std::int32_t>> seen;
  const bool from_whole = applies && exchange.matrices.front().owner < 0;
  for (const Stretch& stretch : from_whole          ? GatheredIn(exchange, /*own_rank=*/true)
                                : copies || applies ? PiecesIn(exchange)
                                                    : WholeIn(exchange)) {
    const ExchangedMatrix& matrix = exchange.matrices[stretch.matrix];
    if (instruction.matrix >= 0 && stretch.matrix != static_cast<std::size_t>(instruction.matrix)) continue;
    const std::int64_t version = versions_[matrix.unit][matrix.parameter];
    if (version >= expected_.Versions(matrix.unit, matrix.parameter)) {
      Fail(fmt::format("the optimizer steps {} once too often", NameOf(matrix.unit, matrix.parameter)));
      return {};
    }
    const auto part = [&](std::span<const std::byte> whole) {
      return whole.subspan(static_cast<std::size_t>(stretch.in_whole * size),
                           static_cast<std::size_t>(stretch.numel * size));
    };
    const std::span<const std::byte> reduced =
        part(expected_.Reduced(matrix.unit, matrix.parameter, rank_, version, exchange.dtype));
    const std::span<const std::byte> updated =
        part(expected_.Updated(matrix.unit, matrix.parameter, rank_, version, exchange.dtype));
    const BytePlace at = {buffer, 0, stretch.in_buffer * size};
    if (copies) {
      if (seen.emplace(matrix.unit, matrix.parameter).second)
        AddReduced(matrix.unit, matrix.parameter, false, work.checks);
    } else {
      work.checks.push_back({.at = at,
                             .expected = applies ? updated : reduced,
                             .dtype = exchange.dtype,
                             .unit = matrix.unit,
                             .parameter = matrix.parameter,
                             .first = stretch.in_whole});
    }
    if (!applies) work.writes.push_back({at, copies ? reduced : updated, exchange.dtype});
    if (applies) seen.emplace(matrix.unit, matrix.parameter);
  }
  for (const auto& [unit, parameter] : seen) {
    if (applies) ApplyUpdate(unit, parameter, work);
  }
  return Enqueue(instruction.stream, std::move(work), std::string(Name(instruction.kind)));
}

// The optimizer's own memory is overwritten, so that whoever shares it by mistake notices.
void CheckedModel::AddScratch(UnitId only_unit, bool of_exchanged, Work& work) {
  for (std::size_t b = 0; b < plan_.buffers.size(); ++b) {
    const Buffer& buffer = plan_.buffers[b];
    const auto id = static_cast<BufferId>(b);
    const bool of_other = only_unit >= 0 && buffer.unit >= 0 && buffer.unit != only_unit;
    if (!IsOptimizersOwn(buffer) || of_other) continue;
    if (!memory_.IsAlive(id)) {
      // Memory of no unit is the other parameters' optimizer's.
      const bool others = of_exchanged && buffer.unit < 0;
      const bool needed = !others && optimizer_steps_ < optimizers_own_.size() &&
                          std::ranges::count(optimizers_own_[optimizer_steps_], id) > 0;
      if (needed) Fail(fmt::format("the optimizer steps without {}", buffer.name));
      continue;
    }
    for (std::size_t part = 0; part < buffer.parts_bytes.size(); ++part) {
      const auto bytes = std::min(static_cast<std::size_t>(buffer.parts_bytes[part].value),
                                  memory_.SizeOf(id, static_cast<std::int32_t>(part)));
      work.writes.push_back({{id, static_cast<std::int32_t>(part), 0}, std::span(scratch_).first(bytes)});
    }
  }
}

Status CheckedModel::OptimizerStep(UnitId only_unit, std::int32_t only_parameter, StreamId stream) {
  Work work;
  for (std::size_t u = 0; u < plan_.units.size(); ++u) {
    const auto unit = static_cast<UnitId>(u);
    if (shard_of_[u] < 0 || (only_unit >= 0 && only_unit != unit)) continue;
    for (std::size_t p = 0; p < versions_[u].size(); ++p) {
      const auto parameter = static_cast<std::int32_t>(p);
      // A step of all parameters is not of Muon's.
      const bool meant =
          only_parameter < 0 ? !plan_.units[u].parameters[p].muon : only_parameter == parameter;
      if (meant) StepParameter(unit, parameter, stream < 0, work);
    }
  }
  const bool of_exchanged = only_parameter >= 0 && IsExchanged(only_unit, only_parameter);
  AddScratch(only_unit, of_exchanged, work);
  ++optimizer_steps_;
  return Enqueue(stream, std::move(work), "optimizer step");
}

Status CheckedModel::CheckEnd() {
  Work work;
  const bool all_computed = step_ + 1 == expected_.steps() && computed_ == order_[step_].size();
  if (expected_.steps() > 0 && !order_.back().empty() && !all_computed)
    Fail("a segment is missing at the end");
  if (zero_grads_ > 0) Fail("the user's zero_grad does not happen");
  for (std::size_t b = 0; b < plan_.buffers.size(); ++b) {
    if (plan_.buffers[b].role == BufferRole::kGradUnsharded) continue;  // allocated by the model
    const auto id = static_cast<BufferId>(b);
    const bool may_live = alive_at_end_[b] != 0 || runs_.buffers[b].persistent || IsKept(runs_, id);
    if (memory_.IsAlive(id) && !may_live) {
      Fail(fmt::format("{} is left over at the end", plan_.buffers[b].name));
    }
  }
  for (std::size_t u = 0; u < plan_.units.size(); ++u) {
    const auto unit = static_cast<UnitId>(u);
    for (std::size_t p = 0; p < versions_[u].size(); ++p) {
      const auto parameter = static_cast<std::int32_t>(p);
      // Nobody's step is of a frozen parameter, whether there is a step of all others or none.
      const bool none = versions_[u][p] == 0 && !plan_.units[u].parameters[p].requires_grad;
      if (!none && versions_[u][p] != expected_.Versions(unit, parameter)) {
        Fail(fmt::format("{} went through {} optimizer steps instead of {}", NameOf(unit, parameter),
                         versions_[u][p], expected_.Versions(unit, parameter)));
      }
      if (made_[u][p] != expected_.GradientsMade(unit, parameter)) {
        Fail(fmt::format("{} gradients of {} were made instead of {}", made_[u][p], NameOf(unit, parameter),
                         expected_.GradientsMade(unit, parameter)));
      }
    }
    if (shard_of_[u] < 0) continue;
    for (const ShardRun& run : expected_.Shard(unit, rank_)) {
      const DType dtype = DTypeOf(plan_.buffers[shard_of_[u]], run.parameter);
      work.checks.push_back(
          ShardPiece(run, unit, shard_of_[u],
                     expected_.Parameter(unit, run.parameter, rank_, versions_[u][run.parameter], dtype)));
    }
  }
  for (std::size_t step = 0; step < reads_.size(); ++step) {
    for (const auto& [microbatch, unit] : expected_.Reads(static_cast<std::int64_t>(step))) {
      if (reads_[step].contains({microbatch, unit})) continue;
      Fail(fmt::format("step {}: nothing reads {} in micro-batch {}", step, plan_.units[unit].fqn,
                       microbatch));
    }
  }
  return Enqueue(-1, std::move(work), "at the end");
}

}  // namespace shardplan::test
