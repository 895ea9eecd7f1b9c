// SPDX-License-Identifier: Apache-2.0
// Builds small plans by hand: tables first (streams, units, buffers, segments), then steps, triggers and
// instructions in host order. Instructions are appended to the trigger opened last; every call that adds one
// returns the builder, so that a trigger reads like a line of the plan:
//
//   b.At(TriggerKind::kPreForward, u).Allocate(out, copy_in).CopyIn(shard, out, copy_in).Sync(copy_in,
//   gather);
//
// Nothing is checked: tests build wrong plans on purpose.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "shardplan/schemas/plan.h"

namespace shardplan::test {

class PlanBuilder {
 public:
  // `ranks` in one "shard" communicator, id 0, or in a {replicate, shard} mesh when `replicas` > 1
  // ("replicate" is communicator 1). Stream 0 is "compute".
  explicit PlanBuilder(std::int64_t ranks = 2, std::int64_t replicas = 1) {
    plan_.model = "small";
    plan_.policy = "fsdp2";
    plan_.world_size = ranks;
    plan_.mesh = {{"shard", ranks / replicas}};
    plan_.communicators.push_back({"shard", ranks / replicas, 1});
    if (replicas > 1) {
      plan_.mesh.insert(plan_.mesh.begin(), {"replicate", replicas});
      plan_.communicators.push_back({"replicate", replicas, ranks / replicas});
      plan_.strategy.mesh = plan_.mesh;
    }
    Stream("compute");
  }

  // ---- tables ----
  StreamId Stream(std::string name) { return Add(plan_.streams, PlanStream{std::move(name), 0}); }
  EventId Event(std::string name) { return Add(plan_.events, std::move(name)); }
  CommunicatorId Communicator(std::string name, std::int64_t size, std::int64_t stride = 1) {
    return Add(plan_.communicators, shardplan::Communicator{std::move(name), size, stride});
  }
  // A unit with one module, `parameters` vectors of `elements` elements, sharded over communicator 0.
  UnitId Unit(std::string fqn, int parameters = 1, std::int64_t elements = 8) {
    shardplan::Unit unit;
    unit.modules = {fqn};
    for (int p = 0; p < parameters; ++p) {
      UnitParameter parameter;
      parameter.fqn = fqn + ".p" + std::to_string(p);
      parameter.shape = {elements};
      unit.parameters.push_back(std::move(parameter));
    }
    unit.fqn = std::move(fqn);
    unit.shard_communicator = 0;
    if (plan_.communicators.size() > 1 && plan_.communicators[1].name == "replicate")
      unit.replicate_communicator = 1;
    return Add(plan_.units, std::move(unit));
  }
  // The unit is flat, and each of its ranks has an equal piece. So are all units of a plan of fsdp1.
  void MakeFlat(UnitId unit) {
    plan_.policy = plan_.strategy.policy = "fsdp1";
    if (plan_.mesh.size() > 1) plan_.strategy.fsdp1.sharding = Fsdp1Sharding::kHybridShard;
    shardplan::Unit& flat = plan_.units[unit];
    flat.layout = LayoutKind::kFlat;
    for (UnitParameter& parameter : flat.parameters) {
      parameter.flat_offset = flat.flat_numel;
      flat.flat_numel += parameter.shape[0];
    }
  }
  // A buffer "<unit>.<role>" that holds all parameters of the unit: what modules and optimizers see in a part
  // for each.
  BufferId Buffer(BufferRole role, UnitId unit, DType dtype = DType::kFloat32) {
    shardplan::Buffer buffer;
    const shardplan::Unit& u = plan_.units[unit];
    buffer.name = u.fqn + "." + std::string(Name(role));
    buffer.role = role;
    buffer.unit = unit;
    buffer.dtype = dtype;
    const bool is_shard = role == BufferRole::kParamSharded || role == BufferRole::kGradSharded ||
                          role == BufferRole::kReduceScatterOutput || role == BufferRole::kAllGatherInput ||
                          role == BufferRole::kOptimizerState || role == BufferRole::kGradHost;
    const std::int64_t shards = plan_.communicators[0].size;
    const bool by_parameter = role == BufferRole::kParamSharded || role == BufferRole::kParamUnsharded ||
                              role == BufferRole::kGradUnsharded || role == BufferRole::kGradSharded ||
                              role == BufferRole::kGradHost;
    for (std::size_t p = 0; p < u.parameters.size(); ++p) {
      buffer.parameters.push_back(static_cast<std::int32_t>(p));
      const std::int64_t elements = u.parameters[p].shape[0] / (is_shard ? shards : 1);
      if (p == 0 || by_parameter) buffer.parts_bytes.push_back({});
      buffer.parts_bytes.back().value += elements * SizeBytes(dtype);
    }
    buffer.persistent = role == BufferRole::kParamSharded;
    return Add(plan_.buffers, std::move(buffer));
  }
  // The unit is the first that it reads, if any.
  SegmentId Segment(SegmentPhase phase, std::string name, std::vector<UnitId> reads,
                    std::vector<SegmentGrad> grads = {}) {
    const UnitId unit = reads.empty() ? -1 : reads.front();
    return Add(plan_.segments, shardplan::Segment{.name = std::move(name),
                                                  .phase = phase,
                                                  .unit = unit,
                                                  .reads = std::move(reads),
                                                  .grads = std::move(grads)});
  }
  SegmentId Forward(std::string name, std::vector<UnitId> reads) {
    return Segment(SegmentPhase::kForward, std::move(name), std::move(reads));
  }
  SegmentId Backward(std::string name, std::vector<UnitId> reads, std::vector<SegmentGrad> grads = {}) {
    return Segment(SegmentPhase::kBackward, std::move(name), std::move(reads), std::move(grads));
  }

