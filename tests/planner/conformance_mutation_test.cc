// SPDX-License-Identifier: Apache-2.0
// The rules by which conformance reads the events out of a plan (tests/conformance/program/*_events.cc) are
// its own, and could overlook a difference. Plans of all recordings, changed in something that a log shows:
// none conforms.
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <random>
#include <set>

#include "events.h"
#include "not_planned.h"
#include "recording.h"
#include "shardplan/planner/planner.h"

namespace shardplan::conformance {
namespace {

constexpr std::size_t kMutantsOfOne = 24;

std::vector<std::string> Recordings() {
  std::vector<std::string> cases;
  for (const char* folder : {"fsdp1", "fsdp2", "fsdp2_215", "live", "own"}) {
    const std::string path = std::string(SHARDPLAN_SOURCE_DIR "/tests/conformance/") + folder;
    for (const auto& entry : std::filesystem::directory_iterator(path)) {
      const std::string name = std::string(folder) + "/" + entry.path().stem().string();
      if (entry.path().extension() == ".log" && !NotPlanned().contains(name)) {
        cases.push_back(std::string(SHARDPLAN_SOURCE_DIR "/tests/conformance/") + name);
      }
    }
  }
  std::ranges::sort(cases);
  return cases;
}

enum class Change { kDrop, kTwice, kOtherRanks, kOtherSize, kOtherUnit };

struct Mutation {
  Change change = Change::kDrop;
  std::int32_t step = 0, trigger = 0, instruction = 0;
};

// Whether the log has a line for the instruction, whatever comes before and behind it.
bool IsLogged(const Plan& plan, const Instruction& i) {
  switch (i.kind) {
    case InstructionKind::kAllGather:
    case InstructionKind::kReduceScatter:
      return true;
    case InstructionKind::kAllReduce:
      return plan.policy == "fsdp1" || plan.buffers[i.src].role == BufferRole::kReduceScatterOutput;
    case InstructionKind::kCopyOut:
      return plan.policy == "fsdp2";
    case InstructionKind::kOptimizerStep:
      return plan.policy == "fsdp2" && i.parameter >= 0;
    case InstructionKind::kFree:
      return plan.policy == "fsdp2" && i.parts.empty() &&
             plan.buffers[i.src].role == BufferRole::kReduceScatterInput;
    case InstructionKind::kBindSharded:
      return plan.policy == "fsdp2";
    case InstructionKind::kUpdateCopyIn:
    case InstructionKind::kAllToAll:
    case InstructionKind::kUpdateGather:
    case InstructionKind::kOrthogonalize:
    case InstructionKind::kUpdateApply:
    case InstructionKind::kCompute:
    case InstructionKind::kAllocate:
    case InstructionKind::kBindUnsharded:
    case InstructionKind::kCopyIn:
    case InstructionKind::kReshardPostForward:
    case InstructionKind::kGradCopyIn:
    case InstructionKind::kGradScale:
    case InstructionKind::kGradZero:
    case InstructionKind::kGradCast:
    case InstructionKind::kGradAccumulate:
    case InstructionKind::kCopyToHost:
    case InstructionKind::kCopyToDevice:
    case InstructionKind::kRecord:
    case InstructionKind::kWait:
    case InstructionKind::kHostWait:
    case InstructionKind::kZeroGrad:
      return false;
  }
  return false;
}

bool IsCollective(const Instruction& i) {
  return i.kind == InstructionKind::kAllGather || i.kind == InstructionKind::kReduceScatter ||
         i.kind == InstructionKind::kAllReduce;
}

std::vector<Mutation> MutationsOf(const Recording& recording, const Plan& plan) {
  std::vector<Mutation> mutations;
  std::set<const PlanStep*> seen;
  for (std::int32_t s = 0; s < recording.steps; ++s) {
    const PlanStep& step = StepAt(plan, s);
    if (!seen.insert(&step).second) continue;
    const auto index = static_cast<std::int32_t>(&step - plan.steps.data());
    for (std::size_t t = 0; t < step.triggers.size(); ++t) {
      for (std::size_t i = 0; i < step.triggers[t].instructions.size(); ++i) {
        const Instruction& instruction = step.triggers[t].instructions[i];
        if (!IsLogged(plan, instruction)) continue;
        const auto add = [&](Change change) {
          mutations.push_back({change, index, static_cast<std::int32_t>(t), static_cast<std::int32_t>(i)});
        };
        add(Change::kDrop);
        add(Change::kTwice);
        if (!IsCollective(instruction)) continue;
        add(Change::kOtherRanks);
        add(Change::kOtherSize);
        if (plan.units.size() > 1) add(Change::kOtherUnit);
      }
    }
  }
  return mutations;
}

BufferId LoggedBuffer(const Instruction& i) { return i.kind == InstructionKind::kAllGather ? i.dst : i.src; }

Plan Mutate(Plan plan, const Mutation& mutation) {
  std::vector<Instruction>& instructions =
      plan.steps[mutation.step].triggers[mutation.trigger].instructions.Edit();
  const auto at = instructions.begin() + mutation.instruction;
  switch (mutation.change) {
    case Change::kDrop:
      instructions.erase(at);
      break;
    case Change::kTwice:
      instructions.insert(at, Instruction(*at));
      break;
    case Change::kOtherRanks: {
      Communicator other = plan.communicators[at->communicator];
      other.size *= 2;
      plan.communicators.push_back(other);
      at->communicator = static_cast<CommunicatorId>(plan.communicators.size()) - 1;
      break;
    }
    case Change::kOtherSize:
    case Change::kOtherUnit: {
      Buffer other = plan.buffers[LoggedBuffer(*at)];
      if (mutation.change == Change::kOtherSize) {
        other.parts_bytes.push_back(Bytes{512});
      } else {
        other.unit = (other.unit + 1) % static_cast<UnitId>(plan.units.size());
      }
      plan.buffers.push_back(other);
      const auto id = static_cast<BufferId>(plan.buffers.size()) - 1;
      (at->kind == InstructionKind::kAllGather ? at->dst : at->src) = id;
      break;
    }
  }
  return plan;
}

class ConformanceMutationTest : public ::testing::TestWithParam<std::string> {};

TEST_P(ConformanceMutationTest, NoChangedPlanConforms) {
  const Result<Recording> recording = ReadRecording(GetParam());
  ASSERT_TRUE(recording) << ToString(recording.error());
  const Result<PlannerOutput> planned =
      MakePlan(recording->trace, recording->strategy, recording->cluster, {.verify = false});
  ASSERT_TRUE(planned) << ToString(planned.error());
  ASSERT_TRUE(ComparePlan(*recording, planned->plan).matches);
  std::vector<Mutation> mutations = MutationsOf(*recording, planned->plan);
  const std::uint64_t seed = std::hash<std::string>()(std::filesystem::path(GetParam()).filename());
  std::shuffle(mutations.begin(), mutations.end(), std::mt19937_64(seed));
  mutations.resize(std::min(mutations.size(), kMutantsOfOne));
  for (const Mutation& m : mutations) {
    EXPECT_FALSE(ComparePlan(*recording, Mutate(planned->plan, m)).matches)
        << "change " << static_cast<int>(m.change) << " of /steps/" << m.step << "/triggers/" << m.trigger
        << "/instructions/" << m.instruction;
  }
}

INSTANTIATE_TEST_SUITE_P(Recordings, ConformanceMutationTest, ::testing::ValuesIn(Recordings()),
                         [](const auto& info) {
                           const std::filesystem::path path(info.param);
                           std::string name =
                               path.parent_path().filename().string() + "_" + path.filename().string();
                           std::ranges::replace_if(
                               name, [](char c) { return std::isalnum(static_cast<unsigned char>(c)) == 0; },
                               '_');
                           return name;
                         });

// A trigger more or less is seen, too.
TEST(ConformanceMutationTest, TriggersAreCompared) {
  for (const std::string& path : Recordings()) {
    const Result<Recording> recording = ReadRecording(path);
    ASSERT_TRUE(recording) << ToString(recording.error());
    const Result<PlannerOutput> planned =
        MakePlan(recording->trace, recording->strategy, recording->cluster, {.verify = false});
    ASSERT_TRUE(planned) << ToString(planned.error());
    for (const TriggerKind kind : {TriggerKind::kBackwardEnd, TriggerKind::kOptimizerStep}) {
      Plan changed = planned->plan;
      PlanStep& step = changed.steps.front();
      const auto found = std::ranges::find(step.triggers, kind, &Trigger::kind);
      if (found == step.triggers.end()) continue;
      step.triggers.erase(found);
      EXPECT_FALSE(ComparePlan(*recording, changed).matches) << path << " without " << Name(kind);
    }
  }
}

}  // namespace
}  // namespace shardplan::conformance
