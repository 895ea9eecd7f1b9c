// SPDX-License-Identifier: Apache-2.0
#include <ATen/Parallel.h>
#include <fmt/format.h>

#include <map>
#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <utility>
#include <vector>

#include "shardplan/executor/backends.h"
#include "tests/executor/rank_backend.h"

namespace shardplan::test {
namespace {

constexpr std::chrono::milliseconds kTimeout{60'000};

class CpuRankBackends final : public RankBackends {
 public:
  CpuRankBackends(std::int64_t rank, std::int64_t ranks, const std::string& file,
                  std::shared_ptr<executor::Peers> peers)
      : rank_(rank),
        store_(c10::make_intrusive<c10d::FileStore>(file, static_cast<int>(ranks))),
        peers_(std::move(peers)) {
    at::set_num_threads(1);
  }

  Result<RankBackend> Make(const Plan& plan, executor::MemorySource memory,
                           const std::string& name) override {
    const auto groups = GroupsOf(plan);
    if (!groups) return std::unexpected(groups.error());
    RankBackend backend;
    backend.device = executor::MakeCpuDevice(memory);
    backend.collectives = executor::MakeProcessGroupCollectives(
        *backend.device, {*groups, kTimeout, c10::make_intrusive<c10d::PrefixStore>(name, store_), peers_});
    return backend;
  }

 private:
  using Groups = std::vector<c10::intrusive_ptr<c10d::ProcessGroup>>;

  // Plans whose communicators are the same ranks share the groups.
  Result<Groups> GroupsOf(const Plan& plan) {
    std::string layout;
    for (const Communicator& communicator : plan.communicators) {
      layout += fmt::format("{}x{}", communicator.size, communicator.stride);
      for (const CommunicatorDim& dim : communicator.dims)
        layout += fmt::format(",{}x{}", dim.size, dim.stride);
      layout += ";";
    }
    const auto known = groups_.find(layout);
    if (known != groups_.end()) return known->second;
    executor::GlooOptions options;
    options.store = c10::make_intrusive<c10d::PrefixStore>(layout, store_);
    options.timeout = kTimeout;
    options.peers = peers_;
    Result<Groups> groups = executor::MakeGlooGroups(plan, rank_, options);
    if (groups) groups_[layout] = *groups;
    return groups;
  }

  const std::int64_t rank_;
  c10::intrusive_ptr<c10d::Store> store_;
  std::shared_ptr<executor::Peers> peers_;
  std::map<std::string, Groups> groups_;  // by the layout of the communicators
};

}  // namespace

std::unique_ptr<RankBackends> MakeRankBackends(std::int64_t rank, std::int64_t ranks, const std::string& file,
                                               std::shared_ptr<executor::Peers> peers) {
  return std::make_unique<CpuRankBackends>(rank, ranks, file, std::move(peers));
}

std::string BackendName() { return "cpu"; }

std::string WhyNot() { return {}; }

}  // namespace shardplan::test
