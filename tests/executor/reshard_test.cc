// SPDX-License-Identifier: Apache-2.0
// Plans of resharding on a backend with a process for each rank, judged by the naive oracle: random layouts
// to random layouts and back, ranks that have another plan, that die, that cannot take part. SHARDPLAN_SEED=n
// runs that seed alone.
#include "shardplan/checkpoints/reshard.h"

#include <ATen/ops/empty.h>
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <optional>
#include <random>
#include <string>
#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <utility>
#include <vector>

#include "shardplan/executor/checkpoints.h"
#include "tests/executor/forked_ranks.h"
#include "tests/executor/rank_backend.h"
#include "tests/schemas/checkpoints/naive_reshard.h"

namespace shardplan::test {
namespace {

using testing::Each;
using ::testing::HasSubstr;
using testing::IsEmpty;

constexpr std::int64_t kProcesses = 4;
constexpr int kPatienceS = 90;
constexpr std::uint64_t kSeeds = 60;
constexpr std::chrono::milliseconds kReshardTimeout{20'000};

// One process's side.
class ReshardProcess {
 public:
  ReshardProcess(std::int64_t rank, std::int64_t ranks, const std::string& file)
      : rank_(rank),
        world_(executor::ExchangePlan(ranks)),
        store_(c10::make_intrusive<c10d::FileStore>(file + "-agreement", static_cast<int>(ranks))),
        peers_(std::make_shared<executor::Peers>(executor::PeersOptions{
            .store = c10::make_intrusive<c10d::PrefixStore>("peers", store_), .rank = rank, .ranks = ranks})),
        backends_(MakeRankBackends(rank, ranks, file, peers_)) {
    Result<RankBackend> backend = backends_->Make(world_, executor::MemorySource::kAllocator, "reshard");
    if (backend) backend_ = std::move(*backend);
    failure_ = backend ? "" : ToString(backend.error());
    if (failure_.empty() && !backend_.device->Prepare(world_)) failure_ = "no device";
    if (failure_.empty() && !backend_.collectives->Prepare(world_, rank)) failure_ = "no collectives";
  }

  const std::string& failure() const { return failure_; }
  at::Tensor ToDevice(const std::vector<std::uint8_t>& bytes) const {
    at::Tensor tensor = at::empty({std::ssize(bytes)}, at::kByte);
    if (!bytes.empty()) std::memcpy(tensor.data_ptr(), bytes.data(), bytes.size());
    return tensor.to(backend_.device->torch_device());
  }
  static std::vector<std::uint8_t> ToHost(const at::Tensor& tensor) {
    const at::Tensor host = tensor.cpu();
    const auto* bytes = static_cast<const std::uint8_t*>(host.data_ptr());
    return {bytes, bytes + host.numel()};
  }

  // Moves `from` into `to`, on the device. The error, or nothing.
  std::string Move(const ReshardPlan& plan, const RankStorage& from, RankStorage& to,
                   executor::ReshardRun run = {}) {
    std::map<std::string, at::Tensor> sources, targets;
    for (const auto& [name, bytes] : from) sources.emplace(name, ToDevice(bytes));
    for (const auto& [name, bytes] : to) targets.emplace(name, ToDevice(bytes));
    const auto storages = [](const StateLayout& layout, const std::map<std::string, at::Tensor>& of) {
      return [&layout, &of](const StateTensor& tensor) {
        const auto found = of.find(tensor.flat < 0 ? tensor.name : "flat " + layout.flats[tensor.flat].name);
        return found == of.end() ? at::Tensor() : found->second;
      };
    };
    run.store = c10::make_intrusive<c10d::PrefixStore>(fmt::format("{}", runs_++), store_);
    run.peers = peers_;
    run.timeout = kReshardTimeout;
    const auto moved =
        executor::ExecuteReshard(plan, rank_, *backend_.device, *backend_.collectives,
                                 storages(plan.source, sources), storages(plan.target, targets), run);
    for (auto& [name, bytes] : to) bytes = ToHost(targets.at(name));
    if (!moved) return ToString(moved.error());
    if (moved->staging_bytes > plan.budget_bytes.value)
      return fmt::format("{} bytes of staging, with a budget of {}", moved->staging_bytes,
                         plan.budget_bytes.value);
    return {};
  }

 private:
  const std::int64_t rank_;
  const Plan world_;
  c10::intrusive_ptr<c10d::Store> store_;
  std::shared_ptr<executor::Peers> peers_;
  std::unique_ptr<RankBackends> backends_;
  RankBackend backend_;
  std::string failure_;
  int runs_ = 0;
};

// A plan between random layouts, where all processes are needed.
std::optional<std::pair<StateLayout, StateLayout>> LayoutsOf(std::uint64_t seed, std::mt19937_64& random) {
  random.seed(seed);
  const RandomTensors tensors = MakeTensors(random);
  for (int attempt = 0; attempt < 200; ++attempt) {
    const StateLayout source = MakeLayout(tensors, random);
    const StateLayout target = MakeLayout(tensors, random);
    if (std::max(RanksOf(source), RanksOf(target)) == kProcesses) return std::pair(source, target);
  }
  return std::nullopt;
}

// There and back; what is wrong.
std::string ThereAndBack(std::uint64_t seed, std::int64_t rank, ReshardProcess& process) {
  std::mt19937_64 random;
  const auto layouts = LayoutsOf(seed, random);
  if (!layouts) return "no layouts of so many ranks";
  const auto& [source, target] = *layouts;
  ReshardOptions options;
  options.budget_bytes = Bytes{kLeastReshardBudget};
  options.ranks_per_node = 1 + static_cast<std::int64_t>(random() % 4);
  const Result<ReshardPlan> there = PlanReshard(source, target, options);
  const Result<ReshardPlan> back = PlanReshard(target, source, options);
  if (!there || !back) return "cannot be planned";
  const auto of_rank = [rank](const NaiveState& state) {
    return rank < std::ssize(state) ? state[static_cast<std::size_t>(rank)] : RankStorage();
  };
  RankStorage moved = of_rank(EmptyIn(target));
  if (std::string wrong = process.Move(*there, of_rank(StateIn(source)), moved); !wrong.empty()) return wrong;
  if (moved != of_rank(StateIn(target))) return "other bytes than the oracle's";
  RankStorage again = of_rank(EmptyIn(source));
  if (std::string wrong = process.Move(*back, moved, again); !wrong.empty()) return wrong;
  return again == of_rank(StateIn(source)) ? "" : "other bytes on the way back";
}

class ReshardOnRanks : public ::testing::Test {
 protected:
  void SetUp() override {
    file_ = (std::filesystem::temp_directory_path() / fmt::format("shardplan-reshard-{}", getpid())).string();
    std::string reason;
    const ForkedRun asked = RunForked(1, kPatienceS, [](std::int64_t, const Log& log) {
      log(WhyNot());
      return true;
    });
    if (!asked.lines.empty() && !asked.lines.front().empty()) GTEST_SKIP() << asked.lines.front();
  }
  void TearDown() override {
    std::filesystem::remove(file_);
    std::filesystem::remove(file_ + "-agreement");
  }

  // Work of a rank whose process is ready; its lines are what it says.
  ForkedRun OnRanks(
      std::int64_t ranks,
      const std::function<std::string(std::int64_t rank, ReshardProcess& process)>& work) const {
    return RunForked(ranks, kPatienceS, [&](std::int64_t rank, const Log& log) {
      ReshardProcess process(rank, ranks, file_);
      const std::string said = process.failure().empty() ? work(rank, process) : process.failure();
      log(said);
      return true;
    });
  }

  std::string file_;
};

TEST_F(ReshardOnRanks, RandomLayoutsToRandomLayoutsAndBackGiveTheSameBytes) {
  const char* only = std::getenv("SHARDPLAN_SEED");
  const std::uint64_t first = only == nullptr ? 1 : std::strtoull(only, nullptr, 10);
  const std::uint64_t last = only == nullptr ? kSeeds : first;
  const ForkedRun run = OnRanks(kProcesses, [&](std::int64_t rank, ReshardProcess& process) -> std::string {
    for (std::uint64_t seed = first; seed <= last; ++seed) {
      const std::string wrong = ThereAndBack(seed, rank, process);
      if (!wrong.empty()) return fmt::format("SHARDPLAN_SEED={}: rank {}: {}", seed, rank, wrong);
    }
    return "";
  });
  EXPECT_THAT(run.faults, IsEmpty());
  EXPECT_EQ(run.lines, std::vector<std::string>(kProcesses, ""));
}

// Rows of a tensor, 4 bytes an element, on so many ranks.
StateLayout Rows(std::int64_t ranks, std::int64_t rows) {
  return {.name = "",
          .mesh = {{"shard", ranks}},
          .flats = {},
          .tensors = {{.name = "w", .shape = {rows, 16}, .splits = {{{"shard"}, 0}}}}};
}

TEST_F(ReshardOnRanks, ManyRoundsStayWithinTheBudgetAndTellHowFarTheyAre) {
  const StateLayout source = Rows(2, 999);
  StateLayout target = Rows(2, 999);
  target.tensors[0].splits[0].tensor_dim = 1;
  const Result<ReshardPlan> plan = PlanReshard(source, target, {.budget_bytes = Bytes{kLeastReshardBudget}});
  ASSERT_TRUE(plan.has_value());
  const ForkedRun run = OnRanks(2, [&](std::int64_t rank, ReshardProcess& process) -> std::string {
    std::vector<std::int64_t> done;
    std::int64_t total = 0;
    executor::ReshardRun how;
    how.progress = [&](std::int64_t done_bytes, std::int64_t total_bytes) {
      done.push_back(done_bytes);
      total = total_bytes;
    };
    RankStorage moved = EmptyIn(target)[rank];
    const std::string wrong = process.Move(*plan, StateIn(source)[rank], moved, how);
    if (!wrong.empty()) return wrong;
    const bool grows = std::ranges::is_sorted(done) && done.size() >= 8 && done.back() == total;
    return moved == StateIn(target)[rank] && grows ? "good" : "wrong";
  });
  EXPECT_EQ(run.lines, std::vector<std::string>(2, "good"));
}

TEST_F(ReshardOnRanks, RanksWithDifferentPlansAreTold) {
  const ForkedRun run = OnRanks(2, [&](std::int64_t rank, ReshardProcess& process) {
    const StateLayout layout = Rows(2, rank == 0 ? 8 : 9);
    RankStorage target = EmptyIn(layout)[rank];
    return process.Move(*PlanReshard(layout, layout), StateIn(layout)[rank], target);
  });
  EXPECT_EQ(run.lines.size(), 2U);
  EXPECT_THAT(run.lines, Each(HasSubstr("the plan of resharding differs")));
}

TEST_F(ReshardOnRanks, AStorageThatIsTooSmallIsTheErrorOfAll) {
  const StateLayout source = Rows(2, 8), target = Rows(1, 8);
  const Result<ReshardPlan> plan = PlanReshard(source, target);
  const ForkedRun run = OnRanks(2, [&](std::int64_t rank, ReshardProcess& process) {
    RankStorage from = StateIn(source)[rank];
    if (rank == 1) from["w"].resize(100);
    RankStorage to = rank == 0 ? EmptyIn(target)[0] : RankStorage();
    return process.Move(*plan, from, to);
  });
  EXPECT_EQ(run.lines.size(), 2U);
  EXPECT_THAT(run.lines,
              Each(HasSubstr("the storage of w in the source has 100 bytes, and the plan reads 256")));
}

TEST_F(ReshardOnRanks, APlanThatDoesNotVerifyIsExecutedNowhere) {
  const StateLayout source = Rows(2, 8), target = Rows(1, 8);
  Result<ReshardPlan> plan = PlanReshard(source, target);
  plan->groups[0].copies.pop_back();
  const ForkedRun run = OnRanks(2, [&](std::int64_t rank, ReshardProcess& process) {
    RankStorage to = rank == 0 ? EmptyIn(target)[0] : RankStorage();
    return process.Move(*plan, StateIn(source)[rank], to);
  });
  EXPECT_EQ(run.lines.size(), 2U);
  EXPECT_THAT(run.lines, Each(HasSubstr("does not verify")));
}

// In the midst of it, without a word.
TEST_F(ReshardOnRanks, ARankThatDiesInTheMidstIsNamedByTheOthersAtOnce) {
  const StateLayout source = Rows(3, 999);
  StateLayout target = Rows(3, 999);
  target.tensors[0].splits[0].tensor_dim = 1;
  const Result<ReshardPlan> plan = PlanReshard(source, target, {.budget_bytes = Bytes{kLeastReshardBudget}});
  const ForkedRun run = OnRanks(3, [&](std::int64_t rank, ReshardProcess& process) {
    executor::ReshardRun how;
    int rounds = 0;
    if (rank == 2) {
      how.progress = [&](std::int64_t, std::int64_t) {
        if (++rounds == 3) std::_Exit(0);
      };
    }
    RankStorage to = EmptyIn(target)[rank];
    const auto begin = std::chrono::steady_clock::now();
    const std::string wrong = process.Move(*plan, StateIn(source)[rank], to, how);
    const auto took = std::chrono::steady_clock::now() - begin;
    return took < kReshardTimeout / 2 ? wrong : "it waited for the timeout";
  });
  EXPECT_EQ(run.lines.size(), 2U);
  EXPECT_THAT(run.lines, Each(HasSubstr("rank 2 did not arrive: it has died")));
}

}  // namespace
}  // namespace shardplan::test
