// SPDX-License-Identifier: Apache-2.0
// Every recorded case, every knob, random models and optimised plans on a backend with a process for each
// rank: cpu with Gloo, cuda with NCCL. The cases are those of planned_test.cc on the virtual machine, with
// the same model of numbers.
//
// SHARDPLAN_CASE=hsdp runs the cases whose name contains that; SHARDPLAN_RANDOM=1000 so many random models;
// SHARDPLAN_EVERY=5 every fifth case, SHARDPLAN_FIRST=2 from the third on. On cpu it is every third one,
// where nothing is said: tools/nightly --only conformance_cpu has all.
//
// SHARDPLAN_RECORDING=FILE: on the device in software rank 0 writes what it issues, for the proof that
// nothing races (tests/python/races/executor_proof.py).
#include <dlfcn.h>
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <string>
#include <vector>

#include "shardplan/executor/replayer.h"
#include "shardplan/planner/planner.h"
#include "shardplan/verifier/verifier.h"
#include "tests/executor/forked_ranks.h"
#include "tests/executor/rank_backend.h"
#include "tests/executor/torch_numbers.h"
#include "tests/executor/virtual/checked_run.h"
#include "tests/executor/virtual/optimized_cases.h"
#include "tests/executor/virtual/plan_cases.h"

namespace shardplan::test {
namespace {

constexpr std::array<std::int64_t, 5> kRanks = {1, 2, 3, 4, 8};
constexpr std::uint32_t kRandomCases = 40;
constexpr std::int64_t kEveryOnCpu = 3;
constexpr int kPatienceSeconds = 20;
constexpr int kShortPatienceSeconds = 3;  // where the others are known to wait
constexpr int kLongPatienceSeconds = 90;  // longer than any backend waits for a rank
constexpr int kMostAttempts = 5;          // to go on behind a case in which a rank gave up
constexpr const char* kBegin = "begin ";

struct RankCase {
  PlanCase c;
  Plan plan;
};

std::vector<PlanCase> AllCases(std::int64_t ranks) {
  std::vector<PlanCase> cases = KnobCases();
  for (const std::string& name : RecordedNames()) cases.push_back(RecordedCase(name));
  for (const std::string& name : GoldenNames()) cases.push_back(GoldenCase(name));
  const char* random = std::getenv("SHARDPLAN_RANDOM");
  const std::uint32_t count =
      random == nullptr ? kRandomCases : static_cast<std::uint32_t>(std::atoi(random));
  for (std::uint32_t seed = 0; seed < count; ++seed) cases.push_back(RandomCase(seed));
  if (ranks != kOptimizedRanks) return cases;  // a search each
  for (const OptimizedCase& what : OptimizedCases()) {
    Result<PlanCase> optimized = Optimized(what);
    EXPECT_TRUE(optimized.has_value()) << NameOf(what);
    if (optimized) cases.push_back(std::move(*optimized));
  }
  return cases;
}

// The plans for so many ranks. Cases that PyTorch refuses or computes wrongly are left to the virtual
// machine.
std::vector<RankCase> CasesOf(std::int64_t ranks) {
  const char* filter = std::getenv("SHARDPLAN_CASE");
  const char* every = std::getenv("SHARDPLAN_EVERY");
  const char* first = std::getenv("SHARDPLAN_FIRST");
  const std::int64_t of_backend = BackendName() == "cpu" ? kEveryOnCpu : 1;
  const std::int64_t stride = every == nullptr ? of_backend : std::max(1, std::atoi(every));
  const std::int64_t offset = first == nullptr ? 0 : std::max(0, std::atoi(first)) % stride;
  std::int64_t position = 0;
  std::vector<RankCase> cases;
  for (PlanCase& c : AllCases(ranks)) {
    EXPECT_NE(std::ranges::find(kRanks, c.cluster.ranks), kRanks.end()) << c.name << " is run by no test";
    const bool other = c.cluster.ranks != ranks || (filter != nullptr && !c.name.contains(filter));
    if (other || RefusedByPyTorch().contains(c.name) || WrongInPyTorch().contains(c.name)) continue;
    // Optimised plans are few, and no two alike.
    if (!c.name.starts_with("optimized/") && position++ % stride != offset) continue;
    Result<PlannerOutput> planned = MakePlan(c.trace, c.strategy, c.cluster);
    EXPECT_TRUE(planned) << ToString(planned.error());
    if (planned && Verify(planned->plan).empty()) cases.push_back({std::move(c), std::move(planned->plan)});
  }
  return cases;
}

Result<Findings> RunSteps(const Plan& plan, ExpectedValues& expected, std::int64_t rank,
                          const RankBackend& backend) {
  Findings findings;
  TorchNumbers numbers(*backend.device);
  CheckedModel model(expected, numbers, rank, findings);
  auto replayer = executor::Replayer::Create(plan, rank, *backend.device, *backend.collectives, &model);
  if (!replayer) return std::unexpected(replayer.error());
  const auto finish = [&]() -> Status {
    if (Result<bool> done = backend.device->Synchronize(); !done) return std::unexpected(done.error());
    numbers.Finish();
    return backend.collectives->Check();
  };
  if (Status status = model.SetInitialShards(); !status) return std::unexpected(status.error());
  if (Status status = finish(); !status) return std::unexpected(status.error());
  while ((*replayer)->steps_completed() < expected.steps()) {
    const executor::TriggerKey trigger = (*replayer)->Expected();
    if (Status status = (*replayer)->Fire(trigger); !status) return std::unexpected(status.error());
  }
  if (Status status = finish(); !status) return std::unexpected(status.error());
  if (Status status = model.CheckEnd(); !status) return std::unexpected(status.error());
  if (Status status = finish(); !status) return std::unexpected(status.error());
  return findings;
}

// "" or what is wrong. An error ends the rank: nothing more can be said of what it has begun with the others.
Result<std::string> RunCase(const RankCase& c, ExpectedValues& expected, std::int64_t rank,
                            RankBackends& backends, executor::MemorySource memory, const std::string& name) {
  try {
    Result<RankBackend> backend = backends.Make(c.plan, memory, name);
    if (!backend) return std::unexpected(backend.error());
    const Result<Findings> findings = RunSteps(c.plan, expected, rank, *backend);
    if (!findings) return std::unexpected(findings.error());
    return WhatIsWrong(c.c, StaleUnits(c.plan), *findings);
  } catch (const std::exception& exception) {
    return MakeError(ErrorCode::kEnvironment, exception.what());
  }
}

// Writes what this process issues to the device in software. A fork takes over nothing of its parent's.
class Recording {
 public:
  explicit Recording(const char* path) {
    const auto begin = Function<int(const char*)>("shardplan_record_begin");
    begun_ = path != nullptr && begin != nullptr && begin(path) == 0;
  }
  ~Recording() {
    if (begun_) Function<void()>("shardplan_record_end")();
  }
  Recording(const Recording&) = delete;
  Recording& operator=(const Recording&) = delete;
  // Reports name the case that issued it.
  void Name(const std::string& name) const {
    if (begun_) Function<void(const char*)>("shardplan_record_module")(name.c_str());
  }

