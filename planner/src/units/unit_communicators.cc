// SPDX-License-Identifier: Apache-2.0
#include "units/unit_communicators.h"

#include <fmt/format.h>

#include <algorithm>
#include <tuple>

#include "shardplan/planner/planner.h"

namespace shardplan {

namespace {

// The groups of `size` adjacent ranks of the unit's shards. `not_divided`: what is wrong where these are no
// whole groups.
Result<MeshDigits> AdjacentRanks(const UnitChoice& choice, std::int64_t size, const std::string& pointer,
                                 const std::string& not_divided) {
  if (size < 0 || choice.shard_size % size != 0) {
    return MakeInputError(pointer, not_divided, fmt::format("{}", size),
                          fmt::format("a divisor of {}", choice.shard_size));
  }
  std::optional<MeshDigits> digits = Innermost(choice.shard_digits, size);
  if (!digits) {
    return MakeInputError(pointer, "adjacent ranks of a dimension flattened from several do not group so",
                          fmt::format("{}", size), "a multiple or divisor of the innermost dimension's size");
  }
  return *std::move(digits);
}

}  // namespace

Status UnitCommunicators::Begin(const Trace& trace, std::int64_t cluster_ranks, Partition& partition) {
  Result<Mesh> mesh = Mesh::Make(strategy_.mesh, cluster_ranks);
  if (!mesh) return std::unexpected(mesh.error());
  mesh_ = std::move(*mesh);
  mesh_.NoteOthers(trace.communicators);
  partition.mesh = mesh_.dims();
  if (strategy_.data_parallel) {
    data_parallel_ = *strategy_.data_parallel;
  } else {
    if (mesh_.Find("shard") != nullptr) data_parallel_.shard = {"shard"};
    if (mesh_.Find("replicate") != nullptr) data_parallel_.replicate = {"replicate"};
  }
  if (Status s = CheckDims(data_parallel_, "/data_parallel"); !s) return s;
  const MeshDigits shard = mesh_.Flatten(data_parallel_.shard);
  const MeshDigits replicate = mesh_.Flatten(data_parallel_.replicate);
  partition.shard_size = RanksOf(shard);
  partition.replicate_size = RanksOf(replicate);
  GroupOf("shard", shard, partition);
  GroupOf("replicate", replicate, partition);
  return {};
}

Status UnitCommunicators::CheckDims(const DataParallelDims& dims, const std::string& pointer) const {
  std::set<std::string> seen;
  for (const std::vector<std::string>* names : {&dims.shard, &dims.replicate}) {
    for (const std::string& name : *names) {
      if (mesh_.Find(name) == nullptr) {
        return MakeInputError(pointer, "the mesh has no such dimension", name);
      }
      if (!seen.insert(name).second) {
        return MakeInputError(pointer, "a mesh dimension is named twice", name);
      }
    }
  }
  return {};
}

// The communicator over a flattened dimension. -1: one rank.
CommunicatorId UnitCommunicators::GroupOf(const std::string& name, const MeshDigits& digits,
                                          Partition& partition) {
  if (digits.empty()) return -1;
  for (const auto& [known, id] : groups_) {
    if (known == digits) return id;
  }
  groups_.emplace_back(digits, static_cast<CommunicatorId>(partition.communicators.size()));
  partition.communicators.push_back(MakeCommunicator(name, digits));
  return groups_.back().second;
}

// FSDP2 reduces over the replicas wherever the mesh has a dimension for them, even one of a single replica.
CommunicatorId UnitCommunicators::ReplicateGroup(const std::string& name, const UnitChoice& choice,
                                                 Partition& partition) {
  if (!choice.replicate_digits.empty() || choice.data_parallel.replicate.empty())
    return GroupOf(name, choice.replicate_digits, partition);
  if (!one_replica_) {
    one_replica_ = static_cast<CommunicatorId>(partition.communicators.size());
    partition.communicators.push_back(MakeCommunicator(name, {}));
  }
  return *one_replica_;
}

// ... over a dimension that is not FSDP's, of the mesh or of another one of the job's.
CommunicatorId UnitCommunicators::GroupOfDim(const std::string& name, Partition& partition) {
  const CommunicatorId group = GroupOf(name, mesh_.Flatten(mesh_.Over(name)), partition);
  partition.mesh_groups.emplace(name, group);
  return group;
}

Status UnitCommunicators::FindHooks(const Trace& trace, const ModelIndex& index) {
  for (std::size_t h = 0; h < strategy_.fsdp2.all_reduce_hooks.size(); ++h) {
    const AllReduceHook& hook = strategy_.fsdp2.all_reduce_hooks[h];
    const std::string pointer = fmt::format("/fsdp2/all_reduce_hooks/{}", h);
    if (!hook.mesh_dim.empty() && mesh_.Find(hook.mesh_dim) == nullptr) {
      return MakeInputError(pointer + "/mesh_dim", "the mesh has no such dimension", hook.mesh_dim);
    }
    std::set<ModuleId>& modules = hooked_.emplace_back();
    for (std::size_t e = 0; e < hook.modules.size(); ++e) {
      Result<std::vector<std::string>> matched = MatchModules(trace, hook.modules[e]);
      if (!matched) {
        matched.error().pointer = fmt::format("{}/modules/{}", pointer, e);
        return std::unexpected(matched.error());
      }
      for (const std::string& fqn : *matched) {
        modules.insert(index.canonical[index.by_fqn.find(fqn)->second]);
      }
    }
  }
  return {};
}

Status UnitCommunicators::SetRanks(const DataParallelDims* own, const std::string& pointer,
                                   UnitChoice& choice) const {
  choice.data_parallel = own == nullptr ? data_parallel_ : *own;
  if (own != nullptr) {
    if (Status s = CheckDims(*own, pointer); !s) return s;
  }
  if (choice.data_parallel.shard.empty() && choice.data_parallel.replicate.empty()) {
    return MakeInputError("/mesh", "no dimension of the mesh is named shard or replicate", "none",
                          "data_parallel, of the strategy or of the unit");
  }
  choice.shard_digits = mesh_.Flatten(choice.data_parallel.shard);
  choice.replicate_digits = mesh_.Flatten(choice.data_parallel.replicate);
  choice.shard_size = RanksOf(choice.shard_digits);
  choice.replicate_size = RanksOf(choice.replicate_digits);
  return {};
}

Status UnitCommunicators::SetCommunicators(const std::string& pointer, UnitChoice& choice,
                                           Partition& partition) {
  Unit& unit = choice.unit;
  const auto name = [](const std::vector<std::string>& dims) {
    return fmt::format("{}", fmt::join(dims, "_"));
  };
  unit.shard_communicator = GroupOf(name(choice.data_parallel.shard), choice.shard_digits, partition);
  unit.replicate_communicator = ReplicateGroup(name(choice.data_parallel.replicate), choice, partition);
  if (unit.shard_communicator >= 0 && SeparatesReduceScatter()) {
    unit.reduce_scatter_communicator = SeparateGroup(unit.shard_communicator, partition);
  }
  for (const UnitParameter& parameter : unit.parameters) {
    for (const ParameterPlacement& placement : parameter.placements) {
      if (placement.grad_partial && parameter.requires_grad && placement.size > 1)
        GroupOfDim(placement.mesh_dim, partition);
    }
  }
  if (Status s = SetHook(pointer, choice, partition); !s) return s;
  if (Status s = SetLevels(choice, partition); !s) return s;
  return SetPostForward(pointer, choice, partition);
}

// The first hook that names the unit (or all).
Status UnitCommunicators::SetHook(const std::string& pointer, UnitChoice& choice, Partition& partition) {
  for (std::size_t h = 0; h < hooked_.size(); ++h) {
    const AllReduceHook& hook = strategy_.fsdp2.all_reduce_hooks[h];
    const bool named =
        std::ranges::any_of(choice.modules, [&](ModuleId m) { return hooked_[h].contains(m); });
    if (!hook.modules.empty() && !named) continue;
    if (hook.own_stream && !choice.data_parallel.replicate.empty()) {
      return MakeInputError(pointer, "an all-reduce hook of an HSDP unit cannot have a stream of its own",
                            DisplayName(choice.unit.fqn), "own_stream false");
    }
    const auto own = [&](const std::vector<std::string>& dims) {
      return std::ranges::find(dims, hook.mesh_dim) != dims.end();
    };
    if (own(choice.data_parallel.shard) || own(choice.data_parallel.replicate)) {
      return MakeInputError(pointer,
                            "an all-reduce hook works on a mesh dimension that FSDP reduces over itself",
                            hook.mesh_dim, "another dimension");
    }
    choice.all_reduce_hook = hook;
    Unit& unit = choice.unit;
    if (!hook.mesh_dim.empty()) unit.hook_communicator = GroupOfDim(hook.mesh_dim, partition);
    if (unit.hook_communicator >= 0 && hook.reduce_op == ReduceOp::kAverage) {
      unit.hook_divisor = static_cast<double>(mesh_.Find(hook.mesh_dim)->size);
    }
    unit.hook_divisor *= hook.divide.value_or(1.0);
    return {};
  }
  return {};
}

// set_separate_reduce_scatter_group by the knob or by a call, which may come at any time.
bool UnitCommunicators::SeparatesReduceScatter() const {
  const auto asks = [](const ModuleCall& call) {
    return call.method == "set_separate_reduce_scatter_group" && call.value.value_or(true);
  };
  if (strategy_.fsdp2.separate_reduce_scatter_communicator) return true;
  if (std::ranges::any_of(strategy_.setup, asks)) return true;
  return std::ranges::any_of(strategy_.program, [&](const StepProgram& step) {
    return std::ranges::any_of(step, [&](const ProgramCall& call) {
      const auto* module_call = std::get_if<ModuleCall>(&call);
      return module_call != nullptr && asks(*module_call);
    });
  });
}

CommunicatorId UnitCommunicators::SeparateGroup(CommunicatorId shard, Partition& partition) {
  const auto [entry, added] =
      separate_.try_emplace(shard, static_cast<CommunicatorId>(partition.communicators.size()));
  if (added) {
    Communicator own = partition.communicators[shard];
    own.name += "_reduce_scatter";
    partition.communicators.push_back(std::move(own));
  }
  return entry->second;
}

Status UnitCommunicators::SetPostForward(const std::string& pointer, UnitChoice& choice,
                                         Partition& partition) {
  const std::int64_t size = choice.post_forward_size;
  if (size == 0 || size == choice.shard_size) return {};
  const Result<MeshDigits> digits = AdjacentRanks(
      choice, size, pointer, "reshard_after_forward is not a divisor of the shard group's size");
  if (!digits) return std::unexpected(digits.error());
  // One group for every size; those of other strides (of units with their own mesh) have their own.
  const auto [entry, added] = post_forward_.try_emplace(
      {size, digits->back().stride}, static_cast<CommunicatorId>(partition.communicators.size()));
  if (added) {
    const bool first = post_forward_.size() == 1;
    partition.communicators.push_back(
        MakeCommunicator(first ? "post_forward" : fmt::format("post_forward_{}", size), *digits));
  }
  choice.unit.post_forward_communicator = entry->second;
  return {};
}

// A unit of no more ranks than the first level has is reduced at once.
Status UnitCommunicators::SetLevels(UnitChoice& choice, Partition& partition) {
  const std::int64_t inner = strategy_.fsdp2.inner_reduce_ranks;
  if (inner <= 1 || choice.shard_size <= inner) return {};
  const Result<MeshDigits> first =
      AdjacentRanks(choice, inner, "/fsdp2/inner_reduce_ranks",
                    "the first level of reductions does not divide the ranks of the shards");
  if (!first) return std::unexpected(first.error());
  const auto [entry, added] = levels_.try_emplace(choice.unit.shard_communicator);
  if (added) {
    const std::string suffix = levels_.size() == 1 ? "" : fmt::format("_{}", levels_.size());
    entry->second.first = static_cast<CommunicatorId>(partition.communicators.size());
    partition.communicators.push_back(MakeCommunicator("inner_reduce" + suffix, *first));
    entry->second.second = static_cast<CommunicatorId>(partition.communicators.size());
    partition.communicators.push_back(
        MakeCommunicator("outer_reduce" + suffix, Outermost(choice.shard_digits, inner)));
  }
  std::tie(choice.unit.inner_reduce_communicator, choice.unit.outer_reduce_communicator) = entry->second;
  return {};
}

}  // namespace shardplan
