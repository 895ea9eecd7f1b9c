// SPDX-License-Identifier: Apache-2.0
// Pass `choose_units`: which parameters are all-gathered together, how each unit is laid out, over which
// ranks.
#pragma once

#include <map>
#include <optional>
#include <vector>

#include "shardplan/schemas/plan.h"
#include "units/mesh.h"
#include "units/model_index.h"

namespace shardplan {

// Facts of a unit that the policies need beside the plan's Unit.
struct UnitChoice {
  Unit unit;
  std::vector<ModuleId> modules;           // canonical
  std::vector<ParameterId> parameter_ids;  // of unit.parameters
  // By parameter of the unit: what autograd makes its gradient in, where the trace says so (the widest of its
  // backwards); whether its grad_dtype is None.
  std::vector<std::optional<DType>> made_grad_dtypes;
  std::vector<bool> any_grad_dtype;
  bool operators_are_known = true;         // the trace has some: it says what autograd makes
  DType recorded_dtype = DType::kFloat32;  // ... when the model computes in this
  bool is_root = false;
  std::int32_t groups = 1;             // parameter groups of its modules; unit.parameter_group is which it is
  bool reshard_given = false;          // reshard_after_forward was an explicit argument
  std::int64_t post_forward_size = 0;  // ranks that keep a shard between forward and backward; 0: no reshard
  MixedPrecision mixed_precision;
  bool mixed_precision_given = false;
  bool cpu_offload = false;
  DataParallelDims data_parallel;                // fsdp2: of this unit
  MeshDigits shard_digits, replicate_digits;     // fsdp2
  std::optional<AllReduceHook> all_reduce_hook;  // fsdp2
  std::int64_t shard_size = 1, replicate_size = 1;
  Fsdp1Sharding sharding = Fsdp1Sharding::kFullShard;                     // fsdp1
  Fsdp1BackwardPrefetch backward_prefetch = Fsdp1BackwardPrefetch::kPre;  // fsdp1
  bool forward_prefetch = false;                                          // fsdp1
};

struct UnitParameterRef {
  UnitId unit = -1;
  std::int32_t parameter = -1;  // index into Unit::parameters
};

struct Partition {
  std::vector<UnitChoice> units;  // order of the modules in the tree, root first
  // By canonical ModuleId: hooks of which unit (of several the first: GroupsOf); -1: none.
  std::vector<UnitId> unit_of_module;
  std::vector<UnitId> managed_by;                     // by canonical ModuleId: whose parameters it holds
  std::vector<std::vector<UnitParameterRef>> owners;  // by ParameterId; several when a tie is broken
  std::vector<UnitId> states;  // pre-order over modules; a unit of two modules is there twice
  std::vector<Communicator> communicators;
  std::vector<CommunicatorId> model_communicators;  // by communicator of the trace; -1: no collective uses it
  std::vector<StrategyMeshDim> mesh;
  std::map<std::string, CommunicatorId> mesh_groups;  // fsdp2: of dimensions that are not FSDP's, by name
  std::int64_t shard_size = 1;
  std::int64_t replicate_size = 1;
};

class UnitMaker;

// The units of the strategy's rules as `maker` makes them (a policy has one: policy/policy_passes.h).
// kBadInput: a rule that matches nothing, a module in two units, a mesh that is not the cluster's ranks, ...
Result<Partition> ChooseUnits(const Trace& trace, const ModelIndex& index, const Strategy& strategy,
                              UnitMaker& maker, std::int64_t cluster_ranks);

// The unit of the first parameter group of the modules that `unit` hooks.
UnitId FirstGroupOf(const Partition& partition, UnitId unit);
// The units of all parameter groups of the modules that `unit` hooks, in their order.
std::vector<UnitId> GroupsOf(const Partition& partition, UnitId unit);

// The unit that hooks the module; -1: none does. kBadInput: there is no such module.
Result<UnitId> UnitOfModule(const ModelIndex& index, const Partition& partition, const std::string& fqn);
// The units that hook `module` or one under it, each once, in the order of named_modules.
std::vector<UnitId> UnitsUnder(const Trace& trace, const ModelIndex& index, const Partition& partition,
                               const std::string& module);

// The innermost unit whose hooks are around the module, or on it; -1: none.
UnitId UnitAround(const ModelIndex& index, const Partition& partition, ModuleId module);

// The owner of `parameter` as seen from `module` (a tie that spans units is broken by FSDP: each unit has its
// own copy). Unit -1: no unit has it.
UnitParameterRef OwnerOf(const Partition& partition, ParameterId parameter, ModuleId module);

// Has any of the passes an operator? A trace of modules alone has none.
bool HasOperators(const std::vector<Pass>& passes);

}  // namespace shardplan
