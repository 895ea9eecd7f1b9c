// SPDX-License-Identifier: Apache-2.0
// The parts of the optimising planner that guess what is worth planning: cuts of the chain, and what has to
// be recomputed to be within a budget.
#include <gtest/gtest.h>

#include <algorithm>
#include <optional>

#include "optimize/evaluator.h"
#include "optimize/moves.h"
#include "optimize/recomputation.h"
#include "optimize/search.h"
#include "optimize/unit_model.h"
#include "shardplan/planner/planner.h"
#include "tests/planner/bound_cases.h"
#include "tests/planner/parts_cases.h"

namespace shardplan {
namespace {

using optimize::Choice;
using optimize::Evaluation;
using testing::Random;

using testing::PartsCase;
using testing::RandomPartsCase;
using testing::SeedsUpTo;

// The best cut that the model of units proposes is hardly slower than any cut of many at random.
TEST(UnitModel, ProposesCutsThatAreAsGoodAsAny) {
  const auto [first, last] = SeedsUpTo(12);
  for (std::uint32_t seed = first; seed <= last; ++seed) {
    SCOPED_TRACE(::testing::Message() << "seed " << seed);
    const PartsCase c = RandomPartsCase(seed, 8);
    OptimizeOptions options{.budget = Bytes{std::int64_t{1} << 40}, .time_limit_ns = {0}};
    optimize::Job job = optimize::MakeJob(c.trace, {}, 4);
    optimize::Evaluator evaluator(c.trace, job, c.cluster, options);
    Random random(seed);
    Choice from{.units = optimize::UnitsOfBlocks(job.chain, 1, optimize::Ends::kOwn), .in_flight = 4};
    from.kept = random.Chance(50) ? 100 : random.Below(4);
    from.prefetch = 1 + random.Below(3);
    const std::vector<Choice> proposed = evaluator.PromisingUnits(from);
    ASSERT_FALSE(proposed.empty());
    std::optional<Nanoseconds> best;
    for (const Evaluation& e : evaluator.Evaluate(proposed)) {
      ASSERT_TRUE(e.planned);
      best = best ? std::min(*best, e.step_ns) : e.step_ns;
    }
    const auto modules = static_cast<std::int32_t>(job.chain.modules.size());
    for (int i = 0; i < 40; ++i) {
      Choice other = from;
      other.units.clear();
      for (std::int32_t left = modules; left > 0; left -= other.units.back())
        other.units.push_back(std::min(left, 1 + random.Below(1 + random.Below(5))));
      // The cut keeps as many modules, or fewer.
      std::int32_t kept_modules = 0, at = modules;
      for (std::int32_t k = 0; k < std::min<std::int32_t>(from.kept, 10); ++k) ++kept_modules;
      other.kept = from.kept >= 100 ? 100 : 0;
      for (auto unit = other.units.rbegin(); other.kept < 100 && unit != other.units.rend(); ++unit) {
        at -= *unit;
        if (modules - at > kept_modules) break;
        ++other.kept;
      }
      const Evaluation e = evaluator.Evaluate({other}).front();
      ASSERT_TRUE(e.planned);
      EXPECT_LE(best->value, e.step_ns.value * 103 / 100) << "cut " << i;
    }
  }
}

// The fewest whole blocks within the budget are no faster, and the proposal differs in what is recomputed
// alone.
TEST(Recomputation, IsNoDearerThanWholeBlocks) {
  const auto [first, last] = SeedsUpTo(10);
  int fitted = 0;
  for (std::uint32_t seed = first; seed <= last; ++seed) {
    SCOPED_TRACE(::testing::Message() << "seed " << seed);
    const PartsCase c = RandomPartsCase(seed, 6);
    OptimizeOptions options{
        .budget = Bytes{std::int64_t{1} << 40}, .may_checkpoint = true, .time_limit_ns = {0}};
    optimize::Job job = optimize::MakeJob(c.trace, {}, 4);
    optimize::Evaluator loose(c.trace, job, c.cluster, options);
    const Choice none{.units = optimize::UnitsOfBlocks(job.chain, 1, optimize::Ends::kOwn)};
    Choice all = none;
    all.recomputed = job.chain.blocks;
    const Bytes most = loose.Reserved(none), least = loose.Reserved(all);
    for (const int part : {100, 80, 50, 20, 0}) {
      options.budget = least + Bytes{(most - least).value * part / 100};
      optimize::Evaluator evaluator(c.trace, job, c.cluster, options);
      optimize::RecomputationPrices prices;
      std::optional<Nanoseconds> whole, best;
      for (std::int32_t count = 0; count <= job.chain.blocks; ++count) {
        Choice next = none;
        next.recomputed = count;
        const Evaluation e = evaluator.Evaluate({next}).front();
        if (evaluator.Fits(next)) whole = whole ? std::min(*whole, e.step_ns) : e.step_ns;
      }
      for (Choice tried : optimize::FitRecomputation(evaluator, job, options, prices, none, kLongestStep)) {
        const Evaluation e = evaluator.Evaluate({tried}).front();
        if (e.planned && evaluator.Fits(tried)) best = best ? std::min(*best, e.step_ns) : e.step_ns;
        tried.recomputed = 0;
        tried.children.clear();
        tried.rest.clear();
        tried.saved.clear();
        EXPECT_EQ(tried, none);
      }
      if (!whole) continue;
      ASSERT_TRUE(best.has_value()) << "part " << part;
      EXPECT_LE(best->value, whole->value * 101 / 100) << "part " << part;
      ++fitted;
    }
  }
  EXPECT_GT(fitted, first == last ? 0 : 20);
}

// Units that wait for the last micro-batch are reduced once, the others in each.
TEST(Accumulation, OfSomeUnitsIsReducedOnce) {
  const PartsCase c = RandomPartsCase(2, 4);
  constexpr std::int32_t kMicrobatches = 3;
  const optimize::Job job =
      optimize::MakeJob(c.trace, {.program = {testing::MicrobatchStep(kMicrobatches)}}, 4);
  for (const auto accumulation : {optimize::Accumulation::kEach, optimize::Accumulation::kEachKept}) {
    for (std::int32_t accumulated = 0; accumulated <= 6; ++accumulated) {
      Choice choice{.units = optimize::UnitsOfBlocks(job.chain, 1, optimize::Ends::kOwn), .kept = 2};
      choice.accumulation = accumulation;
      choice.accumulated = accumulated;
      const Result<PlannerOutput> planned = MakePlan(c.trace, optimize::StrategyOf(job, choice), c.cluster);
      ASSERT_TRUE(planned.has_value()) << ToString(planned.error());
      EXPECT_TRUE(planned->faults.empty());
      int reduced = 0;
      for (const Trigger& trigger : planned->plan.steps.back().triggers) {
        for (const Instruction& i : trigger.instructions)
          reduced += i.kind == InstructionKind::kReduceScatter;
      }
      EXPECT_EQ(reduced, (6 - accumulated) * kMicrobatches + accumulated);
    }
  }
}

// Collectives of the step that repeats: in groups of so many ranks.
int CountOf(const Plan& plan, InstructionKind kind, std::int64_t ranks) {
  int count = 0;
  for (const Trigger& trigger : plan.steps.back().triggers) {
    for (const Instruction& i : trigger.instructions)
      count += i.kind == kind && plan.communicators[static_cast<std::size_t>(i.communicator)].size == ranks;
  }
  return count;
}

// Units that leave the second of two levels to the last micro-batch, beside others that do not.
TEST(Accumulation, OfSomeUnitsLeavesTheRestToTheLastMicrobatch) {
  const PartsCase c = RandomPartsCase(2, 4);
  constexpr std::int32_t kMicrobatches = 3, kUnits = 6;
  const optimize::Job job =
      optimize::MakeJob(c.trace, {.program = {testing::MicrobatchStep(kMicrobatches)}}, 4);
  for (std::int32_t outer_last = 0; outer_last <= kUnits; ++outer_last) {
    for (const std::int32_t accumulated : {0, 2}) {
      SCOPED_TRACE(::testing::Message() << outer_last << " units rest, " << accumulated << " accumulate");
      Choice choice{.units = optimize::UnitsOfBlocks(job.chain, 1, optimize::Ends::kOwn), .inner = 2};
      choice.accumulation = optimize::Accumulation::kRestLast;
      choice.accumulated = accumulated;
      choice.outer_reduced_last = outer_last;
      const Result<PlannerOutput> planned = MakePlan(c.trace, optimize::StrategyOf(job, choice), c.cluster);
      ASSERT_TRUE(planned.has_value()) << ToString(planned.error());
      EXPECT_TRUE(planned->faults.empty());
      // Both levels are over two ranks. A unit that accumulates does neither before the last micro-batch.
      const int first = (kUnits - accumulated) * kMicrobatches + accumulated;
      const int waiting = std::max(outer_last, accumulated);
      const int second = (kUnits - waiting) * kMicrobatches + waiting;
      EXPECT_EQ(CountOf(planned->plan, InstructionKind::kReduceScatter, 2), first + second);
      EXPECT_EQ(CountOf(planned->plan, InstructionKind::kReduceScatter, 4), 0);
    }
  }
}

// The head computes with the embedding's parameter.
void TieEnds(Trace& trace) {
  const auto of = [&](const std::string& fqn) {
    return std::ranges::find(trace.modules, fqn, &Module::fqn)->parameters.front().parameter;
  };
  const ParameterId embedding = of("embed"), head = of("head");
  for (Module& module : trace.modules) {
    for (NamedParameter& named : module.parameters) {
      if (named.parameter == head) named.parameter = embedding;
    }
  }
  trace.parameters[embedding].shared_with = {trace.parameters[head].fqn};
  ASSERT_EQ(head, std::ssize(trace.parameters) - 1);
  trace.parameters.pop_back();
  const auto tied = [&](ParameterId& parameter) {
    if (parameter == head) parameter = embedding;
  };
  for (std::vector<Pass>* passes : {&trace.forwards, &trace.backwards}) {
    for (Pass& pass : *passes) {
      std::erase_if(pass.events, [&](const TraceEvent& event) {
        const auto* grad = std::get_if<ParameterGradEvent>(&event);
        return grad != nullptr && grad->parameter == head;  // that of the embedding comes later
      });
      for (TraceEvent& event : pass.events) {
        if (auto* op = std::get_if<OperatorEvent>(&event)) std::ranges::for_each(op->parameters, tied);
        if (auto* allocate = std::get_if<AllocateEvent>(&event)) tied(allocate->parameter);
      }
    }
  }
}

// A module before the blocks and one behind them share a parameter: they are the root's.
TEST(Accumulation, OfTiedModulesWaits) {
  PartsCase c = RandomPartsCase(2, 6);
  TieEnds(c.trace);
  c.cluster.ranks_per_node = 2;
  c.cluster.links = {{"inner", {500}, 100'000'000'000}, {"outer", {2'000}, 100'000'000}};
  c.cluster.collectives.clear();
  optimize::Job job = optimize::MakeJob(c.trace, {.program = {testing::MicrobatchStep(3)}}, 4);
  job.node_ranks = 2;
  OptimizeOptions options{.budget = Bytes{std::int64_t{1} << 40}, .time_limit_ns = {0}};
  options.may_checkpoint = true;
  optimize::Evaluator evaluator(c.trace, job, c.cluster, options);
  const auto planned = [&](optimize::Ends ends) {
    const std::vector<Choice> waiting = optimize::Waiting(job, options, ends);
    EXPECT_FALSE(waiting.empty());
    return std::ranges::count(evaluator.Evaluate(waiting), true, &Evaluation::planned);
  };
  EXPECT_EQ(planned(optimize::Ends::kOwn), 0);
  const std::vector<Choice> waiting = optimize::Waiting(job, options, optimize::Ends::kRoot);
  EXPECT_EQ(planned(optimize::Ends::kRoot), std::ssize(waiting));
  // The search has tried them if nothing else fits.
  const Choice& all = waiting.front();
  options.budget = evaluator.Reserved(all);
  optimize::Evaluator tight(c.trace, job, c.cluster, options);
  const std::optional<optimize::Found> found = optimize::Search(tight, job, options).Run({});
  ASSERT_TRUE(found.has_value());
  EXPECT_LE(found->evaluation.step_ns, evaluator.Evaluate({all}).front().step_ns);
}

// Units that are kept whole, in part and not at all, over the micro-batches.
TEST(Accumulation, KeepsSomeUnitsInPart) {
  const PartsCase c = RandomPartsCase(2, 4);
  constexpr std::int32_t kMicrobatches = 3, kUnits = 6, kKept = 2;
  const optimize::Job job =
      optimize::MakeJob(c.trace, {.program = {testing::MicrobatchStep(kMicrobatches)}}, 4);
  for (std::int32_t post_forward = 0; post_forward <= kUnits - kKept; ++post_forward) {
    SCOPED_TRACE(::testing::Message() << post_forward << " units in part");
    Choice choice{
        .units = optimize::UnitsOfBlocks(job.chain, 1, optimize::Ends::kOwn), .kept = kKept, .part = 2};
    choice.accumulation = optimize::Accumulation::kEachKept;
    choice.post_forward_units = post_forward;
    const Result<PlannerOutput> planned = MakePlan(c.trace, optimize::StrategyOf(job, choice), c.cluster);
    ASSERT_TRUE(planned.has_value()) << ToString(planned.error());
    EXPECT_TRUE(planned->faults.empty());
    const int passes = 2 * kMicrobatches, freed = kUnits - kKept - post_forward;
    EXPECT_EQ(CountOf(planned->plan, InstructionKind::kAllGather, 4), kKept + post_forward + freed * passes);
    EXPECT_EQ(CountOf(planned->plan, InstructionKind::kAllGather, 2), post_forward * (passes - 1));
  }
}

// The strategy says what is decided.
TEST(Recomputation, OfPartsIsInTheStrategy) {
  const PartsCase c = RandomPartsCase(1, 3);
  const optimize::Job job = optimize::MakeJob(c.trace, {}, 4);
  EXPECT_EQ(job.chain.products, std::vector<std::string>{"aten.mm"});
  EXPECT_EQ(job.chain.attentions, std::vector<std::string>{"aten._scaled_dot_product_flash_attention"});
  Choice choice{.units = optimize::UnitsOfBlocks(job.chain, 1, optimize::Ends::kOwn)};
  choice.recomputed = 1;
  choice.rest = {"mlp"};
  choice.saved = {{"aten.mm", 2}};
  const std::optional<CheckpointRule> rule = optimize::StrategyOf(job, choice).checkpoint;
  ASSERT_TRUE(rule.has_value());
  EXPECT_EQ(rule->modules, (std::vector<std::string>{"layers.0", "layers.1.mlp", "layers.2.mlp"}));
  EXPECT_EQ(rule->save, (std::vector<SavedOperator>{{"aten.mm", 2}}));
  choice.recomputed = 0;  // the rest is all
  const Choice effective = optimize::Effective(job, choice);
  EXPECT_EQ(effective.recomputed, 3);
  EXPECT_EQ(effective.children, std::vector<std::string>{"mlp"});
  EXPECT_TRUE(effective.rest.empty());
}

}  // namespace
}  // namespace shardplan
