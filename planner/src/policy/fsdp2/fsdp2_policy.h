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

#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "policy/optimizer_memory.h"
#include "policy/policy.h"
#include "shardplan/schemas/verifier.h"

namespace shardplan {

class Fsdp2Policy : public Policy {
 public:
  Fsdp2Policy(const PolicyInput& input, ProgramBuilder& builder);

  Status SetUp() override;
  Status On(const HostEvent& event) override;
  std::unique_ptr<PolicyState> State() const override;
  std::vector<KnownFault> Faults() const override { return faults_; }

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
    bool unsharded_by_user = false;
    bool forward_open = false;  // its pre-forward has run, its post-forward not yet
    std::vector<std::int32_t> post_forward_indices;
    bool reshard_after_forward_recorded = false;
    EventId post_reduce_event = -1;
    std::optional<AllReduceState> all_reduce;
    BufferId partial_reduce_output = -1;
    std::vector<BufferId> post_forward_shards;  // alive, one of each parameter
    std::set<std::int32_t> grads;               // parameters whose unsharded .grad is alive
    std::set<std::int32_t> accumulated;         // ... whose gradient waits in the reduce dtype, a buffer each
    std::map<std::int32_t, BufferId> sharded_grads;  // by parameter: what its sharded .grad is a part of
    EventId grad_offload_event = -1;
    bool was_unsharded = false;  // ever: its unsharded parameters exist
    // setters
    bool reduce_grads = true;
    bool all_reduce_grads = true;
    bool reshard_after_backward = true;
    bool unshard_in_backward = true;
    bool unshard_async_op = false;
    bool force_sum_reduction = false;
    bool separate_reduce_scatter = false;
    bool process_group_memory = false;
    std::size_t reduce_scatters_in_flight = 1;
    std::optional<double> gradient_divide_factor;
    bool auto_reshard_after_forward = false;  // reshard_after_forward was not given
    std::int64_t post_forward_size = 0;
    std::vector<UnitId> forward_prefetch, backward_prefetch;
    bool default_backward_prefetch = true;
    // derived
    bool offloads = false;
    DType grad_dtype = DType::kFloat32;  // of unsharded gradients
    BufferId param_sharded = -1, param_unsharded = -1;
    // Of parameters with an extension: their further gathered tensors, and what post-all-gather allocates.
    BufferId extension_gathered = -1, extension_unsharded = -1;
    BufferId copy_out_chunks = -1;  // of parameters cut along another dimension than the first
  };

  struct PendingReduce {
    UnitId unit = -1;
    BufferId input = -1;
    EventId event = -1;
  };
  // FSDPCommContext: streams and what is kept alive for them. Every unit has one of its own until its root is
  // lazily initialised and gives it its.
  struct CommContext {
    bool initialised = false;
    std::int32_t generation = 0;  // a context that two roots share gets new streams when the second one runs
    StreamId copy_in = -1, all_gather = -1, reduce_scatter = -1, all_reduce = -1;
    UnitId all_gather_unit = -1;  // whose all_gather_output is kept
    BufferId all_gather_output = -1;
    std::vector<PendingReduce> reduce_scatters;  // in flight, the oldest first
    std::vector<UnitId> post_forward_order;
  };
  // FSDPStateContext, in the same way.
  struct StateContext {
    std::vector<UnitId> states;  // a unit of two modules is there twice
    UnitId iter_forward_root = -1;
    bool final_callback_queued = false;
    bool is_last_backward = true;
    EventId post_optim_event = -1;
  };

  // fsdp2_contexts.cc: roots
  Status ShareCommContexts();
  Status LazyInit(UnitId root);
  void InitCommContext(CommContext& comm);
  std::vector<UnitId> StatesUnder(ModuleId root) const;
  void RootPreForward(UnitId unit);
  UnitId FirstCalled() const;
  StreamId AllReduceStream(UnitId unit);
  CommContext& Comm(UnitId unit) { return comms_[comm_of_[unit]]; }
  StateContext& Context(UnitId unit) { return contexts_[context_of_[unit]]; }

