// SPDX-License-Identifier: Apache-2.0
#include "training/parameters/flat_gradient.h"

#include <torch/csrc/autograd/functions/utils.h>

#include <algorithm>
#include <limits>
#include <utility>

#include "shardplan/executor/training_error.h"

namespace shardplan::executor {

using torch::autograd::variable_list;

// The nodes refer to their owner weakly: a module holds views, these the nodes, and the owner (through the
// runtime) the module's dictionary.
class FlatGradient::Sink : public torch::autograd::Node {
 public:
  explicit Sink(std::weak_ptr<FlatGradient> owner)
      : Node(std::numeric_limits<std::uint64_t>::max()), owner_(std::move(owner)) {}

  variable_list apply(variable_list&&) override {
    if (const auto owner = owner_.lock()) owner->done_();
    return {};
  }
  std::string name() const override { return "ShardplanFlatGradient"; }

 private:
  std::weak_ptr<FlatGradient> owner_;
};

class FlatGradient::Split : public torch::autograd::Node {
 public:
  Split(std::weak_ptr<FlatGradient> owner, std::vector<std::size_t> parameters)
      : owner_(std::move(owner)), parameters_(std::move(parameters)) {}

  // The gradients go to the owner; the edge to the sink only counts.
  variable_list apply(variable_list&& gradients) override {
    const auto owner = owner_.lock();
    if (!owner) throw TrainingError(ErrorCode::kUsage, "backward of a model that is gone");
    owner->Add(parameters_, std::move(gradients));
    return {at::Tensor()};
  }
  std::string name() const override { return "ShardplanFlatViews"; }

 private:
  std::weak_ptr<FlatGradient> owner_;
  std::vector<std::size_t> parameters_;  // of each input
};

FlatGradient::FlatGradient(std::vector<bool> tracked, std::function<void()> done,
                           std::function<bool(const Gradients&)> add_alone)
    : tracked_(std::move(tracked)),
      gradients_(tracked_.size()),
      done_(std::move(done)),
      add_alone_(std::move(add_alone)) {}
FlatGradient::~FlatGradient() = default;

void FlatGradient::Track(std::vector<at::Tensor>& views) {
  std::vector<std::size_t> parameters;
  for (std::size_t i = 0; i < views.size(); ++i) {
    if (tracked_[i]) parameters.push_back(i);
  }
  if (!sink_) {
    sink_ = MakeNode<Sink>(weak_from_this());
    // Autograd runs a node in the thread of its inputs' device: the splits' one, or two threads would issue
    // at once.
    if (parameters.empty()) {
      sink_->add_input_metadata(torch::autograd::Node::undefined_input());
    } else {
      sink_->add_input_metadata(views[parameters.front()]);
    }
  }
  const auto split = MakeNode<Split>(weak_from_this(), parameters);
  split->add_next_edge({sink_, 0});
  for (const std::size_t i : parameters) torch::autograd::create_gradient_edge(views[i], split);
}

// One use's; see [Note: gradients of several uses].
void FlatGradient::Add(const std::vector<std::size_t>& parameters, variable_list&& gradients) {
  const bool again = std::ranges::any_of(gradients_, [](const at::Tensor& sum) { return sum.defined(); });
  if (again && add_alone_ && add_alone_(gradients_)) Clear();
  for (std::size_t i = 0; i < gradients.size(); ++i) {
    at::Tensor& sum = gradients_[parameters[i]];
    if (!gradients[i].defined()) continue;
    sum = sum.defined() ? sum.add(gradients[i]) : std::move(gradients[i]);
  }
}

void FlatGradient::Clear() {
  for (at::Tensor& gradient : gradients_) gradient = at::Tensor();
}

}  // namespace shardplan::executor
