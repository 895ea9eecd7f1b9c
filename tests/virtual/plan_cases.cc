#include "tests/virtual/plan_cases.h"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <stdexcept>

#include "recording.h"
#include "shardplan/schemas/io.h"
#include "tests/planner/random_cases.h"

namespace shardplan::test {

namespace {

template <typename T>
T Required(Result<T> result) {
  if (!result) throw std::runtime_error(ToString(result.error()));
  return *std::move(result);
}

}  // namespace

std::vector<std::string> RecordedNames() {
  std::vector<std::string> names;
  for (const char* policy : {"fsdp1", "fsdp2"}) {
    const std::string folder = std::string(SHARDPLAN_SOURCE_DIR "/tests/conformance/") + policy;
    for (const auto& entry : std::filesystem::directory_iterator(folder)) {
      if (entry.path().extension() == ".log") {
        names.push_back(fmt::format("{}/{}", policy, entry.path().stem().string()));
      }
    }
  }
  std::ranges::sort(names);
  return names;
}

PlanCase RecordedCase(const std::string& name) {
  conformance::Recording recording =
      Required(conformance::ReadRecording(SHARDPLAN_SOURCE_DIR "/tests/conformance/" + name));
  return {name, std::move(recording.trace), std::move(recording.strategy), std::move(recording.cluster),
          recording.steps + 1};
}

std::vector<std::string> GoldenNames() {
  std::vector<std::string> names;
  for (const char* policy : {"fsdp1", "fsdp2"}) {
    const std::string folder = std::string(SHARDPLAN_SOURCE_DIR "/tests/planner/goldens/") + policy;
    if (!std::filesystem::exists(folder)) continue;
    for (const auto& entry : std::filesystem::directory_iterator(folder)) {
      if (std::filesystem::exists(entry.path() / "strategy.json")) {
        names.push_back(fmt::format("golden/{}/{}", policy, entry.path().filename().string()));
      }
    }
  }
  std::ranges::sort(names);
  return names;
}

PlanCase GoldenCase(const std::string& name) {
  const std::string goldens = SHARDPLAN_SOURCE_DIR "/tests/planner/goldens/";
  const std::string text = Required(ReadFile(goldens + name.substr(7) + "/strategy.json"));
  const nlohmann::json knob = nlohmann::json::parse(text)["extensions"]["knob"];
  const std::string trace = goldens + "traces/" + knob.value("trace", "small") + ".json";
  PlanCase c = {name, Required(ParseTrace(Required(ReadFile(trace)))), Required(ParseStrategy(text)),
                testing::ClusterOf(knob.value("ranks", 2)), 3};
  c.steps = std::max<std::int64_t>(c.steps, std::ssize(c.strategy.program) + 1);
  return c;
}

PlanCase RandomCase(std::uint32_t seed) {
  testing::RandomPlanCase c = testing::RandomCase(seed, /*may_freeze=*/seed % 2 == 0);
  return {fmt::format("random/{}", seed), std::move(c.trace), std::move(c.strategy),
          testing::ClusterOf(c.ranks), 3};
}

}  // namespace shardplan::test
