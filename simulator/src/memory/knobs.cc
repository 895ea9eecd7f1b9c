// SPDX-License-Identifier: Apache-2.0
#include "memory/knobs.h"

#include <algorithm>
#include <variant>

#include "memory/categories.h"
#include "shardplan/schemas/buffer_roles.h"
#include "shardplan/schemas/optimizers.h"
#include "shardplan/schemas/policy_knobs.h"

namespace shardplan::internal {
namespace {

void Set(AliveMemory& alive, std::string knob, Bytes bytes) {
  alive.knob = std::move(knob);
  alive.knob_bytes = bytes;
}

void AdviseFewerParameters(AliveMemory& alive) {
  Set(alive, "needed now; units of fewer parameters", Bytes{0});
}

// Gathered parameters that are not needed now could be resharded, or gathered later.
void AdviseUnsharded(const Plan& plan, AliveMemory& alive) {
  if (alive.in_use) return AdviseFewerParameters(alive);
  const bool is_root = alive.unit >= 0 && plan.units[static_cast<std::size_t>(alive.unit)].fqn.empty();
  const PolicyKnobs& policy = KnobsOf(plan.policy);
  Set(alive, policy.reshard_advice(plan.strategy, UnitText(plan, alive.unit), is_root), alive.bytes);
}

// Whether some backward does not reduce.
bool AccumulatesWithoutSync(const Plan& plan) {
  const std::string& method = KnobsOf(plan.policy).accumulation_call;
  const auto skips = [&](const ModuleCall& call) { return call.method == method; };
  bool found = std::ranges::any_of(plan.strategy.setup, skips);
  for (const StepProgram& step : plan.strategy.program) {
    for (const ProgramCall& call : step) {
      const auto* module = std::get_if<ModuleCall>(&call);
      found = found || (module != nullptr && skips(*module));
    }
  }
  return found;
}

void AdviseOffload(const Plan& plan, AliveMemory& alive) {
  if (plan.strategy.cpu_offload) return Set(alive, "on its way to the host", Bytes{0});
  Set(alive, "cpu_offload: true (twice the shard ranks: half of it)", alive.bytes);
}

bool IsFullPrecision(const Plan& plan, UnitId unit) {
  return unit >= 0 && SizeBytes(plan.units[static_cast<std::size_t>(unit)].reduce_dtype) == 4;
}

bool HasCheckpointing(const Plan& plan) { return plan.strategy.checkpoint.has_value(); }

void AdviseReduction(const Plan& plan, AliveMemory& alive) {
  if (IsFullPrecision(plan, alive.unit)) {
    return Set(alive, "units of fewer parameters; or reduce_dtype: bfloat16, which changes numbers",
               Bytes{alive.bytes.value / 2});
  }
  Set(alive, "units of fewer parameters", Bytes{0});
}

void AdviseWholeGradient(const Plan& plan, BufferRole role, AliveMemory& alive) {
  if (LifetimeOf(role) == RoleLifetime::kAccumulated && AccumulatesWithoutSync(plan)) {
    return Set(alive, "accumulation with gradient sync in every micro-batch", alive.bytes);
  }
  // A flat gradient is as it is in one backward.
  if (alive.in_use) return AdviseFewerParameters(alive);
  Set(alive, "units of their own for the modules of " + UnitText(plan, alive.unit), alive.bytes);
}

void AdviseGathering(BufferRole role, AliveMemory& alive) {
  if (role == BufferRole::kParamPostForwardShard) {
    return Set(alive, "reshard_after_forward: true instead of a number", alive.bytes);
  }
  if (alive.in_use) return AdviseFewerParameters(alive);
  Set(alive, "a prefetch depth of 0, forward and backward", alive.bytes);
}

void AdviseBuffer(const Plan& plan, BufferRole role, AliveMemory& alive) {
  const bool is_gradient = ContentOf(role) == RoleContent::kGradient;
  switch (LifetimeOf(role)) {
    case RoleLifetime::kState:
      if (DescriptionOf(role).memory != RoleMemory::kHost) AdviseOffload(plan, alive);
      return;
    case RoleLifetime::kUnsharded:
      return AdviseUnsharded(plan, alive);
    case RoleLifetime::kScratch:
      return is_gradient ? AdviseReduction(plan, alive) : AdviseGathering(role, alive);
    case RoleLifetime::kBackward:
    case RoleLifetime::kAccumulated:
      return IsWholeGradient(role) ? AdviseWholeGradient(plan, role, alive) : AdviseReduction(plan, alive);
    case RoleLifetime::kOptimizer:
      if (!DescriptionOf(plan.strategy.optimizer.kind).has_fused) {
        return Set(alive, "optimizer implementation: for_loop", Bytes{0});
      }
      return Set(alive, "optimizer implementation: fused", alive.bytes);
    case RoleLifetime::kPasses:
    case RoleLifetime::kPersistent:
      return;
  }
}

void AdviseStorage(const Plan& plan, StorageRole role, AliveMemory& alive) {
  switch (role) {
    case StorageRole::kSaved:
      if (alive.unit < 0) return;
      if (HasCheckpointing(plan))
        return Set(alive,
                   std::string(plan.strategy.activation_offload ? "" : "offloaded activations; or ") +
                       "a shorter sequence or a smaller batch, which change numbers: in proportion",
                   Bytes{0});
      return Set(alive, "checkpoint " + UnitText(plan, alive.unit) + " (all but its input)", alive.bytes);
    case StorageRole::kRecompute:
      return Set(alive, "checkpoints around smaller modules", Bytes{0});
    case StorageRole::kOutput:
      return Set(alive, "let go of the model's output before the backward", alive.bytes);
    case StorageRole::kLossSaved:
    case StorageRole::kLossTemp:
      return Set(
          alive,
          "a loss that works in chunks of tokens; or one that keeps the logits' dtype, which changes numbers",
          Bytes{alive.bytes.value / 2});
    default:
      return;
  }
}

}  // namespace

void AdviseKnob(const Plan& plan, AliveMemory& alive) {
  for (std::int32_t c = 0; c < kBufferRoles; ++c) {
    if (Name(static_cast<BufferRole>(c)) == alive.category) {
      return AdviseBuffer(plan, static_cast<BufferRole>(c), alive);
    }
  }
  for (std::int32_t c = 0; c < kStorageRoles; ++c) {
    if (Name(static_cast<StorageRole>(c)) == alive.category) {
      return AdviseStorage(plan, static_cast<StorageRole>(c), alive);
    }
  }
  constexpr std::int64_t kLargeWorkspace = 32 << 20;  // of recent devices, of which cuBLASLt takes less
  if (alive.category == MemoryCategories()[kCublasWorkspace] && alive.bytes.value >= kLargeWorkspace) {
    Set(alive, "CUBLAS_WORKSPACE_CONFIG=:4096:2:16:8", Bytes{alive.bytes.value / 4 * 3});
  }
}

}  // namespace shardplan::internal
