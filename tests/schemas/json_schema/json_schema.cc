// SPDX-License-Identifier: Apache-2.0
#include "tests/schemas/json_schema/json_schema.h"

#include <algorithm>
#include <array>

#include "schemas/src/documents/document_json.h"
#include "schemas/src/documents/optimization_fields.h"
#include "schemas/src/documents/plan_fields.h"
#include "schemas/src/documents/recording_fields.h"
#include "schemas/src/documents/report_fields.h"
#include "schemas/src/documents/reshard_fields.h"
#include "tests/schemas/json_schema/schema_builder.h"

namespace shardplan {
namespace {

constexpr std::array<std::string_view, kRefKinds> kListNames = {"",
                                                                "the trace's modules",
                                                                "the trace's parameters",
                                                                "the pass's tensors",
                                                                "the trace's forwards",
                                                                "the trace's backwards",
                                                                "threads",
                                                                "places",
                                                                "streams",
                                                                "communicators",
                                                                "units",
                                                                "buffers",
                                                                "streams",
                                                                "events",
                                                                "communicators",
                                                                "segments"};

std::string_view ListName(RefKind kind) { return kListNames[static_cast<std::size_t>(kind)]; }

constexpr std::string_view kByName = "By name; by position where several have that name.";

template <typename T>
void Append(std::string_view schema, std::vector<JsonSchemaFile>& files, std::vector<std::string>& wordless) {
  const std::string document(kDefinition<T>.document);
  SchemaBuilder builder(document);
  const Json file = builder.template File<T>(schema);
  files.push_back({document + ".schema.json", file.dump(2) + "\n"});
  for (const std::string& what : builder.wordless()) wordless.push_back(document + ": " + what);
}

std::vector<JsonSchemaFile> Build(std::vector<std::string>& wordless) {
  std::vector<JsonSchemaFile> files;
  Append<Trace>(kTraceSchema, files, wordless);
  Append<Cluster>(kClusterSchema, files, wordless);
  Append<Strategy>(kStrategySchema, files, wordless);
  Append<Plan>(kPlanSchema, files, wordless);
  Append<Report>(kReportSchema, files, wordless);
  Append<Recording>(kRecordingSchema, files, wordless);
  Append<Certificate>(kCertificateSchema, files, wordless);
  Append<Optimization>(kOptimizationSchema, files, wordless);
  Append<StateLayout>(kStateLayoutSchema, files, wordless);
  Append<ReshardPlan>(kReshardSchema, files, wordless);
  return files;
}

}  // namespace

std::string UnitOfMeasure(std::string_view field_name) {
  static constexpr std::array<std::pair<std::string_view, std::string_view>, 5> kUnits = {{
      {"bytes_per_second", "bytes/s"},  // before its own suffixes
      {"flops_per_second", "FLOP/s"},
      {"_ppm", "parts per million"},
      {"_ns", "nanoseconds"},
      {"_bytes", "bytes"},
  }};
  if (field_name == "bytes_read" || field_name == "bytes_written") return "Unit: bytes.";
  for (const auto& [suffix, unit] : kUnits) {
    if (field_name.ends_with(suffix)) return "Unit: " + std::string(unit) + ".";
  }
  return {};
}

std::string ElementWords(const Spec& spec) {
  if (spec.ref != RefKind::kNone) {
    return "Index into " + std::string(ListName(spec.ref)) + (IsNamed(spec.ref) ? ", or a name there." : ".");
  }
  return spec.max == kMaxStorageId ? "Storage id." : "";
}

std::string FieldWords(std::string_view field_name, std::string_view says, const Spec& spec) {
  std::string words(says);
  const std::string unit = UnitOfMeasure(field_name);
  if (!unit.empty()) words += " " + unit;
  if (IsNamed(spec.ref)) words += " " + std::string(kByName);
  return words;
}

Json TypeNamed(std::string_view type) { return {{"type", type}}; }

Json OneOf(std::span<const std::string_view> names) {
  Json list = Json::array();
  for (const std::string_view name : names) list.push_back(name);
  return {{"enum", std::move(list)}};
}

Json AnyOf(std::vector<Json> alternatives) {
  Json list = Json::array();
  for (Json& alternative : alternatives) list.push_back(std::move(alternative));
  return {{"anyOf", std::move(list)}};
}

Json ListOf(Json element, std::string_view element_words) {
  if (!element_words.empty()) element["description"] = element_words;
  return {{"type", "array"}, {"items", std::move(element)}};
}

Json ReferenceTo(const std::string& pointer, bool closed) {
  Json reference = {{"$ref", pointer}};
  if (closed) reference["unevaluatedProperties"] = false;
  return reference;
}

Json IntegerUpTo(const Spec& spec, std::int64_t most) {
  // An id's limit is that of the list it indexes, which a schema cannot say.
  const std::int64_t max = spec.ref == RefKind::kNone ? std::min(spec.max, most) : most;
  Json integer = {{"type", "integer"}, {"minimum", spec.min}, {"maximum", max}};
  return IsNamed(spec.ref) ? AnyOf({TypeNamed("string"), std::move(integer)}) : integer;
}

Json ObjectOf(std::optional<std::string_view> tag, std::string_view words, std::vector<FieldSchema> fields) {
  Json properties = Json::object();
  Json required = Json::array();
  if (tag.has_value()) {
    properties[kTagField] = {{"const", *tag}};
    required.push_back(kTagField);
  }
  for (FieldSchema& field : fields) {
    properties[field.name] = std::move(field.schema);
    if (field.required) required.push_back(field.name);
  }
  Json object = {{"type", "object"}, {"description", words}, {"properties", std::move(properties)}};
  if (!required.empty()) object["required"] = std::move(required);
  object["additionalProperties"] = false;
  return object;
}

Json EventOf(std::string_view tag, std::string_view words, std::vector<FieldSchema> fields) {
  Json elements = Json::array();
  elements.push_back({{"const", tag}});
  std::size_t least = 1;
  for (FieldSchema& field : fields) {
    field.schema.erase("default");
    elements.push_back(std::move(field.schema));
    least += field.required ? 1 : 0;
  }
  return {{"type", "array"},
          {"description", words},
          {"prefixItems", std::move(elements)},
          {"items", false},
          {"minItems", least}};
}

Json FileOf(const std::string& document, std::string_view schema, const Definition& of, Json definition,
            Json defs) {
  const std::string name(of.name);
  Json file = {
      {"$schema", "https://json-schema.org/draft/2020-12/schema"},
      {"$id", "https://shardplan.dev/schemas/" + document + ".schema.json"},
      {"$comment", "Written by dev/update_schemas from schemas/src/documents/" + document + "_fields.h."},
      {"title", "shardplan " + document},
      {"description", of.says},
      {"$ref", "#/$defs/" + name}};
  file["properties"] = {
      {"schema", {{"const", schema}, {"description", "Kind and major version of the document."}}},
      {"extensions", {{"type", "object"}, {"description", "Anything; ignored, and not written again."}}}};
  file["required"] = Json::array({"schema"});
  file["unevaluatedProperties"] = false;
  // Open, as the file adds two fields; whoever else refers to it closes it.
  definition.erase("description");
  definition.erase("additionalProperties");
  defs[name] = std::move(definition);
  file["$defs"] = std::move(defs);
  return file;
}

void SetDefault(Json& schema, const std::string& json) { schema["default"] = Json::parse(json); }

void SchemaBuilder::Wordless(const Definition& of, std::string_view field) {
  wordless_.push_back(std::string(of.says) + ": " + std::string(field));
}

std::string_view SchemaBuilder::Words(std::string_view tag, const Definition& of) {
  if (of.says.empty()) wordless_.push_back("a type with the tag " + std::string(tag));
  return of.says;
}

std::vector<JsonSchemaFile> JsonSchemaFiles() {
  std::vector<std::string> wordless;
  return Build(wordless);
}

std::vector<std::string> FieldsWithoutWords() {
  std::vector<std::string> wordless;
  Build(wordless);
  return wordless;
}

}  // namespace shardplan
