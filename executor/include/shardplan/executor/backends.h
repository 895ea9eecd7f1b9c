// SPDX-License-Identifier: Apache-2.0
// The backends on LibTorch, one process per rank. cpu: CPU tensors, collectives through c10d process groups
// (Gloo). cuda: CUDA streams and events, LibTorch's caching allocator, NCCL communicators of its own.
#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

#include "shardplan/executor/collectives.h"
#include "shardplan/executor/device.h"
#include "shardplan/executor/peers.h"
#include "shardplan/executor/torch_device.h"

namespace shardplan::executor {

// ---- cpu ----

// Work runs at once on the calling thread, in host order; collectives run in the background and are waited
// for where the plan waits for an event recorded after them (or where their stream is next used).
std::unique_ptr<TorchDevice> MakeCpuDevice(MemorySource memory = MemorySource::kAllocator);

// From the first call on, what the calling thread allocates for CPU tensors is counted: it trains, and calls
// this before there are any. Memory inside a collective (Gloo's threads, a divided copy) is outside, as
// NCCL's buffers are. Every call gives the same count. Allocations cost an atomic addition more.
std::shared_ptr<AllocationCount> CountCpuAllocations();
// Null where nobody has called CountCpuAllocations.
std::shared_ptr<AllocationCount> CpuAllocations();

struct ProcessGroupOptions {
  // By CommunicatorId: the group of this rank's process that the communicator stands for, its ranks in the
  // order of the communicator. Null where the size is 1.
  std::vector<c10::intrusive_ptr<c10d::ProcessGroup>> groups;
  std::chrono::milliseconds timeout{600'000};
  // Side channel through which ranks tell how far they came; null: errors do not say who did not arrive.
  c10::intrusive_ptr<c10d::Store> store;
  std::shared_ptr<Peers> peers = nullptr;  // which of them are alive; null: nobody knows
  std::vector<std::int64_t> names = {};    // of the plan's ranks in errors; empty: the same numbers
  // Whether others leave the plan; null: nobody says so.
  std::shared_ptr<DeviationConsensus> consensus = nullptr;
};

// `device` is the cpu device of the same replayer and outlives it.
std::unique_ptr<Collectives> MakeProcessGroupCollectives(TorchDevice& device, ProcessGroupOptions options);

struct GlooOptions {
  c10::intrusive_ptr<c10d::Store> store;  // that all ranks share
  // The address at which other ranks reach this machine. "": that of GLOO_SOCKET_IFNAME, or of the host name,
  // as torch.distributed chooses it.
  std::string address = "127.0.0.1";
  std::chrono::milliseconds timeout{600'000};
  std::shared_ptr<Peers> peers = nullptr;  // which ranks are alive; null: nobody knows
};
// A Gloo group for each communicator of more than one rank, by CommunicatorId (for
// ProcessGroupOptions::groups). Blocks until all members are there. kEnvironment when they do not come within
// the timeout; kBadInput as CheckCommunicators.
Result<std::vector<c10::intrusive_ptr<c10d::ProcessGroup>>> MakeGlooGroups(const Plan& plan,
                                                                           std::int64_t rank,
                                                                           const GlooOptions& options);

// ---- cuda ----

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

// The count of allocations on that GPU, by everybody in the process: one for each GPU, which is kept from the
// first call on. Null: there is no such GPU.
std::shared_ptr<AllocationCount> CudaAllocations(int device_index);

struct NcclOptions {
  std::chrono::milliseconds timeout{600'000};
  // Ranks exchange NCCL's ids through it and, when one fails, tell how far they came. Required.
  c10::intrusive_ptr<c10d::Store> store;
  std::int64_t world_size = 1;
  std::shared_ptr<Peers> peers = nullptr;  // which ranks are alive; null: nobody knows
  std::vector<std::int64_t> names = {};    // of the plan's ranks in errors; empty: the same numbers
  // Whether others leave the plan; null: nobody says so.
  std::shared_ptr<DeviationConsensus> consensus = nullptr;
};

// Communicators are made in Prepare, without blocking, within the timeout. Sub-communicators are split off
// the world's. A watchdog thread aborts them all when a collective does not finish in time.
Result<std::unique_ptr<Collectives>> MakeNcclCollectives(TorchDevice& device, NcclOptions options);

}  // namespace shardplan::executor
