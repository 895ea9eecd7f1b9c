// PyTorch's FSDP1 (FullyShardedDataParallel, torch 2.11) as a policy: the state machine of _runtime_utils.py
// and FlatParamHandle.
//
// [Note: when a flat parameter's gradient is done]
// The modules' parameters are views of the flat parameter, made when it is unsharded in the forward. The node
// that gathers the views' gradients into the flat gradient, and with it post_backward, runs when everything
// made after the views has run backward (backward_times.h): normally the unit's own operators; for a unit
// with units inside, theirs too. A unit that was prefetched in the forward had its views made in the
// *previous* unit's pre-forward, so its post_backward waits for that unit's backward, too. Of a unit that is
// used several times the first use counts.
//
// [Note: record_stream]
// FSDP1 allocates on side streams and hands memory back by record_stream: the allocator holds a block until
// the recorded streams have passed. Frees carry those streams in safe_after. What bounds the memory then is
// the rate limiter: the host waits for the event of an earlier free before it issues an all-gather.
#pragma once

#include <deque>
#include <map>
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
  std::vector<KnownFault> Faults() const override;

 private:
  enum class TrainingState : std::uint8_t { kIdle, kForward, kBackwardPre, kBackwardPost };

  // A pre-forward: the `occurrence`-th of `unit` in the forward of `microbatch`.
  struct Call {
    UnitId unit = -1;
    std::int32_t occurrence = 0;
    std::int32_t microbatch = 0;
    auto operator<=>(const Call&) const = default;
  };

  struct Copy {
    BufferId buffer = -1;
    bool allocated = false;
  };

  // One FlatParamHandle (a unit without parameters has none).
  struct Handle {
    bool exists = false;
    bool requires_grad = false;
    // knobs
    bool sharded = true;
    bool reshards_after_forward = true;
    bool offloads = false;
    bool forward_prefetch = false;
    Fsdp1BackwardPrefetch backward_prefetch = Fsdp1BackwardPrefetch::kPre;
    // state
    TrainingState training = TrainingState::kIdle;
    bool needs_pre_forward_unshard = false;
    bool needs_pre_backward_unshard = false;
    bool prefetched = false;
    bool ran_pre_backward_hook = false;
    std::optional<std::int32_t> post_forward_index;
    std::optional<std::int32_t> pre_forward_index;
    Copy unsharded;      // _full_param_padded
    Copy full;           // _full_prec_full_param_padded: in the original dtype, in evaluation
    Copy low_precision;  // _mp_shard
    Copy device_shard;   // of an offloaded shard
    bool summoned = false, summon_frees = false;  // inside summon_full_params, which gathered it
    bool points_to_shard = true;                  // flat_param.data is the local shard
    bool on_device = false;                       // ... is on the device although the shard is offloaded
    bool skipped_sharded_views = false;           // use_orig_params without reshard after forward
    std::set<std::int32_t> grads;                 // parameters with a gradient in this backward
    bool has_flat_grad = false;
    bool has_sharded_grad = false;
    bool has_low_grad = false;          // ... kept in the low precision since the backward was over
    Copy host_grad;                     // _cpu_grad
    Copy device_grad;                   // of an offloaded gradient, until the backward is over
    std::optional<Call> hooked_inputs;  // reshard-only hook of a frozen unit: on the inputs of its first call
    std::optional<Call> views;          // in whose pre-forward the views were made
    // derived
    bool casts_params = false;
    std::int64_t numel = 0;  // of the flat parameter, tail padding left out
    std::int64_t ranks = 1;  // that it is sharded over
    BufferId param_sharded = -1;
  };

  // fsdp1_policy.cc: hooks
  Status CheckKnobs() const;
  Status MakeHandles();
  void SetHandleKnobs(UnitId unit);
  void MakeParamBuffers(UnitId unit);
  void MakeFullPrecisionBuffer(UnitId unit);
  void PreForward(const HostEvent& event);
  void RootPreForward();
  void PostForward(const HostEvent& event);
  void PreBackward(const HostEvent& event);
  void OnForwardUndone(const HostEvent& event);
  void OnInputsGradDone(const HostEvent& event);
  void FinalCallback(const HostEvent& event);
  void OnSegment(const HostEvent& event);
  void OptimizerStep(const HostEvent& event);
  void ZeroGrad(const HostEvent& event);
  Status UserCall(const HostEvent& event);

  // fsdp1_summon.cc
  Status SummonFullParams(const HostEvent& event);
  std::vector<UnitId> UnitsUnder(const ModuleCall& call) const;
  void Synchronize();

  // fsdp1_handle.cc: flat parameters
  void Unshard(UnitId unit, std::string_view reason);
  BufferId PreUnshard(UnitId unit, bool gathers, bool full);
  void PostUnshard(UnitId unit, bool gathers);
  void WaitForUnshard(UnitId unit);
  void Reshard(UnitId unit, bool free, bool grad_enabled = false);
  void PostBackwardReshard(UnitId unit);
  UnitId Prefetch(UnitId current, bool forward);
  UnitId PrefetchTarget(UnitId current) const;
  void AllocateOn(Copy& copy, StreamId stream);
  void FreeCopy(Copy& copy, StreamId stream, std::vector<StreamId> safe_after = {});
  void CheckOrder();

  // fsdp1_reduce.cc: gradients
  void PostBackward(UnitId unit, std::int32_t microbatch);
  void GatherFlatGrad(UnitId unit);
  void ReduceGrad(UnitId unit);
  void ReduceGradNoShard(UnitId unit, BufferId grad);
  BufferId ReduceScatterGrad(UnitId unit, BufferId grad);
  void DeliverGrad(UnitId unit, BufferId output, StreamId stream, StreamId allocated_on);
  void OffloadGrad(UnitId unit, BufferId grad, StreamId stream);
  void StepInBackward(UnitId unit, StreamId stream);
  void FinishGrad(UnitId unit);
  void PrepareGrad(UnitId unit);
  BufferId FlatGrad(UnitId unit);
  double PredivideFactor(const Unit& unit) const;
  double PostdivideFactor(const Unit& unit) const;
  std::int64_t DataParallelRanks(const Unit& unit) const;
  DType GradDType(UnitId unit) const;
  DType ReduceDType(UnitId unit) const;
  DType FinalGradDType(UnitId unit) const;
  void Scale(BufferId buffer, double divisor, StreamId stream);
  BufferId FlatBuffer(UnitId unit, BufferRole role, DType dtype, std::int64_t numel,
                      std::string_view suffix = {}, MemoryKind memory = MemoryKind::kDevice);
  BufferId GradBuffer(UnitId unit, const std::set<std::int32_t>& parameters);

  bool FreesInBackward(const Handle& handle) const {
    return handle.sharded && (sync_gradients_ || handle.reshards_after_forward);
  }
  // FlatParamHandle._force_full_precision
  bool ForcesFullPrecision() const {
    return summoning_ || (strategy_.fsdp1.full_precision_in_eval && !training_);
  }
  bool CompressesGrads() const {
    return strategy_.fsdp1.comm_hook == Fsdp1CommHook::kFp16Compress ||
           strategy_.fsdp1.comm_hook == Fsdp1CommHook::kBf16Compress;
  }
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
  std::map<std::pair<UnitId, std::int32_t>, std::int32_t> calls_;  // pre-forwards by unit and micro-batch
  Call current_call_;                                              // the latest
  bool training_ = true;                                           // mode of the modules
  bool first_iteration_ = true;
  std::deque<EventId> free_events_;
  std::int32_t frees_in_step_ = 0;
  bool sync_gradients_ = true;
  bool summoning_ = false;  // while summon_full_params unshards and reshards
  bool final_callback_queued_ = false;
  UnitId backward_unit_ = -1;
};

}  // namespace shardplan
