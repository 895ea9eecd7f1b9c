// SPDX-License-Identifier: Apache-2.0
#include "tests/schemas/json_schema/json_schema.h"

#include <fmt/format.h>
#include <gmock/gmock.h>

#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "shardplan/schemas/instruction_set.h"
#include "shardplan/schemas/io.h"
#include "shardplan/schemas/pytorch_rules.h"
#include "tests/schemas/json_schema/page_tables.h"

namespace shardplan {
namespace {

TEST(JsonSchema, FilesAreWhatTheFieldListsSay) {
  const std::string folder = std::string(SHARDPLAN_SOURCE_DIR) + "/schemas/json/";
  for (const JsonSchemaFile& file : JsonSchemaFiles()) {
    const Result<std::string> stored = ReadFile(folder + file.name);
    ASSERT_TRUE(stored.has_value()) << ToString(stored.error());
    EXPECT_EQ(*stored, file.text) << folder << file.name << " is not up to date: run dev/update_schemas";
  }
}

TEST(JsonSchema, ThereIsNoOtherFile) {
  std::vector<std::string> made, found;
  for (const JsonSchemaFile& file : JsonSchemaFiles()) made.push_back(file.name);
  const std::string folder = std::string(SHARDPLAN_SOURCE_DIR) + "/schemas/json";
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    if (entry.path().extension() == ".json") found.push_back(entry.path().filename());
  }
  EXPECT_THAT(found, testing::UnorderedElementsAreArray(made));
}

TEST(JsonSchema, EveryFieldAndTypeSaysWhatItIs) { EXPECT_THAT(FieldsWithoutWords(), testing::IsEmpty()); }

TEST(JsonSchema, TheTablesOfPagesAreThoseOfTheSources) {
  for (const PageTable& table : PageTables()) {
    const std::string path = SHARDPLAN_SOURCE_DIR "/docs/reference/" + table.page;
    const Result<std::string> page = ReadFile(path);
    ASSERT_TRUE(page.has_value()) << ToString(page.error());
    EXPECT_EQ(*page, table.with(*page)) << path << " is not up to date: run dev/update_schemas";
  }
}

// All source text below a folder.
std::string SourcesOf(const std::string& folder) {
  std::string text;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(SHARDPLAN_SOURCE_DIR "/" + folder)) {
    if (entry.path().extension() == ".cc") text += ReadFile(entry.path().string()).value_or("");
  }
  return text;
}

TEST(PyTorchRules, EachIsAskedForAndShown) {
  const std::string sources =
      SourcesOf("planner/src") + SourcesOf("schemas/src") + SourcesOf("simulator/src");
  for (const PyTorchRule& rule : kPyTorchRules) {
    EXPECT_NE(sources.find(fmt::format(".{}", rule.name)), std::string::npos)
        << rule.name << ": nobody asks for it";
    EXPECT_GT(rule.since, kOldestPyTorch) << rule.name;
    if (rule.shown_by.empty()) continue;
    const std::string recording =
        fmt::format("{}/tests/conformance/{}.log", SHARDPLAN_SOURCE_DIR, rule.shown_by);
    EXPECT_TRUE(std::filesystem::exists(recording)) << rule.name << ": " << recording;
  }
}

TEST(PyTorchRules, AreThoseOfTheReleaseAndPolicy) {
  const PyTorchRules none;
  PyTorchRules all, of_every_policy;
  for (const PyTorchRule& rule : kPyTorchRules) {
    all.*rule.rule = true;
    of_every_policy.*rule.rule = rule.policy.empty();
  }
  EXPECT_EQ(RulesOf({.policy = "fsdp2", .pytorch = PyTorchVersion::k2_11}), none);
  EXPECT_EQ(RulesOf({.policy = "fsdp2", .pytorch = PyTorchVersion::k2_15}), all);
  EXPECT_EQ(RulesOf({.policy = "fsdp1", .pytorch = PyTorchVersion::k2_15}), of_every_policy);
  EXPECT_EQ(RulesOf({.policy = "fsdp2"}), none) << "a plan that names none is of the oldest";
}

