// SPDX-License-Identifier: Apache-2.0
// Streams that the parameter groups of one root share, and what is kept alive for them (FSDPCommContext in
// _fsdp_param_group.py).
#pragma once

#include <cstddef>
#include <optional>
#include <vector>

#include "policy/fsdp2/training_state.h"
#include "shardplan/planner/program_builder.h"

namespace shardplan::fsdp2 {

class FsdpParamGroup;

class FsdpCommContext {
 public:
  // The output of a forward's all-gather, kept until the next copy-out has been issued.
  struct AllGatherState {
    UnitId unit = -1;
    BufferId output = -1;
    EventId event = -1;   // of its copy-out
    bool second = false;  // the unit's second output, gathered while its first was kept
    bool operator==(const AllGatherState&) const = default;
  };
  // The input of a reduce-scatter that nothing has waited for yet.
  struct ReduceScatterState {
    UnitId unit = -1;
    BufferId input = -1;
    EventId event = -1;
    bool operator==(const ReduceScatterState&) const = default;
  };
  struct PostReduceEvent {
    StreamId stream = -1;
    EventId event = -1;
    bool operator==(const PostReduceEvent&) const = default;
  };
  struct AllGatherStreams {
    StreamId copy_in = kCompute;
    StreamId all_gather = kCompute;
  };
  struct State {
    // Streams, made by LazyInit. -1: not yet. The all-reduce stream is made when it is first used.
    StreamId all_gather_copy_in_stream = -1;
    StreamId all_gather_stream = -1;
    StreamId reduce_scatter_stream = -1;
    // all_gather_state: set by FsdpParamGroup::WaitForUnshard in a forward, cleared by the next one or by the
    // PostForward of the forward's root.
    std::optional<AllGatherState> all_gather_state;
    // reduce_scatter_state: several where that many inputs may be in flight, the oldest first. Added by
    // FsdpParamGroup::PostBackward, removed by the next ones and by the final callback.
    std::vector<ReduceScatterState> reduce_scatter_states;
    // post_forward_order: what the implicit backward prefetch walks back. Added to by
    // FsdpParamGroup::RecordPostForward, cleared by the final callback of the last backward and by LazyInit.
    std::vector<FsdpParamGroup*> post_forward_order;
    // reduce_scatter_max_input_buffers: of all units. Set by the root's lazy init.
    std::size_t reduce_scatter_max_input_buffers = 1;
    // _last_post_reduce_events: of each stream that reductions end on, in the order of their first. Set by
    // FsdpParamGroup::PostBackward, cleared by the final callback of the last backward.
    std::vector<PostReduceEvent> last_post_reduce_events;
    bool operator==(const State&) const = default;
  };

  explicit FsdpCommContext(ProgramBuilder& program) : program_(program) {}
  FsdpCommContext(const FsdpCommContext&) = delete;
  FsdpCommContext& operator=(const FsdpCommContext&) = delete;

  // Makes new streams, which `earlier` initialisations of contexts distinguish by name, and drops without
  // waiting what an earlier root of a shared context left.
  void LazyInit(std::size_t earlier);
  // Everything is issued on the compute stream instead.
  void UseComputeStream();
  bool initialised() const { return state_.all_gather_stream >= 0; }

  // Its own streams for implicit prefetching, else (and before LazyInit) the current one.
  AllGatherStreams GetAllGatherStreams(bool async_op, TrainingState training_state) const;
  StreamId reduce_scatter_stream() const;
  StreamId AllReduceStream() const;

  // FSDPParamGroup._wait_all_gather_streams_on_event: does nothing before LazyInit.
  void WaitAllGatherStreamsOnEvent(EventId event);

  void KeepAllGather(AllGatherState state);
  // Makes the all-gather streams wait for the kept output's copy-out and gives the output to the caller, who
  // frees it.
  std::optional<AllGatherState> TakeAllGather();
  void Free(const AllGatherState& taken);
  // The stream whose pool has the memory of all-gather outputs.
  StreamId all_gather_memory_stream() const;
  bool KeepsFirstOutputOf(UnitId unit) const;

  void AddReduceScatter(ReduceScatterState state) { state_.reduce_scatter_states.push_back(state); }
  // Waits for the oldest reduce-scatters until `keep` are left, and frees their inputs.
  void WaitForReduceScatters(std::size_t keep);
  // The same for all, whose inputs are freed when all are waited for.
  void FinishReduceScatters();
  std::size_t ReduceScattersOf(UnitId unit) const;
  void SetReduceScatterMaxInputBuffers(std::size_t buffers) {
    state_.reduce_scatter_max_input_buffers = buffers;
  }

  void SetLastPostReduceEvent(StreamId stream, EventId event);
  // The compute stream waits for the last reduction of each stream.
  void WaitForLastReductions();
  // release_all_gather_state_on_current_stream.
  void ReleaseAllGatherOnComputeStream();

  std::vector<FsdpParamGroup*>& post_forward_order() { return state_.post_forward_order; }
  const State& state() const { return state_; }

 private:
  ProgramBuilder& program_;
  State state_;
};

}  // namespace shardplan::fsdp2
