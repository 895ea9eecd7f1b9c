// SPDX-License-Identifier: Apache-2.0
// A character-level GPT in LibTorch. gpt.py is the same model in Python, with the same names.
#pragma once

#include <torch/nn/functional/activation.h>
#include <torch/nn/functional/loss.h>
#include <torch/nn/init.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>
#include <torch/types.h>

#include <cstdint>
#include <string>

#include "shardplan/executor/module_calls.h"

namespace gpt {

namespace nn = torch::nn;
using shardplan::executor::ModuleCalls;

struct Config {
  std::int64_t vocabulary = 65;
  std::int64_t context = 32;
  std::int64_t layers = 4;
  std::int64_t heads = 4;
  std::int64_t width = 64;
};

// Computes in one operator, as Python's nn.Linear does; torch::nn::Linear::forward adds the bias in a second
// one, and rounds twice.
inline at::Tensor Apply(const nn::Linear& linear, const at::Tensor& x) {
  return at::linear(x, linear->weight, linear->bias);
}

struct AttentionImpl : nn::Module {
  explicit AttentionImpl(const Config& config) : heads(config.heads) {
    qkv = register_module("qkv", nn::Linear(config.width, 3 * config.width));
    proj = register_module("proj", nn::Linear(config.width, config.width));
  }
  // [batch, sequence, width] -> the same
  at::Tensor forward(const at::Tensor& x) {
    const auto batch = x.size(0), sequence = x.size(1), width = x.size(2);
    const at::Tensor split =
        Apply(qkv, x).view({batch, sequence, 3, heads, width / heads}).permute({2, 0, 3, 1, 4});
    const at::Tensor y =
        at::scaled_dot_product_attention(split[0], split[1], split[2], {}, 0.0, /*is_causal=*/true);
    return Apply(proj, y.transpose(1, 2).reshape({batch, sequence, width}));
  }
  std::int64_t heads;
  nn::Linear qkv{nullptr}, proj{nullptr};
};
TORCH_MODULE(Attention);

struct MlpImpl : nn::Module {
  explicit MlpImpl(const Config& config) {
    up = register_module("up", nn::Linear(config.width, 4 * config.width));
    down = register_module("down", nn::Linear(4 * config.width, config.width));
  }
  at::Tensor forward(const at::Tensor& x) { return Apply(down, at::gelu(Apply(up, x), "tanh")); }
  nn::Linear up{nullptr}, down{nullptr};
};
TORCH_MODULE(Mlp);

struct BlockImpl : nn::Module {
  explicit BlockImpl(const Config& config) {
    ln_1 = register_module("ln_1", nn::LayerNorm(nn::LayerNormOptions({config.width})));
    attn = register_module("attn", Attention(config));
    ln_2 = register_module("ln_2", nn::LayerNorm(nn::LayerNormOptions({config.width})));
    mlp = register_module("mlp", Mlp(config));
  }
  at::Tensor forward(at::Tensor x) {
    x = x + attn(ln_1(x));
    return x + mlp(ln_2(x));
  }
  nn::LayerNorm ln_1{nullptr}, ln_2{nullptr};
  Attention attn{nullptr};
  Mlp mlp{nullptr};
};
TORCH_MODULE(Block);

// Token ids [batch, sequence] -> logits [batch, sequence, vocabulary].
struct GptImpl : nn::Module {
  explicit GptImpl(const Config& config) : config(config) {
    wte = register_module("wte", nn::Embedding(config.vocabulary, config.width));
    wpe = register_module("wpe", nn::Embedding(config.context, config.width));
    blocks = register_module("blocks", nn::ModuleList());
    for (std::int64_t i = 0; i < config.layers; ++i) blocks->push_back(Block(config));
    ln_f = register_module("ln_f", nn::LayerNorm(nn::LayerNormOptions({config.width})));
    head =
        register_module("head", nn::Linear(nn::LinearOptions(config.width, config.vocabulary).bias(false)));
    const at::NoGradGuard no_grad;
    for (const auto& parameter : named_parameters()) {
      if (parameter.value().dim() > 1) nn::init::normal_(parameter.value(), 0.0, 0.02);
      if (parameter.key().ends_with("bias")) nn::init::zeros_(parameter.value());
    }
  }
  at::Tensor forward(const at::Tensor& tokens) {
    at::Tensor x = wte(tokens) + wpe(at::arange(tokens.size(1), tokens.options()));
    for (const auto& block : *blocks) x = calls(*block->as<Block>(), x);  // a unit of the plan
    return Apply(head, ln_f(x));
  }

  Config config;
  ModuleCalls calls;
  nn::Embedding wte{nullptr}, wpe{nullptr};
  nn::ModuleList blocks{nullptr};
  nn::LayerNorm ln_f{nullptr};
  nn::Linear head{nullptr};
};
TORCH_MODULE(Gpt);

// Mean next-token cross entropy.
inline at::Tensor Loss(const at::Tensor& logits, const at::Tensor& targets) {
  return at::cross_entropy_loss(logits.flatten(0, 1), targets.flatten());
}

}  // namespace gpt
