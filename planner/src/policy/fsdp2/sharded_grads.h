// SPDX-License-Identifier: Apache-2.0
// The sharded gradients of a group: what foreach_reduce makes of a reduced buffer (the end of foreach_reduce
// in _fsdp_collectives.py; FSDPParam.sharded_param.grad).
#pragma once

#include <cstdint>
#include <map>
#include <string_view>
#include <vector>

#include "policy/fault_list.h"
#include "policy/fsdp2/unit_scope.h"
#include "policy/optimizer_memory.h"
#include "shardplan/schemas/precision.h"

namespace shardplan::fsdp2 {

class ShardedGrads {
 public:
  struct State {
    // sharded_param.grad, by parameter: the buffer that it is a part of. Set by Deliver, cleared by zero_grad
    // and by an optimiser in the backward.
    std::map<std::int32_t, BufferId> grads;
    // grad_offload_event: the last copy to pinned memory that the host has not waited for. Set by Deliver,
    // cleared by WaitForOffload. -1: none.
    EventId grad_offload_event = -1;
    bool operator==(const State&) const = default;
  };

  explicit ShardedGrads(const UnitScope& scope) : scope_(scope) {}

  // Parameter by parameter the gradient in `reduced` is added to .grad, or becomes it. True: a gradient is a
  // view of `reduced`, all of whose memory then stays.
  bool Deliver(BufferId reduced, StreamId stream, const std::vector<std::int32_t>& parameters);
  // Hooks after the accumulation of a sharded gradient (_post_accumulate_grad_hooks): they step the parameter
  // and drop its gradient, on the stream that has just delivered it.
  void StepInBackward(OptimizerMemory& optimizer, StreamId stream,
                      const std::vector<std::int32_t>& parameters);
  void WaitForOffload();
  void Clear() { state_.grads.clear(); }
  // sharded_param.grad = None, of each parameter.
  void Discard();

  const State& state() const { return state_; }

 private:
  // The destinations of some parameters: those whose .grad is there already, by the buffer that it is in, and
  // those without.
  struct Destinations {
    std::map<BufferId, std::vector<std::int32_t>> added;
    std::vector<std::int32_t> fresh;
  };
  // Parameters whose sharded gradients have one dtype (_cast_and_view_sharded_grads).
  struct Run {
    DType dtype = DType::kFloat32;
    std::vector<std::int32_t> parameters;  // ascending
    bool copies = false;  // into memory of its own: another dtype than the reduction's, or less than those
  };
  std::vector<Run> RunsOf(BufferId reduced, const std::vector<std::int32_t>& parameters) const;
  Destinations DestinationsOf(const std::vector<std::int32_t>& parameters) const;
  std::vector<Bytes> Parts(const Run& run, const std::vector<std::int32_t>& parameters) const;
  BufferId Cast(BufferId reduced, StreamId stream, const Run& run) const;
  void SetGrads(const std::vector<std::int32_t>& parameters, BufferId grad);
  bool DeliverRun(BufferId reduced, StreamId stream, const Run& run);
  void DeliverToHost(BufferId reduced, StreamId stream, const Run& run);
  BufferId CopyToHost(BufferId from, StreamId stream, const Run& run,
                      const std::vector<std::int32_t>& parameters, std::string_view suffix,
                      MemoryKind memory);

  const UnitScope& scope_;
  State state_;
};

}  // namespace shardplan::fsdp2
