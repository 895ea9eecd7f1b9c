#include "memory/kernel_memory.h"

#include <algorithm>
#include <array>

namespace shardplan::internal {
namespace {

constexpr std::int64_t kFloatBytes = 4;
constexpr std::int64_t kIndexBytes = 8;

std::int64_t RoundUp(std::int64_t value, std::int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

// Sizes of an attention backward, from the storages that it reads and writes: (B, S, H, D) of the queries.
struct Attention {
  std::int64_t batch_heads = 0;
  std::int64_t queries = 0;
  std::int64_t head_dim = 0;
  bool grouped = false;  // fewer key and value heads than query heads
};

// Reads: grad_out, q, k, v, out, logsumexp, and of the flash kernel the two of the random state (the other's
// are on the host); q, k and v may be one storage, so the logsumexp (B x H x S floats) is counted from the
// end, `behind` it. FLOPs of the backward are 10 B H S S' D, S' = S
// here.
bool ReadAttention(const OperatorEvent& op, std::span<const Bytes> read, std::span<const Bytes> written,
                   std::size_t behind, Attention& found) {
  const std::int64_t element = SizeBytes(op.dtype);
  if (read.size() < 4 || written.empty() || element == 0) return false;
  const std::int64_t query_elements = written[0].value / element;
  const std::int64_t rows = read[read.size() - 1 - behind].value / kFloatBytes;
  if (query_elements <= 0 || rows <= 0 || query_elements % rows != 0 || op.flops <= 0) return false;
  found.head_dim = query_elements / rows;
  found.queries = std::max<std::int64_t>(1, op.flops / (10 * query_elements));
  if (rows % found.queries != 0) return false;
  found.batch_heads = rows / found.queries;
  found.grouped = written.size() > 1 && written[1].value > 0 && written[1].value < written[0].value;
  return true;
}

// mha_bwd (aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp): the float accumulator of dq and
// softmax_d, with lengths up to a multiple of 128 and head dimensions up to one of 32 (64 above 128); grouped
// heads get dk and dv of every query head first.
std::vector<KernelAllocation> FlashBackward(const OperatorEvent& op, const Attention& a) {
  const std::int64_t queries = RoundUp(a.queries, 128);
  const std::int64_t head_dim = RoundUp(a.head_dim, a.head_dim <= 128 ? 32 : 64);
  std::vector<KernelAllocation> taken = {{{a.batch_heads * queries * kFloatBytes}},
                                         {{a.batch_heads * queries * head_dim * kFloatBytes}}};
  const Bytes whole{a.batch_heads * a.queries * a.head_dim * SizeBytes(op.dtype)};
  if (a.grouped) taken.insert(taken.end(), 2, {whole});
  return taken;
}

// _efficient_attention_backward (.../transformers/cuda/attention_backward.cu): delta, and the workspace of
// the gradient of the queries, tiles of 64 x 64 floats with 16 bytes before each (kernel_backward.h). The
// kernels of half precision compute delta themselves; for the others it is the sum of a product, turned.
std::vector<KernelAllocation> EfficientBackward(const OperatorEvent& op, const Attention& a) {
  const std::int64_t tiles = RoundUp(a.queries, 64) / 64 * (RoundUp(a.head_dim, 64) / 64);
  const Bytes delta{a.batch_heads * a.queries * kFloatBytes};
  const Bytes workspace{a.batch_heads * tiles * (std::int64_t{64} * 64 * kFloatBytes + 16)};
  if (SizeBytes(op.dtype) == 2) return {{delta}, {workspace}};
  const Bytes product{a.batch_heads * a.queries * a.head_dim * kFloatBytes};
  return {{product, 3}, {delta, 3}, {delta}, {workspace}};
}

// embedding_dense_backward_cuda (aten/src/ATen/native/cuda/Embedding.cu) and embedding_backward_cuda_kernel
// (EmbeddingBackwardKernel.cu): above 3072 indices they are sorted, and rows are summed in pieces of 10, in
// float.
std::vector<KernelAllocation> EmbeddingBackward(const OperatorEvent& op, std::span<const Bytes> read,
                                                std::span<const Bytes> written) {
  const std::int64_t element = SizeBytes(op.dtype);
  if (read.size() < 2 || written.empty() || element == 0) return {};
  const std::int64_t indices = read[1].value / kIndexBytes;
  if (indices <= 3072) return {};
  const std::int64_t width = read[0].value / element / indices;
  if (width <= 0) return {};
  const std::int64_t segments = std::min(indices, written[0].value / element / width);
  const std::int64_t pieces = indices / 10 + segments;
  const Bytes all{indices * kIndexBytes};
  const Bytes one{kIndexBytes};
  const Bytes each{segments * kIndexBytes};
  const Bytes sums{pieces * width * std::max(element, kFloatBytes)};
  return {{all}, {all}, {all}, {one}, {each}, {each}, {one}, {{pieces * kIndexBytes}}, {sums}};
}

// LaunchGammaBetaBackwardCUDAKernel (aten/src/ATen/native/cuda/layer_norm_kernel.cu): with many short rows a
// partial sum of the weight's gradient for every 32 rows, and of the bias's. 132 multiprocessors (H100).
std::vector<KernelAllocation> NormBackward(const OperatorEvent& op, std::span<const Bytes> read,
                                           std::span<const Bytes> written, bool bias) {
  const std::int64_t element = SizeBytes(op.dtype);
  if (read.size() < 3 || written.size() < 2 || element == 0) return {};
  const std::int64_t width = written[1].value / element;
  if (width <= 0) return {};
  const std::int64_t rows = read[0].value / element / width;
  constexpr std::int64_t kMultiprocessors = 132;
  if (rows <= 64 * 1024 || width / 32 >= kMultiprocessors / 2) return {};
  const std::int64_t blocks = std::min(32 * 1024 / ((width + 31) / 32), (rows + 31) / 32);
  return std::vector<KernelAllocation>(bias ? 2 : 1, {Bytes{blocks * width * element}});
}

}  // namespace

std::vector<KernelAllocation> KernelTemporaries(const OperatorEvent& op, std::span<const Bytes> read,
                                                std::span<const Bytes> written) {
  if (op.name == "aten.embedding_dense_backward") return EmbeddingBackward(op, read, written);
  if (op.name == "aten.native_layer_norm_backward") return NormBackward(op, read, written, true);
  if (op.name == "aten._fused_rms_norm_backward") return NormBackward(op, read, written, false);
  const bool flash = op.name == "aten._scaled_dot_product_flash_attention_backward";
  if (!flash && op.name != "aten._scaled_dot_product_efficient_attention_backward") return {};
  Attention attention;
  if (!ReadAttention(op, read, written, flash ? 2 : 0, attention)) return {};
  return flash ? FlashBackward(op, attention) : EfficientBackward(op, attention);
}

std::int64_t Multiprocessors(std::string_view device) {
  struct Known {
    std::string_view name;
    std::int64_t count;
  };
  constexpr std::array<Known, 4> kKnown = {{{"A100", 108}, {"A800", 108}, {"B200", 148}, {"V100", 80}}};
  const auto* found = std::ranges::find_if(
      kKnown, [&](const Known& known) { return device.find(known.name) != device.npos; });
  return found == kKnown.end() ? 132 : found->count;
}

bool UsesCublas(std::string_view op) {
  constexpr std::array<std::string_view, 8> kProducts = {"aten.mm",      "aten.addmm",  "aten.bmm",
                                                         "aten.baddbmm", "aten.addbmm", "aten.linear",
                                                         "aten.mv",      "aten.addmv"};
  return std::ranges::find(kProducts, op) != kProducts.end();
}

Bytes CublasWorkspaceBytes(std::string_view device) {
  constexpr std::array<std::string_view, 9> kBefore9 = {"V100", "T4",  "A100", "A800",  "A10",
                                                        "A30",  "A40", "L4",   "RTX 30"};
  const bool before_9 =
      std::ranges::any_of(kBefore9, [&](std::string_view name) { return device.find(name) != device.npos; });
  return {before_9 ? 2 * 4096 * 1024 + 8 * 16 * 1024 : 32 << 20};
}

}  // namespace shardplan::internal
