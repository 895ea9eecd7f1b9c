// SPDX-License-Identifier: Apache-2.0
// The names and meanings of a policy's knobs, for the packages beside the planner. Each policy has a file in
// schemas/src/policies.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "shardplan/schemas/plan.h"
#include "shardplan/schemas/strategy.h"

namespace shardplan {

// A strategy with one knob changed.
struct KnobChange {
  std::string knob;  // as a person sets it: "limit_all_gathers: true"
  Strategy strategy;
  bool operator==(const KnobChange&) const = default;
};

// A method that a strategy may call on a module: ModuleCall::method.
enum class CallArgument : std::uint8_t { kValue, kNumber, kCount, kModules };
struct CallForm {
  std::string_view method;
  // The argument beside the module: an optional value, "number", a whole "number", or optional "modules".
  CallArgument argument = CallArgument::kValue;
  bool in_setup = true;
  bool in_program = true;
  std::vector<std::string_view> flags;  // that it knows
  PyTorchVersion since = kOldestPyTorch;
};

struct PolicyKnobs {
  std::string name;
  std::vector<CallForm> calls;
  LayoutKind layout = LayoutKind::kPerParameter;  // of its units
  // The candidates that the strategy gives a unit: mesh dimensions to shard and replicate over, and mixed
  // precision. The unit's modules decide between them.
  std::vector<DataParallelDims> (*unit_ranks)(const Strategy& strategy,
                                              const std::vector<StrategyMeshDim>& mesh);
  std::vector<MixedPrecision> (*unit_precisions)(const Strategy& strategy, const Unit& unit);
  // The procedures of a unit that has parameters, besides kReducePartial.
  std::vector<ProcedureKind> (*procedures)(const Unit& unit);
  // The ModuleCall method that makes a backward accumulate gradients without reducing them.
  std::string accumulation_call;
  // Whether the optimizer steps pieces of the original parameters where a unit's shard is flat.
  bool (*steps_original_parameters)(const Strategy& strategy);
  // The divisor of the sum of a unit's gradients over `ranks` ranks, by the knobs.
  double (*gradient_divisor)(const Strategy& strategy, const Unit& unit, double ranks);
  // The knob that takes away the gathered parameters of a unit that lie unused; `unit` as a person reads it.
  std::string (*reshard_advice)(const Strategy& strategy, const std::string& unit, bool is_root);
  // Changes that can lower the peak of memory, each on its own; some may change nothing.
  std::vector<KnobChange> (*memory_changes)(const Strategy& strategy);
};

// In the order in which they are offered to a person: fsdp2, fsdp1.
const std::vector<PolicyKnobs>& AllPolicyKnobs();

// The number as the value of a knob.
KnobValue KnobNumber(double value);

// Whether the planner has the policy without a library.
bool IsBuiltIn(std::string_view policy);

// The knobs of the policy of that name. One that is not built in has its own in Strategy::policy_knobs, which
// nobody but it knows; here it has what its units take from the strategy as fsdp2's do, and no name.
const PolicyKnobs& KnobsOf(const std::string& policy);

// Flags of units after the setters of a strategy.

// Is the module `fqn` the module `above`, or below it?
bool IsUnder(std::string_view fqn, std::string_view above);
// Is the call one for the module `fqn`: made on it, or on one above it with recurse?
bool Reaches(const ModuleCall& call, std::string_view fqn);

// The flag that the last call of `method` gives the unit, in the strategy's setup or, after that, in the step
// that repeats. False: none reaches it.
bool FlagSetOn(const Strategy& strategy, const Unit& unit, std::string_view method);

}  // namespace shardplan
