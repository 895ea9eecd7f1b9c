// SPDX-License-Identifier: Apache-2.0
#include "tests/support/small_plans.h"

#include <string>
#include <vector>

#include "shardplan/schemas/program.h"
#include "tests/support/plan_builder.h"

namespace shardplan::test {
namespace {

using enum BufferRole;
using enum InstructionKind;

struct UnitBuffers {
  UnitId unit = -1;
  BufferId shard = -1, gather_input = -1, gather_output = -1, unsharded = -1;
  std::vector<BufferId> post_forward;  // by parameter
  BufferId grad = -1, accumulated = -1, scatter_input = -1, scatter_output = -1, grad_shard = -1, state = -1;
  std::vector<SegmentId> forward, backward;  // by micro-batch
  EventId resharded = -1, gathered = -1, copied_out = -1, scattered = -1, all_reduced = -1, reduced = -1;
  bool is_unsharded = false, is_gathering = false, is_post_forward = false;
};

class Fsdp2Like {
 public:
  explicit Fsdp2Like(const SmallPlanOptions& options)
      : options_(options), b_(options.shards * options.replicas, options.replicas) {
    b_.plan().strategy.mixed_precision =
        MixedPrecision{.param_dtype = param_dtype(), .reduce_dtype = reduce_dtype()};
    copy_in_ = b_.Stream("all_gather_copy_in");
    gather_ = b_.Stream("all_gather");
    scatter_ = b_.Stream("reduce_scatter");
    if (options.replicas > 1) reduce_ = b_.Stream("all_reduce");
    for (int i = 0; i < options.units; ++i) units_.push_back(MakeUnit("layers." + std::to_string(i)));
    if (options.owners || options.on_all) MakeExchange();
  }

  Plan Build() {
    for (const char* name : {"first", "steady"}) {
      b_.Step(name).At(TriggerKind::kStepBegin);
      for (int m = 0; m < options_.microbatches; ++m) {
        Forward(m);
        Backward(m, m + 1 == options_.microbatches);
      }
      b_.At(TriggerKind::kOptimizerStep);
      if (std::string(name) == "first") {
        for (const UnitBuffers& u : units_) b_.Allocate(u.state, kCompute0);
      }
      if (options_.owners || options_.on_all) StepMatrices();
      b_.OptimizerStep(kCompute0).At(TriggerKind::kZeroGrad).ZeroGrad().At(TriggerKind::kStepEnd);
    }
    Plan plan = std::move(b_.plan());
    plan.steady_step = 1;
    NumberPasses(plan);
    return plan;
  }

 private:
  static constexpr StreamId kCompute0 = 0;

  DType param_dtype() const { return options_.mixed_precision ? DType::kBFloat16 : DType::kFloat32; }
  DType reduce_dtype() const { return options_.bf16_reduce ? DType::kBFloat16 : DType::kFloat32; }
  bool cast_grads() const { return reduce_dtype() != DType::kFloat32; }

