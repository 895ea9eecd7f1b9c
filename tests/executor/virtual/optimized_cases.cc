// SPDX-License-Identifier: Apache-2.0
#include "tests/executor/virtual/optimized_cases.h"

#include <fmt/format.h>

#include "shardplan/planner/optimize.h"
#include "tests/planner/bound_cases.h"

namespace shardplan::test {
namespace {

Strategy Accumulating(std::int32_t microbatches) {
  Strategy strategy;
  if (microbatches > 1) strategy.program = {testing::MicrobatchStep(microbatches)};
  return strategy;
}

constexpr std::int64_t kNarrow = 8;
// A budget is tight only where the allocator's segments do not hide the tensors.
constexpr std::int64_t kWide = 2048;

Trace ModelOf(std::int64_t width) { return testing::LayeredTrace(4, width, width - 2, 8); }

// The best strategy within so much of what the fastest plan reserves.
Result<OptimizeOutput> SearchFor(const OptimizedCase& what, const Trace& trace, const PlanCase& c) {
  OptimizeOptions options{
      .budget = Bytes{std::int64_t{1} << 40}, .may_checkpoint = true, .time_limit_ns = {0}};
  Result<OptimizeOutput> loose = Optimize(trace, c.strategy, c.cluster, options);
  if (!loose || what.percent == 100) return loose;
  options.budget = Bytes{loose->report.peak_reserved_bytes.value * what.percent / 100};
  Result<OptimizeOutput> tight = Optimize(trace, c.strategy, c.cluster, options);
  if (tight && (tight->report.peak_reserved_bytes > *options.budget || tight->strategy == loose->strategy))
    return MakeError(ErrorCode::kInternal, "the budget is exceeded, or not tight");
  return tight;
}

}  // namespace

std::string NameOf(const OptimizedCase& what) {
  return fmt::format("{}_{}microbatches{}_{}percent_seed{}", what.policy, what.microbatches,
                     what.replicas ? "_replicas" : "", what.percent, what.seed);
}

void PrintTo(const OptimizedCase& what, std::ostream* out) { *out << NameOf(what); }

// A tight budget's strategy is searched for with wide tensors, and run with narrow ones.
Result<PlanCase> Optimized(const OptimizedCase& what) {
  testing::Random random(what.seed);
  PlanCase c{.name = "optimized/" + NameOf(what),
             .trace = ModelOf(kNarrow),
             .strategy = Accumulating(what.microbatches),
             .cluster = testing::RandomCluster(random, kOptimizedRanks)};
  c.strategy.policy = what.policy;
  c.strategy.mixed_precision =
      MixedPrecision{.param_dtype = DType::kBFloat16, .reduce_dtype = DType::kFloat32};
  if (what.replicas) c.strategy.mesh = {{"replicate", 2}, {"shard", 2}};
  Result<OptimizeOutput> output = SearchFor(what, what.percent < 100 ? ModelOf(kWide) : c.trace, c);
  if (!output) return std::unexpected(output.error());
  c.strategy = output->strategy;
  return c;
}

std::vector<OptimizedCase> OptimizedCases() {
  std::vector<OptimizedCase> cases;
  for (const OptimizedCase& what : {OptimizedCase{0, "fsdp2"},
                                    {0, "fsdp1"},
                                    {0, "fsdp2", 3},
                                    {0, "fsdp1", 3},
                                    {0, "fsdp2", 1, true},
                                    {0, "fsdp2", 3, true},
                                    {0, "fsdp2", 1, false, 90},
                                    {0, "fsdp2", 3, false, 90},
                                    {0, "fsdp1", 1, true}}) {
    cases.push_back(what);
    cases.back().seed = static_cast<std::uint32_t>(cases.size());
  }
  return cases;
}

}  // namespace shardplan::test
