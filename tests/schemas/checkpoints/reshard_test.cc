// SPDX-License-Identifier: Apache-2.0
// Plans of resharding against the naive oracle, and mutations of plans against the verifier.
#include "shardplan/checkpoints/reshard.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <functional>
#include <random>
#include <string>

#include "shardplan/schemas/io.h"
#include "tests/schemas/checkpoints/naive_reshard.h"

namespace shardplan {
namespace {

std::vector<std::uint64_t> Seeds(std::uint64_t count) {
  if (const char* seed = std::getenv("SHARDPLAN_SEED")) return {std::strtoull(seed, nullptr, 10)};
  std::vector<std::uint64_t> seeds;
  for (std::uint64_t seed = 1; seed <= count; ++seed) seeds.push_back(seed);
  return seeds;
}

ReshardOptions SmallBudget(std::mt19937_64& random) {
  ReshardOptions options;
  options.budget_bytes = Bytes{kLeastReshardBudget};
  options.ranks_per_node = 1 + static_cast<std::int64_t>(random() % 4);
  return options;
}

// Bytes that no rank has to be sent: those that it holds already.
std::int64_t SentBytes(const ReshardPlan& plan) {
  std::int64_t bytes = 0;
  for (const ReshardGroup& group : plan.groups) {
    for (const ReshardCopy& copy : group.copies)
      bytes += copy.source_rank == copy.target_rank ? 0 : MovedBytes(copy).value * std::ssize(group.tensors);
  }
  return bytes;
}

TEST(Reshard, RandomLayoutsToRandomLayoutsAndBackGiveTheSameBytes) {
  for (const std::uint64_t seed : Seeds(3000)) {
    SCOPED_TRACE("SHARDPLAN_SEED=" + std::to_string(seed));
    std::mt19937_64 random(seed);
    const test::RandomTensors tensors = test::MakeTensors(random);
    const StateLayout source = test::MakeLayout(tensors, random);
    const StateLayout target = test::MakeLayout(tensors, random);
    const Result<ReshardPlan> there = PlanReshard(source, target, SmallBudget(random));
    ASSERT_TRUE(there.has_value()) << ToString(there.error());
    const Result<ReshardPlan> back = PlanReshard(target, source, SmallBudget(random));
    ASSERT_TRUE(back.has_value()) << ToString(back.error());
    const std::vector<ReshardViolation> violations = VerifyReshard(*there);
    ASSERT_TRUE(violations.empty()) << violations.front().pointer << ": " << violations.front().message
                                    << "\n"
                                    << ToJson(*there);
    const test::NaiveState before = test::StateIn(source);
    const test::NaiveState wanted = test::StateIn(target);
    test::NaiveState moved = test::EmptyIn(target);
    ASSERT_EQ(test::Execute(*there, before, moved), std::nullopt);
    ASSERT_TRUE(moved == wanted) << ToJson(*there);
    test::NaiveState again = test::EmptyIn(source);
    ASSERT_EQ(test::Execute(*back, moved, again), std::nullopt);
    ASSERT_TRUE(again == before) << ToJson(*back);
    const Result<ReshardPlan> read = ParseReshard(ToJson(*there));
    ASSERT_TRUE(read.has_value()) << ToString(read.error());
    ASSERT_TRUE(*read == *there);
  }
}

// Element by element: what a rank has in the source it is never sent, and nothing is sent twice to a rank.
TEST(Reshard, NoByteIsSentToARankThatHasIt) {
  for (const std::uint64_t seed : Seeds(300)) {
    SCOPED_TRACE("SHARDPLAN_SEED=" + std::to_string(seed));
    std::mt19937_64 random(seed);
    const test::RandomTensors tensors = test::MakeTensors(random);
    const StateLayout source = test::MakeLayout(tensors, random);
    const StateLayout target = test::MakeLayout(tensors, random);
    const Result<ReshardPlan> plan = PlanReshard(source, target, SmallBudget(random));
    ASSERT_TRUE(plan.has_value()) << ToString(plan.error());
    std::int64_t needed = 0;
    for (const StateTensor& tensor : target.tensors) {
      const auto source_tensor = std::ranges::find(source.tensors, tensor.name, &StateTensor::name);
      for (std::int64_t rank = 0; rank < RanksOf(target); ++rank) {
        std::vector<std::int64_t> missing = test::HeldElements(target, tensor, rank);
        if (rank < RanksOf(source)) {
          const std::vector<std::int64_t> held = test::HeldElements(source, *source_tensor, rank);
          std::erase_if(missing,
                        [&](std::int64_t element) { return std::ranges::find(held, element) != held.end(); });
        }
        needed += std::ssize(missing) * SizeBytes(tensor.dtype);
      }
    }
    ASSERT_EQ(SentBytes(*plan), needed) << ToJson(*plan);
  }
}

StateLayout OneTensor(std::vector<StrategyMeshDim> mesh, std::vector<TensorSplit> splits) {
  return {.name = "",
          .mesh = std::move(mesh),
          .flats = {},
          .tensors = {{.name = "w", .shape = {12, 6}, .splits = std::move(splits)}}};
}

TEST(Reshard, ContiguousRowsAreOneCopyForEachPairOfRanks) {
  const Result<ReshardPlan> plan =
      PlanReshard(OneTensor({{"shard", 4}}, {{{"shard"}, 0}}), OneTensor({{"shard", 3}}, {{{"shard"}, 0}}));
  ASSERT_TRUE(plan.has_value());
  ASSERT_EQ(plan->groups.size(), 1u);
  // Rows 0-2, 3-5, 6-8, 9-11 to 0-3, 4-7, 8-11.
  const std::vector<ReshardCopy> wanted = {{0, 0, 0, 0, Bytes{72}, {}},  {1, 0, 0, 72, Bytes{24}, {}},
                                           {1, 1, 24, 0, Bytes{48}, {}}, {2, 1, 0, 48, Bytes{48}, {}},
                                           {2, 2, 48, 0, Bytes{24}, {}}, {3, 2, 0, 24, Bytes{72}, {}}};
  EXPECT_EQ(plan->groups[0].copies, wanted);
}

TEST(Reshard, WhatLiesSideBySideOnBothRanksIsOneCopy) {
  StateLayout source = OneTensor({{"shard", 2}}, {});
  source.flats = {{"flat", DType::kFloat32, 74, {"shard"}}};
  source.tensors[0].flat = 0;
  // Elements 0-36 and 37-71, which no row ends at, to rows 0-5 and 6-11.
  const Result<ReshardPlan> plan = PlanReshard(source, OneTensor({{"shard", 2}}, {{{"shard"}, 0}}));
  ASSERT_TRUE(plan.has_value());
  const std::vector<ReshardCopy> wanted = {
      {0, 0, 0, 0, Bytes{144}, {}}, {0, 1, 144, 0, Bytes{4}, {}}, {1, 1, 0, 4, Bytes{140}, {}}};
  EXPECT_EQ(plan->groups[0].copies, wanted);
}

TEST(Reshard, ColumnsAreOneCopyWithALoop) {
  const Result<ReshardPlan> plan =
      PlanReshard(OneTensor({{"shard", 2}}, {{{"shard"}, 1}}), OneTensor({{"shard", 1}}, {}));
  ASSERT_TRUE(plan.has_value());
  const std::vector<ReshardCopy> wanted = {{0, 0, 0, 0, Bytes{12}, {{12, 12, 24}}},
                                           {1, 0, 0, 12, Bytes{12}, {{12, 12, 24}}}};
  EXPECT_EQ(plan->groups[0].copies, wanted);
}

TEST(Reshard, SendersOfReplicasAreBalancedWithinTheNode) {
  StateLayout source{.name = "", .mesh = {{"replicate", 8}}, .flats = {}, .tensors = {}};
  for (int t = 0; t < 64; ++t) source.tensors.push_back({.name = "t" + std::to_string(t), .shape = {100}});
  StateLayout target = source;
  target.mesh = {{"replicate", 16}};
  const Result<ReshardPlan> plan = PlanReshard(source, target, {.ranks_per_node = 4});
  ASSERT_TRUE(plan.has_value());
  EXPECT_TRUE(VerifyReshard(*plan).empty());
  std::vector<std::int64_t> sent(8, 0);
  for (const ReshardGroup& group : plan->groups) {
    for (const ReshardCopy& copy : group.copies) {
      if (copy.target_rank < 8) {
        EXPECT_EQ(copy.source_rank, copy.target_rank);
      }
      if (copy.target_rank >= 8)
        sent[static_cast<std::size_t>(copy.source_rank)] +=
            MovedBytes(copy).value * std::ssize(group.tensors);
    }
  }
  EXPECT_EQ(*std::ranges::max_element(sent), *std::ranges::min_element(sent));
}

TEST(Reshard, WhatCannotBeMovedIsRefusedWithThePlace) {
  const StateLayout source = OneTensor({{"shard", 2}}, {{{"shard"}, 0}});
  const auto error = [&](const std::function<void(StateLayout&)>& change) {
    StateLayout target = source;
    change(target);
    const Result<ReshardPlan> plan = PlanReshard(source, target);
    return plan ? std::string("none") : plan.error().pointer;
  };
  EXPECT_EQ(error([](StateLayout& l) { l.tensors[0].name = "x"; }), "/target/tensors/0");
  EXPECT_EQ(error([](StateLayout& l) { l.tensors[0].shape = {6, 12}; }), "/target/tensors/0/shape");
  EXPECT_EQ(error([](StateLayout& l) { l.tensors[0].dtype = DType::kInt32; }), "/target/tensors/0/dtype");
  EXPECT_EQ(error([](StateLayout& l) { l.tensors[0].splits[0].mesh_dims = {"tp"}; }),
            "/target/tensors/0/splits/0/mesh_dims/0");
  EXPECT_EQ(error([](StateLayout& l) { l.tensors[0].splits[0].tensor_dim = 2; }),
            "/target/tensors/0/splits/0/tensor_dim");
  EXPECT_EQ(error([](StateLayout& l) { l.tensors[0].flat = 0; }), "/target/tensors/0/flat");
  EXPECT_EQ(error([](StateLayout& l) { l.mesh[0].size = 0; }), "/target/mesh/0/size");
  EXPECT_EQ(error([](StateLayout& l) { l.tensors.push_back(l.tensors[0]); }), "/target/tensors/1/name");
  EXPECT_EQ(error([](StateLayout& l) {
              l.flats.push_back({"f", DType::kFloat32, 3, {"shard"}});
            }),
            "/target/flats/0/numel");
}

// Every change of one number of one copy is seen, and so is a copy that is missing or there twice.
TEST(ReshardVerifier, SeesEveryMutation) {
  std::size_t mutations = 0;
  for (const std::uint64_t seed : Seeds(120)) {
    SCOPED_TRACE("SHARDPLAN_SEED=" + std::to_string(seed));
    std::mt19937_64 random(seed);
    const test::RandomTensors tensors = test::MakeTensors(random);
    const StateLayout source = test::MakeLayout(tensors, random);
    const StateLayout target = test::MakeLayout(tensors, random);
    const Result<ReshardPlan> good = PlanReshard(source, target, SmallBudget(random));
    ASSERT_TRUE(good.has_value()) << ToString(good.error());
    const test::NaiveState before = test::StateIn(source);
    const test::NaiveState wanted = test::StateIn(target);
    for (std::size_t g = 0; g < good->groups.size(); ++g) {
      for (std::size_t c = 0; c < good->groups[g].copies.size() && c < 6; ++c) {
        const auto expect_seen = [&](const std::function<void(ReshardGroup&)>& change, bool always) {
          ReshardPlan bad = *good;
          change(bad.groups[g]);
          ++mutations;
          // A copy that reads the same bytes of another rank is as good: the oracle says so.
          if (!always) {
            if (VerifyReshard(bad).empty()) {
              test::NaiveState moved = test::EmptyIn(target);
              ASSERT_EQ(test::Execute(bad, before, moved), std::nullopt) << ToJson(bad);
              ASSERT_TRUE(moved == wanted) << ToJson(bad);
            }
            return;
          }
          ASSERT_FALSE(VerifyReshard(bad).empty()) << ToJson(bad);
        };
        expect_seen(
            [&](ReshardGroup& group) {
              group.copies.erase(group.copies.begin() + static_cast<std::ptrdiff_t>(c));
            },
            true);
        expect_seen([&](ReshardGroup& group) { group.copies.push_back(group.copies[c]); }, true);
        expect_seen([&](ReshardGroup& group) { group.copies[c].run_bytes += Bytes{1}; }, true);
        expect_seen([&](ReshardGroup& group) { group.copies[c].run_bytes -= Bytes{1}; }, true);
        expect_seen([&](ReshardGroup& group) { ++group.copies[c].source_offset; }, true);
        expect_seen([&](ReshardGroup& group) { --group.copies[c].target_offset; }, true);
        expect_seen(
            [&](ReshardGroup& group) {
              group.copies[c].source_rank = (group.copies[c].source_rank + 1) % RanksOf(source);
            },
            false);
        expect_seen([&](ReshardGroup& group) { ++group.copies[c].target_rank; }, true);
        for (std::size_t l = 0; l < good->groups[g].copies[c].loops.size(); ++l) {
          expect_seen([&](ReshardGroup& group) { ++group.copies[c].loops[l].count; }, true);
          expect_seen([&](ReshardGroup& group) { ++group.copies[c].loops[l].source_stride; }, true);
          expect_seen([&](ReshardGroup& group) { ++group.copies[c].loops[l].target_stride; }, true);
        }
      }
      ReshardPlan bad = *good;
      bad.groups.erase(bad.groups.begin() + static_cast<std::ptrdiff_t>(g));
      ASSERT_FALSE(VerifyReshard(bad).empty());
    }
  }
  EXPECT_GT(mutations, std::getenv("SHARDPLAN_SEED") != nullptr ? 0u : 5000u);
}

}  // namespace
}  // namespace shardplan
