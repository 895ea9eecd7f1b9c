// SPDX-License-Identifier: Apache-2.0
#include "training/units/post_backward.h"

#include <optional>
#include <utility>

#include "training/autograd_node.h"
#include "training/runtime/runtime.h"

namespace shardplan::executor {
namespace {

using torch::autograd::variable_list;

class PostBackwardNode : public torch::autograd::Node {
 public:
  PostBackwardNode(std::shared_ptr<Runtime> runtime, UnitId unit)
      : runtime_(std::move(runtime)), unit_(unit) {}

  variable_list apply(variable_list&& grads) override {
    // Zeros for an output without gradient, as PyTorch's own custom functions have it by default.
    for (std::size_t i = 0; i < grads.size(); ++i) {
      if (!grads[i].defined()) grads[i] = input_metadata(i).zeros_like();
    }
    runtime_->PostBackward(unit_);
    return std::move(grads);
  }

  std::string name() const override { return "ShardplanPostBackward"; }

 private:
  std::shared_ptr<Runtime> runtime_;
  UnitId unit_;
};

}  // namespace

void InsertPostBackward(const std::shared_ptr<Runtime>& runtime, UnitId unit,
                        std::vector<at::Tensor>& tensors, const std::vector<std::size_t>& indices) {
  variable_list inputs;
  std::vector<std::optional<at::Tensor>> outputs;
  inputs.reserve(indices.size());
  outputs.reserve(indices.size());
  for (const std::size_t index : indices) {
    inputs.push_back(tensors[index]);
    outputs.emplace_back(tensors[index]);
  }
  const auto node = MakeNode<PostBackwardNode>(runtime, unit);
  node->set_next_edges(torch::autograd::collect_next_edges(inputs));
  const auto wrapped = WrapOutputs(inputs, outputs, node);
  for (std::size_t i = 0; i < indices.size(); ++i) tensors[indices[i]] = *wrapped[i];
}

}  // namespace shardplan::executor