 private:
  // A function of the library that is preloaded; null: there is none.
  template <typename Signature>
  static Signature* Function(const char* name) {
    return reinterpret_cast<Signature*>(dlsym(RTLD_DEFAULT, name));
  }
  bool begun_ = false;
};

bool RunRank(const std::vector<RankCase>& cases, std::size_t first, std::int64_t rank, RankBackends& backends,
             const Log& log) {
  const Recording recording(rank == 0 ? std::getenv("SHARDPLAN_RECORDING") : nullptr);
  for (std::size_t i = first; i < cases.size(); ++i) {
    const RankCase& c = cases[i];
    log(fmt::format("{}{}", kBegin, i));
    ExpectedValues expected(c.plan, c.c.trace, std::max(c.c.steps, std::ssize(c.plan.steps) + 1));
    for (const bool arena : {false, true}) {
      const std::string name = fmt::format("{}{}", c.c.name, arena ? ", arena" : "");
      recording.Name(name);
      const auto memory = arena ? executor::MemorySource::kArena : executor::MemorySource::kAllocator;
      const Result<std::string> wrong = RunCase(c, expected, rank, backends, memory, name);
      if (!wrong || !wrong->empty()) {
        log(fmt::format("{}: {}", name, wrong ? *wrong : ToString(wrong.error())));
      }
      if (!wrong) return false;
    }
  }
  return true;
}

class OnRanks : public ::testing::TestWithParam<std::int64_t> {
 protected:
  void SetUp() override {
    const ForkedRun probe = RunForked(1, kPatienceSeconds, [](std::int64_t, const Log& log) {
      const std::string reason = WhyNot();
      if (!reason.empty()) log(reason);
      return true;
    });
    if (!probe.lines.empty()) GTEST_SKIP() << probe.lines.front();
    folder_ = std::filesystem::temp_directory_path() / fmt::format("shardplan_conformance_{}", getpid());
    std::filesystem::create_directories(folder_);
  }
  void TearDown() override {
    if (!folder_.empty()) std::filesystem::remove_all(folder_);
  }

  // The cases from `first` on. `last_rank_cases`: what the last rank takes them for.
  ForkedRun Run(const std::vector<RankCase>& cases, std::size_t first, std::int64_t ranks,
                const std::vector<RankCase>* last_rank_cases = nullptr,
                int patience_s = kPatienceSeconds) const {
    const std::string file = (folder_ / std::to_string(first)).string();
    return RunForked(ranks, patience_s, [&](std::int64_t rank, const Log& log) {
      const bool other = last_rank_cases != nullptr && rank + 1 == ranks;
      const auto backends = MakeRankBackends(rank, ranks, file);
      return RunRank(other ? *last_rank_cases : cases, first, rank, *backends, log);
    });
  }

