// SPDX-License-Identifier: Apache-2.0
// ModuleCalls: which module is said to be entered, with which tensors, and what the caller gets.
#include "shardplan/executor/module_calls.h"

#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <torch/nn/modules/linear.h>

#include <stdexcept>

namespace shardplan::executor {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
namespace nn = torch::nn;

struct BlockImpl : nn::Module {
  BlockImpl() { linear = register_module("linear", nn::Linear(2, 2)); }
  // More kinds of arguments than tensors, and more results than one.
  std::tuple<at::Tensor, std::vector<at::Tensor>> forward(const at::Tensor& x, int times,
                                                          std::optional<at::Tensor> bias) {
    if (times < 0) throw std::runtime_error("negative");
    at::Tensor y = x * times;
    return {bias ? y + *bias : y, {x, at::Tensor(), y}};
  }
  nn::Linear linear{nullptr};
};
TORCH_MODULE(Block);

struct TwoNamesImpl : nn::Module {
  TwoNamesImpl() {
    first = register_module("first", Block());
    same = register_module("same", first);
  }
  at::Tensor forward(const at::Tensor& x, int times) {
    return std::get<0>(calls(first, x, times, std::optional<at::Tensor>()));
  }
  ModuleCalls calls;
  Block first{nullptr}, same{nullptr};
};
TORCH_MODULE(TwoNames);

struct Listener : ModuleListener {
  void Enter(std::int32_t module, std::span<at::Tensor* const> inputs) override {
    heard.push_back(fmt::format("enter {} {}", module, inputs.size()));
    if (add != 0 && !inputs.empty()) *inputs[0] = *inputs[0] + add;
  }
  void Leave(std::int32_t module, std::span<at::Tensor* const> outputs) override {
    heard.push_back(fmt::format("leave {} {}", module, outputs.size()));
    if (add != 0 && !outputs.empty()) *outputs[0] = *outputs[0] * 10;
  }
  void Abandon(std::int32_t module) noexcept override { heard.push_back(fmt::format("abandon {}", module)); }
  std::vector<std::string> heard;
  int add = 0;
};

TEST(ModuleCalls, NestAndCountTensors) {
  TwoNames model;
  Listener listener;
  model->calls.Attach(*model, listener);
  EXPECT_THAT(model->calls.names(), ElementsAre("", "first", "first.linear"));
  model->calls(model, at::ones({2}), 3);
  EXPECT_THAT(listener.heard, ElementsAre("enter 0 1", "enter 1 1", "leave 1 3", "leave 0 1"));
}

TEST(ModuleCalls, ReplacedTensorsAreWhatModuleAndCallerGet) {
  TwoNames model;
  const at::Tensor x = at::ones({2});
  const at::Tensor plain = model->calls(model, x, 3);
  EXPECT_EQ(plain[0].item<float>(), 3);  // nobody listens
  Listener listener;
  listener.add = 1;
  ModuleCalls copy = model->calls;
  copy.Attach(*model, listener);
  EXPECT_EQ(model->calls(model, x, 3)[0].item<float>(), (1 + 1 + 1) * 3 * 10 * 10);
  EXPECT_EQ(x[0].item<float>(), 1);
  copy.Detach();
  EXPECT_EQ(model->calls(model, x, 3)[0].item<float>(), 3);
}

TEST(ModuleCalls, ByNameAndOfAModuleWithTwoNames) {
  TwoNames model;
  Listener listener;
  model->calls.Attach(*model, listener);
  const auto twice = [](const at::Tensor& x) { return x * 2; };
  EXPECT_EQ(model->calls.Call("same.linear", twice, at::ones({1})).item<float>(), 2);
  model->calls.Call("", [] {});
  EXPECT_THAT(listener.heard, ElementsAre("enter 2 1", "leave 2 1", "enter 0 0", "leave 0 0"));
}

TEST(ModuleCalls, AnExceptionLeavesEveryModule) {
  TwoNames model;
  Listener listener;
  model->calls.Attach(*model, listener);
  EXPECT_THROW(model->calls(model, at::ones({2}), -1), std::runtime_error);
  EXPECT_THAT(listener.heard, ElementsAre("enter 0 1", "enter 1 1", "abandon 1", "abandon 0"));
}

TEST(ModuleCalls, UnknownModulesAndSecondListenersAreErrors) {
  TwoNames model;
  Listener listener;
  model->calls.Attach(*model, listener);
  EXPECT_THROW(model->calls.Attach(*model, listener), std::logic_error);
  try {
    model->calls.Call("blocks.0", [] {});
    FAIL();
  } catch (const std::invalid_argument& error) {
    EXPECT_THAT(error.what(), HasSubstr("\"blocks.0\""));
  }
  nn::Linear other(2, 2);
  EXPECT_THROW(model->calls(other, at::zeros({2})), std::invalid_argument);
  EXPECT_THAT(listener.heard, ElementsAre());
}

}  // namespace
}  // namespace shardplan::executor
