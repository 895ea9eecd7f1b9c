// SPDX-License-Identifier: Apache-2.0
// virtual_soak: runs planned cases under many adversarial orders, and every mutation of their plans.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <array>
#include <chrono>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "shardplan/planner/planner.h"
#include "shardplan/schemas/program.h"
#include "shardplan/verifier/verifier.h"
#include "tests/executor/virtual/checked_run.h"
#include "tests/executor/virtual/edits.h"
#include "tests/executor/virtual/field_mutations.h"
#include "tests/executor/virtual/mutations.h"
#include "tests/executor/virtual/plan_cases.h"

namespace shardplan::test {
namespace {

using Clock = std::chrono::steady_clock;
double Since(Clock::time_point begin) { return std::chrono::duration<double>(Clock::now() - begin).count(); }

struct Options {
  std::uint64_t seeds = 1000;
  std::string filter;
  std::uint32_t random = 0;
  bool mutations = false;
  std::uint64_t fields = 0;  // every so many-th mutation of a field; 0: none
  std::uint64_t offset = 0;
  std::uint64_t edits = 0;  // random pairs of edits of every plan
  std::uint64_t first_edit = 0;
  bool on_demand = false;  // not the steps, but what the procedures do
  std::uint64_t seeds_to_find = 2000;
  std::uint64_t seeds_to_trust = 20;
};

struct Totals {
  std::uint64_t cases = 0, right = 0, faulty = 0, refused = 0, runs = 0, mutations = 0;
  std::array<std::array<std::uint64_t, kVerdicts>, kMutationKinds> verdicts = {};  // by kind and verdict
  std::map<std::string, std::array<std::uint64_t, kVerdicts>> fields;
  std::uint64_t disagreements = 0;
};

void RunMutations(const PlanCase& c, const Plan& plan, ExpectedValues& expected,
                  const std::set<std::string>& stale, const Options& options, Totals& totals) {
  const auto begin = Clock::now();
  const std::vector<Mutation> mutations = MutationsOf(plan);
  std::array<std::uint64_t, kVerdicts> counts = {};
  std::uint64_t most_seeds = 0, all_seeds = 0;
  const PlanJudge judge(plan, expected, stale, options.seeds_to_find, options.seeds_to_trust);
  for (const Mutation& mutation : mutations) {
    const Judgement judgement = judge.Judge(mutation);
    ++counts[static_cast<int>(judgement.verdict)];
    ++totals.verdicts[static_cast<int>(mutation.kind)][static_cast<int>(judgement.verdict)];
    if (judgement.verdict == Verdict::kCaught) {
      most_seeds = std::max(most_seeds, judgement.seeds);
      all_seeds += judgement.seeds;
    }
    if (judgement.verdict != Verdict::kMissedByVirtual && judgement.verdict != Verdict::kMissedByVerifier)
      continue;
    fmt::print("  disagreement: {}\n    verifier: {}\n    run: {}\n", Describe(plan, mutation),
               judgement.verifier, judgement.run);
  }
  totals.mutations += mutations.size();
  fmt::print(
      "  {}: {} mutations in {:.1f} s: {} caught (with {} seeds, at most {}), {} harmless, {} and {} missed "
      "by virtual "
      "and verifier, {} of idle work\n",
      c.name, mutations.size(), Since(begin), counts[0], all_seeds, most_seeds, counts[1], counts[2],
      counts[3], counts[4]);
}

void RunFields(const PlanCase& c, const Plan& plan, ExpectedValues& expected,
               const std::set<std::string>& stale, const Options& options, Totals& totals) {
  const auto begin = Clock::now();
  std::array<std::uint64_t, kVerdicts> counts = {};
  const PlanJudge judge(plan, expected, stale, options.seeds_to_find, options.seeds_to_trust);
  ForEachFieldMutation(plan, options.offset % options.fields, options.fields, [&](const FieldMutation& m) {
    const Judgement judgement = judge.Judge(m);
    const auto verdict = static_cast<std::size_t>(judgement.verdict);
    ++counts[verdict];
    ++totals.fields[m.kind][verdict];
    if (judgement.verdict != Verdict::kMissedByVirtual && judgement.verdict != Verdict::kMissedByVerifier)
      return;
    ++totals.disagreements;
    fmt::print("  disagreement: {}: {}\n    verifier: {}\n    run: {}\n", c.name, m.what, judgement.verifier,
               judgement.run);
    std::fflush(stdout);
  });
  fmt::print("  {}: fields in {:.1f} s: {}\n", c.name, Since(begin), fmt::join(counts, " "));
}

// Whether pairs that the verifier refuses go wrong is not asked in many orders.
void RunEdits(const PlanCase& c, const Plan& plan, ExpectedValues& expected,
              const std::set<std::string>& stale, const Options& options, Totals& totals) {
  const auto begin = Clock::now();
  std::array<std::uint64_t, kVerdicts> counts = {};
  const PlanJudge judge(plan, expected, stale, 1, options.seeds_to_trust);
  for (std::uint64_t seed = options.first_edit; seed < options.first_edit + options.edits; ++seed) {
    const FieldMutation edited = RandomEdits(plan, seed, 2);
    if (edited.plan == plan) continue;
    const Judgement judgement = judge.Judge(edited);
    const auto verdict = static_cast<std::size_t>(judgement.verdict);
    ++counts[verdict];
    ++totals.fields[edited.kind][verdict];
    if (judgement.verdict != Verdict::kMissedByVerifier) continue;
    ++totals.disagreements;
    fmt::print("  disagreement: {}, seed {}: {}\n    run: {}\n", c.name, seed, edited.what, judgement.run);
    std::fflush(stdout);
  }
  fmt::print("  {}: edits in {:.1f} s: {}\n", c.name, Since(begin), fmt::join(counts, " "));
}

void RunCase(const PlanCase& c, const Options& options, Totals& totals) {
  if (c.name.find(options.filter) == std::string::npos) return;
  ++totals.cases;
  const auto begin = Clock::now();
  const Result<PlannerOutput> planned = MakePlan(c.trace, c.strategy, c.cluster, {.verify = false});
  if (!planned) {
    fmt::print("{}: {}\n", c.name, ToString(planned.error()));
    ++totals.refused;
    return;
  }
  if (options.on_demand && !HasNumbersOnDemand(planned->plan, c.trace)) {
    ++totals.refused;
    return;
  }
  const Plan plan = options.on_demand ? OnDemandProgramOf(planned->plan).plan : planned->plan;
  const std::vector<Violation> violations = Verify(plan);
  const std::int64_t steps = options.on_demand ? OnDemandStepsWithNumbers(plan)
                                               : std::max<std::int64_t>(c.steps, std::ssize(plan.steps) + 1);
  const Plan of_trace = options.on_demand ? WithPassesOfTrace(plan) : plan;
  ExpectedValues expected(of_trace, c.trace, steps);
  std::string failure;
  std::set<std::string> stale;
  std::uint64_t seed = 0;
  while (seed < options.seeds && failure.empty()) {
    const Findings findings = RunChecked(plan, expected, ++seed);
    if (!findings.failure.empty()) failure = fmt::format("seed {}: {}", seed, findings.failure);
    stale.insert(findings.stale.begin(), findings.stale.end());
  }
  const std::set<std::string> remarked = StaleUnits(plan);
  if (failure.empty() && violations.empty() && !std::ranges::includes(remarked, stale)) {
    failure = "reads stale parameters of which the verifier does not say so";
  }
  totals.runs += seed;
  totals.right += failure.empty() ? 1 : 0;
  totals.faulty += !failure.empty() && !violations.empty() ? 1 : 0;
  fmt::print("{}: {} ranks, {} steps, {} seeds in {:.2f} s: {}\n", c.name, plan.world_size, steps, seed,
             Since(begin), failure.empty() ? "right" : failure);
  for (const std::string& unit : stale)
    fmt::print("  stale parameters: {}\n", unit.empty() ? "(root)" : unit);
  for (const Violation& violation : violations) {
    fmt::print("  verifier: {}: {}\n", Name(violation.rule), violation.message);
  }
  if (options.fields > 0 && failure.empty()) RunFields(c, plan, expected, stale, options, totals);
  if (options.edits > 0 && failure.empty()) RunEdits(c, plan, expected, stale, options, totals);
  if (options.mutations && failure.empty()) RunMutations(c, plan, expected, stale, options, totals);
  std::fflush(stdout);
}

void PrintFields(const Totals& totals) {
  fmt::print(
      "changes: caught, harmless, missed by virtual, missed by the verifier, of idle work, misstated, left "
      "over\n");
  std::array<std::uint64_t, kVerdicts> all = {};
  std::map<std::string, std::array<std::uint64_t, kVerdicts>> by_change;  // whatever is changed
  for (const auto& [kind, v] : totals.fields) {
    fmt::print("  {}: {}\n", kind, fmt::join(v, " "));
    const std::string change =
        (kind.starts_with("buffer") ? "buffer: " : "") + kind.substr(kind.find(": ") + 2);
    for (int k = 0; k < kVerdicts; ++k) {
      all[k] += v[k];
      by_change[change][k] += v[k];
    }
  }
  fmt::print("by change: refused, harmless, wrong\n");
  for (const auto& [change, v] : by_change) {
    fmt::print("  {}: {} {} {}\n", change, v[0] + v[2] + v[4] + v[5] + v[6], v[1], v[3]);
  }
  fmt::print("all: {}\n", fmt::join(all, " "));
}

// The last line, for tools/nightly: changes of plans and, without any, plans.
void PrintCounts(const Totals& totals, std::uint64_t bad) {
  std::uint64_t changes = 0;
  for (const auto& [kind, verdicts] : totals.fields) {
    for (const std::uint64_t count : verdicts) changes += count;
  }
  fmt::print("cases {}, failures {}\n", changes > 0 ? changes : totals.cases, totals.disagreements + bad);
}

}  // namespace
}  // namespace shardplan::test

