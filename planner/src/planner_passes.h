// SPDX-License-Identifier: Apache-2.0
// The planner's passes, as pipeline.cc lists them: each takes what there is to plan and what the passes
// before it have made, and returns what it makes.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "order/record_order.h"
#include "passes/offload_activations.h"
#include "passes/place_events.h"
#include "passes/schedule_graph.h"
#include "policy/policy_passes.h"
#include "shardplan/schemas/cluster.h"
#include "shardplan/schemas/error.h"
#include "shardplan/schemas/plan.h"
#include "shardplan/schemas/strategy.h"
#include "shardplan/schemas/trace.h"
#include "units/model_index.h"
#include "units/partition.h"
#include "units/split_ties.h"

namespace shardplan {

// The input of planning.
struct Task {
  const Trace& given;
  const Strategy strategy;  // names its PyTorch
  const Cluster& cluster;
  const PolicyPasses policy;
  const PolicyDescription* own_policy = nullptr;  // one that is not built in; null: it is
  bool with_procedures = true;                    // what is done on demand, beside the steps
};

// A trace that a pass has made of the one before it; null: that one stands.
using RewrittenTrace = std::shared_ptr<const Trace>;

struct ChosenUnits {
  std::shared_ptr<const ModelIndex> index;
  Partition partition;
};

// Results of the passes so far. A pass takes out what it makes something else of, and what nobody needs after
// it.
struct Made {
  RewrittenTrace rewritten;
  ChosenUnits units;
  std::vector<RecordedStep> order;
  ActivationOffloads offloads;
  Plan plan;
  std::vector<PyTorchFault> possible_faults;  // that the policy knows of
  std::vector<ScheduleGraph> graphs;          // by step
  std::vector<std::string> faults;
};

Result<RewrittenTrace> RunApplyCheckpointing(const Task& task, Made& made);
Result<RewrittenTrace> RunFuseOperators(const Task& task, Made& made);
Result<ChosenUnits> RunChooseUnits(const Task& task, Made& made);
Result<std::optional<SplitTrace>> RunSplitTies(const Task& task, Made& made);
Result<RewrittenTrace> RunExtendGradients(const Task& task, Made& made);
Result<RewrittenTrace> RunJoinTensors(const Task& task, Made& made);
Result<std::vector<RecordedStep>> RunRecordOrder(const Task& task, Made& made);
Result<ActivationOffloads> RunOffloadActivations(const Task& task, Made& made);
Result<PlacedProgram> RunPlaceEvents(const Task& task, Made& made);
Result<Plan> RunAwaitCopies(const Task& task, Made& made);
Result<std::vector<ScheduleGraph>> RunBuildGraph(const Task& task, Made& made);
Result<std::vector<PlanStep>> RunLinearise(const Task& task, Made& made);
Result<Plan> RunDescribe(const Task& task, Made& made);
Result<Digests> RunDigest(const Task& task, Made& made);
// Violations that PyTorch has, too, in words: they are reported and carried, not refused.
Result<std::vector<std::string>> RunVerify(const Task& task, Made& made);

// The texts of `shardplan plan --stop-after PASS --dump`.
std::string TraceDump(const Task& task, const Made& made);
std::string UnitsDump(const Task& task, const Made& made);
std::string OrderDump(const Task& task, const Made& made);
std::string OffloadsDump(const Task& task, const Made& made);
std::string PlanDump(const Task& task, const Made& made);
std::string GraphDump(const Task& task, const Made& made);
std::string FaultsDump(const Task& task, const Made& made);

}  // namespace shardplan
