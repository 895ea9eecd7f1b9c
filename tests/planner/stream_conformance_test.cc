// SPDX-License-Identifier: Apache-2.0
// Which stream waits for which, in the order in which PyTorch asked for it: recordings of FSDP2 with every
// stream and event call (tests/conformance/fsdp2_215/streams), next to the plan of the same case.
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "events.h"
#include "not_planned.h"
#include "recording.h"
#include "shardplan/planner/planner.h"
#include "shardplan/schemas/io.h"
#include "shardplan/schemas/pytorch_rules.h"

namespace shardplan::conformance {
namespace {

// "reduce_scatter waits for compute".
using Waits = std::vector<std::string>;

const std::string& Streams() {
  static const std::string folder = SHARDPLAN_SOURCE_DIR "/tests/conformance/fsdp2_215/streams/";
  return folder;
}

// The cases, "torch_2.11/..." among them.
std::vector<std::string> StreamCases() {
  std::vector<std::string> cases;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(Streams())) {
    std::string name = entry.path().string().substr(Streams().size());
    constexpr std::string_view kSuffix = ".streams.log";
    if (!name.ends_with(kSuffix)) continue;
    name.resize(name.size() - kSuffix.size());
    if (!NotPlanned().contains("fsdp2_215/" + name)) cases.push_back(std::move(name));
  }
  std::ranges::sort(cases);
  return cases;
}

// By step.
std::vector<Waits> WaitsOfTheLog(const Recording& log) {
  std::vector<Waits> steps(static_cast<std::size_t>(log.steps));
  std::map<std::string, std::string> recorded_on;  // by event, "kind:unit"
  for (const LogEvent& event : log.events) {
    Waits& waits = steps[static_cast<std::size_t>(std::stoi(event.At("step")))];
    const std::string op = event.At("op");
    if (op == "record_event") recorded_on[event.At("event") + ":" + event.At("unit")] = event.At("stream");
    if (op == "wait_stream") waits.push_back(event.At("waiter") + " waits for " + event.At("on"));
    if (op == "wait_event")
      waits.push_back(event.At("waiter") + " waits for " + recorded_on[event.At("event")]);
  }
  return steps;
}

Waits WaitsOfThePlan(const Plan& plan, std::int32_t step, std::map<EventId, StreamId>& recorded_on) {
  Waits waits;
  for (const Trigger& trigger : StepAt(plan, step).triggers) {
    for (const Instruction& i : trigger.instructions) {
      if (i.kind == InstructionKind::kRecord) recorded_on[i.event] = i.stream;
      if (i.kind != InstructionKind::kWait) continue;
      waits.push_back(plan.streams[i.stream].name + " waits for " + plan.streams[recorded_on[i.event]].name);
    }
  }
  return waits;
}

class StreamConformanceTest : public ::testing::TestWithParam<std::string> {};

TEST_P(StreamConformanceTest, WaitsForWhatPyTorchWaitsFor) {
  const std::string name = std::filesystem::path(GetParam()).filename().string();
  const bool old = GetParam().starts_with("torch_2.11/");
  Result<Recording> recording = ReadRecording(SHARDPLAN_SOURCE_DIR "/tests/conformance/fsdp2_215/" + name);
  ASSERT_TRUE(recording) << ToString(recording.error());
  recording->strategy.pytorch = old ? PyTorchVersion::k2_11 : PyTorchVersion::k2_15;
  const Result<PlannerOutput> planned =
      MakePlan(recording->trace, recording->strategy, recording->cluster, {.verify = false});
  ASSERT_TRUE(planned) << ToString(planned.error());
  const Result<std::string> text = ReadFile(Streams() + GetParam() + ".streams.log");
  ASSERT_TRUE(text) << ToString(text.error());
  Recording log;
  const Status parsed = ParseLog(*text, log);
  ASSERT_TRUE(parsed) << ToString(parsed.error());
  const std::vector<Waits> expected = WaitsOfTheLog(log);
  ASSERT_FALSE(expected.empty());
  std::map<EventId, StreamId> recorded_on;
  for (std::size_t step = 0; step < expected.size(); ++step) {
    ASSERT_GT(expected[step].size(), 10u);
    EXPECT_EQ(WaitsOfThePlan(planned->plan, static_cast<std::int32_t>(step), recorded_on), expected[step])
        << "step " << step;
  }
}

INSTANTIATE_TEST_SUITE_P(Recordings, StreamConformanceTest, ::testing::ValuesIn(StreamCases()),
                         [](const auto& info) {
                           std::string name = info.param;
                           std::ranges::replace_if(
                               name, [](char c) { return c == '/' || c == '.'; }, '_');
                           return name;
                         });

}  // namespace
}  // namespace shardplan::conformance
