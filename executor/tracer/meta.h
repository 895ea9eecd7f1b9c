// SPDX-License-Identifier: Apache-2.0
// Operators on the meta device, whose tensors have shapes and no memory.
//
// [Note: the meta device without Python]
// LibTorch has kernels for the meta device where shapes come from the operator's structure. The rest are in
// Python (torch/_meta_registrations.py), among them embeddings, norms and attention. Here those of a
// transformer have their shapes, as the CPU's kernels allocate them. Every other one without a kernel runs on
// the CPU, on zeros that are freed behind it: right in shape, at the cost of that operator's memory and time.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include "shardplan/executor/trace_recorder.h"

namespace shardplan::executor {

// CallBelow for tensors of any device. kernels: whose shapes those on the meta device have.
void CallOnAnyDevice(const c10::OperatorHandle& op, torch::jit::Stack& stack, RecordedKernels kernels);

}  // namespace shardplan::executor
