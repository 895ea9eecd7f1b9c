// SPDX-License-Identifier: Apache-2.0
#include "tests/planner/synthetic.h"

#include <map>
#include <set>

namespace shardplan::testing {
namespace {

constexpr std::int64_t kActivationBytes = 4096;

class Builder {
 public:
  explicit Builder(std::int64_t flops) : flops_(flops) {
    trace_.forwards.push_back({.name = "f0"});
    trace_.backwards.push_back({.name = "b0", .forwards = {0}});
    trace_.model = "synthetic";
    trace_.tokens_per_batch = 8;
  }

  Trace Build(const TreeModule& root) {
    Declare(root, "");
    trace_.inputs.push_back({.name = "x", .shape = {8}, .storage = next_storage_++});
    Forward(root, "", NewTensor(false, trace_.inputs[0].storage));
    for (auto undo = undo_.rbegin(); undo != undo_.rend(); ++undo) Backward(*undo);
    return std::move(trace_);
  }

 private:
  struct Step {  // of the forward, to be undone
    enum Kind { kEnter, kExit, kLeaf } kind = kEnter;
    ModuleId module = -1;
    bool inputs_require_grad = false, outputs_require_grad = false;
    StorageId saved = -1;
  };

  static std::string Join(const std::string& prefix, const std::string& name) {
    return prefix.empty() ? name : prefix + "." + name;
  }

  void Declare(const TreeModule& module, const std::string& fqn) {
    Module declared{.fqn = fqn, .class_name = module.class_name};
    for (const TreeModule& child : module.children) declared.children.push_back(child.name);
    for (std::size_t p = 0; p < module.parameters.size(); ++p) {
      const std::string name = "weight" + std::to_string(p);
      declared.parameters.push_back({name, static_cast<ParameterId>(trace_.parameters.size())});
      trace_.parameters.push_back(
          {.fqn = Join(fqn, name), .shape = module.parameters[p], .requires_grad = module.trainable});
    }
    id_[fqn] = static_cast<ModuleId>(trace_.modules.size());
    trace_.modules.push_back(std::move(declared));
    for (const TreeModule& child : module.children) Declare(child, Join(fqn, child.name));
  }

  TensorId NewTensor(bool requires_grad, StorageId storage) {
    std::vector<Tensor>& tensors = trace_.forwards[0].tensors;
    tensors.push_back({.shape = {8}, .requires_grad = requires_grad, .storage = storage});
    return static_cast<TensorId>(tensors.size()) - 1;
  }

  TensorId Forward(const TreeModule& module, const std::string& fqn, TensorId input) {
    Pass& pass = trace_.forwards[0];
    const ModuleId id = id_[fqn];
    const bool input_grad = pass.tensors[input].requires_grad;
    pass.events.push_back(EnterEvent{id, {input}});
    undo_.push_back({.kind = Step::kEnter, .module = id, .inputs_require_grad = input_grad});
    TensorId output = input;
    if (module.children.empty() || !module.parameters.empty()) output = Leaf(id, module.trainable, output);
    for (const TreeModule& child : module.children) output = Forward(child, Join(fqn, child.name), output);
    pass.events.push_back(ExitEvent{id, {output}});
    undo_.push_back(
        {.kind = Step::kExit, .module = id, .outputs_require_grad = pass.tensors[output].requires_grad});
    return output;
  }

  TensorId Leaf(ModuleId id, bool trainable, TensorId input) {
    Pass& pass = trace_.forwards[0];
    const bool grad =
        pass.tensors[input].requires_grad || (trainable && !trace_.modules[id].parameters.empty());
    const StorageId storage = next_storage_++;
    pass.events.push_back(AllocateEvent{storage, Bytes{kActivationBytes}, StorageRole::kSaved, id, -1});
    OperatorEvent op{.name = "aten.mm", .module = id, .flops = flops_};
    op.reads = {pass.tensors[input].storage};
    op.writes = {storage};
    for (const NamedParameter& p : trace_.modules[id].parameters) op.parameters.push_back(p.parameter);
    pass.events.push_back(op);
    undo_.push_back({.kind = Step::kLeaf, .module = id, .outputs_require_grad = grad, .saved = storage});
    return NewTensor(grad, storage);
  }

  void Backward(const Step& step) {
    std::vector<TraceEvent>& events = trace_.backwards[0].events;
    if (step.kind == Step::kExit) {
      if (step.outputs_require_grad) events.push_back(OutputGradReadyEvent{step.module, 0, 0, 0});
    } else if (step.kind == Step::kEnter) {
      if (step.inputs_require_grad) events.push_back(InputsGradDoneEvent{step.module, 0, 0});
    } else {
      if (step.outputs_require_grad) LeafBackward(step);
      events.push_back(FreeEvent{step.saved});
    }
  }

