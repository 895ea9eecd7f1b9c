// SPDX-License-Identifier: Apache-2.0
#include "shardplan/simulator/optimizer_tensors.h"

#include <algorithm>
#include <functional>
#include <numeric>

#include "memory/python_locals.h"
#include "shardplan/schemas/layout.h"

namespace shardplan {
namespace {

using internal::PythonLocals;
using Shards = std::vector<OptimizerShard>;

constexpr Bytes kScalar{4};  // of float32: a step count and what is computed from it

std::int64_t Numel(const OptimizerShard& shard) {
  return std::accumulate(shard.shape.begin(), shard.shape.end(), std::int64_t{1}, std::multiplies<>());
}

bool IsMatrix(const OptimizerShard& shard) { return shard.shape.size() > 1; }

// Bytes of a shard's tensor with the dimension `from_last` (1: the last) reduced to one element.
Bytes Reduced(const OptimizerShard& shard, std::size_t from_last) {
  const std::int64_t size = shard.shape[shard.shape.size() - from_last];
  return {size == 0 ? 0 : SizeBytes(shard).value / size};
}

// ... with both of the last two.
Bytes ReducedTwice(const OptimizerShard& shard) {
  const std::int64_t rows = shard.shape[shard.shape.size() - 2];
  return {rows == 0 ? 0 : Reduced(shard, 1).value / rows};
}

// SGD and Adafactor make all that they keep and compute of the gradient.
Bytes GradBytes(const OptimizerShard& shard) {
  return {Numel(shard) * shardplan::SizeBytes(shard.grad_dtype.value_or(shard.dtype))};
}

OptimizerShard InGradDType(OptimizerShard shard) {
  shard.dtype = shard.grad_dtype.value_or(shard.dtype);
  return shard;
}

Shards InGradDType(const Shards& shards) {
  Shards converted;
  for (const OptimizerShard& shard : shards) converted.push_back(InGradDType(shard));
  return converted;
}

Bytes Element(const OptimizerShard& shard) { return {shardplan::SizeBytes(shard.dtype)}; }

template <typename SizeOf>
std::vector<Bytes> Sizes(const Shards& shards, SizeOf size_of) {
  std::vector<Bytes> sizes;
  sizes.reserve(shards.size());
  for (const OptimizerShard& shard : shards) sizes.push_back(size_of(shard));
  return sizes;
}

std::vector<Bytes> Sizes(const Shards& shards) {
  return Sizes(shards, [](const OptimizerShard& s) { return SizeBytes(s); });
}

// Shards with equal keys, by first appearance.
template <typename KeyOf>
std::vector<Shards> GroupsBy(const Shards& shards, KeyOf key_of) {
  std::vector<Shards> groups;
  for (const OptimizerShard& shard : shards) {
    const auto group =
        std::ranges::find_if(groups, [&](const Shards& g) { return key_of(g[0]) == key_of(shard); });
    if (group != groups.end()) {
      group->push_back(shard);
    } else {
      groups.push_back({shard});
    }
  }
  return groups;
}

// Lists of tensors of equal dtype, one after the other for the foreach implementations: the dtype that is
// found last is first (the order in which a hash table of few entries gives them back).
std::vector<Shards> ByDType(const Shards& shards) {
  std::vector<Shards> groups = GroupsBy(shards, [](const OptimizerShard& s) { return s.dtype; });
  std::ranges::reverse(groups);
  return groups;
}

void MakeAndDrop(PythonLocals& names, std::string_view name, std::vector<Bytes> tensors) {
  names.Make(name, std::move(tensors));
  names.Drop(name);
}

// What the gradient is called: a copy when it is negated, and again when the parameter's decay is added to
// it; foreach adds that to the copy in place, and drops the list before.
void TakeGradient(const Optimizer& optimizer, const std::vector<Bytes>& sizes, bool adds_decay,
                  PythonLocals& names) {
  const bool foreach = ImplementationOf(optimizer) == OptimizerImplementation::kForeach;
  if (foreach || !optimizer.maximize) names.Drop("grad");
  if (optimizer.maximize) names.Make("grad", sizes);
  if (adds_decay && !(foreach && optimizer.maximize)) names.Make("grad", sizes);
}

bool AddsDecay(const Optimizer& optimizer) {
  return optimizer.weight_decay &&
         (optimizer.kind == OptimizerKind::kSgd || optimizer.kind == OptimizerKind::kAdam);
}

// ---- torch/optim/adam.py ----
void AdamLoop(const Optimizer& optimizer, const Shards& shards, PythonLocals& names) {
  for (const OptimizerShard& shard : shards) {
    const Bytes bytes = SizeBytes(shard);
    TakeGradient(optimizer, {bytes}, AddsDecay(optimizer), names);
    if (optimizer.capturable) {  // what the host computes otherwise
      for (const std::string_view name : {"bias_correction1", "bias_correction2"}) {
        names.Make("power", {kScalar});
        names.Make(name, {kScalar});
        names.Drop("power");
      }
      names.Make("reciprocal", {kScalar});
      names.Make("step_size", {kScalar});
      names.Drop("reciprocal");
      names.Make("step_size_neg", {kScalar});
      names.Make("bias_correction2_sqrt", {kScalar});
      if (optimizer.amsgrad) MakeAndDrop(names, "maximum", {bytes});
    }
    names.Make("root", {bytes});
    if (optimizer.capturable) names.Make("scale", {kScalar});
    names.Make("quotient", {bytes});
    names.Drop("root");
    names.Drop("scale");
    names.Rename("quotient", "denom");
  }
}

void AdamForeach(const Optimizer& optimizer, const Shards& shards, PythonLocals& names) {
  for (const Shards& group : ByDType(shards)) {
    TakeGradient(optimizer, Sizes(group), AddsDecay(optimizer), names);
    names.Drop("grad");
    if (optimizer.capturable) {
      const std::vector<Bytes> scalars(group.size(), kScalar);
      names.Make("bias_correction1", scalars);
      names.Make("bias_correction2", scalars);
      names.Alias("step_size", "bias_correction1");
      names.Alias("bias_correction2_sqrt", "bias_correction2");
    }
    names.Make("exp_avg_sq_sqrt", Sizes(group));
  }
}

// ---- torch/optim/sgd.py ----
void Sgd(const Optimizer& optimizer, const std::vector<Bytes>& sizes, PythonLocals& names) {
  TakeGradient(optimizer, sizes, AddsDecay(optimizer), names);
  if (!optimizer.momentum) return;
  if (!optimizer.nesterov) {
    names.Drop("grad");  // the momentum buffer is called so
  } else if (ImplementationOf(optimizer) == OptimizerImplementation::kForLoop) {
    names.Make("grad", sizes);
  }
}

// ---- torch/optim/_adafactor.py ----
void AdafactorLoop(const Optimizer& optimizer, const Shards& shards, PythonLocals& names) {
  for (const OptimizerShard& shard : shards) {
    const Bytes bytes = SizeBytes(shard);
    TakeGradient(optimizer, {bytes}, false, names);
    MakeAndDrop(names, "norm", {Element(shard)});
    if (IsMatrix(shard)) {
      names.Make("row_mean", {Reduced(shard, 1)});
      names.Make("col_mean", {Reduced(shard, 2)});
      names.Make("var_estimate", {bytes});
      MakeAndDrop(names, "row_var_mean", {ReducedTwice(shard)});
    } else {
      names.Make("grad_squared", {bytes});
      names.Make("var_estimate", {bytes});
    }
    names.Alias("update", "var_estimate");
    MakeAndDrop(names, "norm", {Element(shard)});
  }
}

void AdafactorList(const Optimizer& optimizer, const Shards& group, PythonLocals& names) {
  TakeGradient(optimizer, Sizes(group), false, names);
  MakeAndDrop(names, "norm", {Element(group[0])});
  if (IsMatrix(group[0])) {
    const auto reduced = [&](std::size_t from_last) {
      return Sizes(group, [&](const OptimizerShard& s) { return Reduced(s, from_last); });
    };
    MakeAndDrop(names, "row_means", reduced(1));
    MakeAndDrop(names, "col_means", reduced(2));
    names.Make("var_estimates", Sizes(group));
    MakeAndDrop(names, "row_var_means", Sizes(group, ReducedTwice));
  } else {
    MakeAndDrop(names, "grads_squared", Sizes(group));
    names.Make("var_estimates", Sizes(group));
  }
  names.Alias("updates", "var_estimates");
  MakeAndDrop(names, "norm", {Element(group[0])});
}

// Matrices and vectors of a dtype are lists of their own.
void AdafactorForeach(const Optimizer& optimizer, const Shards& shards, PythonLocals& names) {
  for (const Shards& of_dtype : ByDType(shards)) {
    for (const Shards& group : GroupsBy(of_dtype, IsMatrix)) AdafactorList(optimizer, group, names);
  }
}

std::vector<OptimizerShard> PiecesOfFlat(const Unit& unit, std::int64_t ranks) {
  std::vector<OptimizerShard> pieces;
  const std::int64_t end = unit.flat_numel / ranks;
  for (std::size_t p = 0; p < unit.parameters.size(); ++p) {
    const UnitParameter& parameter = unit.parameters[p];
    if (!parameter.requires_grad) continue;
    OptimizerShard piece{parameter.shape, unit.orig_dtype, static_cast<std::int32_t>(p)};
    if (ranks > 1) {
      piece.shape = {std::min(Numel(piece), end - parameter.flat_offset)};
      if (piece.shape[0] <= 0) continue;
    }
    pieces.push_back(std::move(piece));
  }
  return pieces;
}

}  // namespace

Bytes SizeBytes(const OptimizerShard& shard) { return {Numel(shard) * SizeBytes(shard.dtype)}; }

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
                      parameter.grad_dtype});
  }
  return shards;
}

