// SPDX-License-Identifier: Apache-2.0
// CPU memory that a count knows of until it is freed.
#pragma once

#include <c10/core/Allocator.h>

#include <cstdint>
#include <memory>

#include "shardplan/executor/allocation_count.h"

namespace shardplan::executor {

// `bytes` of memory: allocated now, freed when the result is.
c10::DataPtr Counted(c10::DataPtr memory, std::int64_t bytes, std::shared_ptr<AllocationCount> count);

}  // namespace shardplan::executor
