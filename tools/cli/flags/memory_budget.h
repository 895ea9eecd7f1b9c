// SPDX-License-Identifier: Apache-2.0
// Flags of commands that ask whether a plan fits (docs/reference/memory.md).
#pragma once

#include <initializer_list>
#include <optional>
#include <string>
#include <string_view>

#include "shardplan/schemas/error.h"
#include "shardplan/schemas/quantity.h"

namespace shardplan::cli {

struct Suffix {
  std::string_view name;
  std::int64_t factor;
};

// "60GiB" by a table of suffixes; nullopt: not a number from 1 on, or too large.
std::optional<std::int64_t> WithSuffix(std::string_view text, std::initializer_list<Suffix> suffixes);

// The bytes that the caching allocator may reserve. nullopt: `device`, or "": the memory of the cluster's
// device beside context and NCCL's buffers. kUsage: neither bytes nor `device`.
Result<std::optional<Bytes>> ParseMemoryBudget(const std::string& text);

inline constexpr const char* kAllocConfWords =
    "Settings of the caching allocator, as PYTORCH_CUDA_ALLOC_CONF has them: expandable_segments:True,...";
inline constexpr const char* kMemoryBudgetWords =
    "What the caching allocator may reserve on a rank: 60GiB, 80GB, or device: what the cluster's has beside "
    "context and NCCL's buffers";

}  // namespace shardplan::cli