  void LeafBackward(const Step& step) {
    std::vector<TraceEvent>& events = trace_.backwards[0].events;
    OperatorEvent op{.name = "aten.mm", .module = step.module, .flops = 2 * flops_, .reads = {step.saved}};
    std::vector<std::pair<ParameterId, StorageId>> grads;
    for (const NamedParameter& p : trace_.modules[step.module].parameters) {
      op.parameters.push_back(p.parameter);
      const Parameter& parameter = trace_.parameters[p.parameter];
      if (!parameter.requires_grad) continue;
      std::int64_t bytes = 4;
      for (const std::int64_t size : parameter.shape) bytes *= size;
      const StorageId storage = next_storage_++;
      events.push_back(
          AllocateEvent{storage, Bytes{bytes}, StorageRole::kParameterGrad, step.module, p.parameter});
      op.writes.push_back(storage);
      grads.emplace_back(p.parameter, storage);
    }
    events.push_back(op);
    for (const auto& [parameter, storage] : grads) events.push_back(ParameterGradEvent{parameter, storage});
  }

  std::int64_t flops_;
  Trace trace_;
  std::map<std::string, ModuleId> id_;
  StorageId next_storage_ = 0;
  std::vector<Step> undo_;
};

}  // namespace

Trace TraceOf(const TreeModule& root, std::int64_t flops) { return Builder(flops).Build(root); }

Trace LayeredTrace(int layers, std::int64_t rows, std::int64_t columns, std::int64_t root_rows) {
  TreeModule list{.name = "layers", .class_name = "ModuleList"};
  for (int i = 0; i < layers; ++i) {
    list.children.push_back(
        {.name = std::to_string(i), .class_name = "Block", .parameters = {{rows, columns}}});
  }
  TreeModule root{.class_name = "Model"};
  if (root_rows > 0) root.children.push_back({.name = "embed", .parameters = {{root_rows, columns}}});
  root.children.push_back(std::move(list));
  return TraceOf(root);
}

Cluster ClusterOf(std::int64_t ranks) { return {.name = "test", .ranks = ranks, .ranks_per_node = ranks}; }

Cluster BalancedCluster(std::int64_t ranks, std::int64_t ranks_per_node, std::int64_t link_bytes_per_second) {
  Cluster cluster = ClusterOf(ranks);
  cluster.ranks_per_node = ranks_per_node;
  cluster.device.memory_bytes = {std::int64_t{1} << 34};
  cluster.device.memory_bytes_per_second = 100'000'000'000;
  cluster.device.vector_flops_per_second = 100'000'000'000;
  cluster.device.kernel_overhead_ns = {500};
  cluster.compute_rate_while_communicating_ppm = 900'000;
  cluster.communication_rate_while_computing_ppm = 950'000;
  cluster.links = {{"inner", {500}, 10 * link_bytes_per_second}, {"outer", {500}, link_bytes_per_second}};
  return cluster;
}

TracedOptimizerStep MuonStepOf(const std::vector<std::int64_t>& shape, std::int64_t ranks,
                               std::int64_t replicas, StorageId& next) {
  TracedOptimizerStep step{.ranks = ranks, .replicas = replicas, .shape = shape};
  const StorageId update = next++, result = next++;
  const Bytes bytes{shape[0] * shape[1] * 2};
  step.update = {AllocateEvent{update, bytes, StorageRole::kOptimizerTemp}};
  OperatorEvent gather{.name = "c10d.all_gather", .dtype = DType::kBFloat16, .reads = {update}};
  gather.collective =
      ModelCollective{.kind = CollectiveKind::kAllGather, .communicator = kOfShards, .size_bytes = bytes};
  if (ranks > 1) step.orthogonalize.emplace_back(gather);
  step.orthogonalize.emplace_back(AllocateEvent{result, bytes, StorageRole::kOptimizerTemp});
  step.orthogonalize.emplace_back(OperatorEvent{.name = "aten.mm",
                                                .dtype = DType::kBFloat16,
                                                .flops = kFlopsOfIterations * shape[0],
                                                .bytes_read = bytes,
                                                .bytes_written = bytes,
                                                .reads = {update},
                                                .writes = {result}});
  step.apply = {FreeEvent{update}, FreeEvent{result}};
  return step;
}

void AddMuon(Trace& trace, const std::vector<std::pair<std::int64_t, std::int64_t>>& ranks) {
  StorageId next = 1 << 20;
  std::set<std::vector<std::int64_t>> known;
  for (Parameter& parameter : trace.parameters) {
    if (parameter.shape.size() < 2) continue;
    parameter.muon = parameter.requires_grad && !parameter.fqn.starts_with("embed") &&
                     !parameter.fqn.starts_with("lm_head");
    const std::vector<std::int64_t> shape(parameter.shape.end() - 2, parameter.shape.end());
    if (!known.insert(shape).second) continue;
    trace.optimizer_steps.push_back(MuonStepOf(shape, 1, 1, next));
    for (const auto& [shards, replicas] : ranks) {
      if (shape[0] >= shards) trace.optimizer_steps.push_back(MuonStepOf(shape, shards, replicas, next));
    }
  }
}

}  // namespace shardplan::testing