int main(int argc, char** argv) {
  using namespace shardplan::test;
  Options options;
  CLI::App app("Planner-made plans on the virtual machine, every number checked");
  app.add_option("--seeds", options.seeds, "orders of execution of each plan");
  app.add_option("--filter", options.filter, "only cases whose name contains this");
  app.add_option("--random", options.random, "number of random cases beside the recorded ones and the knobs");
  app.add_flag("--mutations", options.mutations, "break every plan in every way");
  app.add_option("--fields", options.fields, "change every so many-th field of every plan");
  app.add_option("--offset", options.offset, "... from this one");
  app.add_flag("--on-demand", options.on_demand, "what the procedures do, not the steps");
  app.add_option("--edits", options.edits, "random pairs of edits of every plan");
  app.add_option("--first-edit", options.first_edit, "... from this seed");
  app.add_option("--seeds-to-find", options.seeds_to_find,
                 "at most, for a mutation that the verifier objects to");
  app.add_option("--seeds-to-trust", options.seeds_to_trust, "for a mutation that the verifier accepts");
  CLI11_PARSE(app, argc, argv);
  const auto begin = Clock::now();
  Totals totals;
  for (const std::string& name : RecordedNames()) RunCase(RecordedCase(name), options, totals);
  for (const std::string& name : GoldenNames()) RunCase(GoldenCase(name), options, totals);
  for (const PlanCase& c : KnobCases()) RunCase(c, options, totals);
  for (std::uint32_t seed = 0; seed < options.random; ++seed) RunCase(RandomCase(seed), options, totals);
  fmt::print("{} cases: {} right, {} wrong as the verifier says, {} refused; {} runs in {:.0f} s\n",
             totals.cases, totals.right, totals.faulty, totals.refused, totals.runs, Since(begin));
  if (options.fields > 0) PrintFields(totals);
  if (options.edits > 0) {
    std::array<std::uint64_t, kVerdicts> all = {};
    for (const auto& [kind, v] : totals.fields) {
      for (int k = 0; k < kVerdicts; ++k) all[k] += v[k];
    }
    fmt::print("pairs of edits: {} refused, {} accepted and right, {} accepted and wrong\n",
               all[0] + all[2] + all[4] + all[5] + all[6], all[1], all[3]);
  }
  const std::uint64_t bad = totals.cases - totals.right - totals.faulty - totals.refused;
  const bool good = totals.disagreements == 0 && bad == 0;
  if (!options.mutations) {
    PrintCounts(totals, bad);
    return good ? 0 : 1;
  }
  fmt::print("{} mutations: caught, harmless, missed by virtual, missed by the verifier, of idle work\n",
             totals.mutations);
  for (int kind = 0; kind < kMutationKinds; ++kind) {
    const auto& v = totals.verdicts[kind];
    fmt::print("  {}: {}\n", Name(static_cast<MutationKind>(kind)), fmt::join(v, " "));
  }
  return good ? 0 : 1;
}
