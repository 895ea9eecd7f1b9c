// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <cstdlib>
#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <utility>

#include "shardplan/executor/backends.h"
#include "tests/executor/rank_backend.h"

namespace shardplan::test {
namespace {

constexpr std::chrono::milliseconds kTimeout{60'000};

class CudaRankBackends final : public RankBackends {
 public:
  CudaRankBackends(std::int64_t rank, std::int64_t ranks, const std::string& file,
                   std::shared_ptr<executor::Peers> peers)
      : rank_(rank),
        ranks_(ranks),
        store_(c10::make_intrusive<c10d::FileStore>(file, static_cast<int>(ranks))),
        peers_(std::move(peers)) {
    // NCCL takes ranks that share a GPU for ranks of several hosts. It reads this when CUDA begins.
    (void)setenv("NCCL_HOSTID", fmt::format("shardplan-{}", rank).c_str(), 1);
  }

  Result<RankBackend> Make(const Plan&, executor::MemorySource memory, const std::string& name) override {
    const int gpu = static_cast<int>(rank_) % std::max(1, executor::CudaDeviceCount());
    auto device = executor::MakeCudaDevice(gpu, memory);
    if (!device) return std::unexpected(device.error());
    auto collectives = executor::MakeNcclCollectives(
        **device, {kTimeout, c10::make_intrusive<c10d::PrefixStore>(name, store_), ranks_, peers_});
    if (!collectives) return std::unexpected(collectives.error());
    return RankBackend{std::move(*device), std::move(*collectives)};
  }

 private:
  const std::int64_t rank_;
  const std::int64_t ranks_;
  c10::intrusive_ptr<c10d::Store> store_;
  std::shared_ptr<executor::Peers> peers_;
};

}  // namespace

std::unique_ptr<RankBackends> MakeRankBackends(std::int64_t rank, std::int64_t ranks, const std::string& file,
                                               std::shared_ptr<executor::Peers> peers) {
  return std::make_unique<CudaRankBackends>(rank, ranks, file, std::move(peers));
}

std::string BackendName() { return "cuda"; }

std::string WhyNot() {
  std::string reason;
  return executor::CudaIsAvailable(&reason) ? std::string() : "no GPU: " + reason;
}

}  // namespace shardplan::test