  // fsdp2_setters.cc: knobs and calls of the user
  void MakeGroups();
  void MakeGroup(UnitId id);
  void SetPrefetchDistances();
  Status SetPrefetchLists(const std::vector<PrefetchList>& lists, std::string_view pointer, bool forward);
  Status SetPrefetchList(const ModuleCall& call, UnitId unit);
  UnitId FindUnit(const std::string& fqn) const;
  Status Setter(const ModuleCall& call, bool in_setup);
  Status NumberSetter(const ModuleCall& call, UnitId unit, bool in_setup);
  void ReshardForStateDict(const ModuleCall& call);
  Status UserCall(const HostEvent& event);

  // fsdp2_policy.cc: hooks
  Status PreForward(const HostEvent& event);
  void PostForward(const HostEvent& event);
  Status PreBackward(const HostEvent& event);
  Status PostBackwardFromAutograd(const HostEvent& event);
  Status BackwardEnd(const HostEvent& event);
  Status FinalCallback(StateContext& context, CommContext& comm);
  void OnSegment(const HostEvent& event);
  void OptimizerStep(const HostEvent& event);
  void ZeroGrad(const HostEvent& event);
  Status Prefetch(UnitId unit, UnitId target, TrainingState as, std::string_view reason);
  Status BackwardPrefetch(UnitId unit);

  // fsdp2_gather.cc: FSDPParamGroup.unshard, wait_for_unshard, reshard
  void Unshard(UnitId unit, bool async, std::string_view reason);
  void IssueAllGather(UnitId unit, bool async);
  StreamId CommunicatorStream(CommunicatorId communicator);
  std::vector<BufferId> GatherSources(UnitId unit, StreamId stream, std::vector<BufferId>& temporaries);
  std::vector<BufferId> CopyShardsToDevice(UnitId unit, StreamId stream, std::vector<BufferId>& temporaries);
  BufferId CopyInto(UnitId unit, const std::vector<BufferId>& sources, std::vector<Bytes> parts,
                    std::vector<std::int32_t> parameters, std::string_view suffix, StreamId stream);
  void WaitForUnshard(UnitId unit);
  void CopyOut(UnitId unit, const PendingAllGather& pending);
  void CastShards(UnitId unit);
  void WaitAllGatherStreams(const CommContext& comm, EventId event);
  void DropKeptOutput(CommContext& comm);
  void Reshard(UnitId unit);
  void ToSharded(UnitId unit);
  void ToShardedPostForward(UnitId unit);
  void FreeUnsharded(UnitId unit);
  bool Casts(UnitId unit, std::int32_t parameter) const;

  // fsdp2_reduce.cc: FSDPParamGroup.post_backward, foreach_reduce
  Status PostBackward(UnitId unit, std::string_view reason);
  void ToAccumulatedGrad(UnitId unit);
  void AddToAccumulatedGrad(UnitId unit);
  std::vector<BufferId> TakeGrads(UnitId unit);
  std::vector<BufferId> ReducePartialGrads(UnitId unit, std::set<std::int32_t>& grads, bool accumulated);
  void WaitReduceScatter(CommContext& comm, std::size_t keep);
  void WaitForPostBackward(UnitId unit);
  void FinalizeBackward(UnitId unit);
  Status ForeachReduce(UnitId unit, const std::vector<std::int32_t>& parameters, std::vector<BufferId> grads);
  void ReduceInput(UnitId unit, const std::vector<std::int32_t>& parameters, BufferId input,
                   std::string_view again);
  struct OrderedGrads {
    std::vector<BufferId> copies;
    BufferId last_grad = -1;  // what the last of them was made of
  };
  bool IsChunked(UnitId unit, std::int32_t parameter) const;
  OrderedGrads OrderChunkedGrads(UnitId unit, const std::vector<std::int32_t>& parameters,
                                 std::vector<BufferId>& grads);
  std::vector<BufferId> DropCopiedGrads(UnitId unit, const std::vector<std::int32_t>& parameters,
                                        const std::vector<BufferId>& grads);
  BufferId CopyInGrads(UnitId unit, const std::vector<std::int32_t>& parameters, std::vector<BufferId>& grads,
                       std::string_view suffix);
  void ReduceScatter(UnitId unit, BufferId input, BufferId output);
  void KeepPartial(UnitId unit, BufferId output, bool is_new);
  Status CheckPartial(UnitId unit, const std::vector<std::int32_t>& parameters) const;
  StreamId AllReduce(UnitId unit, BufferId output);
  StreamId RunHook(UnitId unit, BufferId output, StreamId stream);
  void Scale(const std::optional<double>& factor, BufferId buffer, StreamId stream);

