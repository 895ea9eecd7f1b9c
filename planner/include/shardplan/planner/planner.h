// SPDX-License-Identifier: Apache-2.0
// The planner: trace + strategy + cluster -> plan (docs/internals/planner.md). planner/src/pipeline.cc is the
// table of contents.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "shardplan/schemas/cluster.h"
#include "shardplan/schemas/error.h"
#include "shardplan/schemas/plan.h"
#include "shardplan/schemas/quantity.h"
#include "shardplan/schemas/strategy.h"
#include "shardplan/schemas/trace.h"

namespace shardplan {

struct PolicyDescription;  // policy.h

// The policies that are built in: values of Strategy::policy.
std::vector<std::string> PlannerPolicies();

// A pass of the planner (docs/internals/planner.md).
struct PlannerPass {
  std::string_view name;
  std::string_view makes;      // "trace", "units", "order", "graph", "plan" or "faults"
  std::string_view needed_by;  // empty: it may be skipped; else only together with what is named here
};
// In the order in which they run.
std::span<const PlannerPass> PlannerPasses();

struct PlanOptions {
  // Run the verifier after the passes and fail with kBadInput if it finds a violation that PyTorch itself
  // does not have. False is the same as skipping the pass `verify`.
  bool verify = true;
  // Passes that do not run.
  std::vector<std::string> skip;
  // The policy of a strategy whose policy is not built in (policy.h); null: there is none. The passes
  // build_graph and linearise do not run then.
  const PolicyDescription* policy = nullptr;
  // Called with a pass's name and its wall time when it ends.
  std::function<void(std::string_view pass, Nanoseconds wall_ns)> on_pass;
};

struct PlannerOutput {
  Plan plan;
  // With verify: what PyTorch itself does wrong there and the plan therefore, too, a paragraph each.
  std::vector<std::string> faults;
};

// kBadInput: the trace or strategy is inconsistent (a unit rule that matches nothing, a mesh that is not the
// cluster's ranks, ...), with a pointer into the strategy or trace. A policy that is not built in is named in
// the error, which says that it has failed, thrown or made a plan that does not verify. kUsage: a pass is
// skipped that others need.
Result<PlannerOutput> MakePlan(const Trace& trace, const Strategy& strategy, const Cluster& cluster,
                               const PlanOptions& options = {});

// The output of one pass: a trace or a plan as a document (a plan lacks what later passes add), the units and
// the recorded order as text, the schedule graph of the step that repeats as GraphViz text.
struct PassOutput {
  std::string_view makes;  // as in PlannerPass
  std::string text;
};
// Runs the passes up to `last`, that one included. kUsage: no such pass, or it is skipped, or a pass is
// skipped that others need. Else as MakePlan.
Result<PassOutput> RunPassesUntil(std::string_view last, const Trace& trace, const Strategy& strategy,
                                  const Cluster& cluster, const PlanOptions& options = {});

// Activation checkpointing as a transformation of a trace: the modules that `rule` matches free what they
// saved when they are left, and run again at the start of their backward (torch.utils.checkpoint,
// non-reentrant).
Result<Trace> ApplyCheckpointing(const Trace& trace, const CheckpointRule& rule);

// FQNs of modules (pre-order) that an entry of UnitRule::modules matches. kBadInput when none does.
Result<std::vector<std::string>> MatchModules(const Trace& trace, std::string_view entry);

// The default units: one per repeated block class (children of ModuleLists), the root last.
std::vector<UnitRule> DefaultUnits(const Trace& trace);

// The partial order of a plan's instructions: what may move, and how far (docs/internals/schedule-graph.md).

// The schedule graph of a step as GraphViz text, without edges that follow from others. The plan verifies.
// Time and memory of the square of the step's instructions.
std::string ScheduleGraphviz(const Plan& plan, std::int32_t step);

// The duration of an instruction of a step, by its trigger and its index there.
using InstructionDuration = std::function<Nanoseconds(std::int32_t trigger, std::int32_t instruction)>;

// For a reader: the graph's edges by kind, between which triggers each collective may move, which
// instructions nothing can move across, and the critical path by `duration_ns` (null: left out).
std::string ExplainSchedule(const Plan& plan, std::int32_t step,
                            const InstructionDuration& duration_ns = nullptr);

// Units and kept operators of frameworks around FSDP, each as the release named here has them. Tests hold
// both against the installed packages (tools/requirements-alone.txt).

inline constexpr std::string_view kTorchtitanVersion = "0.3.0";

// torchtitan's selective checkpointing by operator (torchtitan/distributed/activation_checkpoint.py,
// SelectiveAC), with what torch 2.15 calls compute-intensive: operators whose results are kept, of products
// without a bias every second is run again; no early stop. `modules` is empty.
const CheckpointRule& TorchtitanSelectiveCheckpointing();

// "accelerate", "torchtitan", "peft".
std::span<const std::string_view> FrameworksWithUnits();

// The units that a framework makes of the traced model under strategy.policy, the root last: accelerate 1.15,
// torchtitan 0.3, peft 0.21. kUsage: no such framework, or it does not have the policy. kBadInput: the trace
// does not say what the framework asks the model (Module::parts), or it wraps no such model.
Result<std::vector<UnitRule>> UnitsOfFramework(std::string_view framework, const Trace& trace,
                                               const Strategy& strategy);

}  // namespace shardplan