TEST(PyTorchVersions, ATraceSaysWhatIsPlanned) {
  const auto planned = [](std::optional<PyTorchVersion> given, std::string recorded_with) {
    Trace trace;
    trace.recorded_with = std::move(recorded_with);
    return Name(PlannedPyTorch({.pytorch = given}, trace));
  };
  EXPECT_EQ(planned(std::nullopt, "torch 2.11.0; attention auto"), "2.11");
  EXPECT_EQ(planned(std::nullopt, "torch 2.15.1+cu132"), "2.15");
  EXPECT_EQ(planned(PyTorchVersion::k2_11, "torch 2.15.0"), "2.11");
  for (const char* unsaid : {"", "torch", "torch 2", "torch 2.", "torch main", "hand", "PyTorch 2.11.0"}) {
    EXPECT_EQ(planned(std::nullopt, unsaid), Name(kNewestPyTorch)) << unsaid;
  }
}

TEST(PyTorchVersions, AReleaseThatIsNotPlannedIsPlannedAsTheOneBeforeIt) {
  EXPECT_EQ(RecordedPyTorch("torch 2.12.0"), PyTorchVersion::k2_11);
  EXPECT_EQ(RecordedPyTorch("torch 2.14.1; attention auto"), PyTorchVersion::k2_11);
  EXPECT_EQ(RecordedPyTorch("torch 2.16.0+cu132"), kNewestPyTorch);
  EXPECT_EQ(RecordedPyTorch("torch 2.110.0"), kNewestPyTorch);
  EXPECT_EQ(RecordedPyTorch("torch 3.0.0"), kNewestPyTorch);
  EXPECT_EQ(RecordedPyTorch("torch 2.1.0"), kOldestPyTorch);
  EXPECT_EQ(RecordedPyTorch("torch 1.13.1"), kOldestPyTorch);
}

// A field's description begins with the kinds that have it, where these are few: "record, wait,
// host_wait: ...".
TEST(JsonSchema, FieldsNameTheKindsThatHaveThem) {
  const std::vector<std::pair<std::string, bool (*)(const InstructionDescription&)>> fields = {
      {"segment", [](const auto& is) { return is.segment; }},
      {"microbatch", [](const auto& is) { return Has(is.optional, OptionalField::kMicrobatch); }},
      {"matrix", [](const auto& is) { return is.kind == InstructionKind::kOrthogonalize; }},
      {"exchange", [](const auto& is) { return is.exchange; }},
      {"event", [](const auto& is) { return is.event; }},
      {"safe_after", [](const auto& is) { return Has(is.optional, OptionalField::kSafeAfter); }},
      {"parts", [](const auto& is) { return Has(is.optional, OptionalField::kParts); }},
      {"parameter", [](const auto& is) { return Has(is.optional, OptionalField::kParameter); }}};
  for (const JsonSchemaFile& file : JsonSchemaFiles()) {
    if (file.name != "plan.schema.json") continue;
    const auto properties = nlohmann::json::parse(file.text)["$defs"]["instruction"]["properties"];
    for (const auto& [field, has] : fields) {
      std::string kinds;
      for (const InstructionDescription& is : kInstructionSet) {
        if (has(is)) kinds += (kinds.empty() ? "" : ", ") + std::string(is.name);
      }
      EXPECT_THAT(properties[field]["description"].get<std::string>(), testing::StartsWith(kinds + ": "));
    }
  }
}

// Every "$ref" of `value` that names no definition, in `file` or in another.
void CollectBroken(const nlohmann::json& value, const std::string& file,
                   const std::map<std::string, nlohmann::json>& files, std::vector<std::string>& broken) {
  if (value.is_object() && value.contains("$ref") && value["$ref"].is_string()) {
    const std::string reference = value["$ref"];
    const std::size_t hash = reference.find('#');
    const auto target = files.find(hash == 0 ? file : reference.substr(0, hash));
    const nlohmann::json::json_pointer pointer(reference.substr(hash + 1));
    if (target == files.end() || !target->second.contains(pointer)) broken.push_back(file + ": " + reference);
  }
  if (!value.is_structured()) return;
  for (const nlohmann::json& child : value) CollectBroken(child, file, files, broken);
}

TEST(JsonSchema, EveryReferenceIsDefined) {
  std::map<std::string, nlohmann::json> files;
  for (const JsonSchemaFile& file : JsonSchemaFiles()) files[file.name] = nlohmann::json::parse(file.text);
  std::vector<std::string> broken;
  for (const auto& [name, schema] : files) CollectBroken(schema, name, files, broken);
  EXPECT_THAT(broken, testing::IsEmpty());
}

}  // namespace
}  // namespace shardplan