  // fsdp2_deliver.cc: the reduced gradient becomes, or is added to, .grad
  void DeliverGrad(UnitId unit, BufferId output, StreamId stream,
                   const std::vector<std::int32_t>& parameters);
  void DeliverGradToHost(UnitId unit, BufferId output, StreamId stream,
                         const std::vector<std::int32_t>& parameters);
  // Of `parameters`: those whose .grad is there already, by the buffer that it is in, and those without.
  struct Destinations {
    std::map<BufferId, std::vector<std::int32_t>> added;
    std::vector<std::int32_t> fresh;
  };
  Destinations DestinationsOf(UnitId unit, const std::vector<std::int32_t>& parameters) const;
  BufferId CastReduced(UnitId unit, BufferId output, StreamId stream,
                       const std::vector<std::int32_t>& parameters);
  void DropReduced(UnitId unit, BufferId output, StreamId stream, bool is_gradient);
  void StepInBackward(UnitId unit, StreamId stream, const std::vector<std::int32_t>& parameters);
  std::vector<Bytes> ShardedGradParts(UnitId unit, const std::vector<std::int32_t>& parameters) const;

  struct Divide {
    // Of the reduce-scatter's input; of its sum, while it sums; where one rank copies the input to the output
    // instead; of what is reduced.
    std::optional<double> pre, premultiply, copy, post;
    ReduceOp reduce_scatter = ReduceOp::kSum, all_reduce = ReduceOp::kSum;
  };
  Divide DivideFactors(UnitId unit) const;

  const Unit& UnitOf(UnitId unit) const { return partition_.units[unit].unit; }
  MemoryKind ShardMemory(UnitId unit) const;
  std::string EventName(UnitId unit, std::string_view what) const;
  BufferId GradBuffer(UnitId unit, const std::set<std::int32_t>& parameters, bool accumulated);
  BufferId PartialBuffer(UnitId unit, const std::vector<std::int32_t>& parameters);
  std::int64_t ShardRanks(UnitId unit) const { return partition_.units[unit].shard_size; }
  BufferId CommBuffer(UnitId unit, BufferRole role, DType dtype, Bytes bytes,
                      std::vector<std::int32_t> parameters, std::string_view suffix = {});
  void AddFault(Rule rule, std::string why);
  std::vector<UnitId> UnitsUnder(const ModuleCall& call, UnitId unit) const;

  const Trace& trace_;
  const ModelIndex& index_;
  const Partition& partition_;
  const Strategy& strategy_;
  const std::vector<RecordedStep>& steps_;
  ProgramBuilder& builder_;
  OptimizerMemory optimizer_;
  std::vector<Group> groups_;
  std::vector<CommContext> comms_;  // by unit, as are the next three
  std::vector<StateContext> contexts_;
  std::vector<std::size_t> comm_of_, context_of_;
  std::vector<bool> lazily_initialised_;
  std::vector<std::pair<std::size_t, std::size_t>> final_callbacks_;  // queued: state and comm contexts
  std::vector<KnownFault> faults_;

  UnitId backward_unit_ = -1;  // of the last pre-backward: reads of traces without operators
};

}  // namespace shardplan
