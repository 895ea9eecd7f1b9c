// SPDX-License-Identifier: Apache-2.0
#include "shardplan/schemas/optimizers.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "optimizers/shard_sizes.h"
#include "shardplan/schemas/layout.h"
#include "shardplan/schemas/precision.h"

namespace shardplan {
namespace {

void Add(OptimizerPasses& passes, const OptimizerPasses& more) {
  passes.read += more.read;
  passes.written += more.written;
  passes.kernels += more.kernels;
  passes.kernels_by_tensor += more.kernels_by_tensor;
}

bool IsFused(const Optimizer& optimizer) {
  return ImplementationOf(optimizer) == OptimizerImplementation::kFused &&
         DescriptionOf(optimizer.kind).has_fused;
}

bool IsInShardsMemory(const Optimizer& optimizer, StatePlace place) {
  switch (place) {
    case StatePlace::kShard:
      return true;
    case StatePlace::kHost:
      return false;
    case StatePlace::kKernel:
      return optimizer.capturable || IsFused(optimizer);
  }
  return true;
}

// Nothing: this shard has no such state.
std::optional<Bytes> SizeOf(const OptimizerStateDescription& state, const OptimizerShard& stepped) {
  using internal::IsMatrix;
  const OptimizerShard shard =
      state.dtype == StateDType::kGradient ? internal::InGradDType(stepped) : stepped;
  switch (state.shape) {
    case StateShape::kScalar:
      return internal::kScalar;
    case StateShape::kParameter:
      return SizeBytes(shard);
    case StateShape::kRows:
      return IsMatrix(shard) ? std::optional(internal::Reduced(shard, 1)) : std::nullopt;
    case StateShape::kColumns:
      return IsMatrix(shard) ? std::optional(internal::Reduced(shard, 2)) : std::nullopt;
    case StateShape::kOfVector:
      return IsMatrix(shard) ? std::nullopt : std::optional(SizeBytes(shard));
  }
  return std::nullopt;
}

std::vector<OptimizerShard> PiecesOfFlat(const Unit& unit, std::int64_t ranks) {
  std::vector<OptimizerShard> pieces;
  const std::int64_t end = unit.flat_numel / ranks;
  for (std::size_t p = 0; p < unit.parameters.size(); ++p) {
    const UnitParameter& parameter = unit.parameters[p];
    if (!parameter.requires_grad) continue;
    OptimizerShard piece{parameter.shape, unit.orig_dtype, static_cast<std::int32_t>(p)};
    if (ranks > 1) {
      piece.shape = {std::min(internal::Numel(piece), end - parameter.flat_offset)};
      if (piece.shape[0] <= 0) continue;
    }
    pieces.push_back(std::move(piece));
  }
  return pieces;
}

}  // namespace

OptimizerImplementation ImplementationOf(const Optimizer& optimizer) {
  return optimizer.implementation.value_or(DescriptionOf(optimizer.kind).by_default);
}

OptimizerPasses PassesOf(const Optimizer& optimizer) {
  const OptimizerDescription& is = DescriptionOf(optimizer.kind);
  const bool fused = IsFused(optimizer);
  OptimizerPasses passes = fused ? is.fused : is.unfused;
  for (const OptimizerArgument& argument : optimizers::kArguments) {
    if (!(optimizer.*argument.argument) || !Has(argument.works, optimizer.kind)) continue;
    Add(passes, fused ? argument.fused : argument.unfused);
  }
  return passes;
}

bool AddsDecay(const Optimizer& optimizer) {
  const auto* decay =
      std::ranges::find(optimizers::kArguments, &Optimizer::weight_decay, &OptimizerArgument::argument);
  return optimizer.weight_decay && Has(decay->works, optimizer.kind);
}

Optimizer OptimizerOf(const Optimizer& optimizer, bool muon) {
  return muon ? Optimizer{.kind = OptimizerKind::kMuon} : optimizer;
}

bool MuonSteps(const Optimizer& optimizer, const std::string& fqn,
               const std::vector<std::string>& shared_with) {
  return optimizer.muon && std::ranges::any_of(optimizer.muon->matrices, [&](const std::string& pattern) {
           return Matches(pattern, fqn) || std::ranges::any_of(shared_with, [&](const std::string& name) {
                    return Matches(pattern, name);
                  });
         });
}

const TracedOptimizerStep* TracedMuonStep(const Trace& trace, const Muon& muon, std::int64_t shards,
                                          std::int64_t replicas, const std::vector<std::int64_t>& shape,
                                          DType dtype) {
  const auto found = std::ranges::find_if(trace.optimizer_steps, [&](const TracedOptimizerStep& step) {
    return step.ranks == shards && step.replicas == replicas && step.shape == shape && step.dtype == dtype &&
           step.ns_steps == muon.ns_steps && (shards == 1 || step.nesterov == muon.nesterov);
  });
  return found == trace.optimizer_steps.end() ? nullptr : &*found;
}

std::vector<OptimizerStateDescription> StatesOf(const Optimizer& optimizer) {
  std::vector<OptimizerStateDescription> states;
  for (const OptimizerStateDescription& state : optimizers::kStates) {
    const bool made = state.when == nullptr || optimizer.*state.when;
    if (state.kind == optimizer.kind && made) states.push_back(state);
  }
  return states;
}

bool StatesHaveParameterShapes(OptimizerKind kind) {
  return std::ranges::all_of(optimizers::kStates, [&](const OptimizerStateDescription& state) {
    return state.kind != kind || state.shape == StateShape::kParameter || state.shape == StateShape::kScalar;
  });
}

std::string NamesOf(OptimizerSet kinds, std::string_view last) {
  std::vector<std::string_view> names;
  for (const OptimizerDescription& is : kOptimizers) {
    if (Has(kinds, is.kind)) names.push_back(is.name);
  }
  std::ranges::sort(names);
  if (names.size() < 2) return fmt::format("{}", fmt::join(names, ""));
  const std::string_view end = names.back();
  names.pop_back();
  return fmt::format("{} {} {}", fmt::join(names, ", "), last, end);
}

Bytes SizeBytes(const OptimizerShard& shard) { return {internal::Numel(shard) * SizeBytes(shard.dtype)}; }

std::vector<OptimizerShard> OptimizerShardsOf(const Unit& unit, std::int64_t ranks, bool use_orig_params) {
  if (unit.layout == LayoutKind::kFlat) {
    if (use_orig_params) return PiecesOfFlat(unit, ranks);
    if (std::ranges::none_of(unit.parameters, &UnitParameter::requires_grad)) return {};
    return {{{unit.flat_numel / ranks}, unit.orig_dtype}};
  }
  std::vector<OptimizerShard> shards;
  for (std::size_t p = 0; p < unit.parameters.size(); ++p) {
    const UnitParameter& parameter = unit.parameters[p];
    if (!parameter.requires_grad) continue;
    shards.push_back({ShardShape(parameter, ranks, 0), parameter.dtype, static_cast<std::int32_t>(p),
                      parameter.grad_dtype, parameter.muon});
  }
  return shards;
}

std::vector<Bytes> OptimizerStates(const Optimizer& optimizer, const OptimizerShard& shard) {
  const Optimizer of_shard = OptimizerOf(optimizer, shard.muon);
  std::vector<Bytes> states;
  for (const OptimizerStateDescription& state : StatesOf(of_shard)) {
    if (!IsInShardsMemory(of_shard, state.place)) continue;
    if (const std::optional<Bytes> size = SizeOf(state, shard)) states.push_back(*size);
  }
  return states;
}

}  // namespace shardplan
