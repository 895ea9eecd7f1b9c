// SPDX-License-Identifier: Apache-2.0
#include "policy/fsdp2/gradient_divide_factors.h"

#include "policy/gradient_division.h"

namespace shardplan::fsdp2 {

GradientDivideFactors GetGradientDivideFactors(const UnitScope& scope, const ParamGroupSettings& settings,
                                               DType dtype) {
  const std::optional<double>& given = settings.gradient_divide_factor;
  const bool overflow_risk = dtype != DType::kFloat32 && dtype != DType::kBFloat16;
  const bool single = scope.shard_ranks() == 1;
  const auto ranks = static_cast<double>(scope.shard_ranks() * scope.choice().replicate_size);
  GradientDivideFactors factors;
  if (single) factors.copy = given;
  if (!overflow_risk && !settings.force_sum_reduction_for_comms) {
    if (!given) {
      factors.reduce_scatter = factors.all_reduce = ranks == 1 ? ReduceOp::kSum : ReduceOp::kAverage;
    } else if (*given == static_cast<double>(scope.shard_ranks())) {
      factors.reduce_scatter = ReduceOp::kAverage;
    } else if (!single) {
      factors.premultiply = given;
    }
    return factors;
  }
  const double factor = given.value_or(ranks);
  if (!overflow_risk) {
    factors.post = factor;
    return factors;
  }
  factors.pre = PredivideFactor(factor);
  factors.post = factor / *factors.pre;
  return factors;
}

void DivIfNeeded(const std::optional<double>& factor, BufferId buffer, StreamId stream,
                 ProgramBuilder& program) {
  if (!factor || *factor == 1) return;
  Instruction& scale = program.Emit(InstructionKind::kGradScale, stream);
  scale.src = buffer;
  scale.divisor = *factor;
}

}  // namespace shardplan::fsdp2
