// SPDX-License-Identifier: Apache-2.0
#include "trace_models.h"

#include <ATen/ops/conv2d.h>
#include <ATen/ops/gather.h>
#include <ATen/ops/index.h>
#include <ATen/ops/max_pool2d.h>
#include <ATen/ops/relu.h>
#include <ATen/ops/topk.h>
#include <ATen/ops/zeros.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/dropout.h>

#include <map>
#include <utility>

#include "gpt_model.h"

namespace shardplan::executor::testing {
namespace {

namespace nn = torch::nn;

// Two places of one module, which runs twice.
struct ReusedImpl : nn::Module {
  ReusedImpl() {
    linear = register_module("linear", nn::Linear(8, 8));
    again = register_module("again", linear);
    last = register_module("last", nn::Linear(8, 8));
  }
  at::Tensor forward(at::Tensor x) {
    x = calls(linear, x);
    x = at::relu(x);
    x = calls(again, x);
    return calls(last, x);
  }
  ModuleCalls calls;
  nn::Linear linear{nullptr}, again{nullptr}, last{nullptr};
};

struct TiedHeadImpl : nn::Module {
  explicit TiedHeadImpl(const at::Tensor& table) { weight = register_parameter("weight", table); }
  at::Tensor forward(const at::Tensor& x) { return x.matmul(weight.t()); }
  at::Tensor weight;
};
TORCH_MODULE(TiedHead);

struct TiedImpl : nn::Module {
  TiedImpl() {
    wte = register_module("wte", nn::Embedding(16, 8));
    head = register_module("head", TiedHead(wte->weight));
  }
  at::Tensor forward(at::Tensor tokens) {
    at::Tensor x = calls(wte, tokens);
    return calls(head, x);
  }
  ModuleCalls calls;
  nn::Embedding wte{nullptr};
  TiedHead head{nullptr};
};

// Changes what it is given.
struct ShiftImpl : nn::Module {
  ShiftImpl() { linear = register_module("linear", nn::Linear(8, 8)); }
  at::Tensor forward(at::Tensor x) {
    x.add_(1);
    return linear->forward(x);
  }
  nn::Linear linear{nullptr};
};
TORCH_MODULE(Shift);

struct InPlaceImpl : nn::Module {
  InPlaceImpl() {
    first = register_module("first", nn::Linear(8, 8));
    shift = register_module("shift", Shift());
    last = register_module("last", nn::Linear(8, 8));
  }
  at::Tensor forward(at::Tensor x) {
    x = calls(first, x);
    x.mul_(0.5);
    x.view({-1, 2, 4}).add_(1);
    x = calls(shift, x);
    x = x.clone();
    x.select(1, 0).zero_();
    x = calls(last, x);
    return x.relu_();
  }
  ModuleCalls calls;
  nn::Linear first{nullptr}, last{nullptr};
  Shift shift{nullptr};
};

// Uses its input twice; so does its caller.
struct TwiceImpl : nn::Module {
  explicit TwiceImpl(ModuleCalls module_calls) : calls(std::move(module_calls)) {
    left = register_module("left", nn::Linear(8, 8));
    right = register_module("right", nn::Linear(8, 8));
  }
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor y = calls(left, x);
    return y * calls(right, x);
  }
  ModuleCalls calls;
  nn::Linear left{nullptr}, right{nullptr};
};
TORCH_MODULE(Twice);

struct TwiceInsideImpl : nn::Module {
  TwiceInsideImpl() {
    first = register_module("first", nn::Linear(8, 8));
    twice = register_module("twice", Twice(calls));
  }
  at::Tensor forward(at::Tensor x) {
    x = calls(first, x);
    const at::Tensor y = calls(twice, x);
    return x + y;
  }
  ModuleCalls calls;
  nn::Linear first{nullptr};
  Twice twice{nullptr};
};

// A branch that gets no gradient, and parameters that nothing uses.
struct DetachedImpl : nn::Module {
  DetachedImpl() {
    first = register_module("first", nn::Linear(8, 8));
    side = register_module("side", nn::Linear(8, 8));
    last = register_module("last", nn::Linear(8, 8));
    unused = register_module("unused", nn::Linear(8, 8));
  }
  at::Tensor forward(at::Tensor x) {
    x = calls(first, x);
    const at::Tensor weights = calls(side, x).detach();
    x = calls(last, x);
    return x * weights;
  }
  ModuleCalls calls;
  nn::Linear first{nullptr}, side{nullptr}, last{nullptr}, unused{nullptr};
};

struct FrozenImpl : nn::Module {
  FrozenImpl() {
    first = register_module("first", nn::Linear(8, 8));
    middle = register_module("middle", nn::Linear(8, 8));
    last = register_module("last", nn::Linear(8, 8));
    for (const at::Tensor& parameter : first->parameters()) parameter.set_requires_grad(false);
    last->weight.set_requires_grad(false);
  }
  at::Tensor forward(at::Tensor x) {
    x = calls(first, x);
    x = calls(middle, x);
    return calls(last, x);
  }
  ModuleCalls calls;
  nn::Linear first{nullptr}, middle{nullptr}, last{nullptr};
};

// Formulas that fill zeros of their own.
struct IndexedImpl : nn::Module {
  IndexedImpl() {
    first = register_module("first", nn::Linear(8, 8));
    scale = register_buffer("scale", at::zeros({8}));
  }
  at::Tensor forward(at::Tensor x, at::Tensor index) {
    x = calls(first, x);
    x = x * scale;
    const at::Tensor rows = at::index(x, {index});
    const at::Tensor picked = at::gather(rows, 1, index.view({-1, 1}));
    const at::Tensor largest = std::get<0>(at::topk(rows, 2, 1));
    return picked * largest;
  }
  ModuleCalls calls;
  nn::Linear first{nullptr};
  at::Tensor scale;
};

struct ConvolutionalImpl : nn::Module {
  ConvolutionalImpl() {
    conv = register_module("conv", nn::Conv2d(nn::Conv2dOptions(3, 8, 3).padding(1)));
    up = register_module("up", nn::ConvTranspose2d(nn::ConvTranspose2dOptions(8, 4, 2).stride(2)));
    last = register_module("last", nn::Linear(4 * 8 * 8, 5));
  }
  at::Tensor forward(at::Tensor x) {
    x = calls(conv, x);
    x = at::relu(x);
    x = at::max_pool2d(x, {2, 2});
    x = calls(up, x);
    return calls(last, x.flatten(1));
  }
  ModuleCalls calls;
  nn::Conv2d conv{nullptr};
  nn::ConvTranspose2d up{nullptr};
  nn::Linear last{nullptr};
};

struct FirstOfTwoImpl : nn::Module {
  FirstOfTwoImpl() { linear = register_module("linear", nn::Linear(8, 8)); }
  at::Tensor forward(const at::Tensor& x, const at::Tensor& /*not used*/) { return linear->forward(x); }
  nn::Linear linear{nullptr};
};
TORCH_MODULE(FirstOfTwo);

// An input of a module needs a gradient, and gets none.
struct UnusedInputImpl : nn::Module {
  UnusedInputImpl() {
    first = register_module("first", nn::Linear(8, 8));
    second = register_module("second", nn::Linear(8, 8));
    pick = register_module("pick", FirstOfTwo());
  }
  at::Tensor forward(at::Tensor x) {
    const at::Tensor a = calls(first, x);
    const at::Tensor b = calls(second, x);
    return calls(pick, a, b);
  }
  ModuleCalls calls;
  nn::Linear first{nullptr}, second{nullptr};
  FirstOfTwo pick{nullptr};
};

struct DroppingImpl : nn::Module {
  DroppingImpl() {
    linear = register_module("linear", nn::Linear(8, 8));
    dropout = register_module("dropout", nn::Dropout(0.5));
  }
  at::Tensor forward(at::Tensor x) {
    x = calls(linear, x);
    return calls(dropout, x);
  }
  ModuleCalls calls;
  nn::Linear linear{nullptr};
  nn::Dropout dropout{nullptr};
};

// Attention with a mask, and with heads that share keys.
struct MaskedImpl : nn::Module {
  MaskedImpl() {
    linear = register_module("linear", nn::Linear(16, 16));
    mask = register_buffer("mask", at::zeros({4, 4}).to(at::kBool));
  }
  at::Tensor forward(at::Tensor x) {
    const at::Tensor y = calls(linear, x);
    const at::Tensor heads = y.view({2, 4, 2, 8}).transpose(1, 2);
    const at::Tensor one = heads.narrow(1, 0, 1);
    const at::Tensor masked = at::scaled_dot_product_attention(heads, heads, heads, mask);
    const at::Tensor shared =
        at::scaled_dot_product_attention(heads, one, one, {}, 0.0, false, std::nullopt, /*enable_gqa=*/true);
    return masked + shared;
  }
  ModuleCalls calls;
  nn::Linear linear{nullptr};
  at::Tensor mask;
};

using Maker = std::function<TraceModel(const at::TensorOptions& on_device)>;

// The sum of what the model makes of zeros of these shapes.
template <class Implementation>
Maker Of(std::vector<std::vector<std::int64_t>> shapes) {
  return [shapes = std::move(shapes)](const at::TensorOptions& on_device) {
    auto model = std::make_shared<Implementation>();
    const at::Tensor x = at::zeros(shapes[0], on_device);
    const at::Tensor index =
        shapes.size() > 1 ? at::zeros(shapes[1], on_device.dtype(at::kLong)) : at::Tensor();
    auto forward = [model, x, index] {
      if constexpr (requires { model->forward(x, index); }) {
        return model->calls(model, x, index).sum();
      } else {
        return model->calls(model, x).sum();
      }
    };
    return TraceModel{model, model->calls, forward, {}};
  };
}

TraceModel MakeGpt(const at::TensorOptions& on_device) {
  const GptConfig config;
  Gpt gpt(config);
  const at::Tensor tokens = at::zeros({2, config.context}, on_device.dtype(at::kLong)),
                   targets = at::zeros_like(tokens);
  return {
      gpt.ptr(), gpt->calls, [gpt, tokens, targets]() mutable { return GptLoss(gpt, tokens, targets); }, {}};
}

// Two forwards of one backward, of the sum of their losses.
TraceModel MakeTwoForwards(const at::TensorOptions& on_device) {
  TraceModel made = Of<TwiceInsideImpl>({{4, 8}})(on_device);
  made.forward = [forward = made.forward] {
    const at::Tensor first = forward();
    return first + forward();
  };
  return made;
}

Maker With(const Maker& maker, const RecordOptions& options) {
  return [=](const at::TensorOptions& on_device) {
    TraceModel made = maker(on_device);
    made.options = options;
    return made;
  };
}

TraceModel MakeTied(const at::TensorOptions& on_device) {
  auto model = std::make_shared<TiedImpl>();
  const at::Tensor tokens = at::zeros({2, 4}, on_device.dtype(at::kLong));
  return {model, model->calls, [model, tokens] { return model->calls(model, tokens).sum(); }, {}};
}

const std::map<std::string, Maker>& Makers() {
  static const std::map<std::string, Maker> makers = {
      {"convolutional", Of<ConvolutionalImpl>({{2, 3, 8, 8}})},
      {"detached", Of<DetachedImpl>({{4, 8}})},
      {"dropping", Of<DroppingImpl>({{4, 8}})},
      {"frozen", Of<FrozenImpl>({{4, 8}})},
      {"gpt", MakeGpt},
      {"gpt_no_grad", With(MakeGpt, {.grad = false})},
      {"in_place", Of<InPlaceImpl>({{4, 8}})},
      {"indexed", Of<IndexedImpl>({{4, 8}, {5}})},
      {"masked", Of<MaskedImpl>({{2, 4, 16}})},
      {"reused", Of<ReusedImpl>({{4, 8}})},
      {"tied", MakeTied},
      {"twice_inside", Of<TwiceInsideImpl>({{4, 8}})},
      {"two_forwards", MakeTwoForwards},
      {"two_steps", With(Of<TwiceInsideImpl>({{4, 8}}), {.steps = 2})},
      {"unused_input", Of<UnusedInputImpl>({{4, 8}})},
  };
  return makers;
}

}  // namespace

TraceModel MakeTraceModel(const std::string& name, c10::DeviceType device, at::ScalarType dtype) {
  const auto make = [&] {
    TraceModel made = Makers().at(name)(at::TensorOptions(dtype).device(device));
    // Not Module::to, which casts buffers, too.
    for (at::Tensor& parameter : made.model->parameters()) parameter.set_data(parameter.to(dtype));
    return made;
  };
  return device == c10::kMeta ? BuildOnMeta(make) : make();
}

std::vector<std::string> TraceModelNames() {
  std::vector<std::string> names;
  for (const auto& [name, maker] : Makers()) names.push_back(name);
  return names;
}

}  // namespace shardplan::executor::testing
