#include "tests/virtual/checked_model.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>

#include "executor/src/host_kernels.h"

namespace shardplan::test {

using executor::LoadElement;
using executor::StoreElement;

CheckedModel::CheckedModel(ExpectedValues& expected, executor::VirtualMachine& machine, std::int64_t rank,
                           Findings& findings)
    : expected_(expected),
      plan_(expected.plan()),
      machine_(machine),
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
  for (std::size_t b = 0; b < plan_.buffers.size(); ++b) {
    const Buffer& buffer = plan_.buffers[b];
    if (buffer.role == BufferRole::kParamSharded) shard_of_[buffer.unit] = static_cast<BufferId>(b);
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

std::byte* CheckedModel::Part(BufferId buffer, std::int32_t part) {
  return machine_.Memory(rank_, buffer, part).data();
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
  piece.at = Part(id, part) + run.in_shard * size;
  piece.expected = whole.subspan(static_cast<std::size_t>(run.in_whole * size),
                                 static_cast<std::size_t>(run.numel * size));
  return piece;
}

void CheckedModel::SetInitialShards() {
  for (std::size_t u = 0; u < plan_.units.size(); ++u) {
    if (shard_of_[u] < 0) continue;
    const auto unit = static_cast<UnitId>(u);
    for (const ShardRun& run : expected_.Shard(unit, rank_)) {
      const DType dtype = DTypeOf(plan_.buffers[shard_of_[u]], run.parameter);
      const Piece piece =
          ShardPiece(run, unit, shard_of_[u], expected_.Parameter(unit, run.parameter, rank_, 0, dtype));
      std::memcpy(piece.at, piece.expected.data(), piece.expected.size());
    }
  }
}

// Equal, or a parameter as it was some optimizer steps ago, or wrong.
void CheckedModel::Check(const Piece& piece, const std::string& where) {
  if (std::memcmp(piece.at, piece.expected.data(), piece.expected.size()) == 0) return;
  for (std::int64_t version = piece.version - 1; version >= 0; --version) {
    const std::span<const std::byte> old =
        expected_.Parameter(piece.unit, piece.parameter, rank_, version, piece.dtype);
    if (std::memcmp(piece.at, old.data(), old.size()) != 0) continue;
    findings_.stale.insert(plan_.units[piece.unit].fqn);
    return;
  }
  const auto numel = static_cast<std::int64_t>(piece.expected.size()) / SizeBytes(piece.dtype);
  for (std::int64_t e = 0; e < numel; ++e) {
    const double found = LoadElement(piece.at, piece.dtype, e);
    const double wanted = LoadElement(piece.expected.data(), piece.dtype, e);
    if (found == wanted) continue;
    return Fail(fmt::format("{}: element {} of {} is {} instead of {}", where, piece.first + e,
                            NameOf(piece.unit, piece.parameter), found, wanted));
  }
}

void CheckedModel::Make(const Gradient& gradient) {
  const Piece& piece = gradient.piece;
  if (!gradient.adds) {
    std::memcpy(piece.at, piece.expected.data(), piece.expected.size());
    return;
  }
  const auto numel = static_cast<std::int64_t>(piece.expected.size()) / SizeBytes(piece.dtype);
  for (std::int64_t e = 0; e < numel; ++e) {
    StoreElement(piece.at, piece.dtype, e,
                 LoadElement(piece.at, piece.dtype, e) + LoadElement(piece.expected.data(), piece.dtype, e));
  }
}

Status CheckedModel::BindUnsharded(UnitId unit, BufferId buffer) {
  bound_[unit] = buffer;
  return {};
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
    if (!flat && buffer.parts_bytes[p].value < std::ssize(whole)) continue;
    pieces.push_back({.at = Part(id, flat ? 0 : index) + offset,
                      .expected = whole,
                      .dtype = dtype,
                      .unit = unit,
                      .parameter = index,
                      .version = version});
  }
}

Status CheckedModel::Compute(const executor::ComputeCall& call) {
  const Segment& segment = plan_.segments[call.segment];
  std::vector<BufferId> uses;
  std::vector<Piece> reads;
  for (const UnitId unit : segment.reads) {
    if (bound_[unit] < 0) {
      return MakeError(ErrorCode::kInternal,
                       fmt::format("{} reads {}, which is not bound", segment.name, plan_.units[unit].fqn));
    }
    reads_[call.step].insert({call.microbatch, unit});
    uses.push_back(bound_[unit]);
    AddReads(unit, bound_[unit], reads);
  }
  std::vector<Gradient> gradients;
  for (const executor::GradTarget& target : call.grads) {
    const Buffer& buffer = plan_.buffers[target.buffer];
    const Unit& unit = plan_.units[target.unit];
    // One part of several parameters is the flat gradient.
    const bool joined =
        unit.layout == LayoutKind::kFlat && buffer.parts_bytes.size() < buffer.parameters.size();
    const std::int64_t offset = joined ? unit.parameters[target.parameter].flat_offset : 0;
    uses.push_back(target.buffer);
    Gradient gradient = {.adds = target.adds};
    gradient.piece = {.at = Part(target.buffer, target.part) + offset * SizeBytes(buffer.dtype),
                      .expected = expected_.Made(target.unit, target.parameter, rank_,
                                                 made_[target.unit][target.parameter]++, buffer.dtype),
                      .dtype = buffer.dtype,
                      .unit = target.unit,
                      .parameter = target.parameter};
    gradients.push_back(gradient);
  }
  machine_.Enqueue(rank_, call.stream, uses,
                   [this, &segment, reads = std::move(reads), gradients = std::move(gradients)] {
                     for (const Piece& piece : reads) Check(piece, segment.name);
                     for (const Gradient& gradient : gradients) Make(gradient);
                   });
  return {};
}

// The reduced gradient that the parameter's next step needs, where it lies.
void CheckedModel::AddReduced(UnitId unit, std::int32_t parameter, std::vector<BufferId>& uses,
                              std::vector<Piece>& checks) {
  BufferId found = -1;
  for (const BufferId id : gradients_[unit]) {
    const std::vector<std::int32_t>& held = plan_.buffers[id].parameters;
    if (!held.empty() && std::ranges::find(held, parameter) == held.end()) continue;
    if (machine_.Memory(rank_, id, 0).data() == nullptr) continue;
    if (found >= 0) return Fail(fmt::format("{} has two reduced gradients", NameOf(unit, parameter)));
    found = id;
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
  uses.push_back(found);
  for (const ShardRun& run : expected_.Shard(unit, rank_)) {
    if (run.parameter == parameter) {
      checks.push_back(ShardPiece(run, unit, found, reduced.empty() ? std::span(kZeros) : reduced));
    }
  }
}

void CheckedModel::StepParameter(UnitId unit, std::int32_t parameter, std::vector<BufferId>& uses,
                                 std::vector<Piece>& checks, std::vector<Piece>& writes) {
  std::int64_t& version = versions_[unit][parameter];
  if (version >= expected_.Versions(unit, parameter)) {
    return Fail(fmt::format("the optimizer steps {} once too often", NameOf(unit, parameter)));
  }
  AddReduced(unit, parameter, uses, checks);
  const DType dtype = DTypeOf(plan_.buffers[shard_of_[unit]], parameter);
  for (const ShardRun& run : expected_.Shard(unit, rank_)) {
    if (run.parameter != parameter) continue;
    checks.push_back(
        ShardPiece(run, unit, shard_of_[unit], expected_.Parameter(unit, parameter, rank_, version, dtype)));
    writes.push_back(ShardPiece(run, unit, shard_of_[unit],
                                expected_.Parameter(unit, parameter, rank_, version + 1, dtype)));
  }
  ++version;
}

Status CheckedModel::OptimizerStep(UnitId only_unit, std::int32_t only_parameter, StreamId stream) {
  std::vector<BufferId> uses;
  std::vector<Piece> checks, writes;
  for (std::size_t u = 0; u < plan_.units.size(); ++u) {
    const auto unit = static_cast<UnitId>(u);
    if (shard_of_[u] < 0 || (only_unit >= 0 && only_unit != unit)) continue;
    uses.push_back(shard_of_[u]);
    for (std::size_t p = 0; p < versions_[u].size(); ++p) {
      const auto parameter = static_cast<std::int32_t>(p);
      if (only_parameter < 0 || only_parameter == parameter) {
        StepParameter(unit, parameter, uses, checks, writes);
      }
    }
  }
  // The optimizer's own memory is overwritten, so that whoever shares it by mistake notices.
  std::vector<std::span<std::byte>> scratch;
  for (std::size_t b = 0; b < plan_.buffers.size(); ++b) {
    const Buffer& buffer = plan_.buffers[b];
    const bool own = buffer.role == BufferRole::kOptimizerState || buffer.role == BufferRole::kOptimizerTemp;
    if (!own || (only_unit >= 0 && buffer.unit >= 0 && buffer.unit != only_unit)) continue;
    for (std::size_t part = 0; part < buffer.parts_bytes.size(); ++part) {
      scratch.push_back(machine_.Memory(rank_, static_cast<BufferId>(b), static_cast<std::int32_t>(part)));
    }
    if (!scratch.empty() && !scratch.back().empty()) uses.push_back(static_cast<BufferId>(b));
  }
  machine_.Enqueue(
      rank_, stream, uses,
      [this, checks = std::move(checks), writes = std::move(writes), scratch = std::move(scratch)] {
        for (const Piece& piece : checks) Check(piece, "optimizer step");
        for (const Piece& piece : writes) {
          std::memcpy(piece.at, piece.expected.data(), piece.expected.size());
        }
        for (const std::span<std::byte> bytes : scratch) std::ranges::fill(bytes, std::byte{0x5A});
      });
  return {};
}

void CheckedModel::CheckEnd() {
  for (std::size_t u = 0; u < plan_.units.size(); ++u) {
    const auto unit = static_cast<UnitId>(u);
    for (std::size_t p = 0; p < versions_[u].size(); ++p) {
      const auto parameter = static_cast<std::int32_t>(p);
      if (versions_[u][p] != expected_.Versions(unit, parameter)) {
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
      Check(ShardPiece(run, unit, shard_of_[u],
                       expected_.Parameter(unit, run.parameter, rank_, versions_[u][run.parameter], dtype)),
            "at the end");
    }
  }
  for (std::size_t step = 0; step < reads_.size(); ++step) {
    for (const auto& [microbatch, unit] : expected_.Reads(static_cast<std::int64_t>(step))) {
      if (reads_[step].contains({microbatch, unit})) continue;
      Fail(fmt::format("step {}: nothing reads {} in micro-batch {}", step, plan_.units[unit].fqn,
                       microbatch));
    }
  }
}

}  // namespace shardplan::test
