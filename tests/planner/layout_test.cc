// SPDX-License-Identifier: Apache-2.0
// Units, parameter order and sizes against what PyTorch recorded of itself.
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <sstream>

#include "recording.h"
#include "shardplan/planner/planner.h"

namespace shardplan::conformance {
namespace {

const std::string kFolder = SHARDPLAN_SOURCE_DIR "/tests/conformance/";

std::vector<std::string> Stems(const std::string& folder) {
  std::vector<std::string> stems;
  for (const auto& entry : std::filesystem::directory_iterator(kFolder + folder)) {
    if (entry.path().extension() == ".log")
      stems.push_back(kFolder + folder + "/" + entry.path().stem().string());
  }
  return stems;
}

Plan PlanOf(const Recording& recording) {
  Strategy strategy = recording.strategy;
  strategy.cpu_offload = false;  // moves nothing in the layout, and fsdp1 refuses it
  Result<PlannerOutput> planned = MakePlan(recording.trace, strategy, recording.cluster, {.verify = false});
  if (!planned) ADD_FAILURE() << recording.name << ": " << ToString(planned.error());
  return planned ? planned->plan : Plan{};
}

const Unit* Find(const Plan& plan, std::string fqn) {
  if (fqn == "(root)") fqn.clear();
  for (const Unit& unit : plan.units) {
    if (unit.fqn == fqn) return &unit;
  }
  return nullptr;
}

std::int64_t PaddedBytes(const Plan& plan, const Unit& unit, std::size_t parameter) {
  for (const Buffer& buffer : plan.buffers) {
    if (buffer.role == BufferRole::kParamSharded && &plan.units[buffer.unit] == &unit) {
      return buffer.parts_bytes[parameter].value;
    }
  }
  return -1;
}

TEST(PerParameterLayoutTest, UnitsHoldTheParametersThatFullyShardGaveThem) {
  std::size_t units = 0;
  for (const std::string& stem : Stems("fsdp2")) {
    const Result<Recording> recording = ReadRecording(stem);
    ASSERT_TRUE(recording) << ToString(recording.error());
    const Plan plan = PlanOf(*recording);
    const auto json = nlohmann::json::parse(std::ifstream(stem + ".json"));
    for (const auto& expected : json["expected_units"]) {
      ++units;
      const Unit* unit = Find(plan, expected["fqn"]);
      ASSERT_NE(unit, nullptr) << stem << " " << expected["fqn"];
      ASSERT_EQ(unit->parameters.size(), expected["params"].size()) << stem << " " << unit->fqn;
      for (std::size_t p = 0; p < unit->parameters.size(); ++p) {
        const auto& parameter = expected["params"][p];
        EXPECT_EQ(unit->parameters[p].fqn, parameter["fqn"].get<std::string>()) << stem;
        std::int64_t bytes = 4;
        for (const std::int64_t size : parameter["padded_shard_shape"]) bytes *= size;
        EXPECT_EQ(PaddedBytes(plan, *unit, p), bytes) << stem << " " << unit->parameters[p].fqn;
      }
    }
  }
  EXPECT_GT(units, 150u);
}

std::map<std::string, std::string> Words(const std::string& line) {
  std::map<std::string, std::string> words;
  std::istringstream in(line);
  for (std::string word; in >> word;) {
    const std::size_t equals = word.find('=');
    if (equals != std::string::npos) words[word.substr(0, equals)] = word.substr(equals + 1);
  }
  return words;
}

TEST(FlatLayoutTest, OffsetsPaddingAndShardsAreThoseOfTheFlatParameter) {
  std::size_t units = 0, parameters = 0;
  for (const std::string& stem : Stems("fsdp1")) {
    const Result<Recording> recording = ReadRecording(stem);
    ASSERT_TRUE(recording) << ToString(recording.error());
    const Plan plan = PlanOf(*recording);
    for (const std::string& line : recording->header) {
      auto words = Words(line);
      if (line.starts_with("unit ") && words.contains("padded_unsharded_numel")) {
        ++units;
        const Unit* unit = Find(plan, words["fqn"]);
        ASSERT_NE(unit, nullptr) << stem << line;
        EXPECT_EQ(std::to_string(unit->flat_numel), words["padded_unsharded_numel"]) << stem << " " << line;
        EXPECT_EQ(std::to_string(unit->parameters.size()), words["params"]) << stem << " " << line;
      } else if (line.starts_with("param ")) {
        ++parameters;
        const Unit* unit = Find(plan, words["unit"]);
        ASSERT_NE(unit, nullptr) << stem << line;
        const UnitParameter& parameter = unit->parameters[std::stoul(words["i"])];
        EXPECT_EQ(parameter.fqn, words["fqn"]) << stem;
        EXPECT_EQ(std::to_string(parameter.flat_offset), words["offset"]) << stem << " " << line;
      }
    }
  }
  EXPECT_GT(units, 100u);
  EXPECT_GT(parameters, 1000u);
}

}  // namespace
}  // namespace shardplan::conformance
