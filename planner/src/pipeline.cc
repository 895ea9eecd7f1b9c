// The planner's table of contents: every pass, in order, through one choke point.
#include <algorithm>
#include <chrono>
#include <functional>
#include <optional>

#include "passes/linearise.h"
#include "passes/passed_through.h"
#include "passes/place_events.h"
#include "passes/record_order.h"
#include "passes/schedule_graph.h"
#include "policy/fsdp1/fsdp1_frozen.h"
#include "policy/fsdp1/fsdp1_units.h"
#include "shardplan/planner/planner.h"
#include "shardplan/schemas/io.h"
#include "shardplan/schemas/verifier.h"
#include "units/model_index.h"
#include "units/partition.h"
#include "units/split_ties.h"

namespace shardplan {
namespace {

// What the passes hand on to each other.
struct Planning {
  const Trace* trace;  // the one to plan: given, or as the passes changed it
  const Strategy& strategy;
  const Cluster& cluster;
  Trace checkpointed, split, with_gradients, joined;
  ModelIndex index;
  Partition partition;
  std::vector<RecordedStep> steps;
  ScheduleGraph graph;
  std::vector<KnownFault> faults;
  PlannerOutput output;
};

struct PlanningPass {
  std::string_view name;
  Status (*run)(Planning&);
};

template <typename T>
Status Keep(Result<T> result, T& into) {
  if (!result) return std::unexpected(std::move(result.error()));
  into = std::move(*result);
  return {};
}

Status ApplyCheckpointingPass(Planning& p) {
  if (!p.strategy.checkpoint) return {};
  if (Status s = Keep(ApplyCheckpointing(*p.trace, *p.strategy.checkpoint), p.checkpointed); !s) return s;
  p.trace = &p.checkpointed;
  return {};
}

Status ChooseUnitsPass(Planning& p) {
  if (Status s = Keep(MakeModelIndex(*p.trace), p.index); !s) return s;
  return Keep(ChooseUnits(*p.trace, p.index, p.strategy, p.cluster.ranks), p.partition);
}

Status SplitTiesPass(Planning& p) {
  std::optional<SplitTrace> split = SplitTies(*p.trace, p.index, p.partition);
  if (!split) return {};
  p.split = std::move(split->trace);
  p.trace = &p.split;
  p.partition = std::move(split->partition);
  return {};
}

Status ExtendGradientsPass(Planning& p) {
  if (p.strategy.policy != "fsdp1") return {};
  std::optional<Trace> extended = WithGradientsOfFrozenParts(*p.trace, p.index, p.partition);
  if (!extended) return {};
  p.with_gradients = std::move(*extended);
  p.trace = &p.with_gradients;
  return {};
}

Status JoinTensorsPass(Planning& p) {
  std::optional<Trace> joined =
      JoinPassedThrough(*p.trace, p.index, p.partition, p.strategy.policy == "fsdp1");
  if (!joined) return {};
  p.joined = std::move(*joined);
  p.trace = &p.joined;
  return {};
}

Status RecordOrderPass(Planning& p) {
  return Keep(RecordOrder(*p.trace, p.index, p.partition, p.strategy), p.steps);
}

Status PlaceEventsPass(Planning& p) {
  Plan& plan = p.output.plan;
  for (const UnitChoice& choice : p.partition.units) plan.units.push_back(choice.unit);
  return PlaceEvents({*p.trace, p.index, p.partition, p.strategy, p.steps}, plan, p.faults);
}

Status BuildGraphPass(Planning& p) {
  p.graph = BuildScheduleGraph(p.output.plan);
  return {};
}

Status LinearisePass(Planning& p) {
  if (Status s = Linearise(p.graph, p.output.plan); !s) return s;
  p.output.graph_dot = WriteGraphviz(p.graph, p.output.plan);
  return {};
}

Status DescribePass(Planning& p) {
  Plan& plan = p.output.plan;
  plan.model = p.trace->model;
  plan.policy = p.strategy.policy;
  plan.world_size = p.cluster.ranks;
  plan.mesh = p.partition.mesh;
  plan.communicators = p.partition.communicators;
  plan.cluster = p.cluster;
  plan.strategy = p.strategy;
  plan.inputs = p.trace->inputs;
  plan.model_buffers = p.trace->buffers;
  if (p.strategy.policy == "fsdp1") {
    Result<std::set<ModuleId>> ignored = IgnoredModules(*p.trace, p.index, p.strategy);
    if (!ignored) return std::unexpected(ignored.error());
    CastBuffers(p.index, p.partition, *ignored, plan.model_buffers);
  }
  std::int64_t forwards = 0;  // that are trained on, in the step that repeats
  if (!p.strategy.program.empty()) {
    for (const ProgramCall& call : p.strategy.program.back()) {
      const auto* backward = std::get_if<BackwardCall>(&call);
      if (backward != nullptr) forwards += static_cast<std::int64_t>(backward->microbatches.size());
    }
  } else {
    forwards = 1;
  }
  plan.tokens_per_step = p.trace->tokens_per_batch * forwards;
  return {};
}

constexpr PlanningPass kPasses[] = {
    {"apply_checkpointing", ApplyCheckpointingPass},
    {"choose_units", ChooseUnitsPass},
    {"split_ties", SplitTiesPass},
    {"extend_gradients", ExtendGradientsPass},
    {"join_tensors", JoinTensorsPass},
    {"record_order", RecordOrderPass},
    {"place_events", PlaceEventsPass},
    {"build_graph", BuildGraphPass},
    {"linearise", LinearisePass},
    {"describe", DescribePass},
};

// Every pass goes through here: run, time, report.
Status RunTimed(std::string_view name, const PlanOptions& options, const std::function<Status()>& run) {
  const auto begin = std::chrono::steady_clock::now();
  Status status = run();
  const auto wall = std::chrono::steady_clock::now() - begin;
  if (options.on_pass) {
    options.on_pass(name, Nanoseconds{std::chrono::duration_cast<std::chrono::nanoseconds>(wall).count()});
  }
  return status;
}

// Violations that PyTorch has, too, are told, not refused: the plan is what PyTorch does.
Status VerifyPlan(const Plan& plan, const std::vector<KnownFault>& faults, std::vector<std::string>& told) {
  for (const Violation& violation : Verify(plan)) {
    const auto known = std::ranges::find(faults, violation.rule, &KnownFault::rule);
    if (known == faults.end()) {
      return std::unexpected(
          Error{.code = ErrorCode::kInternal,
                .message = "the plan does not verify (a bug of the planner): " + Explain(plan, violation)});
    }
    std::string fault = known->why + "\n" + Explain(plan, violation);
    if (told.empty() || told.back() != fault) told.push_back(std::move(fault));
  }
  return {};
}

}  // namespace

Result<PlannerOutput> MakePlan(const Trace& trace, const Strategy& strategy, const Cluster& cluster,
                               const PlanOptions& options) {
  Planning planning{.trace = &trace, .strategy = strategy, .cluster = cluster};
  for (const PlanningPass& pass : kPasses) {
    Status status = RunTimed(pass.name, options, [&] { return pass.run(planning); });
    if (!status) return std::unexpected(std::move(status.error()));
  }
  Plan& plan = planning.output.plan;
  Status status = RunTimed("digest", options, [&] -> Status {
    plan.digests = {Digest(ToJson(trace)), Digest(ToJson(strategy)), Digest(ToJson(cluster))};
    return {};
  });
  if (options.verify)
    status = RunTimed("verify", options,
                      [&] { return VerifyPlan(plan, planning.faults, planning.output.faults); });
  if (!status) return std::unexpected(std::move(status.error()));
  return std::move(planning.output);
}

}  // namespace shardplan