  // ---- program ----
  PlanBuilder& Step(std::string name) {
    plan_.steps.push_back({std::move(name), {}});
    return *this;
  }
  // `microbatch` left out: of a call of the user, that of the trigger before; of any other trigger, the
  // first.
  PlanBuilder& At(TriggerKind kind, UnitId unit = -1, std::int32_t microbatch = -1) {
    std::vector<Trigger>& triggers = plan_.steps.back().triggers;
    const bool is_call = kind == TriggerKind::kOptimizerStep || kind == TriggerKind::kZeroGrad ||
                         kind == TriggerKind::kUserCall;
    if (microbatch < 0) microbatch = is_call && !triggers.empty() ? triggers.back().microbatch : 0;
    std::int32_t occurrence = 0;
    for (const Trigger& before : triggers) {
      occurrence += before.kind == kind && before.unit == unit && before.microbatch == microbatch ? 1 : 0;
    }
    triggers.push_back({kind, unit, microbatch, occurrence, {}});
    return *this;
  }
  PlanBuilder& Do(Instruction instruction) {
    plan_.steps.back().triggers.back().instructions.Edit().push_back(std::move(instruction));
    return *this;
  }

  PlanBuilder& Compute(SegmentId segment, StreamId stream = 0, std::int32_t microbatch = 0) {
    return Do({.kind = InstructionKind::kCompute,
               .stream = stream,
               .segment = segment,
               .microbatch_offset = microbatch - plan_.steps.back().triggers.back().microbatch});
  }
  PlanBuilder& Allocate(BufferId dst, StreamId stream) {
    return Do({.kind = InstructionKind::kAllocate, .stream = stream, .dst = dst});
  }
  PlanBuilder& Free(BufferId src, std::vector<StreamId> safe_after = {}) {
    return Do({.kind = InstructionKind::kFree, .src = src, .safe_after = std::move(safe_after)});
  }
  PlanBuilder& FreeParts(BufferId src, std::vector<std::int32_t> parts) {
    return Do({.kind = InstructionKind::kFree, .src = src, .parts = std::move(parts)});
  }
  PlanBuilder& Bind(BufferId src) {
    return Do({.kind = InstructionKind::kBindUnsharded, .unit = UnitOf(src), .src = src});
  }
  PlanBuilder& BindSharded(BufferId src) {
    return Do({.kind = InstructionKind::kBindSharded, .unit = UnitOf(src), .src = src});
  }
  // Any instruction that moves src to dst on a stream.
  PlanBuilder& Move(InstructionKind kind, BufferId src, BufferId dst, StreamId stream,
                    CommunicatorId communicator = -1, ReduceOp op = ReduceOp::kSum) {
    return Do({.kind = kind,
               .reduce_op = op,
               .stream = stream,
               .unit = UnitOf(src),
               .src = src,
               .dst = dst,
               .communicator = communicator});
  }
  PlanBuilder& CopyIn(BufferId src, BufferId dst, StreamId s) {
    return Move(InstructionKind::kCopyIn, src, dst, s);
  }
  PlanBuilder& CopyOut(BufferId src, BufferId dst, StreamId s) {
    return Move(InstructionKind::kCopyOut, src, dst, s);
  }
  PlanBuilder& AllGather(BufferId src, BufferId dst, StreamId s, CommunicatorId c = 0) {
    return Move(InstructionKind::kAllGather, src, dst, s, c);
  }
  PlanBuilder& ReduceScatter(BufferId src, BufferId dst, StreamId s, ReduceOp op = ReduceOp::kAverage) {
    return Move(InstructionKind::kReduceScatter, src, dst, s, 0, op);
  }
  PlanBuilder& AllReduce(BufferId src, StreamId s, CommunicatorId c = 1, ReduceOp op = ReduceOp::kAverage) {
    return Move(InstructionKind::kAllReduce, src, -1, s, c, op);
  }
  PlanBuilder& Scale(BufferId src, double divisor, StreamId s) {
    return Do({.kind = InstructionKind::kGradScale,
               .stream = s,
               .unit = UnitOf(src),
               .src = src,
               .divisor = divisor});
  }
  PlanBuilder& Record(EventId event, StreamId s) {
    return Do({.kind = InstructionKind::kRecord, .stream = s, .event = event});
  }
  PlanBuilder& Wait(StreamId s, EventId event) {
    return Do({.kind = InstructionKind::kWait, .stream = s, .event = event});
  }
  PlanBuilder& HostWait(EventId event) { return Do({.kind = InstructionKind::kHostWait, .event = event}); }
  // Later work of `to` starts after what `from` was given so far (torch's to.wait_stream(from)).
  PlanBuilder& Sync(StreamId from, StreamId to) {
    const EventId event = Event("sync" + std::to_string(plan_.events.size()));
    return Record(event, from).Wait(to, event);
  }
  PlanBuilder& OptimizerStep(StreamId s, UnitId unit = -1) {
    return Do({.kind = InstructionKind::kOptimizerStep, .stream = s, .unit = unit});
  }
  PlanBuilder& ZeroGrad() { return Do({.kind = InstructionKind::kZeroGrad}); }

  Plan& plan() { return plan_; }

 private:
  template <typename List, typename Item>
  static std::int32_t Add(List& list, Item item) {
    list.push_back(std::move(item));
    return static_cast<std::int32_t>(list.size()) - 1;
  }
  UnitId UnitOf(BufferId buffer) const { return plan_.buffers[buffer].unit; }

  Plan plan_;
};

}  // namespace shardplan::test