  UnitBuffers MakeUnit(const std::string& fqn) {
    const DType low = param_dtype();
    UnitBuffers u;
    // The reduce-scatter writes one piece.
    u.unit = b_.Unit(fqn, options_.reduce_into_grad ? 1 : options_.parameters);
    b_.plan().units[u.unit].param_dtype = low;
    b_.plan().units[u.unit].reduce_dtype = reduce_dtype();
    if (options_.reshard_to_shards) b_.plan().units[u.unit].post_forward_communicator = 0;
    u.shard = b_.Buffer(kParamSharded, u.unit);
    if (options_.mixed_precision) u.gather_input = b_.Buffer(kAllGatherInput, u.unit, low);
    u.gather_output = b_.Buffer(kAllGatherOutput, u.unit, low);
    u.unsharded = b_.Buffer(kParamUnsharded, u.unit, low);
    u.grad = b_.Buffer(kGradUnsharded, u.unit, low);
    if (options_.microbatches > 1)
      u.accumulated = b_.Buffer(kGradUnshardedAccumulated, u.unit, reduce_dtype());
    u.scatter_input = b_.Buffer(kReduceScatterInput, u.unit, reduce_dtype());
    if (!options_.reduce_into_grad)
      u.scatter_output = b_.Buffer(kReduceScatterOutput, u.unit, reduce_dtype());
    u.grad_shard = b_.Buffer(kGradSharded, u.unit);
    u.state = b_.Buffer(kOptimizerState, u.unit);
    std::vector<SegmentGrad> grads;
    const auto parameters = static_cast<int>(b_.plan().units[u.unit].parameters.size());
    for (int p = 0; p < parameters; ++p) grads.push_back({u.unit, p});
    for (int m = 0; m < options_.microbatches; ++m) {
      u.forward.push_back(b_.Forward("forward " + fqn, {u.unit}));
      u.backward.push_back(b_.Backward("backward " + fqn, {u.unit}, grads));
    }
    if (options_.reshard_to_shards) AddPostForwardShards(u, low);
    u.gathered = b_.Event(fqn + ".gathered");
    u.copied_out = b_.Event(fqn + ".copied_out");
    u.scattered = b_.Event(fqn + ".scattered");
    u.all_reduced = b_.Event(fqn + ".all_reduced");
    u.reduced = b_.Event(fqn + ".reduced");
    return u;
  }

  // The first parameter of each unit is a matrix of one column.
  void MakeExchange() {
    exchange_ = b_.Stream("update_exchange");
    shardplan::Exchange exchange{.name = "muon.0", .communicator = 0, .dtype = DType::kFloat32};
    std::int64_t rows = 0;
    for (const UnitBuffers& u : units_) {
      UnitParameter& parameter = b_.plan().units[u.unit].parameters[0];
      parameter.shape.push_back(1);
      parameter.muon = true;
      exchange.matrices.push_back(
          {.unit = u.unit, .parameter = 0, .owner = options_.on_all ? -1 : u.unit % options_.shards});
      rows += parameter.shape[0];
    }
    b_.plan().exchanges = {exchange};
    for (const BufferRole role : {kUpdatePieces, kUpdateWhole}) {
      const Bytes bytes{(role == kUpdatePieces ? rows / options_.shards : rows) * SizeBytes(exchange.dtype)};
      b_.plan().buffers.push_back({.name = "muon.0." + std::string(Name(role)),
                                   .role = role,
                                   .dtype = exchange.dtype,
                                   .parts_bytes = {bytes}});
    }
    pieces_ = static_cast<BufferId>(b_.plan().buffers.size()) - 2;
    whole_ = pieces_ + 1;
    b_.plan().segments.push_back({.name = "newton schulz", .phase = SegmentPhase::kOptimizer});
  }

  void StepMatrices() {
    const auto segment = static_cast<SegmentId>(b_.plan().segments.size()) - 1;
    b_.Allocate(pieces_, kCompute0).Allocate(whole_, kCompute0);
    b_.Do({.kind = kUpdateCopyIn, .stream = kCompute0, .dst = pieces_, .exchange = 0});
    b_.Sync(kCompute0, exchange_);
    b_.Do({.kind = options_.on_all ? kUpdateGather : kAllToAll,
           .stream = exchange_,
           .src = pieces_,
           .dst = whole_,
           .communicator = 0,
           .exchange = 0});
    b_.Sync(exchange_, kCompute0);
    for (std::int32_t m = 0; m < std::ssize(units_); ++m) {
      b_.Do({.kind = kOrthogonalize,
             .stream = kCompute0,
             .dst = whole_,
             .segment = segment,
             .exchange = 0,
             .matrix = m});
    }
    if (options_.on_all) {
      b_.Do({.kind = kUpdateApply, .stream = kCompute0, .src = whole_, .exchange = 0});
      b_.Free(whole_).Free(pieces_);
      return;
    }
    b_.Sync(kCompute0, exchange_);
    b_.Do({.kind = kAllToAll,
           .stream = exchange_,
           .src = whole_,
           .dst = pieces_,
           .communicator = 0,
           .exchange = 0});
    b_.Sync(exchange_, kCompute0);
    b_.Do({.kind = kUpdateApply, .stream = kCompute0, .src = pieces_, .exchange = 0});
    b_.Free(whole_).Free(pieces_);
  }

