#include "tests/executor/sharded_plan.h"

#include <fmt/format.h>

#include <numeric>

namespace shardplan::test {
namespace {

constexpr StreamId kCompute = 0;

std::int64_t CeilDiv(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

class Maker {
 public:
  explicit Maker(const ShardedPlanOptions& options) : o_(options) {}

  Plan Make() {
    MakeTables();
    plan_.steps.push_back({"steady", {}});
    At(TriggerKind::kStepBegin);
    for (int m = 0; m < o_.microbatches; ++m) {
      Forward(m);
      Backward(m);
    }
    At(TriggerKind::kOptimizerStep);
    Do({.kind = InstructionKind::kOptimizerStep, .stream = kCompute});
    At(TriggerKind::kZeroGrad);
    Do({.kind = InstructionKind::kZeroGrad});
    At(TriggerKind::kStepEnd);
    return std::move(plan_);
  }

 private:
  struct UnitBuffers {
    BufferId shard = -1, unsharded = -1, cast = -1, output = -1, post_forward = -1, post_forward_cast = -1;
    BufferId grads = -1, input = -1, reduced = -1, sharded_grads = -1, converted = -1;
    EventId gathered = -1, copied_out = -1, reduced_event = -1, done = -1;
    SegmentId forward = -1, backward = -1;
  };

  // ---- tables ----
  void MakeTables() {
    plan_.model = "toy";
    plan_.policy = o_.flat ? "fsdp1" : "fsdp2";
    plan_.world_size = o_.shards * o_.replicas;
    plan_.strategy.policy = plan_.policy;
    plan_.communicators.push_back({"shard", o_.shards, 1});
    if (o_.replicas > 1) plan_.communicators.push_back({"replicate", o_.replicas, o_.shards});
    if (o_.post_forward > 1) {
      post_forward_communicator_ = static_cast<CommunicatorId>(plan_.communicators.size());
      plan_.communicators.push_back({"post_forward", o_.post_forward, 1});
    }
    for (const char* name : {"compute", "copy_in", "gather", "scatter", "reduce"})
      plan_.streams.push_back({name, 0});
    for (int u = 0; u < o_.units; ++u) MakeUnit(u);
    plan_.segments.push_back({"loss", {}, {}, {}});
    loss_ = static_cast<SegmentId>(plan_.segments.size()) - 1;
  }

  void MakeUnit(int u) {
    Unit unit;
    unit.fqn = fmt::format("layers.{}", u);
    unit.modules = {unit.fqn};
    unit.layout = o_.flat ? LayoutKind::kFlat : LayoutKind::kPerParameter;
    unit.param_dtype = o_.param_dtype;
    unit.reduce_dtype = o_.reduce_dtype;
    unit.shard_communicator = 0;
    unit.replicate_communicator = o_.replicas > 1 ? 1 : -1;
    unit.post_forward_communicator = post_forward_communicator_;
    // Rows that N does not divide, fewer rows than ranks, a scalar-like row, a third dimension.
    std::vector<std::vector<std::int64_t>> shapes = {{5, 3}, {1 + u}, {7}};
    if (o_.second_dim) shapes.push_back({3, 2 * o_.shards, 2});
    std::int64_t offset = 0;
    for (std::size_t p = 0; p < shapes.size(); ++p) {
      UnitParameter parameter;
      parameter.fqn = fmt::format("{}.p{}", unit.fqn, p);
      parameter.shape = shapes[p];
      parameter.shard_dim = p == 3 ? 1 : 0;
      if (o_.flat && Casts()) offset = CeilDiv(offset, 8) * 8;  // aligned, as with use_orig_params
      if (o_.flat) parameter.flat_offset = offset;
      offset += Numel(parameter);
      unit.parameters.push_back(parameter);
    }
    if (o_.flat) unit.flat_numel = CeilDiv(offset, o_.shards) * o_.shards;
    plan_.units.push_back(unit);
    units_.push_back(o_.flat ? FlatBuffers(u, offset) : PerParameterBuffers(u));
    for (EventId* event :
         {&units_[u].gathered, &units_[u].copied_out, &units_[u].reduced_event, &units_[u].done}) {
      *event = Event();
    }
    std::vector<SegmentGrad> grads;
    for (std::size_t p = 0; p < shapes.size(); ++p) grads.push_back({u, static_cast<std::int32_t>(p)});
    units_[u].forward = static_cast<SegmentId>(plan_.segments.size());
    plan_.segments.push_back({fmt::format("forward {}", unit.fqn), {}, {u}, {}});
    units_[u].backward = static_cast<SegmentId>(plan_.segments.size());
    plan_.segments.push_back({fmt::format("backward {}", unit.fqn), {}, {u}, grads});
  }

  static std::int64_t Numel(const UnitParameter& p) {
    return std::accumulate(p.shape.begin(), p.shape.end(), std::int64_t{1}, std::multiplies<>());
  }
  std::int64_t Piece(const UnitParameter& p) const {
    const std::int64_t rows = p.shape[p.shard_dim];
    return Numel(p) / rows * CeilDiv(rows, o_.shards);
  }

  BufferId AddBuffer(UnitId u, BufferRole role, DType dtype, std::vector<std::int64_t> parts_numel,
                     const char* suffix = "") {
    Buffer buffer;
    buffer.name = fmt::format("{}.{}{}", plan_.units[u].fqn, Name(role), suffix);
    buffer.role = role;
    buffer.unit = u;
    buffer.dtype = dtype;
    for (const std::int64_t numel : parts_numel)
      buffer.parts_bytes.push_back(Bytes{numel * SizeBytes(dtype)});
    for (std::size_t p = 0; p < plan_.units[u].parameters.size(); ++p) {
      buffer.parameters.push_back(static_cast<std::int32_t>(p));
    }
    buffer.persistent = role == BufferRole::kParamSharded;
    plan_.buffers.push_back(buffer);
    return static_cast<BufferId>(plan_.buffers.size()) - 1;
  }

  bool Casts() const { return o_.param_dtype != DType::kFloat32; }

  UnitBuffers PerParameterBuffers(UnitId u) {
    std::vector<std::int64_t> pieces, gathered, smaller, whole;
    std::int64_t slot = 0;
    for (const UnitParameter& p : plan_.units[u].parameters) {
      pieces.push_back(Piece(p));
      gathered.push_back(Piece(p) * o_.shards);
      if (o_.post_forward > 1) smaller.push_back(Piece(p) * o_.shards / o_.post_forward);
      whole.push_back(Numel(p));
      slot += Piece(p);
    }
    UnitBuffers b;
    b.shard = AddBuffer(u, BufferRole::kParamSharded, DType::kFloat32, pieces);
    b.unsharded = AddBuffer(u, BufferRole::kParamUnsharded, o_.param_dtype, gathered);
    if (Casts()) b.cast = AddBuffer(u, BufferRole::kAllGatherInput, o_.param_dtype, {slot});
    b.output = AddBuffer(u, BufferRole::kAllGatherOutput, o_.param_dtype, {slot * o_.shards});
    if (o_.post_forward > 1) {
      b.post_forward = AddBuffer(u, BufferRole::kParamPostForwardShard, o_.param_dtype, smaller);
      if (Casts()) {
        b.post_forward_cast = AddBuffer(u, BufferRole::kAllGatherInput, o_.param_dtype,
                                        {slot * o_.shards / o_.post_forward}, ".post_forward");
      }
    }
    b.grads = AddBuffer(u, BufferRole::kGradUnsharded, o_.param_dtype, whole);
    b.input = AddBuffer(u, BufferRole::kReduceScatterInput, o_.reduce_dtype, {slot * o_.shards});
    b.reduced = AddBuffer(u, BufferRole::kReduceScatterOutput, o_.reduce_dtype, {slot});
    b.sharded_grads = AddBuffer(u, BufferRole::kGradSharded, DType::kFloat32, pieces);
    if (ConvertsGrads())
      b.converted = AddBuffer(u, BufferRole::kReduceScatterOutput, DType::kFloat32, pieces, ".cast");
    return b;
  }

  UnitBuffers FlatBuffers(UnitId u, std::int64_t unpadded) {
    const std::int64_t numel = plan_.units[u].flat_numel;
    UnitBuffers b;
    b.shard = AddBuffer(u, BufferRole::kParamSharded, DType::kFloat32, {numel / o_.shards});
    b.unsharded = AddBuffer(u, BufferRole::kParamUnsharded, o_.param_dtype, {numel});
    if (Casts()) b.cast = AddBuffer(u, BufferRole::kAllGatherInput, o_.param_dtype, {numel / o_.shards});
    // The flat gradient, or one gradient per parameter as autograd makes them.
    std::vector<std::int64_t> whole = {unpadded};
    if (Casts()) {
      whole.clear();
      for (const UnitParameter& p : plan_.units[u].parameters) whole.push_back(Numel(p));
    }
    b.grads = AddBuffer(u, BufferRole::kGradUnsharded, o_.param_dtype, whole);
    b.input = AddBuffer(u, BufferRole::kReduceScatterInput, o_.reduce_dtype, {numel});
    b.reduced = AddBuffer(u, BufferRole::kReduceScatterOutput, o_.reduce_dtype, {numel / o_.shards});
    b.sharded_grads = AddBuffer(u, BufferRole::kGradSharded, DType::kFloat32, {numel / o_.shards});
    if (ConvertsGrads()) {
      b.converted =
          AddBuffer(u, BufferRole::kReduceScatterOutput, DType::kFloat32, {numel / o_.shards}, ".cast");
    }
    return b;
  }

  bool ConvertsGrads() const { return o_.reduce_dtype != DType::kFloat32; }

  // ---- instructions ----
  EventId Event() {
    plan_.events.push_back(fmt::format("e{}", plan_.events.size()));
    return static_cast<EventId>(plan_.events.size()) - 1;
  }
  void At(TriggerKind kind, UnitId unit = -1, int microbatch = 0) {
    plan_.steps.back().triggers.push_back({kind, unit, microbatch, 0, {}});
  }
  void Do(Instruction i) { plan_.steps.back().triggers.back().instructions.push_back(std::move(i)); }
  void Allocate(BufferId dst, StreamId s) {
    Do({.kind = InstructionKind::kAllocate, .stream = s, .dst = dst});
  }
  void Free(BufferId src, std::vector<StreamId> safe_after = {}) {
    Do({.kind = InstructionKind::kFree, .src = src, .safe_after = std::move(safe_after)});
  }
  void Move(InstructionKind kind, BufferId src, BufferId dst, StreamId s, CommunicatorId c = -1) {
    Do({.kind = kind,
        .stream = s,
        .unit = plan_.buffers[src].unit,
        .src = src,
        .dst = dst,
        .communicator = c,
        .reduce_op = o_.sum_and_scale ? ReduceOp::kSum : ReduceOp::kAverage});
  }
  void Scale(BufferId src, double divisor, StreamId s) {
    Do({.kind = InstructionKind::kGradScale, .stream = s, .src = src, .divisor = divisor});
  }
  void Record(EventId e, StreamId s) { Do({.kind = InstructionKind::kRecord, .stream = s, .event = e}); }
  void Wait(EventId e, StreamId s) { Do({.kind = InstructionKind::kWait, .stream = s, .event = e}); }
  void Sync(StreamId from, StreamId to) {
    const EventId e = Event();
    Record(e, from);
    Wait(e, to);
  }
  void Compute(SegmentId segment, int microbatch) {
    Do({.kind = InstructionKind::kCompute, .stream = kCompute, .segment = segment, .microbatch = microbatch});
  }
  void Bind(InstructionKind kind, UnitId u, BufferId b) { Do({.kind = kind, .unit = u, .src = b}); }

  // ---- unshard ----
  void Gather(UnitId u, bool from_post_forward) {
    UnitBuffers& b = units_[u];
    const CommunicatorId c = from_post_forward ? post_forward_communicator_ : 0;
    BufferId source = from_post_forward ? b.post_forward : b.shard;
    const BufferId cast = from_post_forward ? b.post_forward_cast : b.cast;
    if (cast >= 0) {
      Allocate(cast, kCopyIn);
      Move(InstructionKind::kCopyIn, source, cast, kCopyIn);
      source = cast;
    }
    if (o_.flat) {
      Allocate(b.unsharded, kGather);
      Sync(kCopyIn, kGather);
      Move(InstructionKind::kAllGather, source, b.unsharded, kGather, c);
    } else {
      Allocate(b.output, kCopyIn);
      Move(InstructionKind::kCopyIn, source, b.output, kCopyIn, c);
      Sync(kCopyIn, kGather);
      Move(InstructionKind::kAllGather, b.output, b.output, kGather, c);
    }
    Record(b.gathered, kGather);
    if (cast >= 0) Free(cast, o_.flat ? std::vector<StreamId>{kGather} : std::vector<StreamId>{});
  }

  // After it, compute may use the unit.
  void Finish(UnitId u) {
    UnitBuffers& b = units_[u];
    Wait(b.gathered, kCompute);
    if (!o_.flat) {
      Allocate(b.unsharded, kCompute);
      Move(InstructionKind::kCopyOut, b.output, b.unsharded, kCompute);
    }
    Bind(InstructionKind::kBindUnsharded, u, b.unsharded);
    Record(b.copied_out, kCompute);
  }

  void FreeOutput(UnitId u) {
    if (o_.flat) return;
    Wait(units_[u].copied_out, kCopyIn);
    Wait(units_[u].copied_out, kGather);
    Free(units_[u].output);
  }

  void Reshard(UnitId u) {
    UnitBuffers& b = units_[u];
    Bind(InstructionKind::kBindSharded, u, b.shard);
    // FSDP1 gathers on another stream than it computes on.
    Free(b.unsharded, o_.flat ? std::vector<StreamId>{kCompute} : std::vector<StreamId>{});
  }

  void Forward(int m) {
    for (int u = 0; u < o_.units; ++u) {
      At(TriggerKind::kPreForward, u, m);
      if (u == 0) {
        Sync(kCompute, kCopyIn);
        Wait(static_cast<EventId>(plan_.events.size()) - 1, kGather);
      }
      if (o_.rate_limiter && u >= 2) {
        Do({.kind = InstructionKind::kHostWait, .event = units_[u - 2].copied_out});
      }
      Gather(u, false);
      if (u > 0) FreeOutput(u - 1);
      Finish(u);
      Compute(units_[u].forward, m);
      At(TriggerKind::kPostForward, u, m);
      if (o_.post_forward > 1) {
        UnitBuffers& b = units_[u];
        Allocate(b.post_forward, kCompute);
        Move(InstructionKind::kReshardPostForward, b.unsharded, b.post_forward, kCompute,
             post_forward_communicator_);
      }
      Reshard(u);
    }
    FreeOutput(o_.units - 1);
    Sync(kCompute, kCopyIn);  // what was resharded is there
    Compute(loss_, m);
  }

  // ---- reduce ----
  void Backward(int m) {
    const bool smaller = o_.post_forward > 1;
    for (int u = o_.units - 1; u >= 0; --u) {
      At(TriggerKind::kPreBackward, u, m);
      if (u == o_.units - 1) Gather(u, smaller);
      Finish(u);
      FreeOutput(u);
      if (smaller) Free(units_[u].post_forward);
      if (u > 0) Gather(u - 1, smaller);
      Compute(units_[u].backward, m);
      At(TriggerKind::kPostBackward, u, m);
      Reshard(u);
      Reduce(u, m);
    }
    At(TriggerKind::kBackwardEnd, -1, m);
    for (int u = 0; u < o_.units; ++u) {
      Wait(units_[u].done, kCompute);
      if (o_.replicas > 1) Free(units_[u].reduced);
    }
    Wait(units_[0].reduced_event, kCompute);
    Free(units_[0].input);
  }

  void Reduce(UnitId u, int m) {
    UnitBuffers& b = units_[u];
    if (u + 1 < o_.units) {
      Wait(units_[u + 1].reduced_event, kCompute);
      Free(units_[u + 1].input);
    }
    Allocate(b.input, kCompute);
    Move(InstructionKind::kGradCopyIn, b.grads, b.input, kCompute);
    Free(b.grads);
    Sync(kCompute, kScatter);
    Allocate(b.reduced, kScatter);
    const double ranks = static_cast<double>(plan_.world_size);
    const double before = o_.sum_and_scale ? 2.0 : 1.0;
    if (o_.sum_and_scale) Scale(b.input, before, kScatter);
    Move(InstructionKind::kReduceScatter, b.input, b.reduced, kScatter, 0);
    Record(b.reduced_event, kScatter);
    StreamId last = kScatter;
    if (o_.replicas > 1) {
      Sync(kScatter, kReduce);
      Do({.kind = InstructionKind::kAllReduce,
          .stream = kReduce,
          .src = b.reduced,
          .communicator = 1,
          .reduce_op = o_.sum_and_scale ? ReduceOp::kSum : ReduceOp::kAverage});
      last = kReduce;
    }
    if (o_.sum_and_scale) Scale(b.reduced, ranks / before, last);
    Deliver(b, m, last);
    Record(b.done, last);
    // HSDP keeps it until the all-reduce, on another stream, is waited for.
    if (o_.replicas == 1) Free(b.reduced);
  }

  void Deliver(UnitBuffers& b, int m, StreamId s) {
    if (m == 0) {
      if (ConvertsGrads()) Allocate(b.sharded_grads, s);
      Move(InstructionKind::kGradCast, b.reduced, b.sharded_grads, s);
    } else if (ConvertsGrads()) {
      Allocate(b.converted, s);
      Move(InstructionKind::kGradCast, b.reduced, b.converted, s);
      Move(InstructionKind::kGradAccumulate, b.converted, b.sharded_grads, s);
      Free(b.converted);
    } else {
      Move(InstructionKind::kGradAccumulate, b.reduced, b.sharded_grads, s);
    }
  }

  static constexpr StreamId kCopyIn = 1, kGather = 2, kScatter = 3, kReduce = 4;

  const ShardedPlanOptions o_;
  Plan plan_;
  std::vector<UnitBuffers> units_;
  CommunicatorId post_forward_communicator_ = -1;
  SegmentId loss_ = -1;
};

}  // namespace

std::string ToString(const ShardedPlanOptions& o) {
  return fmt::format("{}{}_shards{}{}{}_micro{}{}{}{}_{}_{}", o.flat ? "flat" : "per_parameter", "", o.shards,
                     o.replicas > 1 ? fmt::format("_replicas{}", o.replicas) : "",
                     o.post_forward > 1 ? fmt::format("_post_forward{}", o.post_forward) : "", o.microbatches,
                     o.second_dim ? "_dim1" : "", o.rate_limiter ? "_limited" : "",
                     o.sum_and_scale ? "_scaled" : "", Name(o.param_dtype), Name(o.reduce_dtype));
}

Plan MakeShardedPlan(const ShardedPlanOptions& options) { return Maker(options).Make(); }

std::vector<ShardedPlanOptions> ConformanceCases() {
  const DType bf16 = DType::kBFloat16;
  return {
      {.shards = 2},
      {.shards = 3},
      {.shards = 2, .microbatches = 2},
      {.shards = 2, .replicas = 2},
      {.shards = 2, .replicas = 2, .microbatches = 2, .sum_and_scale = true},
      {.shards = 4, .post_forward = 2},
      {.shards = 4, .post_forward = 2, .param_dtype = bf16},
      {.shards = 2, .second_dim = true},
      {.shards = 3, .second_dim = true, .param_dtype = bf16},
      {.shards = 2, .rate_limiter = true},
      {.shards = 2, .sum_and_scale = true},
      {.shards = 3, .microbatches = 2, .param_dtype = bf16},
      {.shards = 2, .microbatches = 2, .param_dtype = bf16, .reduce_dtype = bf16},
      {.shards = 2, .replicas = 2, .param_dtype = bf16, .reduce_dtype = DType::kFloat16},
      {.shards = 1},
      {.shards = 2, .flat = true},
      {.shards = 3, .microbatches = 2, .flat = true},
      {.shards = 3, .flat = true, .param_dtype = bf16},
      {.shards = 2, .replicas = 2, .flat = true, .param_dtype = bf16, .reduce_dtype = bf16},
  };
}

}  // namespace shardplan::test
