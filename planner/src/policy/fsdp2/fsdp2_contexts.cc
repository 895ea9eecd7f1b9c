// What the FSDPStates of one root share: FSDPStateContext and FSDPCommContext (_fsdp_state.py,
// _fsdp_param_group.py, share_comm_ctx in _fully_shard.py).
//
// [Note: who is a root]
// The first state that runs a forward is the root of all states under its module. A model on whose root
// fully_shard was not called has several, each with contexts of its own: streams, prefetch order, the flag of
// the last backward. share_comm_ctx gives several roots one communication context; every root's first
// forward initialises it again, with new streams and an empty prefetch order.
#include <fmt/format.h>

#include <algorithm>

#include "policy/fsdp2/fsdp2_policy.h"

namespace shardplan {
Status Fsdp2Policy::ShareCommContexts() {
  const auto& shared = strategy_.fsdp2.shared_comm_contexts;
  for (std::size_t s = 0; s < shared.size(); ++s) {
    UnitId first = -1;
    for (std::size_t m = 0; m < shared[s].size(); ++m) {
      const UnitId unit = FindUnit(shared[s][m]);
      if (unit < 0) {
        return MakeInputError(fmt::format("/fsdp2/shared_comm_contexts/{}/{}", s, m), "there is no such unit",
                              shared[s][m]);
      }
      if (first < 0) first = unit;
      comm_of_[unit] = comm_of_[first];
    }
  }
  return {};
}

// FSDPState._lazy_init: all_states are those of root.named_modules().
std::vector<UnitId> Fsdp2Policy::StatesUnder(ModuleId root) const {
  std::vector<UnitId> states;
  std::vector<bool> visited(trace_.modules.size(), false);
  std::vector<ModuleId> stack = {root};
  while (!stack.empty()) {
    const ModuleId module = stack.back();
    stack.pop_back();
    if (visited[module]) continue;
    visited[module] = true;
    if (partition_.unit_of_module[module] >= 0) states.push_back(partition_.unit_of_module[module]);
    const std::vector<ModuleId>& children = index_.children[module];
    for (auto child = children.rbegin(); child != children.rend(); ++child) {
      stack.push_back(index_.canonical[*child]);
    }
  }
  return states;
}

void Fsdp2Policy::InitCommContext(CommContext& comm) {
  const auto name = [&](std::string_view stream) {
    int same = 0;  // contexts made before, and this one's earlier streams
    for (const CommContext& other : comms_) same += other.generation;
    return same == 0 ? std::string(stream) : fmt::format("{}.{}", stream, same + 1);
  };
  comm.copy_in = builder_.Stream(name("all_gather_copy_in"), -1);
  comm.all_gather = builder_.Stream(name("all_gather"), -1);
  comm.reduce_scatter = builder_.Stream(name("reduce_scatter"), -1);
  comm.all_reduce = -1;
  // What an earlier root left: dropped without waiting for anything.
  DropKeptOutput(comm);
  for (const PendingReduce& pending : comm.reduce_scatters) builder_.Free(pending.input, kCompute);
  comm.reduce_scatters.clear();
  comm.post_forward_order.clear();
  comm.initialised = true;
  ++comm.generation;
}

Status Fsdp2Policy::LazyInit(UnitId root) {
  const UnitChoice& choice = partition_.units[root];
  if (choice.modules.size() > 1) {
    return MakeInputError("/units", "a group of modules cannot be a root: FSDP needs a single root module",
                          choice.unit.fqn, "a unit around it, or shard_root");
  }
  StateContext& context = Context(root);
  context.states = StatesUnder(choice.modules.front());
  for (const UnitId unit : context.states) {
    if (unit != root && lazily_initialised_[unit]) {
      return MakeInputError(
          "/units", "PyTorch requires running forward through the root module first",
          fmt::format("{} ran before {}", DisplayName(UnitOf(unit).fqn), DisplayName(choice.unit.fqn)));
    }
  }
  // Its parameters would be gathered again at once.
  if (groups_[root].auto_reshard_after_forward) groups_[root].post_forward_size = 0;
  InitCommContext(Comm(root));
  for (const UnitId unit : context.states) {
    lazily_initialised_[unit] = true;
    context_of_[unit] = context_of_[root];
    comm_of_[unit] = comm_of_[root];
  }
  return {};
}

// Once per forward: all-gathers wait for the optimizer.
void Fsdp2Policy::RootPreForward(UnitId unit) {
  StateContext& context = Context(unit);
  if (context.iter_forward_root >= 0) return;
  context.iter_forward_root = unit;
  const CommContext& comm = Comm(unit);
  EventId event = context.post_optim_event;
  context.post_optim_event = -1;
  if (event < 0) {
    event =
        builder_.Event(partition_.units[unit].is_root ? "forward_begin" : EventName(unit, "forward_begin"));
    builder_.Record(event, kCompute);
  }
  WaitAllGatherStreams(comm, event);
}

StreamId Fsdp2Policy::AllReduceStream(UnitId unit) {
  CommContext& comm = Comm(unit);
  if (comm.all_reduce < 0) {
    const std::string& twin = builder_.plan().streams[comm.reduce_scatter].name;
    comm.all_reduce = builder_.Stream("all_reduce" + twin.substr(std::string_view("reduce_scatter").size()));
  }
  return comm.all_reduce;
}

}  // namespace shardplan
