// SPDX-License-Identifier: Apache-2.0
#include "shardplan/schemas/precision.h"

#include <algorithm>

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

DType ShardedGradDType(const Unit& unit) {
  const auto given = std::ranges::find_if(unit.parameters, [](const UnitParameter& parameter) {
    return parameter.requires_grad && parameter.grad_dtype.has_value();
  });
  return given == unit.parameters.end() ? unit.orig_dtype : *given->grad_dtype;
}

DType AskedReduceDType(const MixedPrecision& mixed, DType sharded, DType computed,
                       const PyTorchRules& rules) {
  return mixed.reduce_dtype.value_or(rules.gradients_keep_their_dtype ? sharded : computed);
}

bool AccumulatesInOtherDType(const Unit& unit) {
  return std::ranges::any_of(unit.parameters, [&](const UnitParameter& parameter) {
    return parameter.requires_grad && ComputeDType(unit, parameter) != unit.reduce_dtype;
  });
}

}  // namespace shardplan
