// SPDX-License-Identifier: Apache-2.0
// Meshes and micro-batches as decisions: the answer is the fastest of the variants' own, and what was passed
// over could not have been it.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <variant>
#include <vector>

#include "shardplan/planner/optimize.h"
#include "shardplan/schemas/io.h"
#include "shardplan/simulator/lower_bound.h"
#include "shardplan/verifier/verifier.h"
#include "tests/planner/parts_cases.h"

namespace shardplan {
namespace {

using testing::OfOneSeed;
using testing::PartsCase;
using testing::RandomPartsCase;
using testing::SeedsUpTo;

// The same model with so many times the samples.
Trace WithSamples(Trace trace, std::int64_t times) {
  trace.tokens_per_batch *= times;
  for (TraceInput& input : trace.inputs) input.shape.front() *= times;
  for (std::vector<Pass>* passes : {&trace.forwards, &trace.backwards}) {
    for (TraceEvent& event : passes->front().events) {
      if (auto* op = std::get_if<OperatorEvent>(&event)) op->flops *= times;
      auto* allocate = std::get_if<AllocateEvent>(&event);
      if (allocate != nullptr && allocate->role == StorageRole::kSaved) allocate->size_bytes.value *= times;
    }
  }
  return trace;
}

OptimizeOptions MadeWithin(Bytes budget) { return {.budget = budget, .may_checkpoint = true, .threads = 2}; }

// One way or the other.
void ExpectFastestOfAll(const std::vector<JobVariant>& variants, const Cluster& cluster,
                        const OptimizeOptions& options, std::vector<int>& outcomes) {
  const Result<OptimizeOutput> output = OptimizeVariants(variants, cluster, options);
  std::vector<Result<OptimizeOutput>> own;
  for (const JobVariant& variant : variants)
    own.push_back(Optimize(*variant.trace, variant.job, cluster, options));
  if (!output) {
    EXPECT_EQ(output.error().code, ErrorCode::kNegative) << ToString(output.error());
    for (const auto& alone : own) EXPECT_FALSE(alone.has_value());
    return;
  }
  const Optimization& report = output->report;
  ASSERT_EQ(report.variants.size(), variants.size());
  EXPECT_EQ(std::ranges::count(report.variants, VariantOutcome::kChosen, &VariantReport::outcome), 1);
  EXPECT_TRUE(Verify(output->plan).empty());
  for (std::size_t v = 0; v < variants.size(); ++v) {
    const VariantReport& variant = report.variants[v];
    SCOPED_TRACE(VariantText(variant));
    ++outcomes[static_cast<std::size_t>(variant.outcome)];
    const bool is_chosen = variant.outcome == VariantOutcome::kChosen;
    EXPECT_EQ(is_chosen, variant.says.empty());
    if (!own[v]) {
      EXPECT_TRUE(variant.outcome == VariantOutcome::kDoesNotFit ||
                  variant.outcome == VariantOutcome::kCannotFit ||
                  variant.outcome == VariantOutcome::kCannotWin)
          << ToString(own[v].error());
      continue;
    }
    EXPECT_LE(report.step_ns, own[v]->report.step_ns);
    EXPECT_LE(report.variants_lower_bound_ns, own[v]->report.step_ns);
    EXPECT_LE(variant.lower_bound_ns, own[v]->report.step_ns);
    EXPECT_NE(variant.outcome, VariantOutcome::kCannotFit);
    if (variant.step_ns.value > 0) {
      EXPECT_EQ(variant.step_ns, own[v]->report.step_ns);
    }
    if (!is_chosen) continue;
    EXPECT_EQ(DigestOfJson(output->plan), DigestOfJson(own[v]->plan));
    EXPECT_EQ(report.lower_bound_ns, variant.lower_bound_ns);
    ASSERT_TRUE(output->certificate.has_value());
    const Status checked = CheckCertificate(*variants[v].trace, output->plan, *output->certificate);
    EXPECT_TRUE(checked.has_value()) << ToString(checked.error());
  }
}

TEST(Variants, TheFastestMeshIsTakenAndNoneIsPassedOverThatIsFaster) {
  const auto [first, last] = SeedsUpTo(2);
  std::vector<int> outcomes(7, 0);
  for (std::uint32_t seed = first; seed <= last; ++seed) {
    SCOPED_TRACE("SHARDPLAN_SEED=" + std::to_string(seed));
    PartsCase c = RandomPartsCase(seed, 3);
    c.cluster.ranks_per_node = 2;
    const auto variants = MakeVariants({{"t", &c.trace}}, {}, c.cluster, {.meshes = true});
    ASSERT_TRUE(variants.has_value()) << ToString(variants.error());
    ASSERT_EQ(variants->size(), 2U);  // all four ranks, and two nodes' replicas
    const auto loose = OptimizeVariants(*variants, c.cluster, MadeWithin(testing::kLoose));
    ASSERT_TRUE(loose.has_value()) << ToString(loose.error());
    for (const std::int64_t percent : {100, 40}) {
      const Bytes budget{loose->report.peak_reserved_bytes.value * percent / 100};
      ExpectFastestOfAll(*variants, c.cluster, MadeWithin(budget), outcomes);
    }
  }
  if (OfOneSeed()) return;
  EXPECT_GT(outcomes[static_cast<std::size_t>(VariantOutcome::kChosen)], 0);
  EXPECT_GT(outcomes[static_cast<std::size_t>(VariantOutcome::kSlower)] +
                outcomes[static_cast<std::size_t>(VariantOutcome::kCannotWin)],
            0);
}

TEST(Variants, TheFastestMicrobatchOfAGlobalBatchIsTaken) {
  const auto [first, last] = SeedsUpTo(1);
  std::vector<int> outcomes(7, 0);
  for (std::uint32_t seed = first; seed <= last; ++seed) {
    SCOPED_TRACE("SHARDPLAN_SEED=" + std::to_string(seed));
    const PartsCase c = RandomPartsCase(seed, 3);
    const Trace two = WithSamples(c.trace, 2), four = WithSamples(c.trace, 4);
    const auto variants = MakeVariants({{"1", &c.trace}, {"2", &two}, {"4", &four}}, {}, c.cluster,
                                       {.global_batch = 8 * 4 * c.cluster.ranks});
    ASSERT_TRUE(variants.has_value()) << ToString(variants.error());
    ASSERT_EQ(variants->size(), 3U);
    EXPECT_EQ(variants->at(1).says.microbatch_size, 16);
    EXPECT_EQ(variants->at(1).says.microbatches, 2);
    const auto loose = OptimizeVariants(*variants, c.cluster, MadeWithin(testing::kLoose));
    ASSERT_TRUE(loose.has_value()) << ToString(loose.error());
    for (const std::int64_t percent : {100, 50}) {
      const Bytes budget{loose->report.peak_reserved_bytes.value * percent / 100};
      ExpectFastestOfAll(*variants, c.cluster, MadeWithin(budget), outcomes);
    }
  }
  if (OfOneSeed()) return;
  EXPECT_GT(outcomes[static_cast<std::size_t>(VariantOutcome::kChosen)], 0);
}

TEST(Variants, ASignalLeavesTheOthersUntried) {
  PartsCase c = RandomPartsCase(1, 3);
  c.cluster.ranks_per_node = 2;
  const auto variants = MakeVariants({{"t", &c.trace}}, {}, c.cluster, {.meshes = true});
  const std::atomic<bool> stop = true;
  OptimizeOptions options = MadeWithin(testing::kLoose);
  options.stop = &stop;
  const auto output = OptimizeVariants(*variants, c.cluster, options);
  ASSERT_TRUE(output.has_value()) << ToString(output.error());
  EXPECT_FALSE(output->report.complete);
  EXPECT_EQ(output->report.variants_lower_bound_ns.value, 0);
  EXPECT_EQ(std::ranges::count(output->report.variants, VariantOutcome::kNotTried, &VariantReport::outcome),
            1);
}

TEST(Variants, MeshesAreNodesAndPartsOfThem) {
  Cluster cluster{.ranks = 48, .ranks_per_node = 8};
  std::vector<std::int64_t> shards;
  for (const auto& mesh : MeshesOf(cluster)) {
    std::int64_t ranks = 1;
    for (const StrategyMeshDim& dim : mesh) ranks *= dim.size;
    EXPECT_EQ(ranks, 48);
    shards.push_back(mesh.back().size);
  }
  EXPECT_EQ(shards, (std::vector<std::int64_t>{48, 24, 16, 8, 4, 2}));
  cluster.ranks = 1;
  EXPECT_EQ(MeshesOf(cluster).size(), 1U);
}

std::string RefusalOf(const std::vector<NamedTrace>& traces, const Strategy& job, const Cluster& cluster,
                      const VariantOptions& options) {
  const auto variants = MakeVariants(traces, job, cluster, options);
  return variants ? "" : ToString(variants.error());
}

TEST(Variants, BadInputIsRefusedByName) {
  const PartsCase c = RandomPartsCase(1, 2);
  const Trace two = WithSamples(c.trace, 2);
  const auto refused = [&](const std::vector<NamedTrace>& traces, const Strategy& job,
                           const VariantOptions& options, const std::string& words) {
    const std::string said = RefusalOf(traces, job, c.cluster, options);
    EXPECT_NE(said.find(words), std::string::npos) << said << "\nexpected: " << words;
  };
  const NamedTrace one{"one.json", &c.trace};
  refused({one, {"two.json", &two}}, {}, {}, "--global-batch says how many");
  refused({one}, {}, {.global_batch = 100}, "a multiple of 32: micro-batches of 8 on 4 ranks");
  refused({one}, {}, {.global_batch = std::int64_t{1} << 40}, "too many micro-batches");
  refused({one, one}, {}, {.global_batch = 64}, "two traces have the same micro-batch");
  refused({one}, {.mesh = {{"shard", 4}}}, {.meshes = true}, "the mesh is given");
  refused({one}, {.program = {testing::MicrobatchStep(2)}}, {.global_batch = 64},
          "the training loop is given");
  refused({one}, {.mesh = {{"shard", 2}, {"tensor", 2}}}, {.global_batch = 64}, "tensor=2");
  Trace other = two;
  other.parameters[1].shape.front() += 1;
  refused({one, {"other.json", &other}}, {}, {.global_batch = 64}, "other.json: /parameters/1");
  other = two;
  other.tokens_per_batch *= 2;
  refused({one, {"other.json", &other}}, {}, {.global_batch = 64}, "other.json: /tokens_per_batch");
  other = two;
  other.inputs.push_back({.name = "labels", .shape = {3}});
  refused({{"other.json", &other}}, {}, {.global_batch = 64}, "other.json: /inputs/1/shape");
  other.inputs.clear();
  refused({{"other.json", &other}}, {}, {.global_batch = 64}, "other.json: /inputs");
}

}  // namespace
}  // namespace shardplan
