// SPDX-License-Identifier: Apache-2.0
#include "planner_passes.h"

#include <fmt/format.h>

#include <algorithm>
#include <exception>
#include <new>
#include <utility>

#include "passes/await_copies.h"
#include "passes/checkpointing.h"
#include "passes/describe.h"
#include "passes/dump.h"
#include "passes/fuse_operators.h"
#include "passes/linearise.h"
#include "passes/outside_reads.h"
#include "passes/passed_through.h"
#include "passes/schedule_analysis.h"
#include "passes/unseen_backward.h"
#include "shardplan/planner/planner.h"
#include "shardplan/schemas/assert.h"
#include "shardplan/schemas/io.h"
#include "shardplan/schemas/pytorch_rules.h"
#include "shardplan/verifier/verifier.h"
#include "units/dtype_checks.h"

namespace shardplan {
namespace {

const Trace& TraceOf(const Task& task, const Made& made) {
  return made.rewritten ? *made.rewritten : task.given;
}

PolicyInput InputOf(const Task& task, const Made& made) {
  return {TraceOf(task, made), *made.units.index, made.units.partition, task.strategy, made.order};
}

RewrittenTrace Shared(std::optional<Trace> trace) {
  return trace ? std::make_shared<const Trace>(*std::move(trace)) : nullptr;
}

// A plan that is impossible because of the model is not our bug.
Error OfTheModel(const Task& task, const Made& made, Error error) {
  if (error.code != ErrorCode::kInternal) return error;
  const auto unseen = FindUnseenBackward(TraceOf(task, made), *made.units.index, made.units.partition);
  return unseen ? ErrorOf(*unseen, TraceOf(task, made), made.units.partition) : error;
}

// An altered trace and a training loop that nobody can run end here, and so would a bug of the planner: which
// of them it is, the documents do not say.
Error DoesNotVerify(const Task& task, const Made& made, const Error& found) {
  if (auto error = ReadOutsideItsUnit(TraceOf(task, made), *made.units.index, made.units.partition))
    return *std::move(error);
  if (task.own_policy != nullptr) {
    return OfPolicy(*task.own_policy, {.code = ErrorCode::kBadInput,
                                       .message = "its plan does not verify: " + found.message,
                                       .file = task.own_policy->library});
  }
  const bool own_loop = !task.strategy.program.empty();
  return {.code = ErrorCode::kBadInput,
          .message = fmt::format("the plan of this {} does not verify (if the {} is meant so and trains with "
                                 "PyTorch, it is a bug of the planner): {}",
                                 own_loop ? "training loop" : "trace",
                                 own_loop ? "loop" : "trace, as it was recorded,", found.message),
          .pointer = own_loop ? "/program" : "/forwards"};
}

// A policy of a library is other people's code.
Result<PlacedProgram> PlaceEventsOfLibrary(const Task& task, const Made& made) {
  const PolicyDescription& own = *task.own_policy;
  const auto wrong = [&](std::string message) {
    return std::unexpected(
        OfPolicy(own, {.code = ErrorCode::kBadInput, .message = std::move(message), .file = own.library}));
  };
  Result<PlacedProgram> placed;
  try {
    placed = PlaceEvents(InputOf(task, made), task.policy, made.offloads, task.with_procedures);
  } catch (const std::bad_alloc&) {
    throw;
  } catch (const std::exception& error) {
    return wrong(fmt::format("it has thrown an exception: {}", error.what()));
  } catch (...) {
    return wrong("it has thrown an exception that is no std::exception");
  }
  if (!placed) {
    Error error = OfPolicy(own, std::move(placed.error()));
    if (error.pointer.empty() && error.file.empty()) error.file = own.library;
    return std::unexpected(std::move(error));
  }
  placed->plan.world_size = task.cluster.ranks;
  const std::vector<Violation> violations = VerifyReferences(placed->plan);
  if (violations.empty()) return placed;
  return wrong("its plan does not verify: " + Explain(placed->plan, violations.front()));
}

}  // namespace

Result<RewrittenTrace> RunApplyCheckpointing(const Task& task, Made& made) {
  if (!task.strategy.checkpoint) return nullptr;
  const Trace& plain = TraceOf(task, made);
  Result<Trace> trace = CheckpointChecked(plain, MakeModelIndex(plain), *task.strategy.checkpoint);
  if (!trace) return std::unexpected(std::move(trace.error()));
  return Shared(*std::move(trace));
}

Result<RewrittenTrace> RunFuseOperators(const Task& task, Made& made) {
  return task.strategy.compile ? Shared(FuseOperators(TraceOf(task, made))) : nullptr;
}

Result<ChosenUnits> RunChooseUnits(const Task& task, Made& made) {
  const Trace& trace = TraceOf(task, made);
  std::shared_ptr<const ModelIndex> index = std::move(made.units.index);  // of a series: it is there already
  if (index == nullptr) index = std::make_shared<const ModelIndex>(MakeModelIndex(trace));
  const std::unique_ptr<UnitMaker> maker = task.policy.make_units(trace, *index, task.strategy);
  Result<Partition> partition = ChooseUnits(trace, *index, task.strategy, *maker, task.cluster.ranks);
  if (!partition) return std::unexpected(std::move(partition.error()));
  if (const Status checked = CheckDTypes(trace, task.strategy, *partition); !checked) {
    return std::unexpected(checked.error());
  }
  return ChosenUnits{std::move(index), *std::move(partition)};
}

Result<std::optional<SplitTrace>> RunSplitTies(const Task& task, Made& made) {
  if (RulesOf(task.strategy).shared_parameters_are_refused) {
    const Status untied = CheckTiesWithinRoots(TraceOf(task, made), *made.units.index, made.units.partition);
    if (!untied) return std::unexpected(untied.error());
  }
  return SplitTies(TraceOf(task, made), *made.units.index, made.units.partition);
}

Result<RewrittenTrace> RunExtendGradients(const Task& task, Made& made) {
  if (task.policy.extend_gradients == nullptr) return nullptr;
  return Shared(task.policy.extend_gradients(TraceOf(task, made), *made.units.index, made.units.partition));
}

Result<RewrittenTrace> RunJoinTensors(const Task& task, Made& made) {
  return Shared(JoinPassedThrough(TraceOf(task, made), *made.units.index, made.units.partition,
                                  task.policy.wraps_inputs));
}

Result<std::vector<RecordedStep>> RunRecordOrder(const Task& task, Made& made) {
  return RecordOrder(TraceOf(task, made), *made.units.index, made.units.partition, task.strategy,
                     task.policy.wraps_inputs);
}

Result<ActivationOffloads> RunOffloadActivations(const Task& task, Made& made) {
  return OffloadActivations(TraceOf(task, made), *made.units.index, made.units.partition, task.strategy,
                            made.order);
}

Result<PlacedProgram> RunPlaceEvents(const Task& task, Made& made) {
  if (task.own_policy != nullptr) return PlaceEventsOfLibrary(task, made);
  Result<PlacedProgram> placed =
      PlaceEvents(InputOf(task, made), task.policy, made.offloads, task.with_procedures);
  if (!placed) return std::unexpected(OfTheModel(task, made, std::move(placed.error())));
  return placed;
}

Result<Plan> RunAwaitCopies(const Task&, Made& made) {
  Plan plan = std::move(made.plan);
  AwaitCopies(plan);
  return plan;
}

Result<std::vector<ScheduleGraph>> RunBuildGraph(const Task&, Made& made) {
  return BuildScheduleGraphs(made.plan);
}

Result<std::vector<PlanStep>> RunLinearise(const Task&, Made& made) {
  const std::vector<ScheduleGraph> graphs =
      std::exchange(made.graphs, {});  // the largest of all that is made
  return Linearise(made.plan, graphs);
}

Result<Plan> RunDescribe(const Task& task, Made& made) {
  Result<Plan> plan = DescribePlan(std::move(made.plan), InputOf(task, made), task.policy, task.cluster);
  made.order = {};  // nobody needs it any more
  return plan;
}

Result<Digests> RunDigest(const Task& task, Made&) {
  return Digests{Digest(ToJson(task.given)), Digest(ToJson(task.strategy)), Digest(ToJson(task.cluster)), {}};
}

Result<std::vector<std::string>> RunVerify(const Task& task, Made& made) {
  const Result<std::vector<FoundFault>> found = CarryFaults(made.plan, made.possible_faults);
  if (found) return Explain(made.plan, *found);
  const auto not_gathered = [](const Violation& v) { return v.rule == Rule::kUseBeforeUnshard; };
  const auto unseen = FindUnseenBackward(TraceOf(task, made), *made.units.index, made.units.partition);
  if (unseen && std::ranges::any_of(Verify(made.plan), not_gathered)) {
    return std::unexpected(ErrorOf(*unseen, TraceOf(task, made), made.units.partition));
  }
  return std::unexpected(DoesNotVerify(task, made, found.error()));
}

std::string TraceDump(const Task& task, const Made& made) { return ToJson(TraceOf(task, made)); }
std::string UnitsDump(const Task& task, const Made& made) {
  return UnitsText(TraceOf(task, made), made.units.partition);
}
std::string OrderDump(const Task&, const Made& made) { return OrderText(made.units.partition, made.order); }
std::string OffloadsDump(const Task& task, const Made& made) {
  return OrderDump(task, made) + OffloadText(made.units.partition, made.offloads);
}
std::string PlanDump(const Task&, const Made& made) { return ToJson(made.plan); }
std::string GraphDump(const Task&, const Made& made) {
  const std::int32_t steady = made.plan.steady_step;
  SHARDPLAN_ASSERT(steady < std::ssize(made.graphs), "build_graph makes a graph for each step");
  return WriteGraphviz(made.graphs[steady], made.plan, made.plan.steps[steady]);
}
std::string FaultsDump(const Task&, const Made& made) {
  return made.faults.empty() ? "the plan verifies\n" : fmt::format("{}\n", fmt::join(made.faults, "\n\n"));
}

}  // namespace shardplan
