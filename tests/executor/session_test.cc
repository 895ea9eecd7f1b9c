// SPDX-License-Identifier: Apache-2.0
// Checkpoints of ranks (processes): any layout to files and from them to any other, in the background, and
// what a rank that cannot, or dies, leaves behind. SHARDPLAN_SEED=n runs that seed alone.
#include <ATen/ops/empty.h>
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <map>
#include <random>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <vector>

#include "shardplan/executor/checkpoints.h"
#include "tests/executor/forked_ranks.h"
#include "tests/executor/rank_backend.h"
#include "tests/schemas/checkpoints/naive_reshard.h"

namespace shardplan::test {
namespace {

namespace fs = std::filesystem;
using testing::Each;
using testing::ElementsAre;
using ::testing::HasSubstr;
using testing::IsEmpty;

constexpr std::int64_t kRanksOfSession = 3;
constexpr int kSessionPatienceS = 60;
constexpr std::uint64_t kSessionSeeds = 20;

using Storages = std::map<std::string, at::Tensor>;

// One rank: its session, and its memory.
class SessionRank {
 public:
  SessionRank(std::int64_t rank, const std::string& file, c10::Device device)
      : rank_(rank),
        device_(device),
        store_(c10::make_intrusive<c10d::FileStore>(file, static_cast<int>(kRanksOfSession))),
        session({.rank = rank,
                 .ranks = kRanksOfSession,
                 .store = store_,
                 .peers = std::make_shared<executor::Peers>(
                     executor::PeersOptions{.store = c10::make_intrusive<c10d::PrefixStore>("peers", store_),
                                            .rank = rank,
                                            .ranks = kRanksOfSession}),
                 .timeout = std::chrono::seconds(20)}) {}

  Storages ToDevice(const NaiveState& state) const {
    Storages storages;
    if (rank_ >= std::ssize(state)) return storages;
    for (const auto& [name, bytes] : state[static_cast<std::size_t>(rank_)]) {
      const at::Tensor host = at::empty({std::ssize(bytes)}, at::kByte);
      if (!bytes.empty()) std::memcpy(host.data_ptr(), bytes.data(), bytes.size());
      storages.emplace(name, host.to(device_));
    }
    return storages;
  }
  // The first difference from `wanted`.
  std::string Differs(const Storages& found, const NaiveState& wanted) const {
    for (const auto& [name, tensor] : ToDevice(wanted)) {
      if (!found.at(name).equal(tensor)) return name + " has other bytes";
    }
    return {};
  }
  executor::ReshardStorage In(const StateLayout& layout, const Storages& storages) const {
    return [&layout, &storages](const StateTensor& tensor) {
      return storages.at(tensor.flat < 0 ? tensor.name : "flat " + layout.flats[tensor.flat].name);
    };
  }
  executor::SessionState StateOf(const StateLayout& layout, const Storages& storages) const {
    return *executor::StateOfRank(layout, rank_, In(layout, storages));
  }

 private:
  const std::int64_t rank_;
  const c10::Device device_;
  const c10::intrusive_ptr<c10d::Store> store_;

 public:
  executor::Session session;
};

std::string Said(const Status& status) { return status ? "good" : ToString(status.error()); }

StateLayout LayoutOfFewRanks(const RandomTensors& tensors, std::mt19937_64& random) {
  StateLayout layout = MakeLayout(tensors, random);
  while (RanksOf(layout) > kRanksOfSession) layout = MakeLayout(tensors, random);
  return layout;
}

StateLayout OneTensorOnAllRanks(std::int32_t tensor_dim) {
  return {.name = "",
          .mesh = {{"shard", kRanksOfSession}},
          .flats = {},
          .tensors = {{.name = "w", .shape = {301, 200}, .splits = {{{"shard"}, tensor_dim}}}}};
}

class SessionOnRanks : public ::testing::Test {
 protected:
  void SetUp() override {
    folder_ = fs::temp_directory_path() / fmt::format("shardplan-session-{}", getpid());
    fs::create_directories(folder_);
    const ForkedRun asked = RunForked(1, kSessionPatienceS, [](std::int64_t, const Log& log) {
      log(WhyNot());
      return true;
    });
    if (!asked.lines.empty() && !asked.lines.front().empty()) GTEST_SKIP() << asked.lines.front();
  }
  void TearDown() override { fs::remove_all(folder_); }

