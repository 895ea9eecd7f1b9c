// The search against all choices there are: small models of two to four modules on random clusters.
// SHARDPLAN_SEED=n: that instance alone. SHARDPLAN_INSTANCES=n: so many (tools/nightly_optimizer).
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <optional>

#include "optimize/evaluator.h"
#include "optimize/prices.h"
#include "optimize/search.h"
#include "shardplan/planner/optimize.h"
#include "tests/planner/bound_cases.h"

namespace shardplan {
namespace {

using optimize::Choice;
using testing::Random;

struct Instance {
  Trace trace;
  Strategy strategy;
  Cluster cluster;
};

Instance RandomInstance(std::uint32_t seed) {
  Random random(seed * 40503U + 7);
  testing::TreeModule list{.name = "layers", .class_name = "ModuleList"};
  const int blocks = 2 + random.Below(2);
  const std::int64_t rows = 8 * (1 + random.Below(8)), columns = 8 * (1 + random.Below(8));
  for (int i = 0; i < blocks; ++i) {
    list.children.push_back(
        {.name = std::to_string(i), .class_name = "Block", .parameters = {{rows, columns}}});
  }
  testing::TreeModule root{.name = "", .children = {list}};
  if (random.Chance(50))
    root.children.insert(root.children.begin(), {.name = "embed", .parameters = {{2 * rows, columns}}});
  Instance instance{.trace = testing::TraceOf(root, 1'000 * (1 + random.Below(3000))),
                    .cluster = testing::RandomCluster(random, 4)};
  instance.strategy.mixed_precision =
      MixedPrecision{.param_dtype = DType::kBFloat16, .reduce_dtype = DType::kFloat32};
  return instance;
}

// Every way to cut `modules` into contiguous units, each in a unit or left to the root.
std::vector<std::vector<std::int32_t>> AllUnits(std::int32_t modules) {
  if (modules == 0) return {{}};
  std::vector<std::vector<std::int32_t>> all;
  for (std::int32_t first = 1; first <= modules; ++first) {
    for (const std::vector<std::int32_t>& rest : AllUnits(modules - first)) {
      for (const std::int32_t size : {first, -1}) {
        if (size < 0 && first > 1) continue;
        std::vector<std::int32_t> units = {size};
        units.insert(units.end(), rest.begin(), rest.end());
        all.push_back(std::move(units));
      }
    }
  }
  return all;
}

std::vector<Choice> AllChoices(std::int32_t modules) {
  std::vector<Choice> all;
  for (const std::vector<std::int32_t>& units : AllUnits(modules)) {
    const auto wrapped =
        static_cast<std::int32_t>(std::ranges::count_if(units, [](auto size) { return size > 0; }));
    for (std::int32_t kept = 0; kept <= wrapped; ++kept) {
      for (const std::int64_t part : {0, 2}) {
        for (const bool root_freed : {false, true}) {
          for (const std::int32_t prefetch : {0, 1, 2}) {
            for (const std::int32_t in_flight : {1, 2}) {
              for (const bool own : {false, true}) {
                all.push_back({.units = units,
                               .kept = kept,
                               .part = part,
                               .root_freed = root_freed,
                               .prefetch = prefetch,
                               .in_flight = in_flight,
                               .own_communicator = own});
              }
            }
          }
        }
      }
    }
  }
  return all;
}

struct Verdict {
  Nanoseconds bound, best, planned;
};

// None: no choice is within the budget.
std::optional<Verdict> Judge(std::uint32_t seed) {
  const Instance instance = RandomInstance(seed);
  OptimizeOptions options{.budget = {std::int64_t{1} << 40}, .time_limit_ns = {0}};
  options.fixed = {"policy"};
  const optimize::Job job = [&] {
    optimize::Job made = optimize::MakeJob(instance.trace, instance.strategy, 4);
    made.keeps_checkpoint = true;
    return made;
  }();
  optimize::Evaluator evaluator(instance.trace, job, instance.cluster, options);
  const std::vector<Choice> choices = AllChoices(static_cast<std::int32_t>(job.chain.modules.size()));
  const std::vector<optimize::Evaluation> evaluations = evaluator.Evaluate(choices);
  optimize::Search search(evaluator, job, options);
  const std::optional<optimize::Found> found = search.Run({});
  std::optional<Nanoseconds> best;
  for (std::size_t i = 0; i < choices.size(); ++i) {
    const optimize::Evaluation& e = evaluations[i];
    if (!e.planned || e.pooled_bytes > options.budget || (best && *best <= e.step_ns)) continue;
    if (evaluator.Reserved(choices[i]) <= options.budget) best = e.step_ns;
  }
  if (!best || !found) return std::nullopt;
  EXPECT_LE(found->evaluation.pooled_bytes, options.budget) << "seed " << seed;
  const Result<PlannerOutput> plan =
      MakePlan(instance.trace, optimize::StrategyOf(job, found->choice), instance.cluster);
  EXPECT_TRUE(plan.has_value()) << "seed " << seed;
  if (!plan) return std::nullopt;
  const Result<StepWork> work = StepWork::Make(instance.trace, plan->plan, false);
  EXPECT_TRUE(work.has_value()) << "seed " << seed;
  if (!work) return std::nullopt;
  const CertificateBranch branch = optimize::FindPrices(*work, optimize::ChooseCuts(*work),
                                                        LayoutKind::kPerParameter, options.budget, *best);
  return Verdict{branch.lower_bound_ns, *best, found->evaluation.step_ns};
}

TEST(ExhaustiveInstances, TheSearchFindsTheBestAndTheBoundIsBelow) {
  std::uint32_t first = 1, instances = 4;
  if (const char* seed = std::getenv("SHARDPLAN_SEED"); seed != nullptr)
    first = static_cast<std::uint32_t>(std::atoi(seed)), instances = 1;
  if (const char* count = std::getenv("SHARDPLAN_INSTANCES"); count != nullptr)
    instances = static_cast<std::uint32_t>(std::atoi(count));
  int judged = 0, optimal = 0;
  double gaps = 0;
  for (std::uint32_t seed = first; seed < first + instances; ++seed) {
    const std::optional<Verdict> verdict = Judge(seed);
    if (!verdict) continue;
    ++judged;
    optimal += verdict->planned <= verdict->best;
    EXPECT_LE(verdict->bound, verdict->best) << "seed " << seed;
    EXPECT_LE(verdict->planned, verdict->best) << "seed " << seed;
    gaps += static_cast<double>(verdict->best.value) /
                static_cast<double>(std::max<std::int64_t>(1, verdict->bound.value)) -
            1;
  }
  EXPECT_GT(judged, 0);
  std::printf("%d instances: %d with the best of all choices; the bound on average %.2f %% below\n", judged,
              optimal, 100 * gaps / std::max(1, judged));
}

}  // namespace
}  // namespace shardplan
