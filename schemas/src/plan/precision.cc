// SPDX-License-Identifier: Apache-2.0
#include "shardplan/schemas/precision.h"

#include <algorithm>
#include <optional>

#include "shardplan/schemas/layout.h"

namespace shardplan {

bool Matches(std::string_view pattern, std::string_view text) {
  if (pattern.empty()) return text.empty();
  if (pattern.front() == '*') {
    for (std::size_t taken = 0;; ++taken) {
      if (Matches(pattern.substr(1), text.substr(taken))) return true;
      if (taken == text.size() || text[taken] == '.') return false;
    }
  }
  if (text.empty()) return false;
  const bool same = pattern.front() == text.front() || (pattern.front() == '?' && text.front() != '.');
  return same && Matches(pattern.substr(1), text.substr(1));
}

DType AskedParamDType(const MixedPrecision& mixed, const UnitParameter& parameter,
                      const PyTorchRules& rules) {
  if (!mixed.param_dtype) return parameter.dtype;
  if (rules.integers_are_not_cast && !IsFloatingPoint(parameter.dtype)) return parameter.dtype;
  const bool keeps = std::ranges::any_of(mixed.keep_param_dtype, [&](const std::string& pattern) {
    return Matches(pattern, parameter.fqn) ||
           std::ranges::any_of(parameter.shared_with,
                               [&](const std::string& name) { return Matches(pattern, name); });
  });
  return keeps ? parameter.dtype : *mixed.param_dtype;
}

DType PromoteTypes(DType a, DType b) {
  if (a == b) return a;
  if (IsFloatingPoint(a) != IsFloatingPoint(b)) return IsFloatingPoint(a) ? a : b;
  if (SizeBytes(a) != SizeBytes(b)) return SizeBytes(a) > SizeBytes(b) ? a : b;
  return IsFloatingPoint(a) ? DType::kFloat32 : a;  // bfloat16 and float16
}

DType MadeGradDType(const Unit& unit, const UnitParameter& parameter) {
  return parameter.made_grad_dtype.value_or(ComputeDType(unit, parameter));
}

DType AccumulatedGradDType(const Unit& unit, const UnitParameter& parameter) {
  return parameter.accumulated_grad_dtype.value_or(unit.reduce_dtype);
}

DType ReduceDTypeOf(const Unit& unit, const std::vector<std::int32_t>& parameters) {
  const bool several = std::ranges::any_of(unit.parameters, [](const UnitParameter& parameter) {
    return parameter.accumulated_grad_dtype.has_value();
  });
  if (!several || parameters.empty()) return unit.reduce_dtype;
  DType promoted = AccumulatedGradDType(unit, unit.parameters[parameters.front()]);
  for (const std::int32_t p : parameters) {
    promoted = PromoteTypes(promoted, AccumulatedGradDType(unit, unit.parameters[p]));
  }
  return promoted;
}

DType ShardedGradDType(const UnitParameter& parameter) {
  return parameter.grad_dtype.value_or(parameter.dtype);
}

bool MayReduceOutsideDataParallel(const UnitParameter& parameter) {
  return std::ranges::any_of(parameter.placements,
                             [](const ParameterPlacement& placement) { return placement.dim < 0; });
}

bool KeepsWiderGrads(const Unit& unit, const UnitParameter& parameter) {
  const DType computed = ComputeDType(unit, parameter);
  const DType accumulated = AccumulatedGradDType(unit, parameter);
  return IsFloatingPoint(computed) && IsFloatingPoint(accumulated) &&
         SizeBytes(accumulated) > SizeBytes(computed) && !MayReduceOutsideDataParallel(parameter);
}

DType PromotedGradDType(const Unit& unit) {
  std::optional<DType> promoted;
  for (const UnitParameter& parameter : unit.parameters) {
    if (!parameter.requires_grad) continue;
    const DType sharded = ShardedGradDType(parameter);
    promoted = promoted ? PromoteTypes(*promoted, sharded) : sharded;
  }
  return promoted.value_or(unit.orig_dtype);
}

DType AskedReduceDType(const MixedPrecision& mixed, DType sharded, DType computed,
                       const PyTorchRules& rules) {
  return mixed.reduce_dtype.value_or(rules.gradients_keep_their_dtype ? sharded : computed);
}

bool AccumulatesInOtherDType(const Unit& unit) {
  return std::ranges::any_of(unit.parameters, [&](const UnitParameter& parameter) {
    return parameter.requires_grad && MadeGradDType(unit, parameter) != AccumulatedGradDType(unit, parameter);
  });
}

}  // namespace shardplan
