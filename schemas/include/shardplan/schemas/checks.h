// SPDX-License-Identifier: Apache-2.0
// Consistency of documents: rules that the JSON Schema cannot express and planning relies on.
#pragma once

#include <string>
#include <string_view>
#include <unordered_map>

#include "shardplan/schemas/cluster.h"
#include "shardplan/schemas/error.h"
#include "shardplan/schemas/plan.h"
#include "shardplan/schemas/strategy.h"
#include "shardplan/schemas/trace.h"

namespace shardplan {

// kBadInput, with the pointer: the modules are no tree, modules are left that were not entered, a storage is
// used that is not alive, ... docs/reference/trace-format.md lists the rules. Reading a trace asks it, and
// planning.
Status CheckTrace(const Trace& trace);

// Whether the pointer is a place in a trace: its first key is that of one of the document's fields.
bool IsPlaceInTrace(std::string_view pointer);

// The compiled modules of a trace, which outlives this.
class CompiledModules {
 public:
  explicit CompiledModules(const Trace& trace);
  // The outermost one whose graph this module is part of; nullptr: there is none.
  const Module* Around(const Module& module) const;

 private:
  std::unordered_map<std::string_view, const Module*> by_fqn_;
};

// kBadInput, with the pointer: no policy has this name, the mesh is none, the optimizer does not take an
// argument, the policy does not know a call, a micro-batch has a backward without a forward, ... Whatever a
// strategy alone says cannot be planned; what depends on the trace or the cluster, planning says. Reading a
// strategy asks it, and planning.
Status CheckStrategy(const Strategy& strategy);

// kBadInput: points of efficiency curves and of tables of collectives do not ascend. `pointer` is where the
// document has the cluster ("" or "/cluster").
Status CheckCluster(const Cluster& cluster, const std::string& pointer = {});

// Every buffer's unit exists (-1: none), and every parameter that a buffer or a segment's gradient names is
// one of its unit's. kBadInput with the JSON pointer. Checked by the readers, and by the replayer, whose plan
// may come from a program.
Status CheckOwners(const Plan& plan);

}  // namespace shardplan
