// SPDX-License-Identifier: Apache-2.0
// The flags of `shardplan plan` that set knobs of the strategy, one to one with
// docs/reference/strategy-format.md.
#pragma once

#include <CLI/CLI.hpp>
#include <optional>
#include <string>
#include <vector>

#include "flags/fsdp1_flags.h"
#include "flags/fsdp2_flags.h"
#include "flags/policy_flags.h"
#include "shardplan/planner/planner.h"
#include "shardplan/planner/policy.h"
#include "shardplan/schemas/error.h"
#include "shardplan/schemas/strategy.h"

namespace shardplan::cli {

// The flags as given; nullopt or empty: not given.
struct PlanFlags {
  std::string policy;
  std::vector<std::string> mesh;   // "replicate=2"
  std::vector<std::string> units;  // rules as UnitRule::modules
  std::string units_of;            // a framework's (planner.h)
  std::optional<std::string> reshard_after_forward;
  std::optional<std::string> backward_prefetch;
  std::optional<std::string> forward_prefetch;
  std::optional<std::string> param_dtype;
  std::optional<std::string> reduce_dtype;
  std::optional<std::string> sharding;
  std::optional<bool> limit_all_gathers;
  bool use_orig_params = false;
  std::vector<std::string> checkpoint;
  std::optional<std::int64_t> checkpoint_every;
  std::vector<std::string> offload_activations;
  std::optional<std::int64_t> offload_every;
  std::vector<std::string> checkpoint_save;  // "aten.mm:2", "torchtitan"
  bool compile = false;
  std::optional<std::string> optimizer;
  std::vector<std::string> muon_matrices;
  std::optional<std::string> muon_owners;
  std::vector<std::string> muon_bucket;
  bool muon_in_backward = false;
  std::optional<std::string> pytorch;
  std::optional<std::string> alloc_conf;
  std::optional<std::int64_t> accumulate;
  bool accumulate_without_sync = false;
  Fsdp1Flags fsdp1;
  Fsdp2Flags fsdp2;
  PolicyFlags own_policy;
};

void AddPlanFlags(CLI::App& command, PlanFlags& flags);

// Writes the given flags over `strategy`. kUsage names the flag, what was found and what is expected.
Status ApplyPlanFlags(const PlanFlags& flags, Strategy& strategy);

// A strategy, and what plans it.
struct GivenStrategy {
  std::optional<PolicyLibrary> library;  // of a policy that is not built in
  Strategy strategy;

  const PolicyDescription* policy() const { return library ? &library->description() : nullptr; }
};

// The strategy file at `path` ("": PyTorch's defaults) with the flags over it.
Result<GivenStrategy> StrategyOf(const std::string& path, const PlanFlags& flags);

// Writes over `strategy` the flags that mean something of a trace: the units of --units-of, the calls of
// --accumulate. An error that is of the trace names its file.
Status ApplyTraceFlags(const PlanFlags& flags, const Trace& trace, const std::string& trace_path,
                       Strategy& strategy);

// An error of planning that names no file, with that of the document that its pointer is in. A place in a
// strategy that flags alone have made is in no file: it becomes part of the message.
Error WithDocument(Error error, const std::string& trace_path, const std::string& strategy_path);

// MakePlan of the trace read from `trace_path`, by the strategy's own policy if it has one. WithDocument of
// an error.
Result<PlannerOutput> PlanTrace(const Trace& trace, const std::string& trace_path, const GivenStrategy& given,
                                const std::string& strategy_path, const Cluster& cluster,
                                PlanOptions options);

}  // namespace shardplan::cli
