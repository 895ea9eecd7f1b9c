#include "tests/schemas/json_schema/json_schema.h"

#include <array>

#include "schemas/src/documents/document_json.h"
#include "schemas/src/documents/optimization_fields.h"
#include "schemas/src/documents/plan_fields.h"
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
