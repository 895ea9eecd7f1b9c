// What the packages beside the planner ask of a policy: how its knobs are called and what they mean. A file
// for each policy in schemas/src/policies.
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
  // What it needs beside the module: a value that may be left out, "number", a whole "number", "modules" that
  // may be left out.
  CallArgument argument = CallArgument::kValue;
  bool in_setup = true;
  bool in_program = true;
  std::vector<std::string_view> flags;  // that it knows
};

struct PolicyKnobs {
  std::string name;
  std::vector<CallForm> calls;
  LayoutKind layout = LayoutKind::kPerParameter;  // of its units
  // What the strategy gives to units: the dimensions of the mesh that one is sharded and replicated over, and
  // its mixed precision. Each that the unit may have; which it has, the modules say.
  std::vector<DataParallelDims> (*unit_ranks)(const Strategy& strategy,
                                              const std::vector<StrategyMeshDim>& mesh);
  std::vector<MixedPrecision> (*unit_precisions)(const Strategy& strategy, const Unit& unit);
  // What a plan does on demand with a unit that has parameters, besides kReducePartial.
  std::vector<ProcedureKind> (*procedures)(const Unit& unit);
  // The ModuleCall method that makes a backward accumulate gradients without reducing them.
  std::string accumulation_call;
  // Whether the optimizer steps pieces of the original parameters where a unit's shard is flat.
  bool (*steps_original_parameters)(const Strategy& strategy);
  // What the sum of a unit's gradients over `ranks` ranks is divided by, by the knobs that say so.
  double (*gradient_divisor)(const Strategy& strategy, const Unit& unit, double ranks);
  // The knob that takes away the gathered parameters of a unit that lie unused; `unit` as a person reads it.
  std::string (*reshard_advice)(const Strategy& strategy, const std::string& unit, bool is_root);
  // Changes that can lower the peak of memory, each on its own; some may change nothing.
  std::vector<KnobChange> (*memory_changes)(const Strategy& strategy);
};

// In the order in which they are offered to a person: fsdp2, fsdp1.
const std::vector<PolicyKnobs>& AllPolicyKnobs();

// Those of the policy of that name. A plan of another program may name a policy that is none of these: its
// knobs are taken for those of fsdp2.
const PolicyKnobs& KnobsOf(const std::string& policy);

}  // namespace shardplan
