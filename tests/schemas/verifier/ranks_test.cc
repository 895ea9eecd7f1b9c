// SPDX-License-Identifier: Apache-2.0
// Programs of several ranks: the same collectives in the same order, and no circle of waits. Deadlocks are
// compared with a brute force that tries every order of all ranks' streams.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <iostream>
#include <map>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "shardplan/verifier/verifier.h"
#include "tests/schemas/verifier/mutations.h"
#include "tests/support/plan_builder.h"
#include "tests/support/small_plans.h"

namespace shardplan {
namespace {

using ::testing::Contains;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using enum InstructionKind;

std::set<std::string> RulesOf(const std::vector<Plan>& plans) {
  std::set<std::string> rules;
  for (const Violation& v : VerifyRanks(plans)) rules.emplace(Name(v.rule));
  return rules;
}

// Persistent tensors that are all-reduced: the smallest program of collectives. Two communicators over both
// ranks.
class TwoRanks {
 public:
  TwoRanks() {
    b_.Communicator("other", 2);
    for (int s = 1; s < 3; ++s) b_.Stream("s" + std::to_string(s));
    for (int t = 0; t < 4; ++t) {
      const UnitId unit = b_.Unit("u" + std::to_string(t));
      Buffer& buffer = b_.plan().buffers[b_.Buffer(BufferRole::kOrderCheck, unit)];
      buffer.persistent = true;
      buffer.unit = -1;
      buffer.parameters.clear();
    }
    b_.Step("only").At(TriggerKind::kStepBegin);
  }
  test::PlanBuilder& builder() { return b_; }
  // All-reduces tensor t, one per stream and communicator, so that nothing but the collectives orders
  // anything.
  TwoRanks& AllReduce(CommunicatorId c, StreamId s) {
    b_.AllReduce(s, s, c);
    return *this;
  }
  Plan plan() { return b_.plan(); }

