#include "memory_trials.h"

#include <fmt/format.h>

#include <algorithm>

#include "shardplan/planner/planner.h"
#include "shardplan/schemas/io.h"
#include "shardplan/simulator/memory_profile.h"

namespace shardplan::cli {
namespace {

struct Candidate {
  std::string knob;
  Strategy strategy;
};

std::vector<Candidate> CommonCandidates(const Plan& plan) {
  std::vector<Candidate> candidates;
  const auto add = [&](std::string knob) -> Strategy& {
    candidates.push_back({std::move(knob), plan.strategy});
    return candidates.back().strategy;
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
  if (plan.strategy.optimizer.kind != OptimizerKind::kAdafactor) {
    add("optimizer implementation: fused").optimizer.implementation = OptimizerImplementation::kFused;
  }
  add("optimizer implementation: for_loop").optimizer.implementation = OptimizerImplementation::kForLoop;
  if (plan.strategy.mixed_precision) {
    add("reduce_dtype: bfloat16").mixed_precision->reduce_dtype = DType::kBFloat16;
  }
  Strategy& synced = add("gradient sync in every micro-batch");
  for (StepProgram& step : synced.program) {
    std::erase_if(step, [](const ProgramCall& call) {
      const auto* module = std::get_if<ModuleCall>(&call);
      return module != nullptr &&
             (module->method == "set_requires_gradient_sync" || module->method == "no_sync");
    });
  }
  return candidates;
}

void AddFsdp2Candidates(const Plan& plan, std::vector<Candidate>& candidates) {
  const auto reshard = [&](bool value) {
    Strategy strategy = plan.strategy;
    strategy.reshard_after_forward = value;
    for (UnitRule& rule : strategy.units) rule.reshard_after_forward = value;
    return strategy;
  };
  candidates.push_back({"reshard_after_forward: true, of the root too", reshard(true)});
  Strategy none = plan.strategy;
  none.fsdp2.forward_prefetch = none.fsdp2.backward_prefetch = 0;
  none.fsdp2.forward_prefetch_lists.clear();
  none.fsdp2.backward_prefetch_lists.clear();
  candidates.push_back({"no prefetch, forward or backward", none});
  Strategy loop = plan.strategy;
  loop.fsdp2.reduce_scatter_inputs_in_flight = 1;
  candidates.push_back({"one reduce-scatter input in flight", loop});
}

void AddFsdp1Candidates(const Plan& plan, std::vector<Candidate>& candidates) {
  Strategy full = plan.strategy;
  full.fsdp1.sharding = Fsdp1Sharding::kFullShard;
  candidates.push_back({"sharding: full_shard", full});
  Strategy none = plan.strategy;
  none.fsdp1.backward_prefetch = Fsdp1BackwardPrefetch::kNone;
  none.fsdp1.forward_prefetch = false;
  candidates.push_back({"no prefetch, forward or backward", none});
  Strategy limit = plan.strategy;
  limit.fsdp1.limit_all_gathers = true;
  candidates.push_back({"limit_all_gathers: true", limit});
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
  std::vector<Candidate> candidates = CommonCandidates(plan);
  if (plan.policy == "fsdp2") AddFsdp2Candidates(plan, candidates);
  if (plan.policy == "fsdp1") AddFsdp1Candidates(plan, candidates);
  const MemoryOptions options{.kernel_temporaries = kernel_temporaries};
  const Bytes peak = ProfileMemory(plan, options).peak_bytes;
  std::vector<KnobTrial> trials;
  for (const Candidate& candidate : candidates) {
    if (candidate.strategy == plan.strategy) continue;
    // A combination that the policy refuses is no way out.
    const Result<PlannerOutput> planned =
        MakePlan(trace, candidate.strategy, plan.cluster, {.verify = false});
    if (!planned) continue;
    const Bytes bytes = ProfileMemory(planned->plan, options).peak_bytes;
    if (bytes != peak) trials.push_back({candidate.knob, bytes});
  }
  std::ranges::stable_sort(trials, {}, [](const KnobTrial& t) { return t.peak_bytes; });
  return trials;
}

std::string TrialsTable(const std::vector<KnobTrial>& trials, Bytes peak_bytes) {
  std::string text =
      fmt::format("\n{:<48} {:>18} {:>18}\n", "planned again with", "peak, bytes", "difference");
  for (const KnobTrial& trial : trials) {
    text += fmt::format("{:<48} {:>18} {:>+18}\n", trial.knob, trial.peak_bytes.value,
                        (trial.peak_bytes - peak_bytes).value);
  }
  return trials.empty() ? "\nno single knob changes the peak\n" : text;
}

}  // namespace shardplan::cli
