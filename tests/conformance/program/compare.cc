// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <algorithm>

#include "events.h"
#include "shardplan/planner/planner.h"
#include "shardplan/verifier/verifier.h"

namespace shardplan::conformance {
namespace {

constexpr const char* kFsdp2Keys[] = {"step",  "phase", "op",   "unit", "bytes", "dtype", "group",
                                      "ranks", "to",    "noop", "via",  "kind",  "param"};
constexpr const char* kFsdp1Keys[] = {"step",  "phase", "op",   "unit",        "bytes",    "dtype",
                                      "group", "ranks", "free", "freed_bytes", "prefetch", "param"};
constexpr std::size_t kContext = 6;

// Lines of an FSDP1 log that are no core operation.
bool IsCompared(const LogEvent& event, const std::string& policy) {
  if (policy != "fsdp1") return true;
  const std::string op = event.At("op");
  return op != "stream_wait" && op != "root_pre_forward" && !op.starts_with("use_") &&
         event.At("skipped").empty() && event.At("handle").empty();
}

}  // namespace

const PlanStep& StepAt(const Plan& plan, std::int32_t step) {
  const auto count = static_cast<std::int32_t>(plan.steps.size());
  if (step < count) return plan.steps[step];
  return plan.steps[plan.steady_step + (step - plan.steady_step) % (count - plan.steady_step)];
}

std::string Text(const LogEvent& event, const std::string& policy) {
  std::string text;
  const auto add = [&](const char* key) {
    if (const auto found = event.keys.find(key); found != event.keys.end()) {
      text += fmt::format("{}{}={}", text.empty() ? "" : " ", key, found->second);
    }
  };
  if (policy == "fsdp1") {
    for (const char* key : kFsdp1Keys) add(key);
  } else {
    for (const char* key : kFsdp2Keys) add(key);
  }
  return text;
}

Comparison Compare(const Recording& recording) {
  // PyTorch may issue what is wrong: the events are compared all the same.
  const PlanOptions options{.verify = false};
  const Result<PlannerOutput> planned =
      MakePlan(recording.trace, recording.strategy, recording.cluster, options);
  if (!planned) return {.difference = "does not plan: " + ToString(planned.error())};
  return ComparePlan(recording, planned->plan);
}

Comparison ComparePlan(const Recording& recording, const Plan& plan) {
  Comparison comparison;
  const std::vector<Violation> violations = Verify(plan);
  if (!violations.empty()) comparison.objection = Explain(plan, violations.front());
  std::vector<std::string> expected, made;
  for (const LogEvent& event : recording.events) {
    if (IsCompared(event, recording.policy)) expected.push_back(Text(event, recording.policy));
  }
  const std::vector<LogEvent> events =
      recording.policy == "fsdp1" ? Fsdp1Events(recording, plan) : Fsdp2Events(recording, plan);
  for (const LogEvent& event : events) made.push_back(Text(event, recording.policy));
  const auto [e, m] = std::mismatch(expected.begin(), expected.end(), made.begin(), made.end());
  comparison.matches = e == expected.end() && m == made.end();
  if (comparison.matches) return comparison;
  const auto at = static_cast<std::size_t>(e - expected.begin());
  std::string& text = comparison.difference;
  text = fmt::format("event {} of {}\n", at, expected.size());
  for (std::size_t i = at < kContext ? 0 : at - kContext; i < at; ++i) text += "    " + expected[i] + "\n";
  for (std::size_t i = at; i < std::min(at + kContext, expected.size()); ++i) {
    text += "  - " + expected[i] + "\n";
  }
  for (std::size_t i = at; i < std::min(at + kContext, made.size()); ++i) text += "  + " + made[i] + "\n";
  return comparison;
}

}  // namespace shardplan::conformance
