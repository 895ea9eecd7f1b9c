// SPDX-License-Identifier: Apache-2.0
// Copies of a plan of resharding between storages and staging memory.
#pragma once

#include <ATen/core/Tensor.h>

#include "shardplan/schemas/reshard.h"

namespace shardplan::executor {

// Bytes from the begin of a storage to the end of what the copy reads (is_source) or writes there.
std::int64_t EndOf(const ReshardCopy& copy, bool is_source);

// On the current stream. To `staging`, at byte `at`, one run behind the other; and from there.
void Pack(const at::Tensor& source, const ReshardCopy& copy, const at::Tensor& staging, std::int64_t at);
void Unpack(const at::Tensor& staging, std::int64_t at, const ReshardCopy& copy, const at::Tensor& target);
// Moves a copy that stays on the rank.
void Move(const at::Tensor& source, const ReshardCopy& copy, const at::Tensor& target);

}  // namespace shardplan::executor