  void AddPostForwardShards(UnitBuffers& u, DType low) {
    std::vector<Buffer>& buffers = b_.plan().buffers;
    const Bytes part{buffers[u.unsharded].parts_bytes[0].value / options_.shards};
    const auto parameters = static_cast<int>(b_.plan().units[u.unit].parameters.size());
    for (int p = 0; p < parameters; ++p) {
      u.post_forward.push_back(b_.Buffer(kParamPostForwardShard, u.unit, low));
      Buffer& shard = buffers[u.post_forward.back()];
      shard.name += ".p" + std::to_string(p);
      shard.parameters = {p};
      shard.parts_bytes = {part};
    }
    u.resharded = b_.Event(b_.plan().units[u.unit].fqn + ".resharded");
  }

  void Unshard(UnitBuffers& u) {
    if (u.is_unsharded || u.is_gathering) return;
    u.is_gathering = true;
    std::vector<BufferId> sources = {u.shard};
    if (u.is_post_forward) {
      sources = u.post_forward;
      b_.Wait(copy_in_, u.resharded).Wait(gather_, u.resharded);
    }
    if (u.gather_input >= 0) {
      b_.Allocate(u.gather_input, copy_in_);
      for (const BufferId source : sources) b_.CopyIn(source, u.gather_input, copy_in_);
      sources = {u.gather_input};
    }
    b_.Allocate(u.gather_output, copy_in_);
    for (const BufferId source : sources) b_.CopyIn(source, u.gather_output, copy_in_);
    if (u.gather_input >= 0) b_.Free(u.gather_input);
    b_.Sync(copy_in_, gather_)
        .AllGather(u.gather_output, u.gather_output, gather_)
        .Record(u.gathered, gather_);
  }

  void WaitForUnshard(UnitBuffers& u, bool forward) {
    if (!u.is_gathering) return;
    if (forward) FreeDeferred();
    b_.Wait(kCompute0, u.gathered).Allocate(u.unsharded, kCompute0);
    b_.CopyOut(u.gather_output, u.unsharded, kCompute0);
    if (u.is_post_forward) {
      for (const BufferId shard : u.post_forward) b_.Free(shard);
    }
    u.is_post_forward = false;
    b_.Bind(u.unsharded).Record(u.copied_out, kCompute0);
    u.is_gathering = false;
    u.is_unsharded = true;
    deferred_ = &u;
    if (!forward) FreeDeferred();
  }

  // The all-gather output is kept until the next unit's copy-out, so that this one's overlaps the next
  // gather.
  void FreeDeferred() {
    if (deferred_ == nullptr) return;
    b_.Wait(copy_in_, deferred_->copied_out)
        .Wait(gather_, deferred_->copied_out)
        .Free(deferred_->gather_output);
    deferred_ = nullptr;
  }

  void Reshard(UnitBuffers& u) {
    if (!u.is_unsharded) return;
    b_.BindSharded(u.shard).Free(u.unsharded);
    u.is_unsharded = false;
  }

  // Each parameter's shard is copied, then the whole goes.
  void ReshardToShards(UnitBuffers& u) {
    const auto parameters = static_cast<int>(u.post_forward.size());
    for (int p = 0; p < parameters; ++p) {
      const BufferId shard = u.post_forward[p];
      b_.Allocate(shard, kCompute0).Move(kReshardPostForward, u.unsharded, shard, kCompute0);
      if (p == 0) b_.BindSharded(shard);
      p + 1 < parameters ? b_.FreeParts(u.unsharded, {p}) : b_.Free(u.unsharded);
    }
    b_.Record(u.resharded, kCompute0);
    u.is_unsharded = false;
    u.is_post_forward = true;
  }

