// SPDX-License-Identifier: Apache-2.0
#include "texts/memory_trials.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "shardplan/planner/planner.h"
#include "shardplan/schemas/io.h"
#include "shardplan/schemas/optimizers.h"
#include "shardplan/schemas/policy_knobs.h"
#include "shardplan/schemas/printable.h"
#include "shardplan/simulator/memory_profile.h"

namespace shardplan::cli {
namespace {

struct Candidate {
  KnobChange change;
  bool changes_numbers = false;
};

// Changes that every policy knows.
std::vector<Candidate> CommonChanges(const Plan& plan) {
  std::vector<Candidate> candidates;
  const auto add = [&](std::string knob, bool changes_numbers = false) -> Strategy& {
    candidates.push_back({{std::move(knob), plan.strategy}, changes_numbers});
    return candidates.back().change.strategy;
  };
  if (!plan.strategy.checkpoint) {
    CheckpointRule rule;
    for (const Unit& unit : plan.units) {
      if (!unit.fqn.empty())
        rule.modules.insert(rule.modules.end(), unit.modules.begin(), unit.modules.end());
    }
    if (!rule.modules.empty()) add("checkpoint every unit but the root").checkpoint = rule;
  }
  add("cpu_offload: true").cpu_offload = true;
  if (DescriptionOf(plan.strategy.optimizer.kind).has_fused) {
    add("optimizer implementation: fused", true).optimizer.implementation = OptimizerImplementation::kFused;
  }
  add("optimizer implementation: for_loop").optimizer.implementation = OptimizerImplementation::kForLoop;
  if (plan.strategy.mixed_precision) {
    add("reduce_dtype: bfloat16", true).mixed_precision->reduce_dtype = DType::kBFloat16;
  }
  const std::string& method = KnobsOf(plan.policy).accumulation_call;
  Strategy& synced = add("gradient sync in every micro-batch", true);
  for (StepProgram& step : synced.program) {
    std::erase_if(step, [&](const ProgramCall& call) {
      const auto* module = std::get_if<ModuleCall>(&call);
      return module != nullptr && module->method == method;
    });
  }
  return candidates;
}

}  // namespace

Result<std::vector<KnobTrial>> TryKnobs(const Plan& plan, const Trace& trace, bool kernel_temporaries) {
  if (const std::string digest = Digest(ToJson(trace)); digest != plan.digests.trace) {
    Error error{ErrorCode::kBadInput, "the plan was made from another trace"};
    error.pointer = "/digests/trace";
    error.found = digest;
    error.expected = plan.digests.trace;
    return std::unexpected(error);
  }
  if (!IsBuiltIn(plan.policy)) {
    return MakeInputError("/policy", "only plans of policies that are built in are planned again",
                          plan.policy);
  }
  const PolicyKnobs& policy = KnobsOf(plan.policy);
  std::vector<Candidate> candidates = CommonChanges(plan);
  // A policy's own change when something is gathered, freed or sent, and no values.
  for (KnobChange& change : policy.memory_changes(plan.strategy)) candidates.push_back({std::move(change)});
  const MemoryOptions options{.kernel_temporaries = kernel_temporaries};
  const Bytes peak = ProfileMemory(plan, options).peak_bytes;
  std::vector<KnobTrial> trials;
  for (const auto& [candidate, changes_numbers] : candidates) {
    if (candidate.strategy == plan.strategy) continue;
    // A combination that the policy refuses is no way out.
    const Result<PlannerOutput> planned =
        MakePlan(trace, candidate.strategy, plan.cluster, {.verify = false});
    if (!planned) continue;
    const Bytes bytes = ProfileMemory(planned->plan, options).peak_bytes;
    if (bytes != peak) trials.push_back({candidate.knob, bytes, changes_numbers});
  }
  std::ranges::stable_sort(trials, {},
                           [](const KnobTrial& t) { return std::pair(t.changes_numbers, t.peak_bytes); });
  return trials;
}

std::string TrialsTable(const std::vector<KnobTrial>& trials, Bytes peak_bytes) {
  std::string text =
      fmt::format("\n{:<48} {:>18} {:>18}\n", "planned again with", "peak, bytes", "difference");
  for (const KnobTrial& trial : trials) {
    text +=
        fmt::format("{:<48} {:>18} {:>+18}{}\n", Printable(trial.knob), trial.peak_bytes.value,
                    (trial.peak_bytes - peak_bytes).value, trial.changes_numbers ? "  changes numbers" : "");
  }
  return trials.empty() ? "\nno single knob changes the peak\n" : text;
}

}  // namespace shardplan::cli
