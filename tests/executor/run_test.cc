// SPDX-License-Identifier: Apache-2.0
// The shardplan-run binary: it runs, and what it says when something is wrong.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>

#include <array>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <thread>

#include "shardplan/checkpoints/reshard.h"
#include "shardplan/schemas/io.h"
#include "tests/executor/step_plan.h"

namespace shardplan::test {
namespace {

using ::testing::HasSubstr;
namespace fs = std::filesystem;

struct Output {
  int exit_code = -1;
  std::string text;  // stdout and stderr
};

class Run : public ::testing::Test {
 protected:
  void SetUp() override {
    folder_ = fs::temp_directory_path() / ("shardplan_run_test_" + std::to_string(getpid()));
    fs::create_directories(folder_);
  }
  void TearDown() override { fs::remove_all(folder_); }

  std::string Write(const std::string& name, const std::string& text) {
    const std::string path = (folder_ / name).string();
    std::ofstream(path) << text;
    return path;
  }
  // A plan whose step takes a while: each segment one second of filler.
  std::string WritePlan(std::int64_t ranks) {
    Plan plan = MakeStepPlan(ranks);
    for (Segment& segment : plan.segments) {
      OperatorEvent op;
      op.name = "aten.mm";
      op.duration_ns = {1'000'000'000};
      segment.entries.push_back(op);
    }
    return Write("plan.json", ToJson(plan));
  }
  static Output Execute(const std::string& arguments) {
    Output output;
    FILE* pipe = popen((std::string(SHARDPLAN_RUN) + " " + arguments + " 2>&1").c_str(), "r");
    std::array<char, 4096> buffer;
    while (std::fgets(buffer.data(), buffer.size(), pipe) != nullptr) output.text += buffer.data();
    const int status = pclose(pipe);
    output.exit_code = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
    return output;
  }

  fs::path folder_;
};

TEST_F(Run, ReplaysOnCpuRanksAndPrintsWhatItMeasured) {
  const Output output = Execute(WritePlan(2) + " --device cpu --steps 2 --compute-scale 0.001");
  EXPECT_EQ(output.exit_code, 0) << output.text;
  EXPECT_THAT(output.text, HasSubstr("2 ranks on cpu, 2 steps"));
  EXPECT_THAT(output.text, HasSubstr("all_gather on shard"));
  EXPECT_THAT(output.text, HasSubstr("peak memory"));
}

TEST_F(Run, ReplaysInAnArena) {
  const Output output = Execute(WritePlan(2) + " --device cpu --arena --steps 2 --compute-scale 0.001");
  EXPECT_EQ(output.exit_code, 0) << output.text;
}

TEST_F(Run, ComparesWithAReport) {
  Report report;
  report.cluster = "a cluster";
  report.step_ns = {42'000'000};
  report.memory.peak_bytes = {3 << 20};
  const std::string path = Write("report.json", ToJson(report));
  const Output output = Execute(WritePlan(2) + " --steps 1 --compute-scale 0 --report " + path);
  EXPECT_EQ(output.exit_code, 0) << output.text;
  EXPECT_THAT(output.text, HasSubstr("42.000 ms"));
  EXPECT_THAT(output.text, HasSubstr("3.00 MiB"));
}

TEST_F(Run, ReplaysOnTheVirtualMachine) {
  const Output output = Execute(WritePlan(3) + " --device virtual --seed 5");
  EXPECT_EQ(output.exit_code, 0) << output.text;
  EXPECT_THAT(output.text, HasSubstr("3 ranks on virtual"));
}

TEST_F(Run, AnotherNumberOfRanksIsAUsageErrorThatNamesBoth) {
  const Output output = Execute(WritePlan(2) + " --ranks 3");
  EXPECT_EQ(output.exit_code, 2);
  EXPECT_THAT(output.text, HasSubstr("found --ranks 3"));
  EXPECT_THAT(output.text, HasSubstr("expected 2"));
}

TEST_F(Run, UnderTorchrunAnotherWorldSizeIsAUsageErrorToo) {
  const std::string plan = WritePlan(2);
  setenv("RANK", "0", 1);
  setenv("WORLD_SIZE", "4", 1);
  const Output output = Execute(plan);
  unsetenv("RANK");
  unsetenv("WORLD_SIZE");
  EXPECT_EQ(output.exit_code, 2);
  EXPECT_THAT(output.text, HasSubstr("found 4 ranks"));
  EXPECT_THAT(output.text, HasSubstr("expected 2 ranks"));
}

TEST_F(Run, ATruncatedPlanIsABadDocument) {
  std::string text;
  {
    std::ifstream file(WritePlan(2));
    std::ostringstream all;
    all << file.rdbuf();
    text = all.str();
  }
  const Output output = Execute(Write("half.json", text.substr(0, text.size() / 2)) + " --ranks 2");
  EXPECT_EQ(output.exit_code, 3);
  EXPECT_THAT(output.text, HasSubstr("half.json"));
}

TEST_F(Run, AnUnknownFlagIsAUsageError) { EXPECT_EQ(Execute(WritePlan(2) + " --no-such-flag").exit_code, 2); }

// Children of a process, from /proc, in the order in which they were started.
std::vector<pid_t> ChildrenOf(pid_t pid) {
  std::ifstream file("/proc/" + std::to_string(pid) + "/task/" + std::to_string(pid) + "/children");
  std::vector<pid_t> children;
  for (pid_t child = 0; file >> child;) children.push_back(child);
  return children;
}

std::string ReadAll(const std::string& path) {
  std::ifstream file(path);
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

// A tensor's rows on some ranks.
StateLayout RowsOn(std::int64_t ranks, std::int64_t rows) {
  return {.name = "",
          .mesh = {{"shard", ranks}},
          .flats = {},
          .tensors = {{.name = "w", .shape = {rows, 64}, .splits = {{{"shard"}, 0}}}}};
}

TEST_F(Run, ExecutesAPlanOfReshardingAndComparesEveryByte) {
  const auto plan = PlanReshard(RowsOn(3, 1000), RowsOn(2, 1000), {.budget_bytes = Bytes{65536}});
  const std::string path = Write("reshard.json", ToJson(*plan));
  const Output output = Execute(path + " --steps 2");
  EXPECT_EQ(output.exit_code, 0) << output.text;
  EXPECT_THAT(output.text, HasSubstr("3 ranks -> 2 ranks on cpu, 2 runs: every byte arrived"));
  EXPECT_THAT(output.text, HasSubstr("bytes of a budget of 65536"));
  const Output wrong = Execute(path + " --ranks 2");
  EXPECT_EQ(wrong.exit_code, 2) << wrong.text;
  EXPECT_THAT(wrong.text, HasSubstr("found --ranks 2, expected 3"));
  EXPECT_EQ(Execute(path + " --device virtual").exit_code, 2);
}

TEST_F(Run, APlanOfReshardingThatDoesNotVerifyIsNotExecuted) {
  auto plan = PlanReshard(RowsOn(3, 1000), RowsOn(2, 1000));
  plan->groups[0].copies[1].source_offset += 4;
  const Output output = Execute(Write("reshard.json", ToJson(*plan)));
  EXPECT_EQ(output.exit_code, 1) << output.text;
  EXPECT_THAT(output.text, HasSubstr("/groups/0/copies/1: the plan of resharding does not verify"));
}

TEST_F(Run, WhenARankIsKilledTheOthersStopAndSayWhereAndWhoIsMissing) {
  const std::string plan = WritePlan(3);
  const std::string log = (folder_ / "log").string();
  const pid_t launcher = fork();
  ASSERT_GE(launcher, 0);
  if (launcher == 0) {
    if (std::freopen(log.c_str(), "w", stdout) == nullptr || dup2(1, 2) < 0) std::_Exit(1);
    execl(SHARDPLAN_RUN, "shardplan-run", plan.c_str(), "--steps", "1000000", "--compute-scale", "0.05",
          "--timeout-s", "30", "--progress", nullptr);
    std::_Exit(127);
  }
  // Once a step is behind them, each is in the middle of another; then the last one dies.
  for (int i = 0; i < 1200 && ReadAll(log).find("rank 2: step 0 took") == std::string::npos; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
  }
  const std::vector<pid_t> ranks = ChildrenOf(launcher);
  ASSERT_EQ(ranks.size(), 3U) << ReadAll(log);
  ASSERT_EQ(kill(ranks[2], SIGKILL), 0);
  int status = 0;
  ASSERT_EQ(waitpid(launcher, &status, 0), launcher);
  const std::string text = ReadAll(log);
  EXPECT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), 4) << text;
  EXPECT_THAT(text, HasSubstr("rank 2 was killed by signal 9"));
  // They left by themselves: the launcher did not have to end them.
  EXPECT_THAT(text, testing::Not(HasSubstr("did not stop by themselves")));
  for (const std::string rank : {"rank 0", "rank 1"}) {
    EXPECT_THAT(text, testing::ContainsRegex(
                          rank + ": .*rank 2 did not arrive.*at step [0-9]+, .*layers\\.[0-2].*instruction"));
  }
}

}  // namespace
}  // namespace shardplan::test
