// SPDX-License-Identifier: Apache-2.0
#include "cuda/nccl_communicators.h"

#include <c10/cuda/CUDAGuard.h>
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <exception>
#include <thread>

#include "torch/arrivals.h"

namespace shardplan::executor {
namespace {

using Clock = std::chrono::steady_clock;

}  // namespace

void NcclCommunicators::Prepare(const Plan& plan, std::int64_t rank) {
  plan_ = &plan;
  rank_ = rank;
  communicators_.assign(plan.communicators.size(), nullptr);
}

// Non-blocking NCCL calls go on in the background.
Status NcclCommunicators::WaitUntilReady(ncclComm_t communicator, const char* what) {
  const auto deadline = Clock::now() + options_.timeout;
  ncclResult_t state = ncclInProgress;
  while (true) {
    const ncclResult_t asked = ncclCommGetAsyncError(communicator, &state);
    if (asked != ncclSuccess) state = asked;
    if (state != ncclInProgress || Clock::now() >= deadline) break;
    if (options_.peers && options_.peers->Dead()) break;
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
  if (state == ncclSuccess) return {};
  const std::string absent = AwaitCulprit(options_.peers.get(), kPatience);
  const char* reason = state != ncclInProgress ? ncclGetErrorString(state)
                       : absent.empty()        ? "timed out"
                                               : absent.c_str();
  return MakeError(ErrorCode::kEnvironment, fmt::format("{}: {} (rank {})", what, reason, rank_));
}

Status NcclCommunicators::MakeWorld() {
  c10::cuda::CUDAGuard guard(static_cast<c10::DeviceIndex>(device_.index()));
  ncclUniqueId id;
  try {
    const std::string key = "shardplan/nccl_id";
    if (rank_ == 0) {
      if (ncclGetUniqueId(&id) != ncclSuccess) return MakeError(ErrorCode::kEnvironment, "NCCL gives no id");
      const auto* bytes = reinterpret_cast<const std::uint8_t*>(id.internal);
      options_.store->set(key, std::vector<std::uint8_t>(bytes, bytes + sizeof(id.internal)));
    } else {
      options_.store->wait({key}, options_.timeout);
      const std::vector<std::uint8_t> bytes = options_.store->get(key);
      std::memcpy(id.internal, bytes.data(), std::min(bytes.size(), sizeof(id.internal)));
    }
  } catch (const std::exception& exception) {
    return MakeError(ErrorCode::kEnvironment, fmt::format("NCCL's id did not arrive: {}", exception.what()));
  }
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = 0;
  const ncclResult_t result = ncclCommInitRankConfig(&world_, static_cast<int>(options_.world_size), id,
                                                     static_cast<int>(rank_), &config);
  if (result != ncclSuccess && result != ncclInProgress) {
    return MakeError(ErrorCode::kEnvironment,
                     fmt::format("making a NCCL communicator: {}", ncclGetErrorString(result)));
  }
  return WaitUntilReady(world_, "making the world's NCCL communicator");
}

// The first communicator of all ranks is the world's; the others are split off it.
Status NcclCommunicators::Make(CommunicatorId id) {
  if (communicators_[id] != nullptr) return {};
  const bool fresh = world_ == nullptr;
  if (fresh) {
    if (Status status = MakeWorld(); !status) return status;
  }
  const Communicator& communicator = plan_->communicators[id];
  if (fresh && communicator.size == options_.world_size) {
    communicators_[id] = world_;
    RegisterArena(world_);
    return {};
  }
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = 0;
  const auto color = static_cast<int>(GroupOf(communicator, rank_).front());
  const auto key = static_cast<int>(RankInGroup(communicator, rank_));
  const ncclResult_t result = ncclCommSplit(world_, color, key, &communicators_[id], &config);
  if (result != ncclSuccess && result != ncclInProgress) {
    return MakeError(ErrorCode::kEnvironment,
                     fmt::format("splitting a NCCL communicator: {}", ncclGetErrorString(result)));
  }
  if (Status status = WaitUntilReady(world_, "splitting the world's NCCL communicator"); !status)
    return status;
  if (Status status = WaitUntilReady(communicators_[id], "making a NCCL communicator"); !status)
    return status;
  RegisterArena(communicators_[id]);
  return {};
}

// NCCL may then read and write the arena without staging. It need not allow it: an optimisation.
void NcclCommunicators::RegisterArena(ncclComm_t communicator) {
  const at::Tensor& arena = device_.arena();
  if (!arena.defined() || arena.numel() == 0) return;
  void* handle = nullptr;
  const ncclResult_t result = ncclCommRegister(communicator, arena.mutable_data_ptr(),
                                               static_cast<std::size_t>(arena.numel()), &handle);
  if (result == ncclSuccess && handle != nullptr) registered_.emplace_back(communicator, handle);
}

std::optional<std::string> NcclCommunicators::IsBroken() const {
  for (ncclComm_t communicator : communicators_) {
    ncclResult_t state = ncclSuccess;
    if (communicator != nullptr) (void)ncclCommGetAsyncError(communicator, &state);
    if (state != ncclSuccess && state != ncclInProgress) return ncclGetErrorString(state);
  }
  return std::nullopt;
}

void NcclCommunicators::Abort() {
  for (ncclComm_t communicator : communicators_) {
    if (communicator != nullptr && communicator != world_) (void)ncclCommAbort(communicator);
  }
  if (world_ != nullptr) (void)ncclCommAbort(world_);
}

void NcclCommunicators::DestroyOne(ncclComm_t communicator) {
  if (communicator == nullptr) return;
  for (const auto& [of, handle] : registered_) {
    if (of == communicator) (void)ncclCommDeregister(communicator, handle);
  }
  const ncclResult_t result = ncclCommFinalize(communicator);
  const bool begun = result == ncclSuccess || result == ncclInProgress;
  if (begun && WaitUntilReady(communicator, "ending a NCCL communicator")) {
    (void)ncclCommDestroy(communicator);
  } else {
    (void)ncclCommAbort(communicator);
  }
}

void NcclCommunicators::Destroy() {
  for (ncclComm_t communicator : communicators_) {
    if (communicator != world_) DestroyOne(communicator);
  }
  DestroyOne(world_);
}

}  // namespace shardplan::executor
