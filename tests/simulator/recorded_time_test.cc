// SPDX-License-Identifier: Apache-2.0
// The line about releases below the time of a recorded step.
#include <gtest/gtest.h>

#include <string>
#include <utility>

#include "shardplan/simulator/simulate_recording.h"
#include "tests/simulator/layered_plan.h"

namespace shardplan::test {
namespace {

constexpr std::string_view kLine = "measured with other releases";

Recording OneKernel(std::string recorded_with) {
  Recording recording;
  recording.job = "python train.py";
  recording.recorded_with = std::move(recorded_with);
  recording.threads = {{"main", -1}};
  recording.streams = {{0, 0}};
  recording.events = {IssuedKernel{0, -1, 0, "aten::mm", {}, {}, 1'000'000}};
  return recording;
}

Cluster MeasuredWith(std::string attention, std::string memory) {
  Cluster cluster = LayeredPlan({}).cluster;
  cluster.sources = {{ClusterFigure::kMatmul, FigureOrigin::kMeasured, 50'000, "", ""},
                     {ClusterFigure::kAttention, FigureOrigin::kMeasured, 100'000, "", std::move(attention)},
                     {ClusterFigure::kMemory, FigureOrigin::kMeasured, 150'000, "", std::move(memory)}};
  return cluster;
}

std::string TimeText(const std::string& recorded_with, const Cluster& cluster) {
  const Result<RecordingSimulation> simulation = SimulateRecording(OneKernel(recorded_with), cluster);
  EXPECT_TRUE(simulation.has_value()) << ToString(simulation.error());
  return simulation ? RecordedTimeText({*simulation}) : "";
}

TEST(RecordedTime, NamesFiguresOfAnotherMinorRelease) {
  const Cluster cluster = MeasuredWith("torch 2.11.0+cu130", "torch 2.12.1");
  const std::string text = TimeText("torch 2.15.0+cu132", cluster);
  EXPECT_NE(text.find("measured with other releases: attention of the cluster with torch 2.11, memory of the "
                      "cluster with torch 2.12; the job ran with torch 2.15\n"),
            std::string::npos)
      << text;
  const Result<RecordingSimulation> simulation = SimulateRecording(OneKernel("torch 2.15.0"), cluster);
  ASSERT_TRUE(simulation.has_value());
  EXPECT_NE(simulation->report.notes.back().find(kLine), std::string::npos);
}

TEST(RecordedTime, FiguresOfOneReleaseAreNamedTogether) {
  const std::string text = TimeText("torch 2.15.0", MeasuredWith("torch 2.9.1", "torch 2.9.0"));
  EXPECT_NE(text.find("attention, memory of the cluster with torch 2.9;"), std::string::npos) << text;
}

TEST(RecordedTime, SaysNothingOfTheSameReleaseOrOfUnknownOnes) {
  for (const std::string recorded_with : {"torch 2.11.3", "by hand", ""}) {
    const std::string text = TimeText(recorded_with, MeasuredWith("torch 2.11.0+cu130", "torch 2.11"));
    EXPECT_EQ(text.find(kLine), std::string::npos) << text;
  }
  const std::string text = TimeText("torch 2.15.0", MeasuredWith("", "jax 0.9"));
  EXPECT_EQ(text.find(kLine), std::string::npos) << text;
}

}  // namespace
}  // namespace shardplan::test
