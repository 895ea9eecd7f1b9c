// SPDX-License-Identifier: Apache-2.0
// Device memory that kernels take from the caching allocator while they run: no operator's output, so no
// trace has it. Formulas from the sources of PyTorch, of the plan's release; docs/reference/memory.md has the
// table and what is left out.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "shardplan/schemas/cluster.h"
#include "shardplan/schemas/pytorch_rules.h"
#include "shardplan/schemas/quantity.h"
#include "shardplan/schemas/trace.h"

namespace shardplan::internal {

// One thing that an operator's host code does, in order. Memory that no step gives back is given back when
// the operator ends.
struct KernelStep {
  enum class Kind : std::uint8_t { kTake, kGiveBack, kOutputs };
  Kind kind = Kind::kTake;
  Bytes bytes;             // kTake
  bool workspace = false;  // kTake: of cuBLAS
  std::int32_t count = 0;  // kGiveBack: which of those taken; kOutputs: so many are allocated here
};

// Operands of an operator that its record does not say.
struct KernelOperands {
  std::span<const Bytes> read, written;  // of the storages in op.reads and op.writes, 0 where unknown
  bool makes_gradient = false;           // it writes the gradient of a parameter
  std::int64_t sequences = 0;            // of a micro-batch, 0 where unknown
};

// The temporaries of one operator, and the step at which it allocates its outputs: the rest of them where its
// steps end. Empty: nothing. Temporaries that cannot be derived from the operands are left out.
std::vector<KernelStep> KernelSteps(const OperatorEvent& op, const KernelOperands& operands,
                                    const Device& device, const PyTorchRules& rules);

// Multiprocessors of the device, as the document has them; without them those of an H100.
std::int64_t Multiprocessors(const Device& device);

// Whether the operator is a product that cuBLAS or cuBLASLt computes, for which releases before
// workspaces_are_given_back keep a workspace.
bool UsesCublas(std::string_view op);

// The workspace of one cuBLAS handle on one stream: 32 MiB on compute capability 9 and later, else
// 2 x 4 MiB + 8 x 16 KiB (parseChosenWorkspaceSize, aten/src/ATen/cuda/CublasHandlePool.cpp). `device` is the
// name of the cluster's device; an unknown one counts as a recent one.
Bytes CublasWorkspaceBytes(std::string_view device);

}  // namespace shardplan::internal