 private:
  std::filesystem::path folder_;
};

class Conformance : public OnRanks {};

TEST_P(Conformance, EveryNumberIsRight) {
  const std::int64_t ranks = GetParam();
  const std::vector<RankCase> cases = CasesOf(ranks);
  std::size_t first = 0;
  for (int attempt = 0; first < cases.size() && attempt < kMostAttempts; ++attempt) {
    const ForkedRun run = Run(cases, first, ranks);
    std::size_t begun = first;
    std::int64_t begins = 0;
    for (const std::string& line : run.lines) {
      if (!line.starts_with(kBegin)) {
        ADD_FAILURE() << line;
        continue;
      }
      ++begins;
      begun = std::max<std::size_t>(begun, std::stoul(line.substr(std::string(kBegin).size())));
    }
    for (const std::string& fault : run.faults) ADD_FAILURE() << cases[begun].c.name << ": " << fault;
    if (run.faults.empty()) {
      EXPECT_EQ(begins, (std::ssize(cases) - static_cast<std::int64_t>(first)) * ranks);
    }
    first = run.faults.empty() ? cases.size() : begun + 1;
  }
  RecordProperty("cases", static_cast<int>(cases.size()));
  fmt::print("{} cases on {} {} ranks, each with the allocator and with an arena\n", cases.size(), ranks,
             BackendName());
}

std::vector<RankCase> TwoCases() {
  std::vector<RankCase> cases;
  for (const char* name : {"fsdp2/mlp3_default_w2", "fsdp1/gptish_bnone"}) {
    PlanCase c = RecordedCase(name);
    Plan plan = MakePlan(c.trace, c.strategy, c.cluster)->plan;
    cases.push_back({std::move(c), std::move(plan)});
  }
  return cases;
}

TEST_P(OnRanks, AWrongNumberIsNamedAndTheRestIsRun) {
  std::vector<RankCase> cases = TwoCases();
  for (Trigger& trigger : cases[0].plan.steps[0].triggers) {
    for (Instruction& instruction : trigger.instructions.Edit()) {
      if (instruction.kind == InstructionKind::kReduceScatter) instruction.reduce_op = ReduceOp::kSum;
    }
  }
  const ForkedRun run = Run(cases, 0, GetParam());
  EXPECT_THAT(run.faults, testing::IsEmpty());
  EXPECT_THAT(run.lines,
              testing::IsSupersetOf(
                  {testing::ContainsRegex("mlp3_default_w2: rank 0: optimizer step: element [0-9]+ of"),
                   testing::ContainsRegex("mlp3_default_w2, arena: rank 1: optimizer step: element")}));
  EXPECT_THAT(run.lines, testing::Not(testing::Contains(::testing::HasSubstr("gptish_bnone:"))));
}

// It leaves, and the other one does not wait for it.
TEST_P(OnRanks, ARankThatGivesUpEndsTheRun) {
  const std::vector<RankCase> cases = TwoCases();
  std::vector<RankCase> others = TwoCases();
  others[0].plan.steps[0].triggers[0].instructions.Edit().push_back(
      {.kind = InstructionKind::kFree, .src = 100'000});
  const ForkedRun run = Run(cases, 0, GetParam(), &others, kShortPatienceSeconds);
  EXPECT_THAT(run.lines, testing::Contains(::testing::HasSubstr("mlp3_default_w2: /steps/0/triggers/0")));
  EXPECT_EQ(run.faults.size(), 2U);
}

// In the middle of a step: the other one waits for a collective that never comes, and finds out. NCCL itself
// may leave it to the timeout of the backend.
TEST_P(OnRanks, ARankThatFailsInAStepLeavesNobodyHanging) {
  const std::vector<RankCase> cases = TwoCases();
  std::vector<RankCase> others = TwoCases();
  Plan& plan = others[0].plan;
  plan.events.push_back("never recorded");
  std::vector<Trigger>& triggers = plan.steps[0].triggers;
  triggers[triggers.size() / 2].instructions.Edit().push_back(
      {.kind = InstructionKind::kWait, .stream = 0, .event = static_cast<EventId>(plan.events.size()) - 1});
  const ForkedRun run = Run(cases, 0, GetParam(), &others, kLongPatienceSeconds);
  EXPECT_THAT(run.lines, testing::Contains(::testing::HasSubstr("waited for before it is recorded")));
  EXPECT_THAT(run.faults, testing::UnorderedElementsAre("rank 0 gave up", "rank 1 gave up"));
}

std::string TestName(const ::testing::TestParamInfo<std::int64_t>& info) {
  return fmt::format("{}_ranks{}", BackendName(), info.param);
}
INSTANTIATE_TEST_SUITE_P(Backends, Conformance, ::testing::ValuesIn(kRanks), TestName);
INSTANTIATE_TEST_SUITE_P(Backends, OnRanks, ::testing::Values(2), TestName);

}  // namespace
}  // namespace shardplan::test
