// SPDX-License-Identifier: Apache-2.0
// How the engine shares links: programs of collectives alone, on a stream and a communicator each.
#include <gtest/gtest.h>

#include <random>

#include "shardplan/simulator/engine.h"

namespace shardplan::test {
namespace {

struct InFlight {
  std::int64_t duration_ns = 0;
  LinkLoads loads;
};

// When each of them ends, all issued at 0.
std::vector<std::int64_t> EndsOf(const std::vector<InFlight>& collectives) {
  EngineProgram program;
  program.streams = program.communicators = static_cast<std::int32_t>(collectives.size());
  EngineStep step;
  step.phases = {Phase::kForward};
  for (std::size_t i = 0; i < collectives.size(); ++i) {
    const auto index = static_cast<std::int32_t>(i);
    program.loads.push_back(collectives[i].loads);
    step.code.push_back({.op = EngineOp::kWork,
                         .work = WorkClass::kCollective,
                         .stream = static_cast<std::int8_t>(index),
                         .loads = static_cast<std::int8_t>(index),
                         .operand = index,
                         .duration_ns = Nanoseconds{collectives[i].duration_ns}});
    step.origins.push_back({0, index});
    step.next_in_stream.push_back(-1);
    step.first_in_stream.push_back(index);
    step.groups.push_back({CollectiveKind::kAllGather, index, "", 1, {}});
  }
  program.steps = {step};
  EngineTimeline timeline;
  const Result<EngineResult> run = RunStep(program, 0, &timeline);
  EXPECT_TRUE(run.has_value());
  std::vector<std::int64_t> ends(collectives.size());
  for (const EngineSpan& span : timeline.spans)
    ends[static_cast<std::size_t>(span.instruction)] = span.end_ns.value;
  return ends;
}

constexpr std::int32_t kWhole = 1'000'000;
using Ends = std::vector<std::int64_t>;

// Both want all of the link: half each, 1,000 done at 2,000, and the 3,000 have 2,000 left then.
TEST(LinkSharing, EqualLoadsHaveEqualShares) {
  EXPECT_EQ(EndsOf({{1'000, {{kWhole, 0}}}, {3'000, {{kWhole, 0}}}}), (Ends{2'000, 4'000}));
}

TEST(LinkSharing, DifferentLinksDoNotMeet) {
  EXPECT_EQ(EndsOf({{1'000, {{kWhole, 0}}}, {3'000, {{0, kWhole}}}, {500, {}}}), (Ends{1'000, 3'000, 500}));
}

// A collective over several nodes takes all of the network and 40 % of the link inside them, where another
// one has the 60 % that are left: 600 of its 1,000 by the time that the first is done.
TEST(LinkSharing, OverNodesBothLinksAreUsedAtOnce) {
  EXPECT_EQ(EndsOf({{1'000, {{kWhole, 0}}}, {1'000, {{400'000, kWhole}}}}), (Ends{1'400, 1'000}));
}

TEST(LinkSharing, WhatFitsTogetherIsNotSlowed) {
  EXPECT_EQ(EndsOf({{1'000, {{300'000, kWhole}}}, {1'000, {{700'000, 0}}}}), (Ends{1'000, 1'000}));
}

// 10 % have all they need, the other two share 90 %: 45 % of 80 % and of 100 %, until the third has its 1,000
// done at 1,778 (1,000 x 80 / 45, up) and the second the rest of the link.
TEST(LinkSharing, SmallLoadsAreServedFirst) {
  const Ends ends = EndsOf({{5'000, {{100'000, 0}}}, {4'000, {{kWhole, 0}}}, {1'000, {{800'000, 0}}}});
  EXPECT_EQ(ends[0], 5'000);
  EXPECT_EQ(ends[2], 1'778);
  // 800.1 of 4,000 done by then, 2,899.8 more at 90 % until the first ends at 5,000, and 300.1 at 100 %, up.
  EXPECT_EQ(ends[1], 5'301);
}

// Whatever is in flight: no link carries more than its rate (each link needs at least the sum of duration x
// load), nothing is faster than alone, and one that is the only one on all its links is not slowed.
TEST(LinkSharing, NoLinkCarriesMoreThanItsRate) {
  for (std::uint64_t seed = 0; seed < 300; ++seed) {
    std::mt19937_64 random(seed);
    std::vector<InFlight> collectives(1 + random() % 6);
    for (InFlight& one : collectives) {
      one.duration_ns = 1 + static_cast<std::int64_t>(random() % 100'000);
      for (std::int32_t& load : one.loads.ppm) {
        if (random() % 3 > 0) load = 1 + static_cast<std::int32_t>(random() % kWhole);
      }
    }
    const Ends ends = EndsOf(collectives);
    for (std::size_t link = 0; link < 2; ++link) {
      long double carried = 0;
      std::int64_t last = 0;
      int users = 0;
      for (std::size_t i = 0; i < collectives.size(); ++i) {
        if (collectives[i].loads.ppm[link] == 0) continue;
        ++users;
        carried +=
            static_cast<long double>(collectives[i].duration_ns) * collectives[i].loads.ppm[link] / kWhole;
        last = std::max(last, ends[i]);
      }
      EXPECT_GE(static_cast<long double>(last) + users, carried) << "seed " << seed;
    }
    for (std::size_t i = 0; i < collectives.size(); ++i) {
      EXPECT_GE(ends[i], collectives[i].duration_ns) << "seed " << seed;
      bool alone = true;
      for (std::size_t j = 0; j < collectives.size(); ++j) {
        for (std::size_t link = 0; link < 2; ++link) {
          alone =
              alone && (i == j || collectives[i].loads.ppm[link] == 0 || collectives[j].loads.ppm[link] == 0);
        }
      }
      if (!alone) continue;
      EXPECT_EQ(ends[i], collectives[i].duration_ns) << "seed " << seed;
    }
  }
}

}  // namespace
}  // namespace shardplan::test