 private:
  test::PlanBuilder b_{2};
};

TEST(Ranks, TheSamePlanOnAllRanksVerifies) {
  const Plan plan = test::Fsdp2LikePlan({.units = 2, .shards = 2, .replicas = 2});
  EXPECT_THAT(VerifyRanks(std::vector<Plan>(4, plan)), IsEmpty());
}

TEST(Ranks, ViolationsOfOneRankAreReportedOnce) {
  const Plan plan = test::Fsdp2LikePlan({.units = 2});
  const Plan broken = test::Without(plan, test::SpotsOf(plan, kBindUnsharded)[0]);
  EXPECT_EQ(VerifyRanks({broken, broken}).size(), Verify(broken).size());
  EXPECT_THAT(VerifyRanks({plan, broken})[0].message, HasSubstr("rank 1: "));
}

TEST(Ranks, ThePlansWorldSizeMustBeTheNumberOfRanks) {
  EXPECT_EQ(RulesOf({test::Fsdp2LikePlan({.units = 1, .shards = 2})}), (std::set<std::string>{"reference"}));
}

TEST(Ranks, RanksMayDifferInWhatTheyDoByThemselves) {
  const Plan plan = test::Fsdp2LikePlan({.units = 2});
  Plan other = plan;
  other.steps[1].triggers[0].instructions.Edit().push_back({.kind = kRecord, .stream = 0, .event = 0});
  EXPECT_THAT(VerifyRanks({plan, other}), IsEmpty());
}

TEST(Ranks, CollectiveOrderDiffers) {
  const Plan plan = test::Fsdp2LikePlan({.units = 2, .reshard_after_forward = false, .prefetch = false});
  Plan other = plan;  // rank 1's second reduce-scatter is twice as large
  for (Buffer& buffer : other.buffers) {
    if (buffer.role == BufferRole::kReduceScatterInput && buffer.unit == 1) buffer.parts_bytes[0].value *= 2;
  }
  std::vector<Violation> violations = VerifyRanks({plan, other});
  std::erase_if(violations, [](const Violation& v) { return v.rule == Rule::kLayout; });  // of rank 1's plan
  ASSERT_EQ(violations.size(), 1U);
  EXPECT_EQ(violations[0].rule, Rule::kCollectiveOrder);
  EXPECT_THAT(violations[0].message, HasSubstr("on communicator shard differs between rank 0 and rank 1"));
  EXPECT_THAT(violations[0].chain,
              Contains(HasSubstr("rank 1: reduce_scatter layers.1.reduce_scatter_input")));
}

TEST(Ranks, ACollectiveThatOneRankLeavesOut) {
  TwoRanks a;
  a.AllReduce(0, 0).AllReduce(0, 1);
  TwoRanks b;
  b.AllReduce(0, 0);
  EXPECT_EQ(RulesOf({a.plan(), b.plan()}), (std::set<std::string>{"collective_order"}));
}

// A group flattened from two dimensions that do not lie side by side: {0, 1, 4, 5} and {2, 3, 6, 7} of 8
// ranks.
Plan FlattenedGroups(int all_reduces) {
  test::PlanBuilder b(8);
  b.plan().communicators.push_back({"flat", 4, 1, {{2, 4}, {2, 1}}});
  const UnitId unit = b.Unit("u");
  const BufferId buffer = b.Buffer(BufferRole::kOrderCheck, unit);
  b.plan().buffers[buffer].persistent = true;
  b.plan().buffers[buffer].unit = -1;
  b.plan().buffers[buffer].parameters.clear();
  b.Step("only").At(TriggerKind::kStepBegin);
  for (int i = 0; i < all_reduces; ++i) b.AllReduce(buffer, 0, 1);
  return b.plan();
}

TEST(Ranks, GroupsOfDimensionsThatDoNotLieSideBySide) {
  std::vector<Plan> plans(8, FlattenedGroups(2));
  plans[0].model = "another";  // so that the ranks are compared
  EXPECT_THAT(VerifyRanks(plans), IsEmpty());
  for (const std::size_t rank : {2U, 3U, 6U, 7U}) plans[rank] = FlattenedGroups(1);  // one whole group
  EXPECT_THAT(VerifyRanks(plans), IsEmpty());
  plans[5] = FlattenedGroups(1);
  const std::vector<Violation> violations = VerifyRanks(plans);
  ASSERT_EQ(violations.size(), 1U);
  EXPECT_EQ(violations[0].rule, Rule::kCollectiveOrder);
  EXPECT_EQ(violations[0].rank, 0);  // who issues the call that rank 5 leaves out
  EXPECT_THAT(violations[0].message,
              HasSubstr("collective number 2 on communicator flat differs between rank 0 and rank 5"));
}

TEST(Ranks, TwoCommunicatorsInOtherOrderOnOneStreamDeadlock) {
  TwoRanks a;
  a.AllReduce(0, 0).AllReduce(1, 0);
  TwoRanks b;
  b.AllReduce(1, 0).AllReduce(0, 0);
  const std::vector<Violation> violations = VerifyRanks({a.plan(), b.plan()});
  ASSERT_EQ(violations.size(), 1U);
  EXPECT_EQ(violations[0].rule, Rule::kDeadlock);
  EXPECT_THAT(violations[0].chain, Contains(HasSubstr("rank 0: all_reduce")));
  EXPECT_THAT(violations[0].chain, Contains(HasSubstr("waits for rank 0")));
}

TEST(Ranks, TwoCommunicatorsInOtherOrderOnTwoStreamsAreFine) {
  TwoRanks a;
  a.AllReduce(0, 0).AllReduce(1, 1);
  TwoRanks b;
  b.AllReduce(1, 1).AllReduce(0, 0);
  EXPECT_THAT(VerifyRanks({a.plan(), b.plan()}), IsEmpty());
}

TEST(Ranks, AHostWaitCanCloseTheCircle) {
  const auto program = [](CommunicatorId first, CommunicatorId second) {
    TwoRanks ranks;
    const EventId event = ranks.builder().Event("done");
    ranks.AllReduce(first, first);
    ranks.builder().Record(event, first).HostWait(event);
    ranks.AllReduce(second, second);
    return ranks.plan();
  };
  EXPECT_THAT(VerifyRanks({program(0, 1), program(0, 1)}), IsEmpty());
  EXPECT_EQ(RulesOf({program(0, 1), program(1, 0)}), (std::set<std::string>{"deadlock"}));
}

// ---- brute force ----

// Tries every order in which hosts issue and streams run. True if some order ends where nothing can go on
// before all is done. Knows of collectives, records and waits only.
class BruteForce {
 public:
  explicit BruteForce(const std::vector<Plan>& plans) {
    for (const Plan& plan : plans) {
      std::vector<Instruction> program;
      for (int round = 0; round < 2; ++round) {
        for (const Trigger& t : plan.steps[0].triggers) {
          program.insert(program.end(), t.instructions.begin(), t.instructions.end());
        }
      }
      programs_.push_back(std::move(program));
    }
  }

  bool CanDeadlock() { return Visit(State(programs_.size())); }

 private:
  struct Rank {
    std::size_t issued = 0;
    std::set<std::size_t> done;  // instructions
    auto operator<=>(const Rank&) const = default;
  };
  using State = std::vector<Rank>;

  bool Visit(const State& state) {
    if (!seen_.insert(state).second) return false;
    bool moved = false;
    for (std::size_t r = 0; r < state.size(); ++r) {
      if (CanIssue(state, r)) {
        moved = true;
        State next = state;
        Issue(next, r);
        if (Visit(next)) return true;
      }
      for (std::size_t i = 0; i < state[r].issued; ++i) {
        if (!CanRun(state, r, i)) continue;
        State next = state;
        if (programs_[r][i].kind != kAllReduce) {
          next[r].done.insert(i);
        } else {
          // All ranks together, each at its front.
          bool all = true;
          for (std::size_t other = 0; other < state.size(); ++other) {
            const std::size_t mate = Mate(r, i, other);
            all = all && mate < state[other].issued && CanRun(state, other, mate);
            if (all) next[other].done.insert(mate);
          }
          if (!all) continue;
        }
        moved = true;
        if (Visit(next)) return true;
      }
    }
    if (moved) return false;
    for (std::size_t r = 0; r < state.size(); ++r) {
      if (state[r].issued < programs_[r].size() || state[r].done.size() < Work(r)) return true;
    }
    return false;
  }

