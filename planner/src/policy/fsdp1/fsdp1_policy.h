// PyTorch's FSDP1 (FullyShardedDataParallel, torch 2.11) as a policy: the state machine of _runtime_utils.py
// and FlatParamHandle.
//
// [Note: when a flat parameter's gradient is done]
// The modules' parameters are views of the flat parameter, made when it is unsharded in the forward. The node
// that gathers the views' gradients into the flat gradient, and with it post_backward, runs when everything
// made after the views has run backward (backward_times.h): normally the unit's own operators; for a unit
// with units inside, theirs too. A unit that was prefetched in the forward had its views made in the
// *previous* unit's pre-forward, so its post_backward waits for that unit's backward, too. Of a unit that is
// used several times, in one or in several forwards, the first use counts that the backward reaches. But the
// hook is registered once, until a backward is over: where each unshard changes the dtype of the flat
// parameter, and with it the accumulator of its gradient, only the gradient of the first views has it. What
// arrives elsewhere, and what a second backward brings, is added to the flat gradient and stays there.
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

#include "policy/optimizer_memory.h"
#include "policy/policy.h"

namespace shardplan {

class Fsdp1Policy : public Policy {
 public:
  Fsdp1Policy(const PolicyInput& input, ProgramBuilder& builder);

  Status SetUp() override;
  void OnStepBegin() override { frees_in_step_ = 0; }
  Status On(const HostEvent& event) override;
  std::unique_ptr<PolicyState> State() const override;
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

  // A call of a unit, and the pre-forward in which the views that it uses were made.
  struct Use {
    Call call;
    Call views;
  };

  struct UndoneCalls {
    std::set<Call> reached;
    std::set<Call> with_gradients;
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
    Copy summoned_host, summoned_grad;            // ... parameters on the host, the gathered gradient
    bool points_to_shard = true;                  // flat_param.data is the local shard
    bool on_device = false;                       // ... is on the device although the shard is offloaded
    bool skipped_sharded_views = false;           // use_orig_params without reshard after forward
    std::set<std::int32_t> grads;                 // parameters with a gradient in this backward
    bool has_flat_grad = false;
    bool has_sharded_grad = false;
    std::string contributions;          // to the gradient that is there: the parameters of each
    bool saved_grad = false;            // ... put aside for this backward
    bool post_backward_called = false;  // since the last backward that reduced was over
    bool has_low_grad = false;          // ... kept in the low precision since the backward was over
    Copy host_grad;                     // _cpu_grad
    Copy device_grad;                   // of an offloaded gradient, until the backward is over
    std::optional<Call> hooked_inputs;  // reshard-only hook of a frozen unit: on the inputs of its first call
    Call views;                         // pre-forward in which the modules' views were made last
    std::vector<Use> uses;              // that a backward may undo, in the order of the forwards
    std::vector<Use> undone;            // ... that this one does, and brings gradients
    std::optional<Call> hook;           // post_backward hangs on the gradient of the views made there
    std::optional<Call> fires;          // ... and runs in this backward when what was made since is undone
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
  void LazyInit();
  void RootPreForward();
  void PostForward(const HostEvent& event);
  void PreBackward(const HostEvent& event);
  void OnForwardBegin(const HostEvent& event);
  void OnBackwardBegin(const HostEvent& event);
  UndoneCalls CallsUndoneBy(const Pass& backward) const;
  static void FindWhereItFires(Handle& handle);
  void OnForwardUndone(const HostEvent& event);
  void BackwardEnd(const HostEvent& event);
  void OnInputsGradDone(const HostEvent& event);
  void FinalCallback();
  void OnSegment(const HostEvent& event);
  void OptimizerStep(const HostEvent& event);
  void ZeroGrad(const HostEvent& event);
  void DropZeroedGrads();
  Status UserCall(const HostEvent& event);

  // fsdp1_summon.cc
  Status SummonFullParams(const HostEvent& event);
  Status CheckSummonFlags(const ModuleCall& call, const std::vector<UnitId>& units) const;
  void Summon(UnitId unit, const std::vector<std::string>& flags);
  void EndSummon(UnitId unit);
  void SummonGrad(UnitId unit);
  void WaitForHost(const std::string& event);
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
  BufferId ZerosForGrad(UnitId unit);
  BufferId ReducedGrad(UnitId unit);
  BufferId TakeReducedGrad(UnitId unit);
  double PredivideFactor(UnitId unit) const;
  double PostdivideFactor(UnitId unit) const;
  double DataParallelRanks(UnitId unit) const {
    return static_cast<double>(partition_.units[unit].shard_size * partition_.units[unit].replicate_size);
  }
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
  const ModelIndex& index_;
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
  bool initialized_ = false;  // the root knows that it is
  std::deque<EventId> free_events_;
  std::int32_t frees_in_step_ = 0;
  bool sync_gradients_ = true;
  bool summoning_ = false;  // while summon_full_params unshards and reshards
  bool final_callback_queued_ = false;
  bool zeroed_ = false;  // the user has dropped the gradients, the flat parameters still have them
  UnitId backward_unit_ = -1;
  bool lost_grad_ = false;             // a gradient that was put aside did not come back
  bool not_gathered_again_ = false;    // a backward that FSDP1 gathers nothing for
  bool dropped_unreduced_ = false;     // the user zeroed gradients that nothing had reduced
  bool missed_hook_ = false;           // a gradient was made that no post_backward reduces
  std::vector<std::int32_t> covered_;  // micro-batches of the backward that runs
};

}  // namespace shardplan
