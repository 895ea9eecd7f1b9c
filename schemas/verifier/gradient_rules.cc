// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>

#include "shardplan/schemas/policy_knobs.h"
#include "verifier/rules.h"

namespace shardplan::verifier {

bool IsLong(const Plan& plan, CommunicatorId communicator) {
  return communicator >= 0 && plan.communicators[communicator].size > 1;
}

bool SameGroups(const Plan& plan, CommunicatorId a, CommunicatorId b) {
  return a >= 0 && b >= 0 && SameRanks(plan.communicators[a], plan.communicators[b]);
}

bool Near(double a, double b) { return std::abs(a - b) <= 1e-9 * std::max(std::abs(a), std::abs(b)); }

std::vector<std::int32_t> ReadBeforeWriteOfGradient(const Plan& plan, const Gradient& gradient,
                                                    const std::vector<std::int32_t>& parameters) {
  // A flat gradient is one tensor, zeros included.
  if (plan.units[gradient.unit].layout == LayoutKind::kFlat || gradient.used_up) return {};
  std::vector<std::int32_t> not_made;
  for (const std::int32_t p : parameters) {
    if (!gradient.Has(static_cast<std::size_t>(p))) not_made.push_back(p);
  }
  return not_made;
}

std::vector<std::int32_t> ReadBeforeWriteOfSum(const Plan& plan, const Gradient& into, const Gradient& value,
                                               BufferRole role) {
  std::vector<std::int32_t> empty;
  const bool in_pieces =
      role == BufferRole::kReduceScatterInput && plan.units[into.unit].layout == LayoutKind::kPerParameter;
  for (std::size_t p = 0; in_pieces && p < value.count.size(); ++p) {
    if (value.Has(p) && !into.Has(p)) empty.push_back(static_cast<std::int32_t>(p));
  }
  return empty;
}

bool GradNotReducedButMoved(const Gradient& gradient) { return gradient.used_up; }

bool GradNotReducedButLost(const Gradient& gradient) { return gradient.IsThere(); }

ReductionFault GradNotReducedRight(const Plan& plan, const Gradient& gradient, CommunicatorId communicator,
                                   bool over_shards) {
  const Unit& unit = plan.units[gradient.unit];
  if (over_shards ? gradient.sharded : gradient.replicated) return ReductionFault::kTwice;
  const bool in_two = unit.inner_reduce_communicator >= 0;
  const CommunicatorId over_part =
      gradient.inner ? unit.outer_reduce_communicator : unit.inner_reduce_communicator;
  const CommunicatorId expected = !over_shards ? unit.replicate_communicator
                                  : in_two     ? over_part
                                               : unit.shard_communicator;
  return SameGroups(plan, communicator, expected) ? ReductionFault::kHolds : ReductionFault::kOtherRanks;
}

bool GradNotReducedAlike(const Gradient& into, const Gradient& value) {
  return into.unit != value.unit || into.inner != value.inner || into.sharded != value.sharded ||
         into.replicated != value.replicated || into.used_up;
}

MissingReduction GradNotReduced(const Plan& plan, const Gradient& gradient) {
  const Unit& unit = plan.units[gradient.unit];
  if (IsLong(plan, unit.shard_communicator) && !gradient.sharded) return MissingReduction::kShards;
  if (IsLong(plan, unit.replicate_communicator) && !gradient.replicated) return MissingReduction::kReplicas;
  return MissingReduction::kNone;
}

bool GradDivision(const Plan& plan, const Gradient& gradient) {
  return !Near(gradient.divisor, ExpectedDivisor(plan, plan.units[gradient.unit]));
}

double ExpectedDivisor(const Plan& plan, const Unit& unit) {
  double ranks = 1;
  for (const CommunicatorId c : {unit.shard_communicator, unit.replicate_communicator}) {
    if (c >= 0) ranks *= static_cast<double>(plan.communicators[c].size);
  }
  return KnobsOf(plan.strategy.policy).gradient_divisor(plan.strategy, unit, ranks);
}

bool GradDivisionOfSum(const Gradient& into, const Gradient& value) {
  return !Near(into.divisor, value.divisor);
}

}  // namespace shardplan::verifier
