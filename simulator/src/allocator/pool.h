// SPDX-License-Identifier: Apache-2.0
// A pool of the caching allocator.
#pragma once

#include <vector>

#include "allocator/free_block_list.h"
#include "shardplan/simulator/caching_allocator.h"

namespace shardplan {

// Free and unmapped blocks of one stream and size class.
struct CachingAllocator::Pool {
  FreeBlockList free;
  std::vector<BlockId> unmapped;  // by address
};

}  // namespace shardplan
