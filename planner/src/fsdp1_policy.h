// PyTorch's FSDP1 (FullyShardedDataParallel, torch 2.11) as a policy: the state machine of _runtime_utils.py
// and FlatParamHandle.
//
// [Note: when a flat parameter's gradient is done]
// The modules' parameters are views of the flat parameter, made when it is unsharded in the forward. Autograd
// runs newer nodes first, so the node that gathers the views' gradients into the flat gradient, and with it
// post_backward, runs when everything made after the views has run: normally after the unit's own operators.
// A unit that was prefetched in the forward had its views made in the *previous* unit's pre-forward, so its
// post_backward waits for that unit's backward, too.
//
// [Note: record_stream]
// FSDP1 allocates on side streams and hands memory back by record_stream: the allocator holds a block until
// the recorded streams have passed. Frees carry those streams in safe_after. What bounds the memory then is
// the rate limiter: the host waits for the event of an earlier free before it issues an all-gather.
#pragma once

#include <deque>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "optimizer_memory.h"
#include "policy.h"

namespace shardplan {

class Fsdp1Policy : public Policy {
 public:
  Fsdp1Policy(const PolicyInput& input, ProgramBuilder& builder);

  Status SetUp() override;
  void OnStepBegin() override { frees_in_step_ = 0; }
  Status On(const HostEvent& event) override;
  std::string State() const override;

 private:
  enum class TrainingState : std::uint8_t { kIdle, kForward, kBackwardPre, kBackwardPost };

  // One FlatParamHandle (a unit without parameters has none).
  struct Handle {
    bool exists = false;
    bool requires_grad = false;
    bool partly_frozen = false;
    TrainingState training = TrainingState::kIdle;
    bool needs_pre_forward_unshard = false;
    bool needs_pre_backward_unshard = false;
    bool prefetched = false;
    bool ran_pre_backward_hook = false;
    bool hooked_inputs = false;  // reshard-only hook of a frozen unit is registered
    std::optional<std::int32_t> post_forward_index;
    std::optional<std::int32_t> pre_forward_index;
    bool unsharded_allocated = false;
    bool points_to_shard = true;         // flat_param.data is the local shard
    bool skipped_sharded_views = false;  // use_orig_params without reshard after forward
    std::set<std::int32_t> grads;        // parameters with a gradient in this backward
    bool has_flat_grad = false;
    bool has_sharded_grad = false;
    UnitId views_made_in = -1;  // unit in whose pre-forward the views were made
    bool grads_done = false;    // post_backward is due
    // derived
    bool casts_params = false;
    std::int64_t numel = 0;  // of the flat parameter, tail padding left out
    BufferId param_sharded = -1, param_unsharded = -1, low_precision = -1;
  };

  // fsdp1_policy.cc: hooks
  Status MakeHandles();
  void PreForward(const HostEvent& event);
  void RootPreForward();
  void PostForward(const HostEvent& event);
  void PreBackward(const HostEvent& event);
  void OnParameterGradsDone(const HostEvent& event);
  void RunDuePostBackwards(UnitId views_made_in, std::int32_t microbatch);
  void RunPostBackwardsOlderThan(UnitId unit, std::int32_t microbatch);
  void OnInputsGradDone(const HostEvent& event);
  void RunReshardOnly();
  void FinalCallback(const HostEvent& event);
  void OnSegment(const HostEvent& event);
  void OptimizerStep(const HostEvent& event);
  void ZeroGrad(const HostEvent& event);
  Status UserCall(const HostEvent& event);

  // fsdp1_handle.cc: flat parameters
  void Unshard(UnitId unit, std::string_view reason);
  void WaitForUnshard(UnitId unit);
  void Reshard(UnitId unit, bool free, bool grad_enabled = false);
  void PostBackwardReshard(UnitId unit);
  void Prefetch(UnitId current, bool forward);
  UnitId PrefetchTarget(UnitId current) const;
  void PostBackward(UnitId unit, std::int32_t microbatch);
  void GatherFlatGrad(UnitId unit);
  void ReduceGrad(UnitId unit);
  void ReduceGradNoShard(UnitId unit, BufferId grad);
  void DeliverGrad(UnitId unit, BufferId output, StreamId stream, StreamId allocated_on);
  void Scale(BufferId buffer, double divisor, StreamId stream);
  BufferId FlatBuffer(UnitId unit, BufferRole role, DType dtype, std::int64_t numel,
                      std::string_view suffix = {});
  BufferId GradBuffer(UnitId unit, const std::set<std::int32_t>& parameters);

  bool ReshardsAfterForward() const;
  // On one rank FSDP1 switches to NO_SHARD.
  bool Sharded() const {
    return strategy_.fsdp1.sharding != Fsdp1Sharding::kNoShard && partition_.shard_size > 1;
  }
  bool FreesInBackward() const { return Sharded() && (sync_gradients_ || ReshardsAfterForward()); }
  const Unit& UnitOf(UnitId unit) const { return partition_.units[unit].unit; }
  std::string EventName(UnitId unit, std::string_view what) const;

  const Trace& trace_;
  const Partition& partition_;
  const Strategy& strategy_;
  ProgramBuilder& builder_;
  OptimizerMemory optimizer_;
  std::vector<Handle> handles_;
  StreamId unshard_stream_ = -1, pre_unshard_stream_ = -1, post_backward_stream_ = -1,
           all_reduce_stream_ = -1;

  std::vector<UnitId> pre_forward_order_, post_forward_order_;
  std::vector<UnitId> first_forward_;  // units in the order of their pre-forwards, latest forward
  bool first_iteration_ = true;
  std::deque<EventId> free_events_;
  std::int32_t frees_in_step_ = 0;
  bool sync_gradients_ = true;
  bool final_callback_queued_ = false;
  UnitId backward_unit_ = -1;
  UnitId reshard_only_ = -1;  // frozen unit whose inputs' gradients are done
  std::int32_t reshard_only_microbatch_ = 0;
};

}  // namespace shardplan
