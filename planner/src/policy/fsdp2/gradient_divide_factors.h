// SPDX-License-Identifier: Apache-2.0
// How gradients are divided (_get_gradient_divide_factors and _div_if_needed in _fsdp_collectives.py).
#pragma once

#include <optional>

#include "policy/fsdp2/param_group_settings.h"
#include "policy/fsdp2/unit_scope.h"

namespace shardplan::fsdp2 {

struct GradientDivideFactors {
  std::optional<double> pre;          // of the reduce-scatter's input
  std::optional<double> premultiply;  // of what it sums, while it sums
  std::optional<double> copy;         // where one rank copies the input to the output instead
  std::optional<double> post;         // of what is reduced
  ReduceOp reduce_scatter = ReduceOp::kSum;
  ReduceOp all_reduce = ReduceOp::kSum;
};

GradientDivideFactors GetGradientDivideFactors(const UnitScope& scope, const ParamGroupSettings& settings,
                                               DType dtype);

// A division kernel, for a factor other than 1.
void DivIfNeeded(const std::optional<double>& factor, BufferId buffer, StreamId stream,
                 ProgramBuilder& program);

}  // namespace shardplan::fsdp2
