// SPDX-License-Identifier: Apache-2.0
// The host time that a Training adds to a deep model of tiny units, on one rank, for
// bench_training_host_time.py: many_units.py in LibTorch, plain and by a plan, taking turns. Prints four
// medians in microseconds per unit: forward and backward of the plain model, and of the other.
//
//   training_host_time PLAN UNITS WIDTH BATCH STEPS
#include <ATen/Parallel.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/randn.h>
#include <fmt/format.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include "shardplan/executor/training.h"
#include "shardplan/schemas/io.h"

namespace {

namespace nn = torch::nn;
using shardplan::executor::ModuleCalls;
using shardplan::executor::Training;
using Clock = std::chrono::steady_clock;

// Computes in one operator, as nn.Linear does in Python.
at::Tensor Apply(const nn::Linear& linear, const at::Tensor& x) {
  return at::linear(x, linear->weight, linear->bias);
}

struct BlockImpl : nn::Module {
  explicit BlockImpl(std::int64_t width) {
    norm = register_module("norm", nn::LayerNorm(nn::LayerNormOptions({width})));
    up = register_module("up", nn::Linear(width, width));
    down = register_module("down", nn::Linear(width, width));
  }
  at::Tensor forward(const at::Tensor& x) { return x + Apply(down, at::relu(Apply(up, norm(x)))); }
  nn::LayerNorm norm{nullptr};
  nn::Linear up{nullptr}, down{nullptr};
};
TORCH_MODULE(Block);

struct ManyUnitsImpl : nn::Module {
  ManyUnitsImpl(std::int64_t units, std::int64_t width) {
    embed = register_module("embed", nn::Linear(width, width));
    blocks = register_module("blocks", nn::ModuleList());
    for (std::int64_t i = 0; i < units; ++i) blocks->push_back(Block(width));
    head = register_module("head", nn::Linear(width, width));
    for (const auto& block : *blocks) in_order.push_back(block->as<Block>());
  }
  at::Tensor forward(const at::Tensor& input) {
    at::Tensor x = Apply(embed, input);
    for (BlockImpl* block : in_order) x = calls(*block, x);
    return Apply(head, x);
  }
  ModuleCalls calls;
  nn::Linear embed{nullptr}, head{nullptr};
  nn::ModuleList blocks{nullptr};
  std::vector<BlockImpl*> in_order;
};
TORCH_MODULE(ManyUnits);

struct Times {
  std::vector<double> forward, backward;
};

// One step; gradients are dropped after it, untimed.
void Step(ManyUnits& model, const at::Tensor& x, Times& times) {
  const auto begin = Clock::now();
  const at::Tensor loss = model->calls(model, x).sum();
  const auto middle = Clock::now();
  loss.backward();
  const auto end = Clock::now();
  for (at::Tensor& parameter : model->parameters()) parameter.mutable_grad().reset();
  times.forward.push_back(std::chrono::duration<double, std::micro>(middle - begin).count());
  times.backward.push_back(std::chrono::duration<double, std::micro>(end - middle).count());
}

double Median(std::vector<double> values) {
  const auto middle = values.begin() + std::ssize(values) / 2;
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 6) {
    std::fputs("usage: training_host_time PLAN UNITS WIDTH BATCH STEPS\n", stderr);
    return 2;
  }
  at::set_num_threads(1);
  const std::int64_t units = std::stoll(argv[2]), width = std::stoll(argv[3]), batch = std::stoll(argv[4]);
  shardplan::Result<shardplan::Plan> plan = shardplan::ReadPlan(argv[1]);
  if (!plan) {
    std::fprintf(stderr, "%s\n", ToString(plan.error()).c_str());
    return ExitCode(plan.error().code);
  }
  ManyUnits plain(units, width), planned(units, width);
  auto training = Training::Create(planned.ptr(), planned->calls, std::move(*plan), {});
  if (!training) {
    std::fprintf(stderr, "%s\n", ToString(training.error()).c_str());
    return ExitCode(training.error().code);
  }
  const at::Tensor x = at::randn({batch, width});
  constexpr int kWarmup = 50;  // the memory of a process that is new
  std::array<Times, 2> times;
  for (std::int64_t step = 0; step < std::stoll(argv[5]) + kWarmup; ++step) {
    if (step == kWarmup) times = {};
    Step(plain, x, times[0]);
    Step(planned, x, times[1]);
  }
  for (const Times& t : times) {
    fmt::print("{:.4f} {:.4f}\n", Median(t.forward) / static_cast<double>(units),
               Median(t.backward) / static_cast<double>(units));
  }
  return 0;
}
