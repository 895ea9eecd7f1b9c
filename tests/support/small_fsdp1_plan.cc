// SPDX-License-Identifier: Apache-2.0
#include <deque>
#include <string>
#include <utility>
#include <vector>

#include "shardplan/schemas/program.h"
#include "tests/support/plan_builder.h"
#include "tests/support/small_plans.h"

namespace shardplan::test {
namespace {

using enum BufferRole;
using enum InstructionKind;

struct FlatUnit {
  UnitId unit = -1;
  BufferId shard = -1, low = -1, unsharded = -1, grad = -1, scatter_input = -1, scatter_output = -1,
           grad_shard = -1;
  SegmentId forward = -1, backward = -1;
  EventId unshard_done = -1, freed = -1;
  bool is_gathered = false;
};

class Fsdp1Like {
 public:
  explicit Fsdp1Like(const SmallFsdp1Options& options)
      : options_(options), b_(options.shards * options.replicas, options.replicas) {
    if (options.mixed_precision) {
      b_.plan().strategy.mixed_precision =
          MixedPrecision{.param_dtype = DType::kBFloat16, .reduce_dtype = DType::kFloat32};
    }
    pre_unshard_ = b_.Stream("pre_unshard");
    unshard_ = b_.Stream("unshard");
    post_backward_ = b_.Stream("post_backward");
    if (options.replicas > 1) all_reduce_ = b_.Stream("all_reduce");
    for (int i = 0; i < options.units; ++i) units_.push_back(MakeUnit("layers." + std::to_string(i)));
  }

  Plan Build() {
    b_.Step("steady").At(TriggerKind::kStepBegin).Sync(0, unshard_).Sync(0, pre_unshard_);
    for (FlatUnit& u : units_) {
      b_.At(TriggerKind::kPreForward, u.unit);
      Unshard(u);
      b_.Wait(0, u.unshard_done).Bind(u.unsharded).Compute(u.forward).At(TriggerKind::kPostForward, u.unit);
      Reshard(u, options_.free_after_forward);
    }
    for (std::size_t i = units_.size(); i-- > 0;) {
      FlatUnit& u = units_[i];
      b_.At(TriggerKind::kPreBackward, u.unit);
      Unshard(u);
      b_.Wait(0, u.unshard_done).Bind(u.unsharded);
      if (options_.prefetch && i > 0) Unshard(units_[i - 1]);
      b_.Compute(u.backward).At(TriggerKind::kPostBackward, u.unit);
      Reshard(u, true);
      Reduce(u);
    }
    b_.At(TriggerKind::kBackwardEnd).Sync(post_backward_, 0);
    if (all_reduce_ >= 0) b_.Sync(all_reduce_, 0);
    if (options_.offload) {
      const EventId done = b_.Event("offloaded");
      b_.Record(done, 0).HostWait(done);
    }
    b_.At(TriggerKind::kOptimizerStep).OptimizerStep(options_.offload ? -1 : 0);
    b_.At(TriggerKind::kZeroGrad).ZeroGrad();
    Plan plan = std::move(b_.plan());
    NumberPasses(plan);
    return plan;
  }

 private:
  FlatUnit MakeUnit(const std::string& fqn) {
    const DType low = options_.mixed_precision ? DType::kBFloat16 : DType::kFloat32;
    FlatUnit u;
    u.unit = b_.Unit(fqn);
    b_.MakeFlat(u.unit);
    b_.plan().units[u.unit].param_dtype = low;
    u.shard = b_.Buffer(kParamSharded, u.unit);
    if (options_.mixed_precision || options_.offload) u.low = b_.Buffer(kAllGatherInput, u.unit, low);
    u.unsharded = b_.Buffer(kParamUnsharded, u.unit, low);
    u.grad = b_.Buffer(kGradUnsharded, u.unit, low);
    if (options_.mixed_precision) u.scatter_input = b_.Buffer(kReduceScatterInput, u.unit);
    u.scatter_output = b_.Buffer(kReduceScatterOutput, u.unit);
    u.grad_shard = b_.Buffer(options_.offload ? kGradHost : kGradSharded, u.unit);
    if (options_.offload) {
      b_.plan().buffers[u.shard].memory = MemoryKind::kPinnedHost;
      b_.plan().buffers[u.grad_shard].memory = MemoryKind::kPinnedHost;
    }
    u.forward = b_.Forward("forward " + fqn, {u.unit});
    u.backward = b_.Backward("backward " + fqn, {u.unit}, {{u.unit, 0}});
    u.unshard_done = b_.Event(fqn + ".unshard_done");
    u.freed = b_.Event(fqn + ".freed");
    return u;
  }

  void Unshard(FlatUnit& u) {
    if (u.is_gathered) return;
    u.is_gathered = true;
    if (u.low >= 0) {
      b_.Allocate(u.low, pre_unshard_);
      b_.Move(options_.offload ? kCopyToDevice : kCopyIn, u.shard, u.low, pre_unshard_)
          .Sync(pre_unshard_, unshard_);
    }
    if (options_.limit_all_gathers && free_events_.size() >= 2) {
      b_.HostWait(free_events_.front());
      free_events_.pop_front();
    }
    b_.Allocate(u.unsharded, unshard_).AllGather(u.low >= 0 ? u.low : u.shard, u.unsharded, unshard_);
    if (u.low >= 0) b_.Free(u.low, {unshard_});
    b_.Record(u.unshard_done, unshard_);
  }

  void Reshard(FlatUnit& u, bool free) {
    b_.BindSharded(u.shard);
    if (!free) return;
    u.is_gathered = false;
    b_.Free(u.unsharded, {0}).Record(u.freed, 0);
    free_events_.push_back(u.freed);
  }

  void Reduce(FlatUnit& u) {
    b_.Sync(0, post_backward_);
    BufferId input = u.grad;
    if (u.scatter_input >= 0) {
      b_.Allocate(u.scatter_input, post_backward_).Move(kGradCopyIn, u.grad, u.scatter_input, post_backward_);
      input = u.scatter_input;
    }
    b_.Allocate(u.scatter_output, post_backward_);
    const double ranks = options_.shards * options_.replicas;
    if (ranks > 2) b_.Scale(input, 2, post_backward_);
    b_.ReduceScatter(input, u.scatter_output, post_backward_, ReduceOp::kSum);
    StreamId stream = post_backward_;
    if (all_reduce_ >= 0) {
      b_.Sync(post_backward_, all_reduce_).AllReduce(u.scatter_output, all_reduce_, 1, ReduceOp::kSum);
      stream = all_reduce_;
    }
    b_.Scale(u.scatter_output, ranks > 2 ? ranks / 2 : ranks, stream);
    if (options_.offload) {
      b_.Allocate(u.grad_shard, -1).Move(kCopyToHost, u.scatter_output, u.grad_shard, stream);
      b_.Free(u.scatter_output, {stream});
    } else {
      b_.Move(kGradCast, u.scatter_output, u.grad_shard, stream).Free(u.scatter_output);
    }
    if (u.scatter_input >= 0) b_.Free(u.scatter_input);
    b_.Free(u.grad, {post_backward_});
  }

  SmallFsdp1Options options_;
  PlanBuilder b_;
  StreamId pre_unshard_ = -1, unshard_ = -1, post_backward_ = -1, all_reduce_ = -1;
  std::vector<FlatUnit> units_;
  std::deque<EventId> free_events_;
};

}  // namespace

Plan Fsdp1LikePlan(const SmallFsdp1Options& options) { return Fsdp1Like(options).Build(); }

}  // namespace shardplan::test
