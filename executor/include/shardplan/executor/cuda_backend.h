// SPDX-License-Identifier: Apache-2.0
// The cuda backend: CUDA streams and events, LibTorch's caching allocator, NCCL communicators of its own.
#pragma once

#include <chrono>
#include <memory>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

#include "shardplan/executor/allocation_count.h"
#include "shardplan/executor/arena.h"
#include "shardplan/executor/collectives.h"
#include "shardplan/executor/peers.h"
#include "shardplan/executor/torch_device.h"
#include "shardplan/executor/ways.h"

namespace shardplan::executor {

// True if a GPU can be used; otherwise `reason` (may be null) says why not.
bool CudaIsAvailable(std::string* reason);
// 0: none can be used.
int CudaDeviceCount();

// streams[0] of the plan is the current CUDA stream of the calling thread when the replayer is made (where
// the model computes); the others are taken from LibTorch's pool, high priority where the plan says priority
// < 0. Waiting, recording and freeing follow the plan alone. kEnvironment: no such GPU. memory: an arena is
// NCCL's memory (ncclMemAlloc) where that is to be had, and MakeNcclCollectives registers it with every
// communicator.
Result<std::unique_ptr<TorchDevice>> MakeCudaDevice(int device_index,
                                                    MemorySource memory = MemorySource::kAllocator);

// What is allocated on that GPU, by everybody in the process: one count for each, which is kept from the
// first call on. Null: there is no such GPU.
std::shared_ptr<AllocationCount> CudaAllocations(int device_index);

struct NcclOptions {
  std::chrono::milliseconds timeout{600'000};
  // Ranks exchange NCCL's ids through it and, when one fails, tell how far they came. Required.
  c10::intrusive_ptr<c10d::Store> store;
  std::int64_t world_size = 1;
  std::shared_ptr<Peers> peers = nullptr;  // which ranks are alive; null: nobody knows
  std::vector<std::int64_t> names = {};    // of the plan's ranks in errors; empty: the same numbers
  std::shared_ptr<Ways> ways = nullptr;    // whether others leave the plan; null: nobody says so
};

// Communicators are made in Prepare, without blocking, within the timeout. Sub-communicators are split off
// the world's. A watchdog thread aborts them all when a collective does not finish in time.
Result<std::unique_ptr<Collectives>> MakeNcclCollectives(TorchDevice& device, NcclOptions options);

}  // namespace shardplan::executor
