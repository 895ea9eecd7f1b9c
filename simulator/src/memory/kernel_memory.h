// Device memory that kernels take from the caching allocator while they run: no operator's output, so no
// trace has it. Formulas from the sources of PyTorch 2.11; docs/memory.md has the table and what is left out.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "shardplan/schemas/quantity.h"
#include "shardplan/schemas/trace.h"

namespace shardplan::internal {

struct KernelAllocation {
  Bytes bytes;
  std::int32_t until = -1;  // freed before the allocation of this index; -1: when the operator ends
};

// Allocations of one operator, in order. `read` and `written` are the bytes of the storages in op.reads and
// op.writes, 0 where unknown; what cannot be derived from them is left out.
std::vector<KernelAllocation> KernelTemporaries(const OperatorEvent& op, std::span<const Bytes> read,
                                                std::span<const Bytes> written);

// Multiprocessors of the device, by its name; an unknown one counts as an H100.
std::int64_t Multiprocessors(std::string_view device);

// Whether the operator is a product that cuBLAS or cuBLASLt computes.
bool UsesCublas(std::string_view op);

// The workspace of one cuBLAS handle on one stream: 32 MiB on compute capability 9 and later, else
// 2 x 4 MiB + 8 x 16 KiB (parseChosenWorkspaceSize, aten/src/ATen/cuda/CublasHandlePool.cpp). `device` is the
// name of the cluster's device; an unknown one counts as a recent one.
Bytes CublasWorkspaceBytes(std::string_view device);

}  // namespace shardplan::internal