OptimizerImplementation ImplementationOf(const Optimizer& optimizer) {
  const bool loops = optimizer.kind == OptimizerKind::kAdafactor;
  return optimizer.implementation.value_or(loops ? OptimizerImplementation::kForLoop
                                                 : OptimizerImplementation::kForeach);
}

std::vector<Bytes> OptimizerStates(const Optimizer& optimizer, const OptimizerShard& shard) {
  const Bytes bytes = SizeBytes(shard);
  std::vector<Bytes> states;
  switch (optimizer.kind) {
    case OptimizerKind::kNone:
      break;
    case OptimizerKind::kSgd:
      if (optimizer.momentum) states.push_back(GradBytes(shard));
      break;
    case OptimizerKind::kAdam:
    case OptimizerKind::kAdamW:
      if (optimizer.capturable || ImplementationOf(optimizer) == OptimizerImplementation::kFused) {
        states.push_back(kScalar);
      }
      states.insert(states.end(), optimizer.amsgrad ? 3 : 2, bytes);
      break;
    case OptimizerKind::kAdafactor:
      if (IsMatrix(shard)) {
        states = {Reduced(InGradDType(shard), 1), Reduced(InGradDType(shard), 2)};
      } else {
        states = {GradBytes(shard)};
      }
      break;
  }
  return states;
}

