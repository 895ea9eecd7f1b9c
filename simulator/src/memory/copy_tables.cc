// SPDX-License-Identifier: Apache-2.0
#include "memory/copy_tables.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "memory/kernel_memory.h"
#include "shardplan/schemas/layout.h"

namespace shardplan::internal {
namespace {

constexpr std::int64_t kNumberBytes = 8;
constexpr std::int64_t kBlockThreads = 128;
constexpr std::int64_t kTileBytes = kBlockThreads * 16;  // what a block copies at once
constexpr std::int64_t kThreadsOfMultiprocessor = 2048;

std::int64_t DivideUp(std::int64_t value, std::int64_t by) { return (value + by - 1) / by; }

std::int64_t BlocksOf(std::span<const std::int64_t> sizes, std::int64_t bytes_of_block) {
  std::int64_t blocks = 0;
  for (const std::int64_t size : sizes) blocks += DivideUp(size, bytes_of_block);
  return blocks;
}

bool HasOneKernel(DType src, DType dst) {
  return src == dst || (src == DType::kBFloat16 && dst == DType::kFloat32);
}

}  // namespace

// Addresses of targets and sources, sizes, the tensor of each block, and the first block of each tensor.
// There are so many blocks that all multiprocessors are filled twice; more than that, and each block copies
// several tiles: sqrt(factor) chunks, and of each the rest of the factor.
Bytes SplitTableBytes(std::span<const std::int64_t> splits, std::int64_t chunks, const Device& device) {
  const std::int64_t most = Multiprocessors(device) * kThreadsOfMultiprocessor / kBlockThreads * 2;
  const std::int64_t factor = DivideUp(BlocksOf(splits, kTileBytes) * chunks, most);
  const auto root = static_cast<std::int64_t>(std::ceil(std::sqrt(static_cast<double>(factor))));
  const std::int64_t tiles = DivideUp(factor, std::max<std::int64_t>(1, std::min(root, chunks)));
  const std::int64_t blocks = BlocksOf(splits, kTileBytes * std::max<std::int64_t>(1, tiles));
  return {(4 * std::ssize(splits) + 1 + blocks) * kNumberBytes};
}

// Addresses, the tensor of each block, the place and the first block of each tensor (each with its end),
// sizes with and without padding, and blocks.
Bytes ChunkCatTableBytes(std::span<const std::int64_t> pieces) {
  return {(6 * std::ssize(pieces) + 2 + BlocksOf(pieces, kTileBytes)) * kNumberBytes};
}

Bytes CopyTableBytes(const Plan& plan, const Instruction& instruction, std::int64_t chunks) {
  const Buffer& src = plan.buffers[static_cast<std::size_t>(instruction.src)];
  const Buffer& dst = plan.buffers[static_cast<std::size_t>(instruction.dst)];
  if (dst.unit < 0 || src.memory != MemoryKind::kDevice || dst.memory != MemoryKind::kDevice) return {};
  const Unit& unit = plan.units[static_cast<std::size_t>(dst.unit)];
  if (unit.layout != LayoutKind::kPerParameter || chunks < 1) return {};
  std::vector<std::int64_t> sizes;
  if (instruction.kind == InstructionKind::kCopyOut) {
    for (const Bytes part : dst.parts_bytes) sizes.push_back(part.value / chunks);
    return SplitTableBytes(sizes, chunks, plan.cluster.device);
  }
  if (!HasOneKernel(src.dtype, dst.dtype)) return {};
  for (const std::int32_t parameter : ParametersOf(plan, dst)) {
    const UnitParameter& p = unit.parameters[static_cast<std::size_t>(parameter)];
    sizes.push_back(PaddedPieceNumel(p, ShardCount(plan, unit)) * SizeBytes(dst.dtype));
  }
  return ChunkCatTableBytes(sizes);
}

}  // namespace shardplan::internal
