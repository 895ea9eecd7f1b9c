// The planner's table of contents: every pass, in order, through one choke point.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <utility>

#include "passes/await_copies.h"
#include "passes/describe.h"
#include "passes/dump.h"
#include "passes/fuse_operators.h"
#include "passes/linearise.h"
#include "passes/outside_reads.h"
#include "passes/passed_through.h"
#include "passes/place_events.h"
#include "passes/record_order.h"
#include "passes/schedule_analysis.h"
#include "passes/unseen_backward.h"
#include "plan_series.h"
#include "policy/policy_description.h"
#include "shardplan/planner/planner.h"
#include "shardplan/schemas/assert.h"
#include "shardplan/schemas/cluster_check.h"
#include "shardplan/schemas/io.h"
#include "shardplan/schemas/known_faults.h"
#include "shardplan/schemas/strategy_check.h"
#include "shardplan/schemas/trace_check.h"
#include "shardplan/simulator/caching_allocator.h"
#include "shardplan/simulator/cost_model.h"
#include "units/model_index.h"
#include "units/partition.h"
#include "units/split_ties.h"

namespace shardplan {
namespace {

// What there is to plan.
struct Task {
  const Trace& given;
  const Strategy& strategy;
  const Cluster& cluster;
  const PolicyDescription& policy;
  const PlanSeries* series = nullptr;  // has what its plans have in common
};

// What the passes have made of it so far: each takes what it needs and puts in what it returns.
struct Made {
  std::shared_ptr<const Trace> rewritten;  // the latest; none: the given trace stands
  std::shared_ptr<const ModelIndex> index;
  Partition partition;
  std::vector<RecordedStep> order;
  Plan plan;
  std::vector<PyTorchFault> possible_faults;  // that the policy knows of
  std::vector<ScheduleGraph> graphs;          // by step
  std::vector<std::string> faults;
};

const Trace& TraceOf(const Task& task, const Made& made) {
  return made.rewritten ? *made.rewritten : task.given;
}

PolicyInput InputOf(const Task& task, const Made& made) {
  return {TraceOf(task, made), *made.index, made.partition, task.strategy, made.order};
}

template <typename T>
Status Keep(Result<T> result, T& into) {
  if (!result) return std::unexpected(std::move(result.error()));
  into = std::move(*result);
  return {};
}

void Rewrite(std::optional<Trace> trace, Made& made) {
  if (trace) made.rewritten = std::make_shared<const Trace>(*std::move(trace));
}

Status RunApplyCheckpointing(const Task& task, Made& made) {
  if (task.series != nullptr) return Keep(task.series->Recomputing(task.strategy.checkpoint), made.rewritten);
  if (!task.strategy.checkpoint) return {};
  Result<Trace> trace = ApplyCheckpointing(TraceOf(task, made), *task.strategy.checkpoint);
  if (!trace) return std::unexpected(std::move(trace.error()));
  Rewrite(std::move(*trace), made);
  return {};
}

Status RunFuseOperators(const Task& task, Made& made) {
  if (task.strategy.compile) Rewrite(FuseOperators(TraceOf(task, made)), made);
  return {};
}

Status RunChooseUnits(const Task& task, Made& made) {
  const Trace& trace = TraceOf(task, made);
  made.index = task.series != nullptr ? task.series->index()
                                      : std::make_shared<const ModelIndex>(MakeModelIndex(trace));
  const std::unique_ptr<UnitMaker> maker = task.policy.make_units(trace, *made.index, task.strategy);
  return Keep(ChooseUnits(trace, *made.index, task.strategy, *maker, task.cluster.ranks), made.partition);
}

Status RunSplitTies(const Task& task, Made& made) {
  std::optional<SplitTrace> split = SplitTies(TraceOf(task, made), *made.index, made.partition);
  if (!split) return {};
  Rewrite(std::move(split->trace), made);
  made.partition = std::move(split->partition);
  return {};
}

Status RunExtendGradients(const Task& task, Made& made) {
  if (task.policy.extend_gradients == nullptr) return {};
  Rewrite(task.policy.extend_gradients(TraceOf(task, made), *made.index, made.partition), made);
  return {};
}

Status RunJoinTensors(const Task& task, Made& made) {
  Rewrite(JoinPassedThrough(TraceOf(task, made), *made.index, made.partition, task.policy.wraps_inputs),
          made);
  return {};
}

Status RunRecordOrder(const Task& task, Made& made) {
  return Keep(
      RecordOrder(TraceOf(task, made), *made.index, made.partition, task.strategy, task.policy.wraps_inputs),
      made.order);
}

// What cannot be planned because of the model is not our bug.
Error OfTheModel(const Task& task, const Made& made, Error error) {
  if (error.code != ErrorCode::kInternal) return error;
  const auto unit = UnitWithUnseenBackward(TraceOf(task, made), *made.index, made.partition);
  return unit ? UnseenBackward(made.partition, *unit) : error;
}

Status RunPlaceEvents(const Task& task, Made& made) {
  Result<PlacedProgram> placed = PlaceEvents(InputOf(task, made), task.policy, task.series == nullptr);
  if (!placed) return std::unexpected(OfTheModel(task, made, std::move(placed.error())));
  made.plan = std::move(placed->plan);
  made.possible_faults = std::move(placed->faults);
  return {};
}

Status RunAwaitCopies(const Task&, Made& made) {
  AwaitCopies(made.plan);
  return {};
}

Status RunBuildGraph(const Task&, Made& made) {
  made.graphs = BuildScheduleGraphs(made.plan);
  return {};
}

Status RunLinearise(const Task&, Made& made) {
  const std::vector<ScheduleGraph> graphs =
      std::exchange(made.graphs, {});  // the largest of all that is made
  return Keep(Linearise(made.plan, graphs), made.plan.steps);
}

Status RunDescribe(const Task& task, Made& made) {
  Status status =
      Keep(DescribePlan(std::move(made.plan), InputOf(task, made), task.policy, task.cluster), made.plan);
  made.order = {};  // nobody needs it any more
  return status;
}

Status RunDigest(const Task& task, Made& made) {
  made.plan.digests = {Digest(ToJson(task.given)), Digest(ToJson(task.strategy)),
                       Digest(ToJson(task.cluster))};
  return {};
}

// An altered trace and a training loop that nobody can run end here, and so would a bug of the planner: which
// of them it is, the documents do not say.
Error DoesNotVerify(const Task& task, const Made& made, const Error& found) {
  if (auto error = ReadOutsideItsUnit(TraceOf(task, made), *made.index, made.partition))
    return *std::move(error);
  const bool own_loop = !task.strategy.program.empty();
  return {.code = ErrorCode::kBadInput,
          .message = fmt::format("the plan of this {} does not verify (if the {} is meant so and trains with "
                                 "PyTorch, it is a bug of the planner): {}",
                                 own_loop ? "training loop" : "trace",
                                 own_loop ? "loop" : "trace, as it was recorded,", found.message),
          .pointer = own_loop ? "/program" : "/forwards"};
}

// Violations that PyTorch has, too, are reported and carried, not refused: the plan is what PyTorch does.
Status RunVerify(const Task& task, Made& made) {
  const Result<std::vector<FoundFault>> found = CarryFaults(made.plan, made.possible_faults);
  if (!found) {
    const auto not_gathered = [](const Violation& v) { return v.rule == Rule::kUseBeforeUnshard; };
    const auto unit = UnitWithUnseenBackward(TraceOf(task, made), *made.index, made.partition);
    if (unit && std::ranges::any_of(Verify(made.plan), not_gathered)) {
      return std::unexpected(UnseenBackward(made.partition, *unit));
    }
  }
  if (!found) return std::unexpected(DoesNotVerify(task, made, found.error()));
  made.faults = Explain(made.plan, *found);
  return {};
}

std::string TraceDump(const Task& task, const Made& made) { return ToJson(TraceOf(task, made)); }
std::string UnitsDump(const Task& task, const Made& made) {
  return UnitsText(TraceOf(task, made), made.partition);
}
std::string OrderDump(const Task&, const Made& made) { return OrderText(made.partition, made.order); }
std::string PlanDump(const Task&, const Made& made) { return ToJson(made.plan); }
std::string GraphDump(const Task&, const Made& made) {
  const std::int32_t steady = made.plan.steady_step;
  SHARDPLAN_ASSERT(steady < std::ssize(made.graphs), "build_graph makes a graph for each step");
  return WriteGraphviz(made.graphs[steady], made.plan, made.plan.steps[steady]);
}
std::string FaultsDump(const Task&, const Made& made) {
  return made.faults.empty() ? "the plan verifies\n" : fmt::format("{}\n", fmt::join(made.faults, "\n\n"));
}

struct PipelinePass {
  PlannerPass about;
  Status (*run)(const Task&, Made&);
  std::string (*dump)(const Task&, const Made&);
};

constexpr std::array<PipelinePass, 14> kPasses = {{
    {{"apply_checkpointing", "trace", ""}, RunApplyCheckpointing, TraceDump},
    {{"fuse_operators", "trace", ""}, RunFuseOperators, TraceDump},
    {{"choose_units", "units", "split_ties"}, RunChooseUnits, UnitsDump},
    {{"split_ties", "trace", "record_order"}, RunSplitTies, TraceDump},
    {{"extend_gradients", "trace", ""}, RunExtendGradients, TraceDump},
    {{"join_tensors", "trace", ""}, RunJoinTensors, TraceDump},
    {{"record_order", "order", "place_events"}, RunRecordOrder, OrderDump},
    {{"place_events", "plan", "describe"}, RunPlaceEvents, PlanDump},
    {{"await_copies", "plan", ""}, RunAwaitCopies, PlanDump},
    {{"build_graph", "graph", "linearise"}, RunBuildGraph, GraphDump},
    {{"linearise", "plan", ""}, RunLinearise, PlanDump},
    {{"describe", "plan", "every reader of the plan"}, RunDescribe, PlanDump},
    {{"digest", "plan", ""}, RunDigest, PlanDump},
    {{"verify", "faults", ""}, RunVerify, FaultsDump},
}};

bool IsSkipped(std::string_view pass, const PlanOptions& options) {
  if (pass == "verify" && !options.verify) return true;
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

// Every pass runs here, is timed and reported. Ends behind the pass `last`; empty: behind the last one.
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

// What the document's own rules and the allocator say of it. kBadInput.
Status CheckKnobs(const Strategy& strategy) {
  if (Status s = CheckStrategy(strategy); !s) return s;
  const Status settings = CheckAllocatorSettings(strategy.alloc_conf);
  if (settings) return {};
  const Error& error = settings.error();
  return MakeInputError("/alloc_conf", error.message, error.found, error.expected);
}

// What to do it with; kBadInput or kUsage where there is nothing to begin with.
Result<Task> MakeTask(const Trace& trace, const Strategy& strategy, const Cluster& cluster,
                      const PlanOptions& options) {
  if (Status s = CheckSkipped(options); !s) return std::unexpected(std::move(s.error()));
  if (Status s = CheckTrace(trace); !s) return std::unexpected(std::move(s.error()));
  if (Status s = CheckKnobs(strategy); !s) return std::unexpected(std::move(s.error()));
  if (Status s = CheckCluster(cluster); !s) return std::unexpected(std::move(s.error()));
  return Task{trace, strategy, cluster, FindPolicy(strategy.policy)};
}

template <typename Change>
void ForEachOperator(Trace& trace, Change change) {
  for (std::vector<Pass>* passes : {&trace.forwards, &trace.backwards}) {
    for (Pass& pass : *passes) {
      for (TraceEvent& event : pass.events) {
        if (auto* op = std::get_if<OperatorEvent>(&event)) change(*op);
      }
    }
  }
}

}  // namespace

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

PlanSeries::PlanSeries(const Trace& trace, const Cluster& cluster)
    : trace_(trace), cluster_(cluster), checked_(CheckTrace(trace)) {
  if (!checked_) return;
  if (checked_ = CheckCluster(cluster); !checked_) return;
  index_ = std::make_shared<const ModelIndex>(MakeModelIndex(trace_));
  const std::unique_ptr<CostModel> costs = MakeCostModel(cluster);
  ForEachOperator(trace_, [&](OperatorEvent& op) { op.duration_ns = costs->Operator(op); });
}

Result<std::shared_ptr<const Trace>> PlanSeries::Recomputing(
    const std::optional<CheckpointRule>& rule) const {
  constexpr std::size_t kMostKept = 12;
  {
    const std::lock_guard lock(mutex_);
    for (const auto& [of, known] : recomputing_) {
      if (of == rule) return known;
    }
  }
  Result<Trace> made = rule ? ApplyCheckpointing(trace_, *rule) : trace_;
  if (!made) return std::unexpected(std::move(made.error()));
  // What operators read and write is looked at where ties are split, and nowhere behind.
  const bool tied =
      std::ranges::any_of(made->parameters, [](const Parameter& p) { return !p.shared_with.empty(); });
  if (!tied) {
    ForEachOperator(*made, [](OperatorEvent& op) {
      op.reads = {};
      op.writes = {};
    });
  }
  auto trace = std::make_shared<const Trace>(*std::move(made));
  const std::lock_guard lock(mutex_);
  if (recomputing_.size() >= kMostKept) recomputing_.clear();
  recomputing_.emplace_back(rule, trace);
  return trace;
}

Result<Plan> PlanSeries::Make(const Strategy& strategy) const {
  if (!checked_) return std::unexpected(checked_.error());
  if (Status s = CheckKnobs(strategy); !s) return std::unexpected(std::move(s.error()));
  const Task task{trace_, strategy, cluster_, FindPolicy(strategy.policy), this};
  const PlanOptions options{.verify = false, .skip = {"build_graph", "linearise", "digest"}};
  Made made;
  if (Status s = RunPasses(task, "", options, made); !s) return std::unexpected(std::move(s.error()));
  return std::move(made.plan);
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
