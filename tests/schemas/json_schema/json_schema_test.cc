#include "tests/schemas/json_schema/json_schema.h"

#include <gmock/gmock.h>

#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "shardplan/schemas/instruction_set.h"
#include "shardplan/schemas/io.h"
#include "tests/schemas/json_schema/instruction_table.h"

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

TEST(JsonSchema, TheTableOfInstructionsIsTheInstructionSet) {
  const std::string path = std::string(SHARDPLAN_SOURCE_DIR) + "/docs/plan-format.md";
  const Result<std::string> page = ReadFile(path);
  ASSERT_TRUE(page.has_value()) << ToString(page.error());
  EXPECT_EQ(*page, WithInstructionTable(*page)) << path << " is not up to date: run dev/update_schemas";
}

// What a field says of itself begins with the kinds that have it, where these are few: "record, wait,
// host_wait: ...".
TEST(JsonSchema, FieldsNameTheKindsThatHaveThem) {
  const std::vector<std::pair<std::string, bool (*)(const InstructionDescription&)>> fields = {
      {"segment", [](const auto& is) { return is.segment; }},
      {"microbatch", [](const auto& is) { return Has(is.optional, OptionalField::kMicrobatch); }},
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