  using Work = std::function<std::string(std::int64_t rank, SessionRank& of)>;
  ForkedRun OnRanks(const Work& work) {
    const int run = runs_++;
    return RunForked(kRanksOfSession, kSessionPatienceS, [&](std::int64_t rank, const Log& log) {
      const Plan world = executor::ExchangePlan(1);
      const auto backends =
          MakeRankBackends(rank, kRanksOfSession, (folder_ / fmt::format("backends{}", run)).string());
      const auto backend = backends->Make(world, executor::MemorySource::kAllocator, "session");
      if (!backend || !backend->device->Prepare(world)) return false;
      SessionRank of(rank, (folder_ / fmt::format("store{}", run)).string(), backend->device->torch_device());
      log(work(rank, of));
      return true;
    });
  }
  std::string Path(const std::string& name) const { return (folder_ / name).string(); }
  // The folders of checkpoints, and what lies beside them.
  std::vector<std::string> Folders() const {
    std::vector<std::string> names;
    for (const fs::directory_entry& entry : fs::directory_iterator(folder_)) {
      if (entry.is_directory()) names.push_back(entry.path().filename().string());
    }
    std::ranges::sort(names);
    return names;
  }

  fs::path folder_;
  int runs_ = 0;
};

TEST_F(SessionOnRanks, WhatIsSavedInOneLayoutIsLoadedInAnother) {
  const char* only = std::getenv("SHARDPLAN_SEED");
  const std::uint64_t first = only == nullptr ? 1 : std::strtoull(only, nullptr, 10);
  const std::uint64_t last = only == nullptr ? kSessionSeeds : first;
  const ForkedRun run = OnRanks([&](std::int64_t rank, SessionRank& of) -> std::string {
    for (std::uint64_t seed = first; seed <= last; ++seed) {
      std::mt19937_64 random(seed);
      const RandomTensors tensors = MakeTensors(random);
      const StateLayout source = LayoutOfFewRanks(tensors, random),
                        target = LayoutOfFewRanks(tensors, random);
      const std::string path = Path(std::to_string(seed));
      Storages from = of.ToDevice(StateIn(source));
      Status status;
      if (seed % 2 == 0) {
        status = of.session.Save(path, of.StateOf(source, from), {});
      } else {
        status = of.session.SaveInBackground(path, of.StateOf(source, from), {});
        of.session.HoldBack();
        for (auto& [name, tensor] : from) tensor.fill_(7);  // what the optimizer would do
        if (status) status = of.session.Wait();
      }
      Storages to = of.ToDevice(EmptyIn(target));
      if (status) status = of.session.Load(path, target, of.In(target, to));
      const std::string wrong = status ? of.Differs(to, StateIn(target)) : ToString(status.error());
      if (!wrong.empty()) return fmt::format("SHARDPLAN_SEED={}: rank {}: {}", seed, rank, wrong);
    }
    return "good";
  });
  EXPECT_THAT(run.faults, IsEmpty());
  EXPECT_EQ(run.lines, std::vector<std::string>(kRanksOfSession, "good"));
}

TEST_F(SessionOnRanks, ACheckpointThatIsThereStaysUnlessItIsReplaced) {
  const StateLayout layout = OneTensorOnAllRanks(0), other = OneTensorOnAllRanks(1);
  const ForkedRun run = OnRanks([&](std::int64_t, SessionRank& of) -> std::string {
    Storages zeros = of.ToDevice(EmptyIn(layout));
    const Storages values = of.ToDevice(StateIn(layout));
    const Status made = of.session.Save(Path("last"), of.StateOf(layout, zeros), {});
    const Status again = of.session.Save(Path("last"), of.StateOf(layout, values), {});
    const Status replaced =
        of.session.SaveInBackground(Path("last"), of.StateOf(layout, values), {.replaces = true});
    const Status waited = of.session.Wait();
    Storages loaded = of.ToDevice(EmptyIn(other));
    const Status read = of.session.Load(Path("last"), other, of.In(other, loaded));
    return fmt::format("{}; {}; {}; {}; {}; {}", Said(made), Said(again).contains("it is there already"),
                       Said(replaced), Said(waited), Said(read), of.Differs(loaded, StateIn(other)));
  });
  EXPECT_EQ(run.lines, std::vector<std::string>(kRanksOfSession, "good; true; good; good; good; "));
  EXPECT_THAT(Folders(), ElementsAre("last"));
}

TEST_F(SessionOnRanks, WhatOneRankCannotDoIsTheErrorOfAll) {
  const StateLayout layout = OneTensorOnAllRanks(0);
  const ForkedRun run = OnRanks([&](std::int64_t rank, SessionRank& of) -> std::string {
    const Storages values = of.ToDevice(StateIn(layout));
    executor::SessionState state = of.StateOf(layout, values);
    if (rank == 1) state.boxes[0] = state.boxes[0].narrow(0, 0, 5);
    const Status begun = of.session.SaveInBackground(Path("new"), std::move(state), {});
    const std::string next = Said(of.session.SaveInBackground(Path("new"), of.StateOf(layout, values), {}));
    StateLayout wrong = layout;
    wrong.tensors[0].name = rank == 2 ? "v" : "w";
    Storages loaded = values;
    const Status good = of.session.SaveInBackground(Path("new"), of.StateOf(layout, values), {});
    const std::string read =
        Said(of.session.Load(Path("new"), wrong, [&](const StateTensor&) { return loaded.at("w"); }));
    return fmt::format("{}; {}; {}; {}", Said(begun), next.contains("given as 5"), Said(good),
                       read.contains("the checkpoint lacks v"));
  });
  EXPECT_EQ(run.lines, std::vector<std::string>(kRanksOfSession, "good; true; good; true"));
  EXPECT_THAT(Folders(), ElementsAre("new"));
}

TEST_F(SessionOnRanks, ARankThatDiesInASaveLeavesTheOldCheckpoint) {
  const StateLayout layout = OneTensorOnAllRanks(0);
  const ForkedRun run = OnRanks([&](std::int64_t rank, SessionRank& of) -> std::string {
    const Storages values = of.ToDevice(StateIn(layout)), none = of.ToDevice(EmptyIn(layout));
    const Status made = of.session.Save(Path("last"), of.StateOf(layout, values), {});
    executor::SessionState state = of.StateOf(layout, none);
    if (rank == 2) {
      // It begins the save, and has nothing to write with.
      (void)of.session.SaveInBackground(Path("last"), std::move(state), {.replaces = true});
      std::_Exit(0);
    }
    const Status begun = of.session.SaveInBackground(Path("last"), std::move(state), {.replaces = true});
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    return fmt::format("{}; {}; {}", Said(made), Said(begun), Said(of.session.Wait()));
  });
  // It may have written all before it died, and then everything is new: never anything between.
  const bool is_old = run.lines.size() == 2 && run.lines[0].contains("rank 2 did not arrive: it has died");
  EXPECT_THAT(run.lines,
              Each(testing::AnyOf(HasSubstr("rank 2 did not arrive: it has died"), "good; good; good")));
  const ForkedRun after = OnRanks([&](std::int64_t, SessionRank& of) -> std::string {
    Storages loaded = of.ToDevice(StateIn(layout));
    const Status read = of.session.Load(Path("last"), layout, of.In(layout, loaded));
    return read ? of.Differs(loaded, is_old ? StateIn(layout) : EmptyIn(layout)) : ToString(read.error());
  });
  EXPECT_EQ(after.lines, std::vector<std::string>(kRanksOfSession, ""));
}

}  // namespace
}  // namespace shardplan::test
