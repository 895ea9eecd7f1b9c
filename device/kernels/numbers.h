// SPDX-License-Identifier: Apache-2.0
// Numbers where nothing computes.
//
// [Note: known numbers]
// In null mode bulk arithmetic is empty, and what the host reads is real: integers and truth values up to a
// size (token ids, counts of tokens, splits, offsets, lengths), and few floats (a loss scale, a step count).
// A tensor of such a kind and size is known. Results of known tensors alone are computed by the host's
// kernel, and are known, too, if they are of floats: they are remembered by their storage. Results of empty
// numbers are settled as if those were 0. An index is a valid one, spread evenly (routers of experts choose
// by topk).
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <cstdint>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "device/runtime/known_memory.h"

namespace shardplan::softdevice {

constexpr std::int64_t kRememberedFloats = std::int64_t{1} << 22;

bool IsKnown(const at::Tensor& tensor);
bool AreAllKnown(std::span<const c10::IValue> values);

// Floats of a storage of their own, not too many.
bool CanRemember(const at::Tensor& tensor);
// From the first call on, memory that is freed is forgotten (ForgetMemory). The allocator has to be there.
void WatchFrees();
// They are known until their memory is freed.
void Remember(const at::Tensor& tensor);

// Known floats of the values that are not a number become 0: a script that looks at its loss goes on.
void MakeFinite(std::span<const c10::IValue> values);

// Zeros for the known ones of the values. No work of a stream: it is there at once.
void Zero(const c10::IValue& value);
// The same, with the truth values that the operator gives where all its floats are 0.
void SettleTruth(const c10::OperatorHandle& op, const c10::Stack& arguments, const c10::IValue& value);

// [Note: routing]
// The experts of a token are distinct, and over the tokens each expert has its share: token t takes the
// experts where the running sum of the shares passes t/T, t/T + 1, ... (systematic sampling). Without a
// histogram the shares are equal.
class Routing {
 public:
  // `shares`: of the experts, any scale; a share of more than 1/k of a token's k is cut. Empty: balanced.
  explicit Routing(std::vector<double> shares) : shares_(std::move(shares)) {}
  // SHARDPLAN_DEVICE_ROUTING names a file of numbers, one a line or separated by commas. Read once.
  static const Routing& Get();
  // rows x k indices below `experts`, one row after the other.
  std::vector<std::int64_t> Choose(std::int64_t rows, std::int64_t k, std::int64_t experts) const;

 private:
  std::vector<double> shares_;
};

// Operators that give indices: the returned value that holds them. Nothing: others.
std::optional<std::size_t> IndexResult(std::string_view op_name);
// Writes valid indices to `indices`, which an operator of that name gives for floats of `input`'s shape.
void SpreadIndices(const c10::OperatorHandle& op, const c10::Stack& arguments, const at::Tensor& indices);

}  // namespace shardplan::softdevice