  void Forward(int microbatch) {
    b_.At(TriggerKind::kPreForward, -1, microbatch).Sync(kCompute0, copy_in_).Sync(kCompute0, gather_);
    for (UnitBuffers& u : units_) {
      b_.At(TriggerKind::kPreForward, u.unit, microbatch);
      Unshard(u);
      WaitForUnshard(u, true);
      b_.Compute(u.forward[microbatch], kCompute0, microbatch)
          .At(TriggerKind::kPostForward, u.unit, microbatch);
      const bool last = &u == &units_.back();
      if (options_.reshard_after_forward && !(last && options_.prefetch)) {
        options_.reshard_to_shards ? ReshardToShards(u) : Reshard(u);
      }
    }
    b_.At(TriggerKind::kPostForward, -1, microbatch);
    FreeDeferred();
  }

  void Backward(int microbatch, bool reduce) {
    for (std::size_t i = units_.size(); i-- > 0;) {
      UnitBuffers& u = units_[i];
      b_.At(TriggerKind::kPreBackward, u.unit, microbatch);
      Unshard(u);
      WaitForUnshard(u, false);
      if (options_.prefetch && i > 0) Unshard(units_[i - 1]);
      b_.Compute(u.backward[microbatch], kCompute0, microbatch)
          .At(TriggerKind::kPostBackward, u.unit, microbatch);
      Accumulate(u, microbatch);
      Reshard(u);
      if (reduce) Reduce(u);
    }
    b_.At(TriggerKind::kBackwardEnd, -1, microbatch);
    if (!reduce) return;
    for (UnitBuffers& u : units_) {
      b_.Wait(kCompute0, u.reduced);
      if (reduce_ >= 0) b_.Wait(kCompute0, u.all_reduced);
      if (u.scatter_output >= 0 && reduce_ >= 0 && cast_grads()) b_.Free(u.scatter_output);
    }
    FreeScatterInput();
  }

  void Accumulate(UnitBuffers& u, int microbatch) {
    if (u.accumulated < 0) return;
    if (microbatch == 0) b_.Allocate(u.accumulated, kCompute0);
    b_.Move(kGradAccumulate, u.grad, u.accumulated, kCompute0).Free(u.grad);
  }

  void FreeScatterInput() {
    if (scattering_ == nullptr) return;
    b_.Wait(kCompute0, scattering_->scattered).Free(scattering_->scatter_input);
    scattering_ = nullptr;
  }

  void Reduce(UnitBuffers& u) {
    FreeScatterInput();
    const BufferId grad = u.accumulated >= 0 ? u.accumulated : u.grad;
    const BufferId output = u.scatter_output >= 0 ? u.scatter_output : u.grad_shard;
    const ReduceOp op = options_.sum_reduction ? ReduceOp::kSum : ReduceOp::kAverage;
    b_.Allocate(u.scatter_input, kCompute0).Move(kGradCopyIn, grad, u.scatter_input, kCompute0).Free(grad);
    b_.Sync(kCompute0, scatter_)
        .Allocate(output, scatter_)
        .ReduceScatter(u.scatter_input, output, scatter_, op);
    b_.Record(u.scattered, scatter_);
    scattering_ = &u;
    StreamId post = scatter_;
    if (reduce_ >= 0) {
      post = reduce_;
      b_.Sync(scatter_, reduce_).AllReduce(output, reduce_, 1, op).Record(u.all_reduced, reduce_);
    }
    if (options_.sum_reduction) b_.Scale(output, options_.shards * options_.replicas, post);
    if (u.scatter_output >= 0) {
      if (cast_grads()) b_.Allocate(u.grad_shard, post);
      b_.Move(kGradCast, output, u.grad_shard, post);
      if (!cast_grads() || reduce_ < 0) b_.Free(output);
    }
    b_.Record(u.reduced, post);
  }

  SmallPlanOptions options_;
  PlanBuilder b_;
  StreamId copy_in_ = -1, gather_ = -1, scatter_ = -1, reduce_ = -1, exchange_ = -1;
  BufferId pieces_ = -1, whole_ = -1;  // of the exchange
  std::vector<UnitBuffers> units_;
  UnitBuffers* deferred_ = nullptr;    // its all-gather output is to be freed
  UnitBuffers* scattering_ = nullptr;  // its reduce-scatter input is to be freed
};

}  // namespace

Plan Fsdp2LikePlan(const SmallPlanOptions& options) { return Fsdp2Like(options).Build(); }

}  // namespace shardplan::test
