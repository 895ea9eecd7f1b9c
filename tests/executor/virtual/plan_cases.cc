// SPDX-License-Identifier: Apache-2.0
#include "tests/executor/virtual/plan_cases.h"

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

const std::set<std::string>& RefusedByPyTorch() {
  static const std::set<std::string> kNames = {"golden/fsdp1/frozen_flat", "golden/fsdp2/shard_dims_uneven",
                                               "golden/fsdp2/tensor_parallel_int_reshard"};
  return kNames;
}

const std::map<std::string, std::string>& WrongInPyTorch() {
  static const std::map<std::string, std::string> kNames = {
      // A reduce-scatter's output is dropped while the hook's stream still casts it.
      {"golden/fsdp2/all_reduce_hook_cast", "optimizer step: element"},
      // Copied to the host over what an earlier micro-batch left there.
      {"golden/fsdp1/cpu_offload_accumulate", "optimizer step: element"},
      // Divided while it is copied, and again where reductions are sums.
      {"golden/fsdp2/divide_on_one_rank", "is 0.5 instead of 1"},
      // The unit computes its backward without its parameters.
      {"golden/fsdp2/unshard_in_backward_needed", "which is not bound"},
  };
  return kNames;
}

}  // namespace shardplan::test
