// SPDX-License-Identifier: Apache-2.0
// Equal micro-batches are written once: whatever a plan is, its documents read back as it is.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>
#include <string>

#include "shardplan/schemas/io.h"
#include "shardplan/schemas/plan_text.h"
#include "shardplan/schemas/program.h"
#include "tests/support/small_plans.h"

namespace shardplan {
namespace {

using ::testing::HasSubstr;

Instruction Compute(SegmentId segment, std::int32_t offset = 0) {
  return {.kind = InstructionKind::kCompute, .stream = 0, .segment = segment, .microbatch_offset = offset};
}

// A micro-batch: the forward and the backward of every unit, told apart by `salt`.
std::vector<Trigger> Microbatch(const Plan& plan, std::int32_t microbatch, std::int32_t salt) {
  std::vector<Trigger> triggers;
  const auto segments = static_cast<std::int32_t>(plan.segments.size());
  for (const TriggerKind kind : {TriggerKind::kPreForward, TriggerKind::kPreBackward}) {
    for (std::size_t u = 0; u < plan.units.size(); ++u) {
      const auto unit = static_cast<UnitId>(u);
      Trigger& trigger = triggers.emplace_back(Trigger{kind, unit, microbatch, 0, {}});
      trigger.instructions.Edit().push_back(Compute((unit + salt) % segments));
      trigger.instructions.Edit().push_back(
          {.kind = InstructionKind::kZeroGrad, .unit = unit, .reason = "a reason that is long enough"});
    }
  }
  triggers.push_back({TriggerKind::kBackwardEnd, -1, microbatch, 0, {}});
  return triggers;
}

// The plan with one step of such micro-batches.
Plan WithMicrobatches(const std::vector<std::int32_t>& salts) {
  Plan plan = test::Fsdp2LikePlan({.units = 2});
  plan.steps.resize(1);
  plan.steady_step = 0;
  plan.steps[0].triggers = {{TriggerKind::kStepBegin, -1, 0, 0, {}}};
  for (std::size_t m = 0; m < salts.size(); ++m) {
    for (Trigger& trigger : Microbatch(plan, static_cast<std::int32_t>(m), salts[m])) {
      plan.steps[0].triggers.push_back(std::move(trigger));
    }
  }
  plan.steps[0].triggers.push_back({TriggerKind::kStepEnd, -1, 0, 0, {}});
  return plan;
}

std::size_t CountOf(const std::string& text, std::string_view what) {
  std::size_t count = 0;
  for (std::size_t at = text.find(what); at != std::string::npos; at = text.find(what, at + 1)) ++count;
  return count;
}

void ExpectReadsBack(const Plan& plan, const std::string& what) {
  const std::string json = ToJson(plan);
  const Result<Plan> read = ParsePlan(json);
  ASSERT_TRUE(read.has_value()) << what << ": " << ToString(read.error());
  EXPECT_EQ(*read, plan) << what;
  EXPECT_EQ(ToJson(*read), json) << what;
  const Result<Plan> parsed = ParsePlanText(PlanText(plan));
  ASSERT_TRUE(parsed.has_value()) << what << ": " << ToString(parsed.error());
  EXPECT_EQ(*parsed, plan) << what;
}

TEST(Repetitions, EqualMicrobatchesAreWrittenOnce) {
  const std::string ten = ToJson(WithMicrobatches(std::vector<std::int32_t>(10, 0)));
  const std::string thousand = ToJson(WithMicrobatches(std::vector<std::int32_t>(1000, 0)));
  EXPECT_LE(thousand.size(), ten.size() + 2);  // "9" and "999"
  EXPECT_THAT(thousand, HasSubstr("{\"repeat\": {\"triggers\": 5, \"times\": 999}}"));
  EXPECT_THAT(PlanText(WithMicrobatches(std::vector<std::int32_t>(10, 0))),
              HasSubstr("\n  repeat the last 5 triggers 9 times\n"));
}

TEST(Repetitions, MicrobatchesThatDifferAreWritten) {
  const std::string json = ToJson(WithMicrobatches({0, 1, 1, 1, 0, 2, 3, 3}));
  EXPECT_EQ(CountOf(json, "\"repeat\""), 2U) << json;
  EXPECT_THAT(json, HasSubstr("\"times\": 2"));
  EXPECT_EQ(CountOf(ToJson(WithMicrobatches({0, 1, 0, 1, 2})), "\"repeat\""), 0U);
  EXPECT_EQ(CountOf(ToJson(test::Fsdp2LikePlan({.units = 2})), "\"repeat\""), 0U);
}

TEST(Repetitions, WhateverIsEqualReadsBack) {
  for (std::uint64_t seed = 0; seed < 300; ++seed) {
    std::mt19937_64 random(seed);
    std::vector<std::int32_t> salts;
    const std::size_t count = random() % 12;
    const std::size_t choices = 1 + random() % 3;
    for (std::size_t m = 0; m < count; ++m) salts.push_back(static_cast<std::int32_t>(random() % choices));
    Plan plan = WithMicrobatches(salts);
    std::vector<Trigger>& triggers = plan.steps[0].triggers;
    // Points that are left out, moved, passed again, or of another micro-batch's number.
    for (std::size_t change = random() % 4; change > 0; --change) {
      const std::size_t at = random() % triggers.size();
      switch (random() % 4) {
        case 0:
          triggers.erase(triggers.begin() + static_cast<std::ptrdiff_t>(at));
          break;
        case 1:
          std::swap(triggers[at], triggers[random() % triggers.size()]);
          break;
        case 2:
          triggers[at].microbatch = static_cast<std::int32_t>(random() % 14);
          break;
        default:
          triggers.insert(triggers.begin() + static_cast<std::ptrdiff_t>(at), Trigger(triggers[at]));
      }
      if (triggers.empty()) break;
    }
    ExpectReadsBack(plan, "seed " + std::to_string(seed));
  }
}

// {"times": 9} is {"times": 4} and {"times": 5}; and the micro-batches themselves may stand there.
TEST(Repetitions, PartlyWrittenOutReadsAlike) {
  const Plan plan = WithMicrobatches(std::vector<std::int32_t>(10, 0));
  std::string json = ToJson(plan);
  const std::string whole = "{\"repeat\": {\"triggers\": 5, \"times\": 9}}";
  const std::size_t at = json.find(whole);
  ASSERT_NE(at, std::string::npos);
  json.replace(
      at, whole.size(),
      "{\"repeat\": {\"times\": 1, \"triggers\": 5}}, {\"repeat\": {\"triggers\": 10, \"times\": 1}},"
      "{\"repeat\": {\"triggers\": 5, \"times\": 8}}");
  const Result<Plan> read = ParsePlan(json);
  ASSERT_TRUE(read.has_value()) << ToString(read.error());
  // Ten before it again, each one higher: the third micro-batch is the second once more.
  EXPECT_EQ(read->steps[0].triggers[1 + 2 * 5].microbatch, 1);
  json = ToJson(plan);
  json.replace(
      at, whole.size(),
      "{\"repeat\": {\"triggers\": 5, \"times\": 4}}, {\"repeat\": {\"triggers\": 5, \"times\": 5}}");
  const Result<Plan> halves = ParsePlan(json);
  ASSERT_TRUE(halves.has_value()) << ToString(halves.error());
  EXPECT_EQ(*halves, plan);
  EXPECT_EQ(ToJson(*halves), ToJson(plan));
}

TEST(Repetitions, DocumentsHaveTheMicrobatchItself) {
  Plan plan = WithMicrobatches({0, 1, 2});
  Trigger& last = plan.steps[0].triggers[1 + 2 * 5];
  ASSERT_EQ(last.microbatch, 2);
  EXPECT_EQ(MicrobatchOf(last, last.instructions[0]), 2);
  last.instructions.Edit()[0].microbatch_offset = -1;
  EXPECT_THAT(Describe(plan, last, last.instructions[0]), HasSubstr(" mb=1 "));
  ExpectReadsBack(plan, "a compute of another micro-batch");
}

TEST(Repetitions, ReadersShareEqualLists) {
  const Result<Plan> read = ParsePlan(ToJson(WithMicrobatches({0, 0, 1, 0})));
  ASSERT_TRUE(read.has_value());
  const std::vector<Trigger>& triggers = read->steps[0].triggers;
  EXPECT_TRUE(triggers[1].instructions.Shares(triggers[1 + 5].instructions));
  EXPECT_FALSE(triggers[1].instructions.Shares(triggers[1 + 10].instructions));
  EXPECT_TRUE(triggers[1].instructions.Shares(triggers[1 + 15].instructions));
}

TEST(Repetitions, WhoeverEditsAListEditsItAlone) {
  Plan plan = WithMicrobatches({0, 0});
  ShareInstructions(plan);
  std::vector<Trigger>& triggers = plan.steps[0].triggers;
  ASSERT_TRUE(triggers[1].instructions.Shares(triggers[6].instructions));
  const Plan copy = plan;
  triggers[1].instructions.Edit()[0].segment = 1;
  EXPECT_NE(triggers[1].instructions[0].segment, triggers[6].instructions[0].segment);
  EXPECT_EQ(copy, WithMicrobatches({0, 0}));
  triggers[1].instructions.Edit()[0].segment = 0;
  EXPECT_EQ(copy, plan);
}

void ExpectRefused(const std::string& entry, std::string_view message, int trigger = 6) {
  std::string json = ToJson(WithMicrobatches({0, 0}));
  const std::string whole = "{\"repeat\": {\"triggers\": 5, \"times\": 1}}";
  const std::size_t at = json.find(whole);
  ASSERT_NE(at, std::string::npos);
  json.replace(at, whole.size(), entry);
  const Result<Plan> read = ParsePlan(json);
  ASSERT_FALSE(read.has_value()) << entry;
  EXPECT_EQ(read.error().code, ErrorCode::kBadInput) << entry;
  EXPECT_THAT(read.error().pointer, HasSubstr("/steps/0/triggers/" + std::to_string(trigger))) << entry;
  EXPECT_THAT(ToString(read.error()), HasSubstr(message)) << entry;
}

TEST(Repetitions, WhatCannotBeRepeatedIsRefused) {
  ExpectRefused("{\"repeat\": {\"triggers\": 7, \"times\": 1}}", "at most the 6 triggers before it");
  ExpectRefused("{\"repeat\": {\"triggers\": 5, \"times\": 2147483647}}", "triggers in a step");
  ExpectRefused("{\"repeat\": {\"triggers\": 2147483647, \"times\": 2147483647}}", "at most the 6 triggers");
  ExpectRefused("{\"repeat\": {\"triggers\": 5, \"times\": 99999999999}}", "an integer from 1");
  ExpectRefused("{\"repeat\": {\"triggers\": 0, \"times\": 1}}", "an integer from 1");
  ExpectRefused("{\"repeat\": {\"triggers\": 5, \"times\": 0}}", "an integer from 1");
  ExpectRefused("{\"repeat\": {\"triggers\": 5}}", "\"times\" is missing");
  ExpectRefused("{\"repeat\": {\"triggers\": 5, \"times\": 1, \"kind\": \"x\"}}", "unknown field");
  ExpectRefused("{\"repeat\": {\"triggers\": 5, \"times\": 1}, \"kind\": \"step_end\"}", "unknown field");
  ExpectRefused("{\"repeat\": 5}", "wrong type");
  // The numbers of micro-batches end.
  ExpectRefused(
      "{\"kind\": \"user_call\", \"microbatch\": 2147483640, \"instructions\": []}, "
      "{\"repeat\": {\"triggers\": 1, \"times\": 7}}, {\"repeat\": {\"triggers\": 1, \"times\": 1}}",
      "micro-batches up to 2147483647", 8);
}

TEST(Repetitions, TextSaysWhatItExpects) {
  const std::string text = PlanText(WithMicrobatches({0, 0, 0}));
  const std::string whole = "repeat the last 5 triggers 2 times";
  const std::size_t at = text.find(whole);
  ASSERT_NE(at, std::string::npos);
  for (const std::string wrong :
       {"repeat", "repeat the last 5 triggers", "repeat the last x triggers 2 times",
        "repeat the last 5 triggers 2 times more", "repeat the last 99 triggers 2 times",
        "repeat the last 5 triggers 0 times", "repeat the last -5 triggers 2 times"}) {
    const Result<Plan> read = ParsePlanText(std::string(text).replace(at, whole.size(), wrong));
    ASSERT_FALSE(read.has_value()) << wrong;
    EXPECT_THAT(read.error().pointer, HasSubstr("line ")) << wrong;
  }
}

}  // namespace
}  // namespace shardplan
