// virtual_soak: runs planned cases under many adversarial orders.
#include <fmt/format.h>

#include <chrono>
#include <string>
#include <vector>

#include "shardplan/planner/planner.h"
#include "shardplan/schemas/verifier.h"
#include "tests/virtual/checked_run.h"
#include "tests/virtual/plan_cases.h"

namespace shardplan::test {
namespace {

bool RunCase(const PlanCase& c, std::uint64_t seeds) {
  const auto begin = std::chrono::steady_clock::now();
  const Result<PlannerOutput> planned = MakePlan(c.trace, c.strategy, c.cluster, {.verify = false});
  if (!planned) {
    fmt::print("{}: {}\n", c.name, ToString(planned.error()));
    return false;
  }
  const Plan& plan = planned->plan;
  const std::vector<Violation> violations = Verify(plan);
  ExpectedValues expected(plan, c.trace, c.steps);
  Findings all;
  std::uint64_t ran = 0;
  for (std::uint64_t seed = 1; seed <= seeds && all.failure.empty(); ++seed, ++ran) {
    const Findings findings = RunChecked(plan, expected, seed);
    if (!findings.failure.empty()) all.failure = fmt::format("seed {}: {}", seed, findings.failure);
    all.stale.insert(findings.stale.begin(), findings.stale.end());
  }
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  fmt::print(
      "{}: {} ranks, {} steps, {} seeds in {:.2f} s: {}{}\n", c.name, plan.world_size, c.steps, ran, seconds,
      all.failure.empty() ? "right" : all.failure,
      violations.empty() ? "" : fmt::format("; verifier: {} {}", violations.size(), violations[0].message));
  for (const std::string& stale : all.stale) fmt::print("    {}\n", stale);
  std::fflush(stdout);
  return all.failure.empty();
}

}  // namespace
}  // namespace shardplan::test

int main(int argc, char** argv) {
  using namespace shardplan::test;
  const std::uint64_t seeds = argc > 1 ? std::stoull(argv[1]) : 10;
  const std::string filter = argc > 2 ? argv[2] : "";
  std::size_t right = 0, cases = 0;
  for (const std::string& name : RecordedNames()) {
    if (name.find(filter) == std::string::npos) continue;
    ++cases;
    right += RunCase(RecordedCase(name), seeds) ? 1 : 0;
  }
  fmt::print("{} of {} cases right\n", right, cases);
  return right == cases ? 0 : 1;
}
