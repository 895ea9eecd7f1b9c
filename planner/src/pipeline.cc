// SPDX-License-Identifier: Apache-2.0
// The planner's table of contents: every pass, in order, through one choke point.
#include "pipeline.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <utility>

#include "planner_passes.h"
#include "shardplan/planner/planner.h"
#include "shardplan/schemas/checks.h"
#include "shardplan/schemas/policy_knobs.h"
#include "shardplan/schemas/program.h"
#include "shardplan/schemas/pytorch_rules.h"
#include "shardplan/simulator/caching_allocator.h"
#include "units/muon_matrices.h"
#include "units/trace_mesh.h"

namespace shardplan {
namespace {

template <auto Run>
Status Keeping(const Task& task, Made& made);

struct PipelinePass {
  PlannerPass about;
  Status (*run)(const Task&, Made&);  // and puts away what the pass has made
  std::string (*dump)(const Task&, const Made&);
};

constexpr std::array<PipelinePass, 15> kPasses = {{
    // Recomputation adds forwards in the backward, and every later pass has to see them.
    {{"apply_checkpointing", "trace", ""}, Keeping<RunApplyCheckpointing>, TraceDump},
    // A compiled model runs, allocates and launches by fused kernels.
    {{"fuse_operators", "trace", ""}, Keeping<RunFuseOperators>, TraceDump},
    // The units decide which hooks exist and what a collective moves.
    {{"choose_units", "units", "split_ties"}, Keeping<RunChooseUnits>, UnitsDump},
    // Units that share a parameter each gather it, and each gets the gradient of its own modules.
    {{"split_ties", "trace", "record_order"}, Keeping<RunSplitTies>, TraceDump},
    // A flat parameter trains as a whole, so its backward runs through frozen parts, too.
    {{"extend_gradients", "trace", ""}, Keeping<RunExtendGradients>, TraceDump},
    // The tracer's identities around inputs split tensors that FSDP keeps as one, with all their hooks.
    {{"join_tensors", "trace", ""}, Keeping<RunJoinTensors>, TraceDump},
    // A policy acts at hooks, so it needs their order and no module.
    {{"record_order", "order", "place_events"}, Keeping<RunRecordOrder>, OrderDump},
    // The recorded order alone says when the last use before and the first use after are.
    {{"offload_activations", "order", ""}, Keeping<RunOffloadActivations>, OffloadsDump},
    // The policy runs here: instructions at every point, until its state repeats.
    {{"place_events", "plan", "describe"}, Keeping<RunPlaceEvents>, PlanDump},
    // PyTorch's own waits do not cover every copy of a shard that the host steps.
    {{"await_copies", "plan", ""}, Keeping<RunAwaitCopies>, PlanDump},
    // Dependencies say which instructions may move, and the order of emission does not.
    {{"build_graph", "graph", "linearise"}, Keeping<RunBuildGraph>, GraphDump},
    // The plan's order is taken from the graph, so that it holds by construction.
    {{"linearise", "plan", ""}, Keeping<RunLinearise>, PlanDump},
    // Readers of a plan know neither the trace nor the strategy.
    {{"describe", "plan", "every reader of the plan"}, Keeping<RunDescribe>, PlanDump},
    // The adapter refuses a plan of other inputs.
    {{"digest", "plan", ""}, Keeping<RunDigest>, PlanDump},
    // No plan leaves the planner with a fault that PyTorch does not have.
    {{"verify", "faults", ""}, Keeping<RunVerify>, FaultsDump},
}};

// Stores the result of a pass.
void Put(RewrittenTrace trace, Made& made) {
  if (trace != nullptr) made.rewritten = std::move(trace);
}
void Put(ChosenUnits units, Made& made) { made.units = std::move(units); }
void Put(std::optional<SplitTrace> split, Made& made) {
  if (!split) return;
  made.rewritten = std::make_shared<const Trace>(std::move(split->trace));
  made.units.partition = std::move(split->partition);
}
void Put(std::vector<RecordedStep> order, Made& made) { made.order = std::move(order); }
void Put(ActivationOffloads offloads, Made& made) { made.offloads = std::move(offloads); }
void Put(PlacedProgram placed, Made& made) {
  made.plan = std::move(placed.plan);
  made.possible_faults = std::move(placed.faults);
}
void Put(Plan plan, Made& made) { made.plan = std::move(plan); }
void Put(std::vector<ScheduleGraph> graphs, Made& made) { made.graphs = std::move(graphs); }
void Put(std::vector<PlanStep> steps, Made& made) { made.plan.steps = std::move(steps); }
void Put(Digests digests, Made& made) { made.plan.digests = std::move(digests); }
void Put(std::vector<std::string> faults, Made& made) { made.faults = std::move(faults); }

template <auto Run>
Status Keeping(const Task& task, Made& made) {
  auto result = Run(task, made);
  if (!result) return std::unexpected(std::move(result.error()));
  Put(*std::move(result), made);
  return {};
}

bool IsSkipped(std::string_view pass, const PlanOptions& options) {
  if (pass == "verify" && !options.verify) return true;
  // The schedule graph is that of a plan that verifies, which nobody knows yet of a library's.
  if (options.policy != nullptr && (pass == "build_graph" || pass == "linearise")) return true;
  return std::ranges::find(options.skip, pass) != options.skip.end();
}

Status CheckPassName(std::string_view name, std::string_view option) {
  if (std::ranges::find(kPasses, name, [](const PipelinePass& p) { return p.about.name; }) != kPasses.end())
    return {};
  std::vector<std::string_view> names;
  for (const PipelinePass& pass : kPasses) names.push_back(pass.about.name);
  return std::unexpected(Error{.code = ErrorCode::kUsage,
                               .message = fmt::format("{}: there is no such pass", option),
                               .found = std::string(name),
                               .expected = fmt::format("one of {}", fmt::join(names, ", "))});
}

Status CheckSkipped(const PlanOptions& options) {
  for (const std::string& name : options.skip) {
    if (Status s = CheckPassName(name, "skip"); !s) return s;
  }
  for (const PipelinePass& pass : kPasses) {
    const std::string_view user = pass.about.needed_by;
    if (user.empty() || !IsSkipped(pass.about.name, options) || IsSkipped(user, options)) continue;
    return std::unexpected(
        Error{.code = ErrorCode::kUsage,
              .message = fmt::format("the pass {} cannot be skipped: {} needs it", pass.about.name, user)});
  }
  return {};
}

// Makes the task; kBadInput or kUsage where there is nothing to begin with.
Result<Task> MakeTask(const Trace& trace, const Strategy& strategy, const Cluster& cluster,
                      const PlanOptions& options) {
  if (Status s = CheckSkipped(options); !s) return std::unexpected(std::move(s.error()));
  if (Status s = CheckTrace(trace); !s) return std::unexpected(std::move(s.error()));
  if (Status s = CheckKnobs(strategy); !s) return std::unexpected(std::move(s.error()));
  Result<Strategy> completed = CompleteStrategy(strategy, trace, cluster.ranks);
  if (!completed) return std::unexpected(std::move(completed.error()));
  Strategy planned = *std::move(completed);
  if (Status s = CheckKnobs(planned); !s) return std::unexpected(std::move(s.error()));
  if (Status s = CheckCluster(cluster); !s) return std::unexpected(std::move(s.error()));
  Result<PolicyPasses> policy = FindPolicy(planned, options.policy);
  if (!policy) return std::unexpected(std::move(policy.error()));
  const PolicyDescription* own = IsBuiltIn(planned.policy) ? nullptr : options.policy;
  if (own != nullptr) {
    Result<Strategy> known = WithPolicyKnobs(std::move(planned), *own);
    if (!known) return std::unexpected(std::move(known.error()));
    planned = *std::move(known);
  }
  return Task{trace, std::move(planned), cluster, *policy, own};
}

}  // namespace

Status RunPasses(const Task& task, std::string_view last, const PlanOptions& options, Made& made) {
  for (const PipelinePass& pass : kPasses) {
    if (!IsSkipped(pass.about.name, options)) {
      const auto begin = std::chrono::steady_clock::now();
      Status status = pass.run(task, made);
      const auto wall = std::chrono::steady_clock::now() - begin;
      if (options.on_pass) {
        options.on_pass(pass.about.name,
                        Nanoseconds{std::chrono::duration_cast<std::chrono::nanoseconds>(wall).count()});
      }
      if (!status) return status;
    }
    if (pass.about.name == last) break;
  }
  return {};
}

Result<Strategy> CompleteStrategy(Strategy strategy, const Trace& trace, std::int64_t ranks) {
  strategy.pytorch = PlannedPyTorch(strategy, trace);
  Result<Strategy> with_matrices = WithMuonMatrices(trace, WithCallsOf(trace, std::move(strategy)));
  if (!with_matrices) return with_matrices;
  return WithMeshOf(trace, *std::move(with_matrices), ranks);
}

Status CheckKnobs(const Strategy& strategy) {
  if (Status s = CheckStrategy(strategy); !s) return s;
  const Status settings = CheckAllocatorSettings(strategy.alloc_conf);
  if (settings) return {};
  const Error& error = settings.error();
  return MakeInputError("/alloc_conf", error.message, error.found, error.expected);
}

std::span<const PlannerPass> PlannerPasses() {
  static constexpr auto kAbout = [] {
    std::array<PlannerPass, kPasses.size()> about;
    for (std::size_t p = 0; p < kPasses.size(); ++p) about[p] = kPasses[p].about;
    return about;
  }();
  return kAbout;
}

Result<PlannerOutput> MakePlan(const Trace& trace, const Strategy& strategy, const Cluster& cluster,
                               const PlanOptions& options) {
  const Result<Task> task = MakeTask(trace, strategy, cluster, options);
  if (!task) return std::unexpected(task.error());
  Made made;
  if (Status s = RunPasses(*task, "", options, made); !s) return std::unexpected(std::move(s.error()));
  return PlannerOutput{.plan = std::move(made.plan), .faults = std::move(made.faults)};
}

Result<PassOutput> RunPassesUntil(std::string_view last, const Trace& trace, const Strategy& strategy,
                                  const Cluster& cluster, const PlanOptions& options) {
  if (Status s = CheckPassName(last, "stop after"); !s) return std::unexpected(s.error());
  if (IsSkipped(last, options)) {
    return std::unexpected(
        Error{.code = ErrorCode::kUsage,
              .message = fmt::format("the pass {} is skipped and makes nothing to stop after", last)});
  }
  const Result<Task> task = MakeTask(trace, strategy, cluster, options);
  if (!task) return std::unexpected(task.error());
  Made made;
  if (Status s = RunPasses(*task, last, options, made); !s) return std::unexpected(std::move(s.error()));
  const PipelinePass& pass =
      *std::ranges::find(kPasses, last, [](const PipelinePass& p) { return p.about.name; });
  return PassOutput{.makes = pass.about.makes, .text = pass.dump(*task, made)};
}

}  // namespace shardplan
