// SPDX-License-Identifier: Apache-2.0

// The temporaries of torch.optim's steps, as its Python makes and drops them.
#include <algorithm>

#include "optimizers/python_locals.h"
#include "optimizers/shard_sizes.h"
#include "shardplan/schemas/optimizers.h"

namespace shardplan {
namespace {

using internal::InGradDType;
using internal::IsMatrix;
using internal::kScalar;
using internal::PythonLocals;
using internal::Reduced;
using Shards = std::vector<OptimizerShard>;

// Bytes of a shard's tensor with its last two dimensions reduced to one element.
Bytes ReducedTwice(const OptimizerShard& shard) {
  const std::int64_t rows = shard.shape[shard.shape.size() - 2];
  return {rows == 0 ? 0 : Reduced(shard, 1).value / rows};
}

Bytes GradBytes(const OptimizerShard& shard) { return SizeBytes(InGradDType(shard)); }

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

// Takes the gradient under its name: a copy when it is negated, and again when the parameter's decay is added
// to it; foreach adds that to the copy in place, and drops the list before.
void TakeGradient(const Optimizer& optimizer, const std::vector<Bytes>& sizes, bool adds_decay,
                  PythonLocals& names) {
  const bool foreach = ImplementationOf(optimizer) == OptimizerImplementation::kForeach;
  if (foreach || !optimizer.maximize) names.Drop("grad");
  if (optimizer.maximize) names.Make("grad", sizes);
  if (adds_decay && !(foreach && optimizer.maximize)) names.Make("grad", sizes);
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

PythonLocals LocalsOf(const Optimizer& optimizer, Shards shards) {
  std::erase_if(shards, &OptimizerShard::muon);
  PythonLocals names;
  const OptimizerImplementation implementation = ImplementationOf(optimizer);
  if (implementation == OptimizerImplementation::kFused) return names;
  const bool loops = implementation == OptimizerImplementation::kForLoop;
  switch (optimizer.kind) {
    case OptimizerKind::kNone:
    case OptimizerKind::kMuon:
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
