// SPDX-License-Identifier: Apache-2.0
#include "memory/kernel_memory.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <limits>
#include <numeric>

#include "allocator/sizes.h"

namespace shardplan::internal {
namespace {

constexpr std::int64_t kFloatBytes = 4;
constexpr std::int64_t kIndexBytes = 8;

std::int64_t CeilDiv(std::int64_t value, std::int64_t by) { return (value + by - 1) / by; }

using Kind = KernelStep::Kind;
constexpr std::int32_t kAllOutputs = 1 << 30;

KernelStep Take(std::int64_t bytes) { return {.bytes = {bytes}}; }
KernelStep GiveBack(std::int32_t which) { return {.kind = Kind::kGiveBack, .count = which}; }
KernelStep Outputs(std::int32_t count) { return {.kind = Kind::kOutputs, .count = count}; }

// Sizes of an attention's backward.
struct Attention {
  std::int64_t batch_heads = 0;
  std::int64_t queries = 0, keys = 0;
  std::int64_t head_dim = 0;
  bool grouped = false;   // fewer key and value heads than query heads
  bool one_head = false;  // a single head, where that is certain
};

// From the storages that it reads and writes. Its FLOPs are 10 B H S S' D of S queries and S' keys. Grouped
// heads do not tell S from S': then they are equal. Reads: grad_out, q, k, v, out, logsumexp, and of the
// flash kernel the two of the random state (the other's are on the host); q, k and v may be one storage, so
// the logsumexp (B x H x S floats, S up to a multiple of `rows_multiple`) is counted from the end, `behind`
// it.
bool ReadAttention(const OperatorEvent& op, std::span<const Bytes> read, std::span<const Bytes> written,
                   std::size_t behind, std::int64_t rows_multiple, Attention& found) {
  const std::int64_t element = SizeBytes(op.dtype);
  if (read.size() < 4 || written.empty() || element == 0) return false;
  const std::int64_t elements = written[0].value / element;
  const std::int64_t rows = read[read.size() - 1 - behind].value / kFloatBytes;
  if (elements <= 0 || rows <= 0 || op.flops < 10 * elements) return false;
  found.keys = found.queries = op.flops / (10 * elements);
  if (written.size() > 1 && written[1].value > 0) {
    if (behind == 0) found.queries = found.keys * written[0].value / written[1].value;
    found.grouped = behind > 0 && written[1].value < written[0].value;
  }
  const std::int64_t rows_of_head = RoundUp(found.queries, rows_multiple);
  if (rows_of_head == 0 || rows % rows_of_head != 0) return false;
  found.batch_heads = rows / rows_of_head;
  found.head_dim = elements / (found.batch_heads * found.queries);
  return found.head_dim > 0 && found.head_dim * found.batch_heads * found.queries == elements;
}

// The inputs of an efficient attention's backward up to the logsumexp: behind it 2.15 has the random state on
// the device, a seed and an offset.
std::span<const Bytes> WithoutRandomState(std::span<const Bytes> read) {
  while (!read.empty() && read.back().value == kIndexBytes) read = read.first(read.size() - 1);
  return read;
}

// The number of splits of the keys: as many as fill the multiprocessors nearly as well as any number would
// (num_splits_heuristic, aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp). `blocks` are there
// without splits, `most` could run at once.
std::int64_t FlashSplits(std::int64_t blocks, std::int64_t most, std::int64_t key_blocks) {
  constexpr float kNearlyFull = 0.8F;
  constexpr double kNearlyAsGood = 0.85;
  if (static_cast<float>(blocks) >= kNearlyFull * static_cast<float>(most)) return 1;
  const std::int64_t limit = std::min({std::int64_t{128}, most, key_blocks});
  const auto changes_anything = [&](std::int64_t splits) {
    return splits == 1 || CeilDiv(key_blocks, splits) != CeilDiv(key_blocks, splits - 1);
  };
  const auto efficiency = [&](std::int64_t splits) {
    const float waves = static_cast<float>(blocks * splits) / static_cast<float>(most);
    return waves / std::ceil(waves);
  };
  float best = 0;
  for (std::int64_t splits = 1; splits <= limit; ++splits) {
    if (changes_anything(splits)) best = std::max(best, efficiency(splits));
  }
  for (std::int64_t splits = 1; splits <= limit; ++splits) {
    if (changes_anything(splits) && efficiency(splits) >= kNearlyAsGood * best) return splits;
  }
  return 1;
}

std::int64_t FlashHeadDim(std::int64_t head_dim) { return RoundUp(head_dim, head_dim <= 128 ? 32 : 64); }

// mha_fwd (flash_api.cpp): behind the output and the log-sum-exp, the same of every split, in float. Queries
// and keys are of one length (with others the storages do not tell heads from lengths), and there is no
// dropout, with which it never splits: the random state is small then.
std::vector<KernelStep> FlashForward(const OperatorEvent& op, std::span<const Bytes> read,
                                     std::span<const Bytes> written, const Device& device) {
  const std::int64_t element = SizeBytes(op.dtype);
  if (read.empty() || written.size() < 2 || element == 0 || op.flops <= 0) return {};
  const std::int64_t rows = written[1].value / kFloatBytes;
  const std::int64_t elements = written[0].value / element;
  if (rows <= 0 || elements % rows != 0) return {};
  const std::int64_t head_dim = elements / rows;
  const std::int64_t length = op.flops / (4 * elements);
  if (length <= 0 || rows % length != 0) return {};
  constexpr std::int64_t kQueriesOfBlock = 64;
  const std::int64_t keys_of_block = head_dim <= 64 ? 256 : head_dim <= 128 ? 128 : 64;
  const std::int64_t splits = FlashSplits(rows / length * CeilDiv(length, kQueriesOfBlock),
                                          2 * Multiprocessors(device), CeilDiv(length, keys_of_block));
  if (splits <= 1) return {};
  const std::int64_t sums = splits * rows * kFloatBytes;
  return {Outputs(2), Take(sums), Take(sums * FlashHeadDim(head_dim))};
}

// mha_bwd (flash_api.cpp): the float accumulator of dq and softmax_d, with lengths up to a multiple of 128
// and head dimensions up to one of 32 (64 above 128); grouped heads get dk and dv of every query head first.
std::vector<KernelStep> FlashBackward(const OperatorEvent& op, const Attention& a) {
  const std::int64_t queries = RoundUp(a.queries, 128);
  const std::int64_t sums = a.batch_heads * queries * kFloatBytes;
  std::vector<KernelStep> steps = {Outputs(kAllOutputs), Take(sums), Take(sums * FlashHeadDim(a.head_dim))};
  const std::int64_t whole = a.batch_heads * a.queries * a.head_dim * SizeBytes(op.dtype);
  if (a.grouped) steps.insert(steps.end(), 2, Take(whole));
  return steps;
}

// _efficient_attention_backward (.../transformers/cuda/attention_backward.cu): delta, and the workspace of
// the gradient of the queries, tiles of floats with 16 bytes before each (kernel_backward.h). The kernels of
// half precision compute delta themselves; for the others it is the sum of a product, turned (a single head's
// lies right as it is). Kernels of half precision with long heads have sums of the gradients of keys and
// values, too, for every split of the keys: as many as 200 blocks of threads need.
std::vector<KernelStep> EfficientBackward(const OperatorEvent& op, const Attention& a) {
  const bool half = SizeBytes(op.dtype) == 2;
  const std::int64_t tile_queries = a.head_dim <= 64 ? 64 : 128;
  const std::int64_t tile_width = a.head_dim <= 64 || a.head_dim > 128 || !half ? 64 : 128;
  const std::int64_t tiles = CeilDiv(a.queries, tile_queries) * CeilDiv(a.head_dim, tile_width);
  std::int64_t of_head = tiles * (tile_queries * tile_width * kFloatBytes + 16);
  if (half && a.head_dim > 128) {
    constexpr std::int64_t kKeysOfBlock = 64, kBlocks = 200;
    const std::int64_t splits =
        std::clamp<std::int64_t>(kBlocks / a.batch_heads, 1, CeilDiv(a.keys, kKeysOfBlock));
    of_head += 2 * splits * kKeysOfBlock * RoundUp(a.head_dim, 128) * kFloatBytes;
  }
  const std::int64_t delta = a.batch_heads * a.queries * kFloatBytes;
  const std::int64_t workspace = a.batch_heads * of_head;
  if (half) return {Outputs(kAllOutputs), Take(delta), Take(workspace)};
  const std::int64_t product = a.batch_heads * a.queries * a.head_dim * kFloatBytes;
  if (a.one_head) return {Outputs(kAllOutputs), Take(product), Take(delta), GiveBack(0), Take(workspace)};
  return {Outputs(kAllOutputs), Take(product), Take(delta),    Take(delta),
          GiveBack(1),          GiveBack(0),   Take(workspace)};
}

// Memory that cub takes at once: each of its parts a multiple of 256 bytes, and room to align the first.
std::int64_t CubBytes(std::initializer_list<std::int64_t> parts) {
  std::int64_t bytes = 255;
  for (const std::int64_t part : parts) bytes += RoundUp(part, 256);
  return bytes;
}

// A pass over `count` items of 8 bytes that scans: the state of every tile, of which a warp's are padding.
std::int64_t CubScanBytes(std::int64_t count, std::int64_t items_of_tile) {
  constexpr std::int64_t kTileState = 16;
  return CubBytes({(CeilDiv(count, items_of_tile) + 32) * kTileState, 1});
}

// A sort of pairs of 8 bytes by `digits` digits of the keys: the second halves of the double buffers (one
// digit needs none), a histogram and a counter for each digit, and a histogram for each tile.
std::int64_t CubSortBytes(std::int64_t count, std::int64_t digits) {
  constexpr std::int64_t kBins = 256, kItemsOfTile = 4608;
  const std::int64_t halves = digits > 1 ? count * kIndexBytes : 0;
  return CubBytes(
      {digits * kBins * kIndexBytes, halves, halves, CeilDiv(count, kItemsOfTile) * kBins * 4, digits * 4});
}

// embedding_dense_backward_cuda (aten/src/ATen/native/cuda/Embedding.cu) and embedding_backward_cuda_kernel
// (EmbeddingBackwardKernel.cu): above 3072 indices they are sorted, and rows are summed in pieces of 10, in
// float. Tiles are those of cub on compute capability 9.
std::vector<KernelStep> EmbeddingBackward(const OperatorEvent& op, std::span<const Bytes> read,
                                          std::span<const Bytes> written, const PyTorchRules& rules) {
  const std::int64_t element = SizeBytes(op.dtype);
  if (read.size() < 2 || written.empty() || element == 0) return {};
  const std::int64_t indices = read[1].value / kIndexBytes;
  if (indices <= 3072) return {};
  const std::int64_t width = read[0].value / element / indices;
  if (width <= 0) return {};
  constexpr std::int64_t kItemsOfSum = 896, kBitsOfDigit = 8;
  const std::int64_t items_of_unique = rules.cub_tiles_of_cuda_13_2 ? 4928 : 4480;
  const std::int64_t rows = written[0].value / element / width;
  const std::int64_t bits = rules.embeddings_sort_few_digits
                                ? std::bit_width(static_cast<std::uint64_t>(rows))
                                : kBitsOfDigit * kIndexBytes;
  const std::int64_t segments = std::min(indices, rows);
  const std::int64_t pieces = indices / 10 + segments;
  const KernelStep all = Take(indices * kIndexBytes);
  const KernelStep one = Take(kIndexBytes);
  const KernelStep each = Take(segments * kIndexBytes);
  return {all,
          all,
          all,
          Take(CubSortBytes(indices, CeilDiv(bits, kBitsOfDigit))),
          GiveBack(3),
          GiveBack(2),
          Outputs(1),
          all,
          one,
          all,
          Take(CubScanBytes(indices, items_of_unique)),
          GiveBack(7),
          GiveBack(6),
          each,
          each,
          Take(CubScanBytes(segments, kItemsOfSum)),
          GiveBack(10),
          one,
          Take(pieces * kIndexBytes),
          Take(pieces * width * std::max(element, kFloatBytes))};
}

// LaunchGammaBetaBackwardCUDAKernel (aten/src/ATen/native/cuda/layer_norm_kernel.cu): with many short rows a
// partial sum of the weight's gradient for every 32 rows, and of the bias's.
std::vector<KernelStep> NormBackward(const OperatorEvent& op, std::span<const Bytes> read,
                                     std::span<const Bytes> written, const Device& device, bool bias) {
  const std::int64_t element = SizeBytes(op.dtype);
  if (read.size() < 3 || written.size() < 2 || element == 0) return {};
  const std::int64_t width = written[1].value / element;
  if (width <= 0) return {};
  const std::int64_t rows = read[0].value / element / width;
  if (rows <= 64 * 1024 || width / 32 >= Multiprocessors(device) / 2) return {};
  const std::int64_t blocks = std::min(32 * 1024 / ((width + 31) / 32), (rows + 31) / 32);
  std::vector<KernelStep> steps = {Outputs(kAllOutputs)};
  steps.insert(steps.end(), bias ? 2 : 1, Take(blocks * width * element));
  return steps;
}

std::int64_t PowerOf2UpTo(std::int64_t value) {
  return static_cast<std::int64_t>(std::bit_floor(static_cast<std::uint64_t>(value)));
}

// How a sum of `rows` x `outputs` elements over its rows uses threads (setReduceConfig,
// aten/src/ATen/native/cuda/Reduce.cuh; sums in float): along the outputs, or, where there is one output,
// along the rows. Blocks that share outputs exchange their parts in `buffer`.
struct SumBlocks {
  Bytes buffer, semaphores;  // 0: every output is of one block
};
SumBlocks BlocksOfSum(std::int64_t rows, std::int64_t outputs, const Device& device) {
  constexpr std::int64_t kMostThreads = 512, kWarp = 32, kThreadsOfMultiprocessor = 2048;
  constexpr std::int64_t kFewValues = 16, kManyValues = 256, kVector = 4;
  const bool whole = outputs == 1;
  const std::int64_t vector = whole ? 1 : std::gcd(outputs, kVector);
  const std::int64_t most = kMostThreads / vector;
  const std::int64_t along = whole ? (rows >= 128 ? rows / kVector : rows) : outputs / vector;
  const std::int64_t across = whole ? 1 : rows;
  const std::int64_t along_threads = along < most ? PowerOf2UpTo(along) : most;
  const std::int64_t across_threads = across < most ? PowerOf2UpTo(across) : most;
  const std::int64_t height = std::min(across_threads, most / std::min(along_threads, kWarp));
  const std::int64_t width = std::min(along_threads, most / height);

  std::int64_t values = CeilDiv(rows, whole ? width : 1);  // that a thread sums
  if (values < std::min(height * kFewValues, kManyValues)) return {};
  values = CeilDiv(rows, (whole ? width : 1) * height);
  const std::int64_t grid = CeilDiv(outputs / vector, whole ? 1 : width);
  const std::int64_t target = Multiprocessors(device) * (kThreadsOfMultiprocessor / (width * height));
  if (values < kManyValues || grid > target) return {};
  const std::int64_t blocks =
      std::max(std::min(CeilDiv(target, grid), CeilDiv(values, kFewValues)), CeilDiv(values, kManyValues));
  if (blocks <= 1) return {};
  return {{kFloatBytes * outputs * blocks * (whole ? 1 : width * vector)}, {kFloatBytes * grid}};
}

// gpu_reduce_kernel (Reduce.cuh). Above 2 GiB it goes by halves of the rows; parts of half precision are
// summed in floats then. A sum that makes a parameter's gradient, or leaves one element, is one over leading
// dimensions. Others are taken for sums over the last dimension, which are of one block up to 131,072
// elements.
std::vector<KernelStep> Sum(const OperatorEvent& op, const KernelOperands& operands, const Device& device) {
  const std::int64_t element = SizeBytes(op.dtype);
  if (operands.read.empty() || operands.written.empty() || (element != 2 && element != 4)) return {};
  const std::int64_t elements = operands.read[0].value / element;
  const std::int64_t outputs =
      operands.written[0].value <= kFloatBytes ? 1 : operands.written[0].value / element;
  if (elements <= 0 || elements % outputs != 0 || (outputs > 1 && !operands.makes_gradient)) return {};
  const auto is_too_large = [&](std::int64_t bytes) {  // for offsets of 32 bits, up to the last element's
    return bytes - element >= std::numeric_limits<std::int32_t>::max();
  };
  std::vector<KernelStep> steps = {Outputs(kAllOutputs)};
  std::int32_t taken = 0;
  if (is_too_large(operands.read[0].value) && element == 2) {
    steps.push_back(Take(outputs * kFloatBytes));
    ++taken;
  }
  std::vector<std::int64_t> parts = {elements / outputs};  // the next one last
  while (!parts.empty()) {
    const std::int64_t rows = parts.back();
    parts.pop_back();
    if (rows > 1 && is_too_large(rows * outputs * element)) {
      parts.insert(parts.end(), {rows - rows / 2, rows / 2});
      continue;
    }
    const SumBlocks blocks = BlocksOfSum(rows, outputs, device);
    if (blocks.buffer.value == 0) continue;
    steps.insert(
        steps.end(),
        {{.bytes = blocks.buffer}, {.bytes = blocks.semaphores}, GiveBack(taken + 1), GiveBack(taken)});
    taken += 2;
  }
  return steps;
}

// Whether cuBLASLt computes an addmm (isInputCompliesAddmmCudaLt, aten/src/ATen/native/cuda/Blas.cpp): it
// adds a bias to each row, and in half precision a matrix. Its FLOPs are 2 M N K. Parameters are none of the
// storages that it reads, and a bias that is one is a row. beta is taken to be 1.
bool UsesCublasLt(const OperatorEvent& op, std::span<const Bytes> read, std::span<const Bytes> written) {
  if (op.name == "aten.linear") return read.size() + op.parameters.size() > 2;
  const std::int64_t element = SizeBytes(op.dtype);
  if (op.name != "aten.addmm" || read.empty() || written.empty() || element == 0) return false;
  const std::int64_t outputs = written[0].value / element;
  const std::int64_t inner = outputs > 0 ? op.flops / (2 * outputs) : 0;
  if (inner <= 1) return false;
  const bool bias_is_read = read.size() > 2;
  const std::int64_t rows = read[bias_is_read ? 1 : 0].value / element / inner;
  if (outputs == rows) return false;  // a single column
  const bool matrix = bias_is_read && read[0] == written[0] && rows > 1;
  return !matrix || element == 2;
}

// torch/_native/ops/bmm_outer_product: a batch of products of a column and a row is a kernel of Triton, which
// is there wherever torch's CUDA wheels are. The products have as many multiplications as results.
bool IsOuterProduct(const OperatorEvent& op, std::span<const Bytes> written) {
  return op.name == "aten.bmm" && !written.empty() && op.flops * SizeBytes(op.dtype) == 2 * written[0].value;
}

// CUDABlasHandleWithWorkspace and CublasLtWorkspace: behind the output, for as long as the product is issued.
std::vector<KernelStep> Product(const OperatorEvent& op, std::span<const Bytes> read,
                                std::span<const Bytes> written, const Device& device) {
  if (IsOuterProduct(op, written)) return {};
  constexpr Bytes kOfCublasLt{1 << 20};  // parseCUDABlasLtWorkspaceSize
  KernelStep workspace = {.bytes = CublasWorkspaceBytes(device.name), .workspace = true};
  if (UsesCublasLt(op, read, written)) workspace.bytes = kOfCublasLt;
  return {Outputs(kAllOutputs), workspace};
}

}  // namespace

std::vector<KernelStep> KernelSteps(const OperatorEvent& op, const KernelOperands& operands,
                                    const Device& device, const PyTorchRules& rules) {
  std::span<const Bytes> read = operands.read;
  const std::span<const Bytes> written = operands.written;
  if (op.name == "aten.sum") return Sum(op, operands, device);
  if (op.name == "aten.embedding_dense_backward") return EmbeddingBackward(op, read, written, rules);
  if (op.name == "aten.native_layer_norm_backward") return NormBackward(op, read, written, device, true);
  if (op.name == "aten._fused_rms_norm_backward") return NormBackward(op, read, written, device, false);
  if (op.name == "aten._scaled_dot_product_flash_attention") return FlashForward(op, read, written, device);
  if (rules.workspaces_are_given_back && (UsesCublas(op.name) || op.name == "aten.dot")) {
    return Product(op, read, written, device);
  }
  const bool flash = op.name == "aten._scaled_dot_product_flash_attention_backward";
  if (!flash && op.name != "aten._scaled_dot_product_efficient_attention_backward") return {};
  Attention attention;
  if (!flash) read = WithoutRandomState(read);
  if (!ReadAttention(op, read, written, flash ? 2 : 0, flash ? 1 : 32, attention)) return {};
  attention.one_head = attention.batch_heads == 1 || attention.batch_heads == operands.sequences;
  return flash ? FlashBackward(op, attention) : EfficientBackward(op, attention);
}

std::int64_t Multiprocessors(const Device& device) {
  constexpr std::int64_t kOfH100 = 132;
  return device.multiprocessors > 0 ? device.multiprocessors : kOfH100;
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
