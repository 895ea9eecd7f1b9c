// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <set>
#include <string_view>

#include "allocator/sizes.h"
#include "memory/categories.h"
#include "shardplan/schemas/buffer_roles.h"
#include "shardplan/schemas/optimizers.h"
#include "shardplan/schemas/pytorch_rules.h"
#include "shardplan/simulator/memory_profile.h"
#include "shardplan/simulator/reserved_memory.h"
#include "text/format.h"

namespace shardplan {
namespace {

MemoryHistoryOptions HistoryOptions(const FitOptions& options) {
  return {.kernel_temporaries = options.kernel_temporaries};
}

// Whether ranks divide it between them on the device: shards and what is made of them. Everything else a rank
// has whole.
bool IsDividedOnDevice(std::int32_t category) {
  if (category >= internal::kBufferRoles) return false;
  const auto role = static_cast<BufferRole>(category);
  const bool divided =
      ArrangementOf(role) == Arrangement::kShard || IsInnerReduced(role) || IsOptimizerMemory(role);
  return divided && DescriptionOf(role).memory != RoleMemory::kHost;
}

// The model's own memory, which no sharding of parameters changes.
bool IsOfTheModel(std::int32_t category) { return category >= internal::kBufferRoles; }

// The most that is allocated at one time in the categories that count.
Bytes PeakOf(const MemoryProfile& profile, bool (*counts)(std::int32_t)) {
  std::map<std::int32_t, Bytes> now;
  Bytes sum, most;
  for (const MemorySample& sample : profile.samples) {
    if (!counts(sample.category)) continue;
    Bytes& of_category = now[sample.category];
    sum += sample.category_bytes - of_category;
    of_category = sample.category_bytes;
    most = std::max(most, sum);
  }
  return most;
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
    const OptimizerShard whole{
        .shape = parameter.shape,
        .dtype = parameter.dtype,
        .muon = MuonSteps(plan.strategy.optimizer, parameter.fqn, parameter.shared_with)};
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
  const Cluster& cluster = plan.cluster;
  std::optional<Bytes> budget = options.budget_bytes;
  if (!budget && cluster.device.memory_bytes.value > 0)
    budget = cluster.device.memory_bytes - OutsideBytes(plan, cluster);
  if (!budget) return std::nullopt;
  return std::max(*budget - plan.unmanaged.Total(), Bytes{1});
}

Result<ReservedOptions> AllocatorOptions(const Plan& plan, const FitOptions& options) {
  ReservedOptions reserved{
      .completion = options.completion, .addresses = options.addresses, .stop_at_release = !options.releases};
  const std::optional<Bytes> budget = AllocatorBudget(plan, options);
  const Bytes memory = plan.cluster.device.memory_bytes;
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
          .outside_bytes = OutsideBytes(plan, plan.cluster),
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

std::string WhyNoRanksFit(const Plan& plan, const FitOptions& options) {
  const std::optional<Bytes> budget = AllocatorBudget(plan, options);
  if (!budget) return {};
  const Bytes all = *budget + plan.unmanaged.Total();
  const auto exceeds = [&](std::string_view what, Bytes bytes) {
    return fmt::format("{} exceed the budget: {} of {} ({} of {} bytes)", what, internal::Gibibytes(bytes),
                       internal::Gibibytes(all), bytes.value, all.value);
  };
  if (plan.unmanaged.Total() >= all) return exceeds("parameters in no unit alone", plan.unmanaged.Total());
  const MemoryProfile profile = ProfileMemory(plan, {.record_samples = true,
                                                     .first_sampled_step = plan.steady_step,
                                                     .kernel_temporaries = options.kernel_temporaries});
  const Bytes activations = PeakOf(profile, IsOfTheModel);
  if (activations > *budget) return exceeds("activations alone", activations);
  const Bytes whole = PeakOf(profile, [](std::int32_t category) { return !IsDividedOnDevice(category); });
  if (whole > *budget) return exceeds("activations and gathered parameters", whole);
  return {};
}

}  // namespace shardplan
