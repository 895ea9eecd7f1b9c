#include "shardplan/simulator/device_fit.h"

#include <algorithm>
#include <set>
#include <string_view>

#include "allocator/sizes.h"
#include "shardplan/schemas/pytorch_rules.h"
#include "shardplan/simulator/memory_profile.h"
#include "shardplan/simulator/optimizer_tensors.h"

namespace shardplan {
namespace {

const Cluster& ClusterOf(const Plan& plan, const FitOptions& options) {
  return options.cluster != nullptr ? *options.cluster : plan.cluster;
}

MemoryHistoryOptions HistoryOptions(const FitOptions& options) {
  return {.kernel_temporaries = options.kernel_temporaries};
}

}  // namespace

UnmanagedParameters UnmanagedOf(const Trace& trace, const Plan& plan) {
  std::set<std::string_view> managed;
  for (const Unit& unit : plan.units) {
    for (const UnitParameter& parameter : unit.parameters) {
      managed.insert(parameter.fqn);
      managed.insert(parameter.shared_with.begin(), parameter.shared_with.end());
    }
  }
  UnmanagedParameters unmanaged;
  for (const Parameter& parameter : trace.parameters) {
    const bool known = managed.contains(parameter.fqn) ||
                       std::ranges::any_of(parameter.shared_with,
                                           [&](const std::string& fqn) { return managed.contains(fqn); });
    if (known) continue;
    const OptimizerShard whole{.shape = parameter.shape, .dtype = parameter.dtype};
    unmanaged.parameter_bytes += InBlocks(SizeBytes(whole));
    if (!parameter.requires_grad) continue;
    unmanaged.gradient_bytes += InBlocks(SizeBytes(whole));
    for (const Bytes state : OptimizerStates(plan.strategy.optimizer, whole)) {
      unmanaged.state_bytes += InBlocks(state);
    }
  }
  return unmanaged;
}

Bytes OutsideBytes(const Plan& plan, const Cluster& cluster) {
  return cluster.device.context_bytes + NcclBufferBytes(plan);
}

std::optional<Bytes> AllocatorBudget(const Plan& plan, const FitOptions& options) {
  const Cluster& cluster = ClusterOf(plan, options);
  std::optional<Bytes> budget = options.budget_bytes;
  if (!budget && cluster.device.memory_bytes.value > 0)
    budget = cluster.device.memory_bytes - OutsideBytes(plan, cluster);
  if (!budget) return std::nullopt;
  return std::max(*budget - options.unmanaged_bytes, Bytes{1});
}

Result<ReservedOptions> AllocatorOptions(const Plan& plan, const FitOptions& options) {
  ReservedOptions reserved{
      .completion = options.completion, .addresses = options.addresses, .stop_at_release = !options.releases};
  const std::optional<Bytes> budget = AllocatorBudget(plan, options);
  const Bytes memory = ClusterOf(plan, options).device.memory_bytes;
  // An expandable segment has 9/8 of the device's memory in addresses, whatever the process may reserve of
  // it.
  if (memory.value > 0) reserved.device_bytes = memory;
  if (budget) {
    reserved.device_bytes = std::max(reserved.device_bytes, *budget);
    if (memory.value == 0) reserved.device_bytes = *budget;
    reserved.other_bytes = reserved.device_bytes - *budget;
  }
  reserved.settings.older_segments_first = RulesOf(plan.strategy).older_segments_first;
  const std::string& settings = plan.strategy.alloc_conf;
  if (Status parsed = ParseAllocatorSettings(settings, reserved.device_bytes, reserved.settings); !parsed) {
    return MakeInputError("/strategy/alloc_conf", parsed.error().message, parsed.error().found,
                          parsed.error().expected);
  }
  return reserved;
}

DeviceFit FitOf(const Plan& plan, const FitOptions& options, const ReservedMemory& replayed) {
  return {.budget_bytes = AllocatorBudget(plan, options),
          .outside_bytes = OutsideBytes(plan, ClusterOf(plan, options)),
          .reserved_bytes = replayed.peak_reserved_bytes,
          .cache_releases = replayed.retries,
          .out_of_memory = replayed.out_of_memory,
          .out_of_memory_at = replayed.out_of_memory_at};
}

Bytes ReservedToShow(const Plan& plan, FitOptions options, const DeviceFit& fit) {
  if (!fit.out_of_memory) return fit.reserved_bytes;
  options.completion = Completion::kAtOnce;
  return ReservedWithoutBudget(plan, options).value_or(fit.reserved_bytes);
}

Result<DeviceFit> FitDevice(const Plan& plan, const FitOptions& options) {
  Result<ReservedOptions> allocator = AllocatorOptions(plan, options);
  if (!allocator) return std::unexpected(allocator.error());
  // Nothing bounds what a device without end reserves that is always behind.
  if (!AllocatorBudget(plan, options)) allocator->completion = Completion::kAtOnce;
  const SteadyReplay replay = ReplayUntilSteady(plan, HistoryOptions(options), *allocator, options.steps);
  return FitOf(plan, options, replay.reserved);
}

Result<Bytes> ReservedWithoutBudget(const Plan& plan, FitOptions options) {
  options.releases = true;
  Result<ReservedOptions> allocator = AllocatorOptions(plan, options);
  if (!allocator) return std::unexpected(allocator.error());
  allocator->other_bytes = {};
  allocator->device_bytes = ReservedOptions().device_bytes;
  return ReplayUntilSteady(plan, HistoryOptions(options), *allocator, options.steps)
      .reserved.peak_reserved_bytes;
}

}  // namespace shardplan
