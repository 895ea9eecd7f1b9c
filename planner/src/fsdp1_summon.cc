// FullyShardedDataParallel.summon_full_params (_unshard_param_utils.py).
#include <fmt/format.h>

#include <algorithm>

#include "fsdp1_policy.h"

namespace shardplan {
namespace {

bool IsUnder(const std::string& fqn, const std::string& module) {
  return module.empty() || fqn == module || fqn.starts_with(module + ".");
}

}  // namespace

std::vector<UnitId> Fsdp1Policy::UnitsUnder(const ModuleCall& call) const {
  std::vector<UnitId> units;
  for (const UnitId unit : partition_.states) {
    const std::string& fqn = UnitOf(unit).fqn;
    if (call.recurse ? IsUnder(fqn, call.module) : fqn == call.module) units.push_back(unit);
  }
  return units;
}

// Enters the context (value true) or leaves it. Unit by unit the host waits for the device; the parameters
// are gathered in the original dtype, on the compute stream, and freed by those that they were gathered by.
// (What the user changed is written back to this rank's shard: a copy on the device that is no instruction.)
Status Fsdp1Policy::SummonFullParams(const HostEvent& event) {
  if (!event.call->flags.empty()) {
    return MakeInputError("/program",
                          "fsdp1 plans summon_full_params for all ranks, on the device, without gradients",
                          event.call->flags.front(), "no flags");
  }
  const bool enters = event.call->value.value_or(true);
  std::vector<UnitId> units = UnitsUnder(*event.call);
  if (!enters) std::ranges::reverse(units);
  const StreamId unshard_stream = unshard_stream_, pre_unshard_stream = pre_unshard_stream_;
  builder_.SetReason("summon_full_params");
  for (const UnitId id : units) {
    Handle& handle = handles_[id];
    builder_.SetUnit(id);
    if (enters) Synchronize();
    if (!handle.exists) continue;
    if (enters == handle.summoned) {
      return MakeInputError("/program", "summon_full_params is entered twice, or left before it is entered",
                            DisplayName(UnitOf(id).fqn));
    }
    unshard_stream_ = pre_unshard_stream_ = kCompute;
    summoning_ = true;
    if (enters) {
      if (handle.sharded && handle.casts_params && handle.full.buffer < 0) MakeFullPrecisionBuffer(id);
      const Copy& copy = handle.casts_params ? handle.full : handle.unsharded;
      handle.summon_frees = handle.sharded && !copy.allocated;
      Unshard(id, "summon_full_params");
    } else {
      Reshard(id, handle.summon_frees);
    }
    handle.summoned = enters;
    summoning_ = false;
    unshard_stream_ = unshard_stream;
    pre_unshard_stream_ = pre_unshard_stream;
  }
  return {};
}

// torch.cuda.synchronize()
void Fsdp1Policy::Synchronize() {
  const auto streams = static_cast<StreamId>(builder_.plan().streams.size());
  for (StreamId stream = 0; stream < streams; ++stream) {
    const EventId event = builder_.Event(fmt::format("synchronize.{}", builder_.plan().streams[stream].name));
    builder_.Record(event, stream);
    builder_.HostWait(event);
  }
}

}  // namespace shardplan
