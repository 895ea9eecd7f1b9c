// SPDX-License-Identifier: Apache-2.0
#include "training/units/inputs_done.h"

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

#include <memory>
#include <optional>
#include <utility>

#include "training/autograd_node.h"

namespace shardplan::executor {
namespace {

using torch::autograd::Node;

bool WillRun(Node* node) {
  const auto* executed = torch::autograd::get_current_graph_task_exec_info();
  if (executed != nullptr && !executed->empty()) {
    const auto found = executed->find(node);
    return found != executed->end() && found->second.should_execute();
  }
  const auto* nodes = torch::autograd::get_current_graph_task_nodes_in_graph();
  return nodes != nullptr && nodes->contains(node);
}

// The destination of a gradient. Weak: the hooks, which own the countdown, are owned by it.
struct Target {
  std::optional<WeakNodePtr> node;
  c10::weak_intrusive_ptr<c10::TensorImpl> leaf;  // its node may be made anew

  explicit Target(const at::Tensor& tensor) : leaf(tensor.getIntrusivePtr()) {
    if (tensor.grad_fn()) {
      node.emplace(tensor.grad_fn());
      leaf.reset();
    }
  }

  bool WillRun() const {
    if (const auto tensor = leaf.lock()) {
      return executor::WillRun(torch::autograd::impl::gradient_edge(at::Tensor(tensor)).function.get());
    }
    const auto function = node->lock();
    return function && executor::WillRun(function.get());
  }
};

struct Countdown {
  std::vector<Target> targets;
  std::function<void()> done;
  int backward = -1;  // the one being counted
  std::size_t left = 0;

  void Arrived() {
    const int current = torch::autograd::get_current_graph_task_id();
    if (current != backward) {
      backward = current;
      left = 0;
      for (const Target& target : targets) left += target.WillRun() ? 1 : 0;
    }
    if (--left > 0) return;
    backward = -1;
    done();
  }
};

}  // namespace

void WhenGradientsDone(const std::vector<at::Tensor>& tensors, std::function<void()> done) {
  auto countdown = std::make_shared<Countdown>();
  countdown->done = std::move(done);
  for (const at::Tensor& tensor : tensors) countdown->targets.emplace_back(tensor);
  for (const at::Tensor& tensor : tensors) {
    tensor.register_hook([countdown](const at::TensorBase&) { countdown->Arrived(); });
  }
}

}  // namespace shardplan::executor
