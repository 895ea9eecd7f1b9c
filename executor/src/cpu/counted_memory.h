// SPDX-License-Identifier: Apache-2.0
// CPU memory that a count knows of until it is freed.
#pragma once

#include <c10/core/Allocator.h>

#include <cstdint>
#include <memory>

#include "shardplan/executor/device.h"

namespace shardplan::executor {

// `bytes` of memory: allocated now, freed when the result is.
c10::DataPtr Counted(c10::DataPtr memory, std::int64_t bytes, std::shared_ptr<AllocationCount> count);

// While it lives, what this thread allocates is not counted (CountCpuAllocations): a backend's own memory.
class Uncounted {
 public:
  Uncounted();
  ~Uncounted();
  Uncounted(const Uncounted&) = delete;
  Uncounted& operator=(const Uncounted&) = delete;
};

}  // namespace shardplan::executor
