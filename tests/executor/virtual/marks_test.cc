// SPDX-License-Identifier: Apache-2.0
// A machine of marks sees the poison that a machine of numbers sees, and needs no memory for what nobody
// looks at.
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <algorithm>
#include <map>
#include <random>
#include <vector>

#include "executor/src/virtual/poison_marks.h"
#include "shardplan/executor/virtual_backend.h"
#include "shardplan/planner/planner.h"
#include "tests/executor/virtual/mutations.h"
#include "tests/executor/virtual/plan_cases.h"
#include "tests/planner/synthetic.h"

namespace shardplan::test {
namespace {

using executor::PoisonMarks;
using executor::ReplayFiller;
using executor::VirtualContent;

std::vector<bool> Bits(const PoisonMarks& marks, std::int64_t begin, std::int64_t end) {
  std::vector<bool> bits(static_cast<std::size_t>(end));
  std::int64_t last = -1;
  marks.ForEach(begin, end, [&](std::int64_t from, std::int64_t to) {
    EXPECT_LT(last, from) << "ranges are in order and do not touch";
    EXPECT_LT(from, to);
    last = to;
    for (std::int64_t i = from; i < to; ++i) bits[static_cast<std::size_t>(i)] = true;
  });
  return bits;
}

TEST(PoisonMarks, AreAFlagForEachByte) {
  constexpr std::int64_t kBytes = 24;
  for (std::uint32_t seed = 0; seed < 300; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937 random(seed);
    PoisonMarks marks;
    std::vector<bool> expected(kBytes);
    for (int step = 0; step < 40; ++step) {
      const auto a = static_cast<std::int64_t>(random() % (kBytes + 1));
      const auto b = static_cast<std::int64_t>(random() % (kBytes + 1));
      const bool mark = random() % 2 == 0;
      mark ? marks.Mark(a, b) : marks.Clear(a, b);
      for (std::int64_t i = a; i < b; ++i) expected[static_cast<std::size_t>(i)] = mark;
      ASSERT_EQ(Bits(marks, 0, kBytes), expected);
      ASSERT_EQ(marks.empty(), std::ranges::count(expected, true) == 0);
      std::vector<bool> window(expected.begin(), expected.begin() + std::max(a, b));
      std::fill_n(window.begin(), std::min(a, b), false);
      ASSERT_EQ(Bits(marks, std::min(a, b), std::max(a, b)), window);
    }
  }
}

Plan PlanOf(const PlanCase& c) {
  const Result<PlannerOutput> planned =
      MakePlan(c.trace, c.strategy, c.cluster, PlanOptions{.verify = false});
  EXPECT_TRUE(planned.has_value()) << ToString(planned.error());
  return planned ? planned->plan : Plan{};
}

// The verdict of a run: "" or an error.
std::string Verdict(const Plan& plan, std::uint64_t seed, VirtualContent content) {
  const Status status = ReplayFiller(plan, seed, 2, content);
  return status ? "" : ToString(status.error());
}

// The same seed makes the same order, so both machines stop at the same thing.
TEST(Marks, FindWhatNumbersFindInEveryMutation) {
  std::map<bool, int> runs;
  for (const char* name : {"fsdp2/gptish_bf16_w2", "fsdp2/gptish_raf_int2_w4", "fsdp2/gptish_hsdp_2x2",
                           "fsdp2/uneven_bf16_w3", "fsdp2/gptish_cpu_offload_w2", "fsdp1/gptish_mp_bf16",
                           "fsdp1/uneven_w3_orig", "fsdp1/gptish_offload"}) {
    const Plan plan = PlanOf(RecordedCase(name));
    const std::vector<Mutation> mutations = MutationsOf(plan);
    // Every 7th mutation of a case, each under two orders.
    for (std::size_t m = 0; m < mutations.size(); m += 7) {
      if (mutations[m].kind == MutationKind::kSwappedCollectives) continue;  // of the last rank's plan alone
      const Plan broken = Mutated(plan, mutations[m]);
      for (std::uint64_t seed = m; seed < m + 2; ++seed) {
        const std::string numbers = Verdict(broken, seed, VirtualContent::kNumbers);
        ASSERT_EQ(Verdict(broken, seed, VirtualContent::kMarks), numbers)
            << name << ", seed " << seed << ": " << Describe(plan, mutations[m]);
        ++runs[numbers.empty()];
      }
    }
  }
  RecordProperty("wrong", runs[false]);
  EXPECT_GT(runs[false], 50);
  EXPECT_GT(runs[true], 50);
}

TEST(Marks, AgreeOnRandomPlans) {
  for (std::uint32_t seed = 500; seed < 540; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    const Plan plan = PlanOf(RandomCase(seed));
    EXPECT_EQ(Verdict(plan, seed, VirtualContent::kMarks), Verdict(plan, seed, VirtualContent::kNumbers));
  }
}

std::int64_t PeakKibibytes() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return usage.ru_maxrss;
}

// 8 layers of 1 GiB of parameters on two ranks: with numbers, some 40 GiB.
TEST(Marks, NeedNoMemoryForNumbers) {
  const Trace trace = testing::LayeredTrace(8, 16'384, 16'384);
  Strategy strategy;
  strategy.mixed_precision = MixedPrecision{.param_dtype = DType::kBFloat16, .reduce_dtype = DType::kFloat32};
  const std::int64_t before = PeakKibibytes();
  EXPECT_EQ(Verdict(PlanOf({"large", trace, strategy, testing::ClusterOf(2)}), 1, VirtualContent::kMarks),
            "");
  EXPECT_LT(PeakKibibytes() - before, 100 * 1024);
}

}  // namespace
}  // namespace shardplan::test
