#include "tests/fuzz/fuzz_targets.h"

#include <cstdio>
#include <cstdlib>

#include "shardplan/schemas/io.h"
#include "shardplan/schemas/plan_text.h"
#include "shardplan/schemas/verifier.h"

namespace shardplan::test {
namespace {

void Require(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "does not hold: %s\n", what);
  std::abort();
}

void CheckError(const Error& error) {
  Require(error.code == ErrorCode::kBadInput, "bad bytes are bad input");
  Require(!error.message.empty() && !ToString(error).empty(), "an error has a message");
}

template <typename T>
Result<T> Check(std::string_view bytes, Result<T> (*parse)(std::string_view)) {
  Result<T> value = parse(bytes);
  if (!value.has_value()) {
    CheckError(value.error());
    return value;
  }
  const std::string text = ToJson(*value);
  const Result<T> again = parse(text);
  Require(again.has_value(), "what was written is read");
  Require(*again == *value, "what was written is read as the same value");
  Require(ToJson(*again) == text, "the canonical text stays as it is");
  return value;
}

void CheckPlan(const Plan& plan) {
  const Result<Plan> again = ParsePlanText(PlanText(plan));
  Require(again.has_value(), "the text form is read");
  Require(*again == plan, "the text form is read as the same plan");
  Require(DescribeDifferences(plan, *again).empty(), "equal plans have no differences");
  for (const Violation& violation : Verify(plan))
    Require(!Explain(plan, violation).empty(), "violations are explained");
}

}  // namespace

void FuzzTrace(std::string_view bytes) { Check(bytes, ParseTrace); }
void FuzzCluster(std::string_view bytes) { Check(bytes, ParseCluster); }
void FuzzStrategy(std::string_view bytes) { Check(bytes, ParseStrategy); }
void FuzzReport(std::string_view bytes) { Check(bytes, ParseReport); }
void FuzzPlan(std::string_view bytes) {
  const Result<Plan> plan = Check(bytes, ParsePlan);
  if (plan.has_value()) CheckPlan(*plan);
}
void FuzzPlanText(std::string_view bytes) {
  const Result<Plan> plan = ParsePlanText(bytes);
  if (plan.has_value()) {
    CheckPlan(*plan);
  } else {
    CheckError(plan.error());
    Require(plan.error().pointer.starts_with("line "), "an error names the line");
  }
}

}  // namespace shardplan::test
