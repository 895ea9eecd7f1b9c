// SPDX-License-Identifier: Apache-2.0
// The rules are those of attention.py of the tracer, which names their sources in PyTorch.
#include "tracer/composites.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/_scaled_dot_product_attention_math.h>
#include <ATen/ops/_scaled_dot_product_efficient_attention.h>
#include <ATen/ops/_scaled_dot_product_flash_attention.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu.h>
#include <ATen/ops/native_dropout.h>
#include <ATen/ops/pad.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros_like.h>
#include <torch/library.h>

#include <cmath>
#include <limits>
#include <optional>
#include <tuple>

namespace shardplan::executor {
namespace {

using OptionalTensor = std::optional<at::Tensor>;

constexpr double kMinusInfinity = -std::numeric_limits<double>::infinity();

bool IsMask(const OptionalTensor& mask) {
  return mask && mask->defined() && mask->scalar_type() == at::kBool;
}

// Every fused kernel's: four dimensions, not empty, one dtype, the last dimension dense.
bool FitsFused(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) {
  for (const at::Tensor* t : {&q, &k, &v}) {
    if (t->dim() != 4 || t->scalar_type() != q.scalar_type() || t->size(0) != q.size(0)) return false;
    if (t->stride(3) != 1 && t->size(3) != 1) return false;
  }
  return q.size(2) != 0 && k.size(2) != 0;
}

bool HeadsFit(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, bool shares_heads) {
  return k.size(1) == v.size(1) && (shares_heads ? q.size(1) % k.size(1) == 0 : q.size(1) == k.size(1));
}

// ---- of the CPU ----

bool FitsFlashOfCpu(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const OptionalTensor& mask,
                    double dropout, bool shares_heads) {
  for (const at::Tensor* t : {&q, &k, &v}) {
    if (t->size(3) != q.size(3) || t->stride(3) != 1) return false;
  }
  if (!at::isFloatingType(q.scalar_type()) || dropout != 0 || !HeadsFit(q, k, v, shares_heads)) return false;
  if (!mask || !mask->defined()) return true;
  return (mask->dim() == 2 || mask->dim() == 4) && !mask->requires_grad();
}

// scaled_dot_product_attention asks the device for a kernel, and takes the unfused one where it knows none.
at::Tensor AttentionOfCpu(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                          const OptionalTensor& mask, double dropout, bool is_causal,
                          std::optional<double> scale, bool shares_heads) {
  if (q.dim() == 3 && k.dim() == 3 && v.dim() == 3) {  // one batch
    return AttentionOfCpu(q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0), mask, dropout, is_causal, scale,
                          shares_heads)
        .squeeze(0);
  }
  OptionalTensor bias = mask;
  if (IsMask(mask)) {
    // In the order in which torch makes them.
    const at::Tensor low = at::scalar_tensor(kMinusInfinity, q.options());
    const at::Tensor zero = at::scalar_tensor(0.0, q.options());
    bias = at::where(*mask, zero, low);
  }
  if (FitsFused(q, k, v) && FitsFlashOfCpu(q, k, v, mask, dropout, shares_heads)) {
    return std::get<0>(
        at::_scaled_dot_product_flash_attention_for_cpu(q, k, v, dropout, is_causal, bias, scale));
  }
  return std::get<0>(at::_scaled_dot_product_attention_math(q, k, v, bias, dropout, is_causal, std::nullopt,
                                                            scale, shares_heads));
}

// ---- of a GPU ----

bool IsHalf(const at::Tensor& tensor) {
  return tensor.scalar_type() == at::kHalf || tensor.scalar_type() == at::kBFloat16;
}

bool FitsFlashOfGpu(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const OptionalTensor& mask,
                    bool is_causal, bool shares_heads) {
  constexpr std::int64_t kMostHeadDim = 256;
  if (!IsHalf(q) || (mask && mask->defined()) || !HeadsFit(q, k, v, shares_heads)) return false;
  if (q.size(3) != k.size(3) || q.size(3) != v.size(3) || q.size(3) > kMostHeadDim) return false;
  return !is_causal || q.size(2) == k.size(2);
}

bool FitsEfficient(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) {
  if (!IsHalf(q) && q.scalar_type() != at::kFloat) return false;
  const std::int64_t alignment = IsHalf(q) ? 8 : 4;
  return HeadsFit(q, k, v, false) && q.size(3) == k.size(3) && q.size(3) % alignment == 0 &&
         v.size(3) % alignment == 0;
}

// The memory-efficient kernel reads rows whose pitch is a multiple of 16 elements, and a mask of full shape.
at::Tensor AlignedMask(at::Tensor mask, const at::Tensor& q, const at::Tensor& k) {
  const std::int64_t length = mask.size(-1);
  if (length % 16 != 0) mask = at::pad(mask, {0, 16 - length % 16}).narrow(-1, 0, length);
  return mask.expand({q.size(0), q.size(1), q.size(2), k.size(2)});
}

at::Tensor PaddedHeads(const at::Tensor& tensor) {
  const std::int64_t rest = tensor.size(3) % 8;
  return rest == 0 ? tensor : at::pad(tensor, {0, 8 - rest});
}

// kAlwaysTrains: it makes what a backward needs though no gradient is recorded.
template <bool kAlwaysTrains>
at::Tensor AttentionOfGpu(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                          const OptionalTensor& mask, double dropout, bool is_causal,
                          std::optional<double> scale, bool shares_heads) {
  const bool fused = FitsFused(q, k, v);
  if (fused && FitsFlashOfGpu(q, k, v, mask, is_causal, shares_heads)) {
    const std::int64_t head_dim = q.size(3);
    const double own_scale = scale.value_or(1 / std::sqrt(static_cast<double>(head_dim)));
    const at::Tensor output = std::get<0>(at::_scaled_dot_product_flash_attention(
        PaddedHeads(q), PaddedHeads(k), PaddedHeads(v), dropout, is_causal, false, own_scale));
    return output.size(3) == head_dim ? output : output.narrow(3, 0, head_dim);
  }
  OptionalTensor bias = mask;
  if (IsMask(mask)) {
    bias = at::zeros_like(*mask, q.scalar_type()).masked_fill_(mask->logical_not(), kMinusInfinity);
  }
  if (fused && FitsEfficient(q, k, v)) {
    if (bias && bias->defined()) bias = AlignedMask(*bias, q, k);
    const bool needs_gradient = q.requires_grad() || k.requires_grad() || v.requires_grad();
    const bool trains = kAlwaysTrains || (at::GradMode::is_enabled() && needs_gradient);
    return std::get<0>(
        at::_scaled_dot_product_efficient_attention(q, k, v, bias, trains, dropout, is_causal, scale));
  }
  return std::get<0>(at::_scaled_dot_product_attention_math(q, k, v, bias, dropout, is_causal, std::nullopt,
                                                            scale, shares_heads));
}

at::Tensor DropoutOfGpu(const at::Tensor& input, double probability, bool trains) {
  if (probability == 0 || !trains || input.numel() == 0) return input;
  if (probability == 1) return input.mul(at::zeros_like(input));
  return std::get<0>(at::native_dropout(input, probability, trains));
}

}  // namespace

struct MetaComposites::Registration {
  torch::Library library{torch::Library::IMPL, "aten", c10::DispatchKey::AutogradMeta, __FILE__, __LINE__};
};

MetaComposites::MetaComposites(RecordedKernels kernels, bool always_trains)
    : registration_(std::make_unique<Registration>()) {
  torch::Library& library = registration_->library;
  if (kernels == RecordedKernels::kCpu) {
    library.impl("scaled_dot_product_attention", AttentionOfCpu);
  } else {
    library.impl("scaled_dot_product_attention",
                 always_trains ? AttentionOfGpu<true> : AttentionOfGpu<false>);
    library.impl("dropout", DropoutOfGpu);
  }
}
MetaComposites::~MetaComposites() = default;

}  // namespace shardplan::executor
