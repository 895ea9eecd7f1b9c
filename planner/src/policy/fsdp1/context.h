// SPDX-License-Identifier: Apache-2.0
// Facts that are fixed once the model is wrapped, and the places for instructions and findings. Functions of
// this policy take it with the state (fsdp_state.h) that they change.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "policy/optimizer_memory.h"
#include "shardplan/planner/program_builder.h"
#include "units/partition.h"

namespace shardplan::fsdp1 {

// _init_streams.
struct Streams {
  StreamId unshard = -1;        // _unshard_stream: all-gathers, their outputs, and flat gradients (see below)
  StreamId pre_unshard = -1;    // _pre_unshard_stream: casts and copies of shards before all-gathers
  StreamId post_backward = -1;  // _post_backward_stream: reductions
  StreamId all_reduce = -1;     // _all_reduce_stream: of hybrid sharding, otherwise -1
};

// [Note: the backward of views] FSDP1 makes the views of a flat parameter with the unshard stream current
// (FlatParamHandle._use_unsharded_views inside of _unshard). Autograd runs a node's backward on the stream
// that was current when the node was made, and makes it wait for the streams of its inputs. So the gradients
// of the views are put together on the unshard stream, and from its pool; the flat parameter's AccumulateGrad
// and its post-backward hook run there, too: what the hook records or waits for as "the current stream" is
// the unshard stream. (torch/csrc/autograd/input_buffer.cpp, engine.cpp: "Streaming backwards".)

// The streams that _unshard takes, and for _reshard the one that is current.
struct UnshardStreams {
  StreamId unshard = -1;
  StreamId pre_unshard = -1;
  StreamId current = kCompute;
};
inline constexpr UnshardStreams kUnshardOnCompute{kCompute, kCompute};  // summon_full_params

// The arguments that a FlatParamHandle is constructed with, derived from the unit's knobs.
struct FlatParamConfig {
  bool requires_grad = false;          // flat_param.requires_grad: one of the unit's parameters does
  bool sharded = true;                 // uses_sharded_strategy
  bool reshards_after_forward = true;  // RESHARD_AFTER_FORWARD_HANDLE_STRATEGIES has its strategy
  bool offloads = false;               // _offload_params
  bool casts_params = false;           // _uses_param_mixed_precision
  std::int64_t numel = 0;              // of the flat parameter without the padding of its last shard
  std::int64_t ranks = 1;              // that it is sharded over
};

// Faults of PyTorch that the program has run into. They decide nothing later: they are no state.
struct FaultsSeen {
  bool lost_grad = false;           // a gradient that was put aside did not come back
  bool not_gathered_again = false;  // a backward that FSDP1 gathers nothing for
  bool dropped_unreduced = false;   // the user zeroed gradients that nothing had reduced
  bool missed_hook = false;         // a gradient was made that no post-backward hook reduces
  bool mixed_with_reduced = false;  // no_sync added a gradient to one that NO_SHARD had reduced
};

struct Context {
  const Trace& trace;
  const ModelIndex& index;
  const Partition& partition;
  const Strategy& strategy;
  ProgramBuilder& builder;
  OptimizerMemory& optimizer;
  FaultsSeen& faults_seen;
  Streams streams;
  std::vector<std::optional<FlatParamConfig>> flat_params;  // by unit; a unit without parameters has none

  const Unit& UnitOf(UnitId id) const { return partition.units[id].unit; }
  UnshardStreams unshard_streams() const { return {streams.unshard, streams.pre_unshard}; }
  // ... in a post-backward hook.
  UnshardStreams post_backward_hook_streams() const {
    return {streams.unshard, streams.pre_unshard, streams.unshard};
  }
  // "<unit>.<what>"
  std::string EventName(UnitId id, std::string_view what) const;
  // A buffer over all parameters of the unit.
  BufferId FlatBuffer(UnitId id, BufferRole role, DType dtype, std::int64_t numel,
                      std::string_view suffix = {}, MemoryKind memory = MemoryKind::kDevice) const;
  // tensor.record_stream(stream) of memory of the pool of `owner`: safe_after of its free.
  static std::vector<StreamId> RecordStream(StreamId stream, StreamId owner) {
    return stream == owner ? std::vector<StreamId>() : std::vector<StreamId>{stream};
  }
  // stream.synchronize()
  void SynchronizeStream(StreamId stream, const std::string& event) const;
};

// kBadInput: parameters that do not fit in one flat parameter.
Result<FlatParamConfig> MakeFlatParamConfig(const Partition& partition, const Strategy& strategy, UnitId id);

// Puts a unit and a reason on the instructions while it lives.
class InstructionLabel {
 public:
  InstructionLabel(ProgramBuilder& builder, UnitId unit, std::string_view reason);
  ~InstructionLabel();
  InstructionLabel(const InstructionLabel&) = delete;
  InstructionLabel& operator=(const InstructionLabel&) = delete;

 private:
  ProgramBuilder& builder_;
  const UnitId unit_;         // of the instructions before and after
  const std::string reason_;  // of the instructions before and after
};

}  // namespace shardplan::fsdp1
