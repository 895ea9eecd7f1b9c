// SPDX-License-Identifier: Apache-2.0
// DeepSpeed's ZeRO-3 as a policy, with a unit where DeepSpeed has a parameter. Its rules are those of
// deepspeed/runtime/zero (DeepSpeed 0.17):
//   fetch, prefetch, release   partitioned_param_coordinator.py
//   persistent parameters      parameter_offload.py, stage3.py
//   constants                  config.py
// DeepSpeed records the order of modules in its first iterations and then uses it; the planner knows it from
// the start. One thing differs: gradients are reduced unit by unit, not in buckets of reduce_bucket_size.
#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

#include "shardplan/planner/policy.h"
#include "shardplan/schemas/layout.h"

namespace {

using shardplan::HookPoint;
using shardplan::HookPointKind;
using shardplan::Status;
using shardplan::UnitId;

// The hooks of a module that fetch its parameters: before its forward, a recomputation, its backward.
bool Fetches(const HookPoint& point) {
  return point.kind == HookPointKind::kPreForward || point.kind == HookPointKind::kRecomputePreForward ||
         point.kind == HookPointKind::kPreBackward;
}

class Zero3 : public shardplan::Policy {
 public:
  Zero3(const shardplan::PolicyInput& input, shardplan::ProgramBuilder& builder)
      : units_(input, builder),
        unit_count_(static_cast<UnitId>(builder.plan().units.size())),
        max_live_parameters_(input.Knob<std::int64_t>("max_live_parameters")),
        prefetch_bucket_size_(input.Knob<std::int64_t>("prefetch_bucket_size")),
        max_reuse_distance_(input.Knob<std::int64_t>("max_reuse_distance")) {
    // mark_persistent_parameters: those of at most this many elements are never released.
    const auto threshold = input.Knob<std::int64_t>("param_persistence_threshold");
    for (const shardplan::Unit& unit : builder.plan().units) {
      persistent_.push_back(std::ranges::all_of(unit.parameters, [&](const shardplan::UnitParameter& p) {
        return shardplan::Numel(p) <= threshold;
      }));
    }
  }

  Status SetUp() override { return units_.SetUp(); }
  Status Procedures() override { return units_.Procedures(); }

  // Nothing of the policy's own is left when a step ends: each forward begins anew.
  std::unique_ptr<shardplan::PolicyState> State() const override {
    return std::make_unique<shardplan::PolicyStateOf<shardplan::UnitOperations::State>>(units_.state());
  }

  // __submodule_order: of each forward and its backward, in the order of the hooks.
  void BeginStep(const shardplan::RecordedStep& step) override {
    orders_.clear();
    forward_ = -1;
    for (const HookPoint& point : step.events) {
      if (point.kind == HookPointKind::kForwardBegin) orders_.emplace_back();
      if (Fetches(point) && !orders_.empty()) orders_.back().push_back(point.unit);
    }
  }

  Status On(const HookPoint& point) override {
    if (Status begun = units_.Begin(point); !begun) return begun;
    if (Fetches(point)) Fetch(point.unit);
    switch (point.kind) {
      case HookPointKind::kForwardBegin:  // reset_step
        ++forward_;
        step_ = queue_ = 0;
        fetched_for_.assign(static_cast<std::size_t>(unit_count_), -1);
        break;
      case HookPointKind::kPostForward:
      case HookPointKind::kRecomputePostForward:
        Release(point.unit);
        break;
      case HookPointKind::kInputsGradDone:
        units_.Reduce(point.unit);
        Release(point.unit);
        break;
      case HookPointKind::kBackwardEnd:
        units_.EndBackward();
        for (UnitId unit = 0; unit < unit_count_; ++unit) Free(unit);  // modules without a hook, as the root
        break;
      case HookPointKind::kOptimizerStep:  // stage3.py, _post_step: persistent parameters are gathered anew
        for (UnitId unit = 0; unit < unit_count_; ++unit) {
          if (!units_.IsUnsharded(unit)) continue;
          units_.Free(unit);
          units_.Gather(unit);
        }
        break;
      default:
        break;
    }
    return {};
  }

 private:
  const std::vector<UnitId>& order() const { return orders_[static_cast<std::size_t>(forward_)]; }
  bool IsAvailable(UnitId unit) const { return units_.IsUnsharded(unit) || units_.IsGathering(unit); }

  // __n_available_params
  std::int64_t LiveParameters() const {
    std::int64_t live = 0;
    for (UnitId unit = 0; unit < unit_count_; ++unit) live += IsAvailable(unit) ? units_.Numel(unit) : 0;
    return live;
  }

  // fetch_sub_module: the module's own parameters, then those of the modules behind it, up to a bucket and as
  // long as there may be more live parameters.
  void Fetch(UnitId unit) {
    units_.Gather(unit);
    units_.Await(unit);
    fetched_for_[unit] = std::max(fetched_for_[unit], step_);
    queue_ = std::max(queue_, ++step_);
    const std::int64_t most = std::min(max_live_parameters_ - LiveParameters(), prefetch_bucket_size_);
    for (std::int64_t prefetched = 0; prefetched < most && queue_ < std::ssize(order()); ++queue_) {
      const UnitId next = order()[queue_];
      fetched_for_[next] = std::max(fetched_for_[next], queue_);
      if (IsAvailable(next)) continue;
      units_.Gather(next);
      prefetched += units_.Numel(next);
    }
  }

  // __params_to_release: not what the prefetch has passed over because it was there, nor what is used again
  // within max_reuse_distance elements.
  void Release(UnitId unit) {
    if (fetched_for_[unit] > step_) return;
    std::int64_t distance = 0;
    for (std::int64_t use = step_; use < std::ssize(order()) && distance < max_reuse_distance_; ++use) {
      if (order()[use] == unit) return;
      distance += units_.Numel(order()[use]);
    }
    Free(unit);
  }

  void Free(UnitId unit) {
    if (!persistent_[unit] && units_.IsUnsharded(unit)) units_.Free(unit);
  }

  shardplan::UnitOperations units_;
  const UnitId unit_count_;
  const std::int64_t max_live_parameters_, prefetch_bucket_size_, max_reuse_distance_;
  std::vector<bool> persistent_;
  std::vector<std::vector<UnitId>> orders_;  // by forward of the step
  std::int64_t forward_ = -1;
  std::int64_t step_ = 0;                  // __step_id: fetches so far
  std::int64_t queue_ = 0;                 // __param_queue: the first use that no prefetch has looked at
  std::vector<std::int64_t> fetched_for_;  // __most_recent_step_id_param_fetched_for
};

shardplan::PolicyDescription Describe() {
  return {.name = "zero3",
          .knobs = {{"max_live_parameters", 1'000'000'000, "elements", "No prefetch goes beyond so many."},
                    {"prefetch_bucket_size", 50'000'000, "elements", "Fetched ahead of their use."},
                    {"param_persistence_threshold", 100'000, "elements", "Smaller parameters stay."},
                    {"max_reuse_distance", 1'000'000'000, "elements", "What is used again by then stays."}},
          .make = [](const shardplan::PolicyInput& input, shardplan::ProgramBuilder& builder)
              -> std::unique_ptr<shardplan::Policy> { return std::make_unique<Zero3>(input, builder); }};
}

}  // namespace

SHARDPLAN_POLICY(Describe)
