// Parameter groups as the strategy makes them, and the setters of FSDPModule (_fully_shard.py).
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <numeric>

#include "policy/fsdp2/fsdp2_policy.h"
#include "units/layout.h"

namespace shardplan {

void Fsdp2Policy::MakeGroups() {
  const std::size_t count = partition_.units.size();
  groups_.resize(count);
  comms_.resize(count);
  contexts_.resize(count);
  lazily_initialised_.assign(count, false);
  comm_of_.resize(count);
  context_of_.resize(count);
  for (std::size_t u = 0; u < count; ++u) {
    comm_of_[u] = context_of_[u] = u;
    MakeGroup(static_cast<UnitId>(u));
  }
}

void Fsdp2Policy::MakeGroup(UnitId id) {
  const UnitChoice& choice = partition_.units[id];
  const Unit& unit = choice.unit;
  const Fsdp2Knobs& knobs = strategy_.fsdp2;
  Group& group = groups_[id];
  group.has_parameters = !unit.parameters.empty();
  group.post_forward_size = choice.post_forward_size;
  group.auto_reshard_after_forward = !choice.reshard_given;
  group.offloads = choice.cpu_offload;
  group.grad_dtype = unit.param_dtype;
  group.unshard_async_op = knobs.unshard_async_op;
  group.gradient_divide_factor = knobs.gradient_divide_factor;
  group.force_sum_reduction = knobs.force_sum_reduction;
  group.separate_reduce_scatter = knobs.separate_reduce_scatter_communicator;
  group.process_group_memory = knobs.allocate_memory_from_process_group;
  group.reduce_scatters_in_flight = static_cast<std::size_t>(knobs.reduce_scatter_inputs_in_flight);
  if (!group.has_parameters) return;
  std::vector<std::int32_t> all(unit.parameters.size());
  std::iota(all.begin(), all.end(), 0);
  const std::int64_t ranks = ShardRanks(id);
  group.param_sharded = builder_.UnitBuffer(id, BufferRole::kParamSharded, unit.orig_dtype,
                                            OriginalShardParts(unit, ranks), all, {}, ShardMemory(id));
  group.param_unsharded = builder_.UnitBuffer(id, BufferRole::kParamUnsharded, unit.param_dtype,
                                              UnshardedParts(unit, ranks), all);
  std::vector<std::int32_t> extended, chunked;
  std::vector<Bytes> gathered, unsharded, chunks;
  const std::vector<Bytes> whole = UnshardedParts(unit, ranks);
  for (const std::int32_t p : all) {
    const UnitParameter& parameter = unit.parameters[p];
    for (std::size_t t = 1; t < parameter.gathered.size(); ++t) {
      const ExtensionBuffer& tensor = parameter.gathered[t];
      gathered.push_back(Bytes{tensor.numel * ranks * SizeBytes(tensor.dtype)});
    }
    for (const ExtensionBuffer& tensor : parameter.unsharded) {
      unsharded.push_back(Bytes{tensor.numel * SizeBytes(tensor.dtype)});
    }
    if (!parameter.gathered.empty()) extended.push_back(p);
    if (parameter.shard_dim != 0 && ranks > 1) {
      chunked.push_back(p);
      chunks.push_back(whole[p]);
    }
  }
  if (!gathered.empty()) {
    group.extension_gathered =
        builder_.UnitBuffer(id, BufferRole::kExtensionGathered, DType::kUInt8, gathered, extended);
  }
  if (!unsharded.empty()) {
    group.extension_unsharded =
        builder_.UnitBuffer(id, BufferRole::kExtensionUnsharded, DType::kUInt8, unsharded, extended);
  }
  if (!chunked.empty()) {
    group.copy_out_chunks =
        builder_.UnitBuffer(id, BufferRole::kAllGatherInput, unit.param_dtype, chunks, chunked, "chunks");
  }
}

// forward_prefetch / backward_prefetch as distances: explicit lists over the units in forward order, the root
// left as it is (what torchtitan sets).
void Fsdp2Policy::SetPrefetchDistances() {
  const Fsdp2Knobs& knobs = strategy_.fsdp2;
  std::vector<UnitId> order;
  for (const HostEvent& event : steps_.front().events) {
    if (event.kind == HostEventKind::kForwardEnd) break;
    if (event.kind != HostEventKind::kPreForward || !groups_[event.unit].has_parameters) continue;
    if (partition_.units[event.unit].is_root) continue;
    if (std::find(order.begin(), order.end(), event.unit) == order.end()) order.push_back(event.unit);
  }
  const auto count = static_cast<std::int32_t>(order.size());
  for (std::int32_t i = 0; i < count; ++i) {
    for (std::int32_t d = 1; d <= knobs.forward_prefetch && i + d < count; ++d) {
      groups_[order[i]].forward_prefetch.push_back(order[i + d]);
    }
    for (std::int32_t d = 1; d <= knobs.backward_prefetch && i - d >= 0; ++d) {
      groups_[order[i]].backward_prefetch.push_back(order[i - d]);
    }
  }
  for (Group& group : groups_) group.default_backward_prefetch = knobs.backward_prefetch != 0;
}

// The unit of this name, or that hooks this module. -1: none.
UnitId Fsdp2Policy::FindUnit(const std::string& fqn) const {
  for (std::size_t u = 0; u < partition_.units.size(); ++u) {
    if (partition_.units[u].unit.fqn == fqn) return static_cast<UnitId>(u);
  }
  const auto found = index_.by_fqn.find(fqn);
  return found == index_.by_fqn.end() ? -1 : partition_.unit_of_module[index_.canonical[found->second]];
}

Status Fsdp2Policy::SetPrefetchLists(const std::vector<PrefetchList>& lists, std::string_view pointer,
                                     bool forward) {
  for (std::size_t i = 0; i < lists.size(); ++i) {
    const UnitId unit = FindUnit(lists[i].unit);
    if (unit < 0) {
      return MakeInputError(fmt::format("{}/{}/unit", pointer, i), "there is no such unit", lists[i].unit);
    }
    std::vector<UnitId>& targets = forward ? groups_[unit].forward_prefetch : groups_[unit].backward_prefetch;
    targets.clear();
    for (std::size_t t = 0; t < lists[i].prefetch.size(); ++t) {
      const UnitId target = FindUnit(lists[i].prefetch[t]);
      if (target < 0) {
        return MakeInputError(fmt::format("{}/{}/prefetch/{}", pointer, i, t), "there is no such unit",
                              lists[i].prefetch[t]);
      }
      targets.push_back(target);
    }
  }
  return {};
}

Status Fsdp2Policy::SetPrefetchList(const ModuleCall& call, UnitId unit) {
  std::vector<UnitId> targets;
  for (const std::string& fqn : call.modules) {
    targets.push_back(FindUnit(fqn));
    if (targets.back() < 0) return MakeInputError("", "there is no such unit", fqn);
  }
  const bool forward = call.method == "set_modules_to_forward_prefetch";
  (forward ? groups_[unit].forward_prefetch : groups_[unit].backward_prefetch) = std::move(targets);
  return {};
}

std::vector<UnitId> Fsdp2Policy::UnitsUnder(const ModuleCall& call, UnitId unit) const {
  if (!call.recurse) return {unit};
  std::vector<UnitId> units;
  for (std::size_t m = 0; m < trace_.modules.size(); ++m) {
    const std::string& fqn = trace_.modules[m].fqn;
    const bool under = call.module.empty() || fqn == call.module || fqn.starts_with(call.module + ".");
    const UnitId inside = partition_.unit_of_module[index_.canonical[m]];
    if (under && inside >= 0 && std::find(units.begin(), units.end(), inside) == units.end()) {
      units.push_back(inside);
    }
  }
  return units;
}

Status Fsdp2Policy::Setter(const ModuleCall& call, bool in_setup) {
  const auto found = index_.by_fqn.find(call.module);
  if (found == index_.by_fqn.end()) return MakeInputError("", "there is no such module", call.module);
  const UnitId unit = partition_.unit_of_module[index_.canonical[found->second]];
  if (unit < 0) {
    return MakeInputError("", "fully_shard is not called on this module", DisplayName(call.module), "a unit");
  }
  const bool value = call.value.value_or(true);
  Group& own = groups_[unit];
  // Setters of one module, and those of the state that it shares with its root.
  if (call.method == "set_is_last_backward") {
    Context(unit).is_last_backward = value;
  } else if (call.method == "set_force_sum_reduction_for_comms") {
    own.force_sum_reduction = value;
  } else if (call.method == "set_unshard_in_backward") {
    own.unshard_in_backward = value;
  } else if (call.method == "set_allocate_memory_from_process_group_for_comm") {
    own.process_group_memory = value;
  } else if (call.method == "set_post_optim_event") {
    Context(unit).post_optim_event = builder_.Event("post_optim");
    if (!in_setup) builder_.Record(Context(unit).post_optim_event, 0);
  } else if (call.method == "set_modules_to_forward_prefetch" ||
             call.method == "set_modules_to_backward_prefetch") {
    return SetPrefetchList(call, unit);
  } else if (call.method == "set_gradient_divide_factor" ||
             call.method == "set_reduce_scatter_max_input_buffers") {
    return NumberSetter(call, unit, in_setup);
  } else {
    static constexpr std::array<std::string_view, 6> kRecursive = {
        "set_requires_gradient_sync", "set_requires_all_reduce", "set_reshard_after_backward",
        "set_reshard_after_forward",  "_set_unshard_async_op",   "set_separate_reduce_scatter_group"};
    if (std::ranges::find(kRecursive, call.method) == kRecursive.end()) {
      return MakeInputError("", "fsdp2 does not know this call", call.method);
    }
    for (const UnitId target : UnitsUnder(call, unit)) {
      Group& group = groups_[target];
      if (call.method == "set_requires_gradient_sync") {
        group.reduce_grads = group.all_reduce_grads = value;
      } else if (call.method == "set_requires_all_reduce") {
        group.all_reduce_grads = value;
      } else if (call.method == "set_reshard_after_backward") {
        group.reshard_after_backward = value;
      } else if (call.method == "set_reshard_after_forward") {
        group.post_forward_size = value ? ShardRanks(target) : 0;
        group.auto_reshard_after_forward = false;
      } else if (call.method == "_set_unshard_async_op") {
        group.unshard_async_op = value;
      } else {
        group.separate_reduce_scatter = value;
      }
    }
  }
  return {};
}

Status Fsdp2Policy::NumberSetter(const ModuleCall& call, UnitId unit, bool in_setup) {
  if (!call.number) return MakeInputError("", "this call takes a number", call.method, "\"number\"");
  if (call.method == "set_gradient_divide_factor") {
    if (!in_setup) {
      return MakeInputError("", "the divide factor can be set before the first step only", call.method,
                            "in setup");
    }
    groups_[unit].gradient_divide_factor = call.number;
    return {};
  }
  const auto count = static_cast<std::int64_t>(*call.number);
  if (count < 1 || static_cast<double>(count) != *call.number) {
    return MakeInputError("", "so many reduce-scatter inputs cannot be in flight",
                          fmt::format("{}", *call.number), "1 or more");
  }
  for (const UnitId target : UnitsUnder(call, unit)) {
    groups_[target].reduce_scatters_in_flight = static_cast<std::size_t>(count);
  }
  return {};
}

// A unit's own lazy initialisation (its root's, or the user's first unshard) hooks the modules whose
// parameters it manages: it is resharded before their states are read or written.
void Fsdp2Policy::ReshardForStateDict(const ModuleCall& call) {
  for (std::size_t m = 0; m < trace_.modules.size(); ++m) {
    const std::string& fqn = trace_.modules[m].fqn;
    const bool under = call.module.empty() || fqn == call.module || fqn.starts_with(call.module + ".");
    const UnitId unit = partition_.managed_by[index_.canonical[m]];
    if (!under || unit < 0 || !(lazily_initialised_[unit] || groups_[unit].unsharded_by_user) ||
        trace_.modules[m].parameters.empty())
      continue;
    builder_.SetUnit(unit);
    ToSharded(unit);
  }
}

Status Fsdp2Policy::UserCall(const HostEvent& event) {
  builder_.BeginTrigger(TriggerKind::kUserCall, event.unit, event.microbatch);
  const ModuleCall& call = *event.call;
  builder_.SetReason("user");
  if (call.method == "unshard") {
    // unshard(async_op) waits only when it is synchronous. Outside a hook the group's state is idle, so the
    // current stream is used.
    if (event.unit < 0 || !groups_[event.unit].has_parameters) return {};
    groups_[event.unit].unsharded_by_user = true;
    Unshard(event.unit, call.value.value_or(false), "user");
    if (!call.value.value_or(false)) WaitForUnshard(event.unit);
    return {};
  }
  if (call.method == "wait_for_unshard") {  // UnshardHandle.wait
    if (event.unit >= 0) WaitForUnshard(event.unit);
    return {};
  }
  if (call.method == "state_dict" || call.method == "load_state_dict") {
    ReshardForStateDict(call);
    return {};
  }
  if (call.method == "reshard") {
    if (event.unit >= 0 && groups_[event.unit].has_parameters) Reshard(event.unit);
    return {};
  }
  return Setter(call, /*in_setup=*/false);
}

}  // namespace shardplan