namespace {

PythonLocals LocalsOf(const Optimizer& optimizer, const Shards& shards) {
  PythonLocals names;
  const OptimizerImplementation implementation = ImplementationOf(optimizer);
  if (implementation == OptimizerImplementation::kFused) return names;
  const bool loops = implementation == OptimizerImplementation::kForLoop;
  switch (optimizer.kind) {
    case OptimizerKind::kNone:
      break;
    case OptimizerKind::kSgd:
      if (loops) {
        for (const OptimizerShard& shard : shards) Sgd(optimizer, {GradBytes(shard)}, names);
      } else {
        for (const Shards& group : ByDType(shards)) Sgd(optimizer, Sizes(group, GradBytes), names);
      }
      break;
    case OptimizerKind::kAdam:
    case OptimizerKind::kAdamW:
      loops ? AdamLoop(optimizer, shards, names) : AdamForeach(optimizer, shards, names);
      break;
    case OptimizerKind::kAdafactor:
      loops ? AdafactorLoop(optimizer, InGradDType(shards), names)
            : AdafactorForeach(optimizer, InGradDType(shards), names);
      break;
  }
  return names;
}

}  // namespace

std::vector<Bytes> OptimizerTemporaries(const Optimizer& optimizer,
                                        const std::vector<OptimizerShard>& shards) {
  return LocalsOf(optimizer, shards).Most();
}

std::vector<OptimizerTensorStep> OptimizerTensorSteps(const Optimizer& optimizer,
                                                      const std::vector<OptimizerShard>& shards) {
  return LocalsOf(optimizer, shards).Steps();
}

}  // namespace shardplan
