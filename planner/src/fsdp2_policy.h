// PyTorch's FSDP2 (torch.distributed.fsdp.fully_shard, torch 2.11) as a policy: the state machine of its
// runtime, with the same names, issuing plan instructions instead of kernels.
//
// [Note: who keeps a buffer alive]
// Nothing in FSDP2 frees memory explicitly but the storage of unsharded parameters; everything else dies with
// its last Python reference. The frees emitted here stand where those references are dropped:
// - all_gather_output: in the forward a reference is kept (comm_.all_gather_state) so that the next unit's
// copy-in
//   can overlap; it goes at the end of the next unit's wait_for_unshard, or in the root's post_forward. In
//   the backward it goes at the end of its own wait_for_unshard.
// - reduce_scatter_input: kept (comm_.reduce_scatter_state) until the next unit that reduces, or the end of
// the
//   backward.
// - reduce_scatter_output: becomes the gradient when no cast is needed; else it goes at once, but with HSDP
// it is
//   the input of an all-reduce on another stream and stays until the unit's next post_backward or the end of
//   the backward.
#pragma once

#include <optional>
#include <set>
#include <string>
#include <vector>

#include "optimizer_memory.h"
#include "policy.h"

namespace shardplan {

class Fsdp2Policy : public Policy {
 public:
  Fsdp2Policy(const PolicyInput& input, ProgramBuilder& builder);

  Status SetUp() override;
  Status On(const HostEvent& event) override;
  std::string State() const override;

 private:
  enum class TrainingState : std::uint8_t { kIdle, kForward, kPreBackward, kPostBackward };
  enum class ShardedState : std::uint8_t { kSharded, kShardedPostForward, kUnsharded };

  struct PendingAllGather {
    BufferId output = -1;
    EventId event = -1;
    bool async = false;
  };
  struct AllReduceState {
    BufferId input = -1;
    EventId event = -1;
    bool free_input = false;  // it is not the gradient itself
  };

  // One FSDPState with its FSDPParamGroup (which a unit without parameters lacks).
  struct Group {
    bool has_parameters = false;
    TrainingState state_training = TrainingState::kIdle;  // FSDPState's
    TrainingState training = TrainingState::kIdle;        // FSDPParamGroup's
    ShardedState sharded = ShardedState::kSharded;
    std::optional<PendingAllGather> pending;
    std::vector<std::int32_t> post_forward_indices;
    bool reshard_after_forward_recorded = false;
    EventId post_reduce_event = -1;
    std::optional<AllReduceState> all_reduce;
    BufferId partial_reduce_output = -1;
    BufferId post_forward_shard = -1;  // alive
    std::set<std::int32_t> grads;      // parameters whose unsharded .grad is alive
    std::set<std::int32_t> accumulated;
    bool has_sharded_grad = false;
    EventId grad_offload_event = -1;
    // setters
    bool reduce_grads = true;
    bool all_reduce_grads = true;
    bool reshard_after_backward = true;
    bool unshard_in_backward = true;
    std::int64_t post_forward_size = 0;
    std::vector<UnitId> forward_prefetch, backward_prefetch;
    bool default_backward_prefetch = true;
    // derived
    bool casts_params = false;
    bool offloads = false;
    DType grad_dtype = DType::kFloat32;  // of unsharded gradients
    BufferId param_sharded = -1, param_unsharded = -1;
  };
  struct CommContext {
    UnitId all_gather_state = -1;  // unit whose all_gather_output is kept
    BufferId all_gather_output = -1;
    UnitId reduce_scatter_unit = -1;
    BufferId reduce_scatter_input = -1;
    std::vector<UnitId> post_forward_order;
  };

  // fsdp2_policy.cc: hooks
  void MakeGroups();
  void SetPrefetchDistances();
  Status SetPrefetchLists(const std::vector<PrefetchList>& lists, std::string_view pointer, bool forward);
  Status Setter(const ModuleCall& call);
  Status UserCall(const HostEvent& event);
  void PreForward(const HostEvent& event);
  void PostForward(const HostEvent& event);
  void PreBackward(const HostEvent& event);
  void PostBackwardFromAutograd(const HostEvent& event);
  void FinalCallback(const HostEvent& event);
  void OnSegment(const HostEvent& event);
  void OptimizerStep(const HostEvent& event);
  void ZeroGrad(const HostEvent& event);
  void Prefetch(UnitId target, TrainingState as, std::string_view reason);
  void BackwardPrefetch(UnitId unit);

  // fsdp2_collectives.cc: parameter groups
  void Unshard(UnitId unit, bool async, std::string_view reason);
  void IssueAllGather(UnitId unit, bool async);
  BufferId CopyShardsToDevice(UnitId unit, StreamId stream, std::vector<BufferId>& temporaries);
  void WaitForUnshard(UnitId unit);
  void WaitAllGatherStreams(EventId event);
  void Reshard(UnitId unit);
  void ToSharded(UnitId unit);
  void ToShardedPostForward(UnitId unit);
  void PostBackward(UnitId unit, std::string_view reason);
  void ToAccumulatedGrad(UnitId unit);
  void AddToAccumulatedGrad(UnitId unit);
  void WaitForPostBackward(UnitId unit);
  void FinalizeBackward(UnitId unit);
  void ForeachReduce(UnitId unit, const std::vector<std::int32_t>& parameters,
                     const std::vector<BufferId>& grads);
  void AllReduceAndDeliver(UnitId unit, BufferId output, std::int64_t numel,
                           const std::vector<std::int32_t>& parameters, std::optional<double> post_divide);
  void DeliverGrad(UnitId unit, BufferId output, StreamId stream,
                   const std::vector<std::int32_t>& parameters);

  void DeliverGradToHost(UnitId unit, BufferId output, StreamId stream,
                         const std::vector<std::int32_t>& parameters);

  struct Divide {
    std::optional<double> pre, post;
    ReduceOp reduce_scatter = ReduceOp::kSum, all_reduce = ReduceOp::kSum;
  };
  Divide DivideFactors(UnitId unit) const;

  const Unit& UnitOf(UnitId unit) const { return partition_.units[unit].unit; }
  MemoryKind ShardMemory(UnitId unit) const;
  std::string EventName(UnitId unit, std::string_view what) const;
  BufferId GradBuffer(UnitId unit, const std::set<std::int32_t>& parameters, bool accumulated);
  BufferId PartialBuffer(UnitId unit, const std::vector<std::int32_t>& parameters);
  std::int64_t ShardRanks(UnitId unit) const;
  std::vector<UnitId> UnitsUnder(const ModuleCall& call, UnitId unit) const;

  const Trace& trace_;
  const ModelIndex& index_;
  const Partition& partition_;
  const Strategy& strategy_;
  const std::vector<RecordedStep>& steps_;
  ProgramBuilder& builder_;
  OptimizerMemory optimizer_;
  std::vector<Group> groups_;
  CommContext comm_;
  StreamId copy_in_stream_ = -1, all_gather_stream_ = -1, reduce_scatter_stream_ = -1,
           all_reduce_stream_ = -1;

  UnitId iter_forward_root_ = -1;
  bool final_callback_queued_ = false;
  bool is_last_backward_ = true;
  bool unshard_async_op_ = false;
  std::optional<double> gradient_divide_factor_;
  bool force_sum_reduction_ = false;
  UnitId backward_unit_ = -1;  // of the last pre-backward: reads of traces without operators
};

}  // namespace shardplan
