// SPDX-License-Identifier: Apache-2.0
// A training loop's operations on all gradients: their norm, and a scale.
#include <ATen/core/grad_mode.h>
#include <ATen/ops/_amp_foreach_non_finite_check_and_unscale.h>
#include <ATen/ops/_foreach_mul.h>
#include <ATen/ops/clamp.h>
#include <ATen/ops/full.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/max.h>
#include <ATen/ops/pow.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>

#include <cmath>
#include <map>
#include <stdexcept>

#include "training/cpp/training_impl.h"

namespace shardplan::executor {
namespace {

struct Gradients {
  std::vector<at::Tensor> tensors;
  std::vector<CommunicatorId> sharded_over;  // of each
};

// Between steps every parameter is a shard, and so is its gradient. In the order of the model's parameters.
Gradients GradientsOf(const Plan& plan, const ModelTree& tree) {
  std::vector<CommunicatorId> communicators(tree.parameters.size(), -1);
  for (const Unit& unit : plan.units) {
    for (const UnitParameter& parameter : unit.parameters) {
      communicators[tree.by_name.at(parameter.fqn)] = unit.shard_communicator;
    }
  }
  Gradients gradients;
  for (std::size_t p = 0; p < tree.parameters.size(); ++p) {
    const at::Tensor& grad = tree.parameters[p].tensor.grad();
    if (!grad.defined()) continue;
    gradients.tensors.push_back(grad);
    gradients.sharded_over.push_back(communicators[p]);
  }
  return gradients;
}

}  // namespace

// The same as DTensor's _NormPartial: each gradient's norm over its ranks by the sum of powers, then the norm
// of these.
at::Tensor Training::ClipGradNorm(double max_norm, double norm_type) {
  const at::NoGradGuard no_grad;
  Gradients gradients = GradientsOf(plan(), impl_->tree());
  const bool infinite = std::isinf(norm_type);
  if (norm_type <= 0) throw std::invalid_argument("shardplan: norm_type is to be positive");
  if (gradients.tensors.empty()) return at::zeros({}, at::TensorOptions().device(device()));
  std::vector<at::Tensor> norms;
  for (const at::Tensor& gradient : gradients.tensors) {
    norms.push_back(at::linalg_vector_norm(gradient, norm_type));
  }
  std::map<CommunicatorId, std::vector<std::size_t>> of_group;
  for (std::size_t g = 0; g < norms.size(); ++g) of_group[gradients.sharded_over[g]].push_back(g);
  for (const auto& [communicator, members] : of_group) {
    if (communicator < 0) continue;
    std::vector<at::Tensor> mine;
    for (const std::size_t g : members) mine.push_back(infinite ? norms[g] : at::pow(norms[g], norm_type));
    const at::Tensor all = impl_->groups()
                               .Reduce(at::stack(mine), communicator,
                                       infinite ? HostGroups::Operation::kMax : HostGroups::Operation::kSum)
                               .to(norms[members.front()].device());
    const at::Tensor reduced = infinite ? all : at::pow(all, 1.0 / norm_type);
    for (std::size_t m = 0; m < members.size(); ++m) {
      norms[members[m]] = reduced[static_cast<std::int64_t>(m)];
    }
  }
  const at::Tensor total = at::linalg_vector_norm(at::stack(norms), norm_type);
  at::_foreach_mul_(gradients.tensors, at::clamp(max_norm / (total + 1e-6), {}, 1.0));
  return total;
}

GradScaler::GradScaler(Training& training, Options options)
    : training_(training), options_(options), scale_(options.initial_scale) {}

at::Tensor GradScaler::Scale(const at::Tensor& loss) const { return loss * scale_; }

void GradScaler::Unscale() {
  if (unscaled_) throw std::logic_error("shardplan: GradScaler::Unscale was called already in this step");
  const at::NoGradGuard no_grad;
  unscaled_ = true;
  const at::TensorOptions scalar = at::TensorOptions().device(training_.device()).dtype(at::kFloat);
  at::Tensor found = at::zeros({1}, scalar);
  const at::Tensor inverse = at::full({1}, 1.0 / scale_, scalar);
  std::map<at::ScalarType, std::vector<at::Tensor>> of_dtype;
  for (const at::Tensor& parameter : training_.parameters()) {
    if (parameter.grad().defined()) of_dtype[parameter.grad().scalar_type()].push_back(parameter.grad());
  }
  for (auto& [dtype, gradients] : of_dtype) {
    at::_amp_foreach_non_finite_check_and_unscale_(gradients, found, inverse);
  }
  finite_ = !training_.AnyRank(found.item<float>() != 0);
}

bool GradScaler::Step(torch::optim::Optimizer& optimizer) {
  if (!unscaled_) Unscale();
  unscaled_ = false;
  if (finite_) {
    training_.Step(optimizer);
    if (++good_steps_ == options_.growth_interval) {
      good_steps_ = 0;
      scale_ *= options_.growth_factor;
    }
  } else {
    training_.Step([] {});
    good_steps_ = 0;
    scale_ *= options_.backoff_factor;
  }
  return finite_;
}

}  // namespace shardplan::executor
