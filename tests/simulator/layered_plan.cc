// SPDX-License-Identifier: Apache-2.0
#include "tests/simulator/layered_plan.h"

#include <string>
#include <vector>

#include "tests/support/plan_builder.h"

namespace shardplan::test {
namespace {

constexpr StreamId kCompute = 0;

class LayeredBuilder {
 public:
  explicit LayeredBuilder(const LayeredOptions& options)
      : options_(options), b_(options.all_reduce_ns > 0 ? 4 : 2, options.all_reduce_ns > 0 ? 2 : 1) {
    gather_ = b_.Stream("all_gather");
    scatter_ = b_.Stream("reduce_scatter");
    reduce_ = b_.Stream("all_reduce");
    scatter_communicator_ = options.one_communicator ? 0 : b_.Communicator("shard_reduce", 2);
    for (int i = 0; i < options.layers; ++i) AddLayer("layers." + std::to_string(i));
  }

  Plan Build() {
    b_.Step("steady").At(TriggerKind::kStepBegin);
    for (int i = 0; i < options_.layers; ++i) Forward(i);
    for (int i = options_.layers - 1; i >= 0; --i) Backward(i);
    b_.At(TriggerKind::kBackwardEnd).Wait(kCompute, layers_[0].reduced);
    b_.At(TriggerKind::kStepEnd);
    b_.plan().cluster =
        ConstantCluster(options_.all_reduce_ns > 0 ? 4 : 2, options_.collective_ns, options_.all_reduce_ns);
    return b_.plan();
  }

 private:
  struct Layer {
    UnitId unit;
    BufferId shard, gathered, grad, grad_shard;
    EventId arrived, computed, made, scattered, reduced;
    SegmentId forward, backward;
  };

  void AddLayer(const std::string& name) {
    Layer layer;
    layer.unit = b_.Unit(name);
    layer.shard = b_.Buffer(BufferRole::kParamSharded, layer.unit);
    layer.gathered = b_.Buffer(BufferRole::kAllGatherOutput, layer.unit);
    layer.grad = b_.Buffer(BufferRole::kGradUnsharded, layer.unit);
    layer.grad_shard = b_.Buffer(BufferRole::kGradSharded, layer.unit);
    layer.arrived = b_.Event(name + " arrived");
    layer.computed = b_.Event(name + " computed");
    layer.made = b_.Event(name + " made");
    layer.scattered = b_.Event(name + " scattered");
    layer.reduced = b_.Event(name + " reduced");
    layer.forward = b_.Forward("forward " + name, {layer.unit});
    layer.backward = b_.Backward("backward " + name, {layer.unit}, {{layer.unit, 0}});
    b_.plan().segments[static_cast<std::size_t>(layer.forward)].entries = {
        FixedOperator(options_.forward_ns)};
    b_.plan().segments[static_cast<std::size_t>(layer.backward)].entries = {
        FixedOperator(options_.backward_ns)};
    layers_.push_back(layer);
  }

  void Gather(const Layer& layer) {
    b_.Allocate(layer.gathered, gather_).AllGather(layer.shard, layer.gathered, gather_);
    b_.Record(layer.arrived, gather_);
  }

  void Forward(int i) {
    const Layer& layer = layers_[static_cast<std::size_t>(i)];
    b_.At(TriggerKind::kPreForward, layer.unit);
    if (options_.all_gather_limit > 0 && i >= options_.all_gather_limit) {
      b_.HostWait(layers_[static_cast<std::size_t>(i - options_.all_gather_limit)].computed);
    }
    Gather(layer);
    b_.Wait(kCompute, layer.arrived).Compute(layer.forward).Record(layer.computed, kCompute);
    b_.At(TriggerKind::kPostForward, layer.unit);
    if (options_.reshard_after_forward) b_.Free(layer.gathered);
  }

  void Backward(int i) {
    const Layer& layer = layers_[static_cast<std::size_t>(i)];
    const bool gathers = options_.reshard_after_forward;
    const bool first = i == options_.layers - 1;
    b_.At(TriggerKind::kPreBackward, layer.unit);
    if (gathers && (first || !options_.backward_prefetch)) Gather(layer);
    if (gathers) b_.Wait(kCompute, layer.arrived);
    if (gathers && options_.backward_prefetch && i > 0) Gather(layers_[static_cast<std::size_t>(i - 1)]);
    b_.Compute(layer.backward);
    b_.At(TriggerKind::kPostBackward, layer.unit).Free(layer.gathered);
    // One reduce_scatter state is outstanding: the compute stream waits for the one before.
    if (!first) b_.Wait(kCompute, layers_[static_cast<std::size_t>(i + 1)].scattered);
    b_.Record(layer.made, kCompute).Wait(scatter_, layer.made).Allocate(layer.grad_shard, scatter_);
    b_.Do({.kind = InstructionKind::kReduceScatter,
           .stream = scatter_,
           .unit = layer.unit,
           .src = layer.grad,
           .dst = layer.grad_shard,
           .communicator = scatter_communicator_});
    b_.Record(layer.scattered, scatter_);
    if (options_.all_reduce_ns > 0) {
      b_.Wait(reduce_, layer.scattered).AllReduce(layer.grad_shard, reduce_).Record(layer.reduced, reduce_);
    } else {
      b_.Record(layer.reduced, scatter_);
    }
    b_.Free(layer.grad);
  }

  LayeredOptions options_;
  PlanBuilder b_;
  StreamId gather_, scatter_, reduce_;
  CommunicatorId scatter_communicator_;
  std::vector<Layer> layers_;
};

}  // namespace

OperatorEvent FixedOperator(std::int64_t duration_ns) {
  OperatorEvent event;
  event.name = "aten.mm";
  event.duration_ns = Nanoseconds{duration_ns};
  return event;
}

Cluster ConstantCluster(std::int64_t ranks, std::int64_t collective_ns, std::int64_t all_reduce_ns) {
  Cluster cluster;
  cluster.name = "constant";
  cluster.ranks = ranks;
  cluster.ranks_per_node = 8;
  cluster.links = {{"nvlink", {}, 0}};
  for (const auto kind :
       {CollectiveKind::kAllGather, CollectiveKind::kReduceScatter, CollectiveKind::kAllReduce}) {
    const std::int64_t duration_ns = kind == CollectiveKind::kAllReduce ? all_reduce_ns : collective_ns;
    cluster.collectives.push_back({.kind = kind,
                                   .ranks = 2,
                                   .link = "nvlink",
                                   .points = {{Bytes{1}, Nanoseconds{duration_ns}}},
                                   .source = "by hand"});
  }
  return cluster;
}

Plan LayeredPlan(const LayeredOptions& options) { return LayeredBuilder(options).Build(); }

}  // namespace shardplan::test
