// SPDX-License-Identifier: Apache-2.0
// The cost of one dispatched operator: FLOPs, bytes read and written. The rules of the tracer
// (tools/python/shardplan/tracer/operators.py) for C++; a test compares both tables, and recordings of both.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <c10/util/ArrayRef.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "shardplan/schemas/dtype.h"

namespace shardplan::executor {

// torch's name; a type that documents have no name for is given as an integer of its size.
DType ToDType(at::ScalarType type);

// The tensors in a value, in order: lists, tuples and dictionaries are looked into. A number that torch has
// wrapped in a tensor is none.
void TensorsIn(const c10::IValue& value, std::vector<at::Tensor>& into);
std::vector<at::Tensor> TensorsIn(c10::ArrayRef<c10::IValue> values);

// Bytes of the elements of a view, an expanded dimension counted once.
std::int64_t TouchedBytes(const at::Tensor& tensor);
// Whether the elements fill a block without gaps or overlaps, in some order of the dimensions.
bool IsDense(const at::Tensor& tensor);

// Facts of an operator before its arguments.
struct OperatorKind {
  explicit OperatorKind(const c10::OperatorHandle& op);

  std::string name;             // "aten.mm"
  std::string base;             // "mm"
  bool allocates_only = false;  // storage without a kernel
  bool is_mutable = false;
  std::vector<std::size_t> written;  // arguments that it writes to
  std::size_t positional = 0;        // arguments that may be given by position; they come first
};

struct ReadTensor {
  at::Tensor tensor;
  std::int64_t read_bytes = 0;
};

// The tensor arguments that are read, in order.
std::vector<ReadTensor> ReadTensors(const OperatorKind& kind, c10::ArrayRef<c10::IValue> arguments,
                                    const std::vector<at::Tensor>& outputs);
std::vector<at::Tensor> WrittenArguments(const OperatorKind& kind, c10::ArrayRef<c10::IValue> arguments);

// FLOPs of matrix products, convolutions, attention and recurrent layers; 0 of everything else.
std::int64_t Flops(const OperatorKind& kind, c10::ArrayRef<c10::IValue> arguments,
                   c10::ArrayRef<c10::IValue> results);

// That of the floating input with the most elements (statistics and scalars do not decide); without one of
// such an output; else the first tensor's. One of the lists is not empty.
DType ArithmeticDType(const std::vector<at::Tensor>& inputs, const std::vector<at::Tensor>& outputs);

// "table operator position ..." a line, sorted: for the test that compares them with the tracer's.
std::string OperatorTables();

}  // namespace shardplan::executor
