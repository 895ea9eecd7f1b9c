// SPDX-License-Identifier: Apache-2.0
// A character-level GPT of LibTorch modules, as nanoGPT names them. Its twin in Python is
// examples/gpt_cpp/twin.py.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cross_entropy_loss.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <fmt/format.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>

#include <cstdint>
#include <vector>

#include "shardplan/executor/module_calls.h"

namespace shardplan::executor::testing {

struct GptConfig {
  std::int64_t vocabulary = 65, context = 64, width = 96, heads = 4;
  int blocks = 4;
};

struct AttentionImpl : torch::nn::Module {
  AttentionImpl(const GptConfig& config, ModuleCalls module_calls)
      : calls(std::move(module_calls)), heads(config.heads) {
    qkv = register_module("qkv", torch::nn::Linear(config.width, 3 * config.width));
    proj = register_module("proj", torch::nn::Linear(config.width, config.width));
  }
  at::Tensor forward(at::Tensor x) {
    const std::int64_t batch = x.size(0), length = x.size(1), width = x.size(2);
    std::vector<at::Tensor> parts = calls(qkv, x).split(width, 2);
    for (at::Tensor& part : parts) part = part.view({batch, length, heads, width / heads}).transpose(1, 2);
    at::Tensor y =
        at::scaled_dot_product_attention(parts[0], parts[1], parts[2], {}, 0.0, /*is_causal=*/true);
    return calls(proj, y.transpose(1, 2).reshape({batch, length, width}));
  }
  ModuleCalls calls;
  std::int64_t heads;
  torch::nn::Linear qkv{nullptr}, proj{nullptr};
};
TORCH_MODULE(Attention);

struct MlpImpl : torch::nn::Module {
  MlpImpl(const GptConfig& config, ModuleCalls module_calls) : calls(std::move(module_calls)) {
    up = register_module("up", torch::nn::Linear(config.width, 4 * config.width));
    down = register_module("down", torch::nn::Linear(4 * config.width, config.width));
  }
  at::Tensor forward(at::Tensor x) { return calls(down, at::gelu(calls(up, x))); }
  ModuleCalls calls;
  torch::nn::Linear up{nullptr}, down{nullptr};
};
TORCH_MODULE(Mlp);

struct BlockImpl : torch::nn::Module {
  BlockImpl(const GptConfig& config, ModuleCalls module_calls) : calls(std::move(module_calls)) {
    ln_1 = register_module("ln_1", torch::nn::LayerNorm(torch::nn::LayerNormOptions({config.width})));
    attn = register_module("attn", Attention(config, calls));
    ln_2 = register_module("ln_2", torch::nn::LayerNorm(torch::nn::LayerNormOptions({config.width})));
    mlp = register_module("mlp", Mlp(config, calls));
  }
  at::Tensor forward(at::Tensor x) {
    x = x + calls(attn, calls(ln_1, x));
    return x + calls(mlp, calls(ln_2, x));
  }
  ModuleCalls calls;
  torch::nn::LayerNorm ln_1{nullptr}, ln_2{nullptr};
  Attention attn{nullptr};
  Mlp mlp{nullptr};
};
TORCH_MODULE(Block);

struct GptImpl : torch::nn::Module {
  explicit GptImpl(const GptConfig& config = {}) {
    wte = register_module("wte", torch::nn::Embedding(config.vocabulary, config.width));
    wpe = register_module("wpe", torch::nn::Embedding(config.context, config.width));
    blocks = register_module("blocks", torch::nn::ModuleList());
    for (int i = 0; i < config.blocks; ++i) blocks->push_back(Block(config, calls));
    ln_f = register_module("ln_f", torch::nn::LayerNorm(torch::nn::LayerNormOptions({config.width})));
    head = register_module(
        "head", torch::nn::Linear(torch::nn::LinearOptions(config.width, config.vocabulary).bias(false)));
  }
  at::Tensor forward(at::Tensor tokens) {
    const at::Tensor positions = at::arange(tokens.size(1), tokens.options());
    at::Tensor x = calls(wte, tokens);  // C++ does not say which side of a + is first
    x = x + calls(wpe, positions);
    for (const auto& block : *blocks) x = calls(*block->as<BlockImpl>(), x);
    return calls(head, calls(ln_f, x));
  }
  ModuleCalls calls;
  torch::nn::Embedding wte{nullptr}, wpe{nullptr};
  torch::nn::ModuleList blocks{nullptr};
  torch::nn::LayerNorm ln_f{nullptr};
  torch::nn::Linear head{nullptr};
};
TORCH_MODULE(Gpt);

// tokens, targets: (batch, sequence). One number: the mean cross entropy.
inline at::Tensor GptLoss(Gpt& gpt, const at::Tensor& tokens, const at::Tensor& targets) {
  const at::Tensor logits = gpt->calls(gpt, tokens);
  return at::cross_entropy_loss(logits.view({-1, logits.size(-1)}), targets.view({-1}));
}

}  // namespace shardplan::executor::testing
