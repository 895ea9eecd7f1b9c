#include "tests/virtual/plan_cases.h"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>

#include "recording.h"
#include "tests/planner/random_cases.h"

namespace shardplan::test {

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
  Result<conformance::Recording> recording =
      conformance::ReadRecording(SHARDPLAN_SOURCE_DIR "/tests/conformance/" + name);
  if (!recording) throw std::runtime_error(ToString(recording.error()));
  return {name, std::move(recording->trace), std::move(recording->strategy), std::move(recording->cluster),
          recording->steps + 1};
}

PlanCase RandomCase(std::uint32_t seed) {
  testing::RandomPlanCase c = testing::RandomCase(seed, /*may_freeze=*/seed % 2 == 0);
  return {fmt::format("random/{}", seed), std::move(c.trace), std::move(c.strategy),
          testing::ClusterOf(c.ranks), 3};
}

}  // namespace shardplan::test