  std::size_t Work(std::size_t r) const {
    return static_cast<std::size_t>(
        std::ranges::count_if(programs_[r], [](const Instruction& i) { return i.kind != kHostWait; }));
  }
  // The latest record of the event before instruction i; programs_.size() where there is none.
  static std::size_t LatestRecord(const std::vector<Instruction>& program, std::size_t i) {
    for (std::size_t k = i; k-- > 0;) {
      if (program[k].kind == kRecord && program[k].event == program[i].event) return k;
    }
    return program.size();
  }
  bool CanIssue(const State& state, std::size_t r) const {
    const std::size_t i = state[r].issued;
    if (i == programs_[r].size()) return false;
    if (programs_[r][i].kind != kHostWait) return true;
    const std::size_t record = LatestRecord(programs_[r], i);
    return record == programs_[r].size() || state[r].done.contains(record);
  }
  void Issue(State& state, std::size_t r) const { ++state[r].issued; }
  bool CanRun(const State& state, std::size_t r, std::size_t i) const {
    const std::vector<Instruction>& program = programs_[r];
    if (program[i].kind == kHostWait || state[r].done.contains(i)) return false;
    for (std::size_t k = 0; k < i; ++k) {
      if (program[k].kind == kHostWait || state[r].done.contains(k)) continue;
      if (program[k].stream == program[i].stream) return false;
      if (program[k].kind == kAllReduce && program[i].kind == kAllReduce &&
          program[k].communicator == program[i].communicator) {
        return false;
      }
    }
    if (program[i].kind != kWait) return true;
    const std::size_t record = LatestRecord(program, i);
    return record == program.size() || state[r].done.contains(record);
  }
  // The instruction of `other` that is the same collective: same communicator, same number on it.
  std::size_t Mate(std::size_t r, std::size_t i, std::size_t other) const {
    const auto same = [&](const Instruction& x) {
      return x.kind == kAllReduce && x.communicator == programs_[r][i].communicator;
    };
    const auto number =
        std::count_if(programs_[r].begin(), programs_[r].begin() + static_cast<std::ptrdiff_t>(i), same);
    std::ptrdiff_t seen = 0;
    for (std::size_t k = 0; k < programs_[other].size(); ++k) {
      if (same(programs_[other][k]) && seen++ == number) return k;
    }
    return programs_[other].size();
  }

  std::vector<std::vector<Instruction>> programs_;
  std::set<State> seen_;
};

// A program with `per_communicator` collectives on each of two communicators, in random order, on random
// streams.
Plan RandomProgram(std::mt19937_64& random, const std::vector<int>& per_communicator) {
  TwoRanks ranks;
  test::PlanBuilder& b = ranks.builder();
  std::vector<CommunicatorId> todo;
  for (int c = 0; c < 2; ++c) todo.insert(todo.end(), static_cast<std::size_t>(per_communicator[c]), c);
  std::ranges::shuffle(todo, random);
  for (const CommunicatorId c : todo) {
    if (random() % 4 == 0) b.Sync(static_cast<StreamId>(random() % 3), static_cast<StreamId>(random() % 3));
    if (random() % 5 == 0) {
      const EventId event = b.Event("host");
      b.Record(event, static_cast<StreamId>(random() % 3)).HostWait(event);
    }
    ranks.AllReduce(c, static_cast<StreamId>(random() % 3));
  }
  return ranks.plan();
}

TEST(Ranks, DeadlocksAreThoseOfBruteForce) {
  int deadlocks = 0;
  for (std::uint64_t seed = 1; seed <= 200; ++seed) {
    std::mt19937_64 random(seed);
    const std::vector<int> counts = {static_cast<int>(random() % 3), static_cast<int>(1 + random() % 2)};
    const std::vector<Plan> plans = {RandomProgram(random, counts), RandomProgram(random, counts)};
    bool found = false;
    for (const Violation& v : VerifyRanks(plans)) {
      ASSERT_NE(v.rule, Rule::kCollectiveOrder) << "seed " << seed;
      found = found || v.rule == Rule::kDeadlock;
    }
    ASSERT_EQ(found, BruteForce(plans).CanDeadlock()) << "seed " << seed;
    deadlocks += found ? 1 : 0;
  }
  std::cout << deadlocks << " of 200 programs deadlock\n";
  EXPECT_GT(deadlocks, 10);
  EXPECT_LT(deadlocks, 190);
}

}  // namespace
}  // namespace shardplan
