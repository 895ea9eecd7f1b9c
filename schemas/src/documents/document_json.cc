#include "documents/document_json.h"

#include <fmt/format.h>

#include <optional>

#include "documents/file_bytes.h"
#include "documents/plan_parts.h"
#include "shardplan/schemas/available_memory.h"
#include "shardplan/schemas/io.h"
#include "shardplan/schemas/plan_text.h"

namespace shardplan {
namespace {

constexpr std::string_view kAllSchemas =
    "\"shardplan.trace/1\", \"shardplan.cluster/1\", \"shardplan.strategy/1\", \"shardplan.plan/1\", "
    "\"shardplan.report/1\", \"shardplan.state_layout/1\" or \"shardplan.reshard/1\"";

template <typename T>
Result<T> ParseWith(std::string_view json_text, Result<T> (*read)(const JsonTape&)) {
  const Result<JsonTape> tape = JsonTape::Parse(json_text);
  if (!tape.has_value()) return std::unexpected(tape.error());
  return read(*tape);
}

template <typename T>
Result<T> ReadWith(const std::string& path, Result<T> (*parse)(std::string_view)) {
  const Result<std::string> text = ReadFile(path);
  if (!text.has_value()) return std::unexpected(text.error());
  Result<T> value = parse(*text);
  if (!value.has_value()) value.error().file = path;
  return value;
}

std::optional<Plan> PlanInFile(const std::string& path) {
  FileBytes bytes(path);
  if (!CheckMemory("", static_cast<std::int64_t>(bytes.size()))) return std::nullopt;  // ReadFile says so
  return ReadPlanByParts(bytes);
}

template <typename T>
Result<Document> AsDocument(Result<T> value) {
  if (!value.has_value()) return std::unexpected(std::move(value.error()));
  return Document(std::move(*value));
}

// The text of a plan begins with a word. What is no JSON object either is JSON's to refuse.
bool IsPlanText(std::string_view text) {
  const std::size_t first = text.find_first_not_of(" \t\r\n");
  return first != std::string_view::npos && text[first] != '{';
}

Result<Plan> ParsePlanInAnyForm(std::string_view text) {
  return IsPlanText(text) ? ParsePlanText(text) : ParsePlan(text);
}

Result<Document> ParseDocumentInAnyForm(std::string_view text) {
  return IsPlanText(text) ? AsDocument(ParsePlanText(text)) : ParseDocument(text);
}

}  // namespace

Result<std::string_view> SchemaOf(const JsonTape& tape) {
  if (tape[0].kind != JsonKind::kObject) {
    return MakeInputError("", "not a shardplan document", tape.Describe(0), "an object");
  }
  const JsonIndex schema = tape.Find(0, kSchemaField);
  if (schema == 0) {
    return MakeInputError("", "the field \"schema\" is missing: not a shardplan document", {},
                          std::string(kAllSchemas));
  }
  if (tape[schema].kind != JsonKind::kString) {
    return MakeInputError("/schema", "wrong type", tape.Describe(schema), std::string(kAllSchemas));
  }
  return tape.String(schema);
}

Status ExpectSchema(const JsonTape& tape, std::string_view schema) {
  const Result<std::string_view> found = SchemaOf(tape);
  if (!found.has_value()) return std::unexpected(found.error());
  if (*found == schema) return {};
  const std::string_view kind = schema.substr(0, schema.find('/') + 1);
  const char* message = found->starts_with(kind) ? "a version of the document that this program does not know"
                                                 : "another kind of document";
  return MakeInputError("/schema", message, fmt::format("\"{}\"", *found), fmt::format("\"{}\"", schema));
}

Result<Trace> ParseTrace(std::string_view json_text) { return ParseWith(json_text, TraceFromTape); }
Result<Cluster> ParseCluster(std::string_view json_text) { return ParseWith(json_text, ClusterFromTape); }
Result<Strategy> ParseStrategy(std::string_view json_text) { return ParseWith(json_text, StrategyFromTape); }
Result<Plan> ParsePlan(std::string_view json_text) {
  if (std::optional<Plan> plan = ReadPlanByParts(json_text)) return std::move(*plan);
  return ParseWith(json_text, PlanFromTape);
}
Result<Report> ParseReport(std::string_view json_text) { return ParseWith(json_text, ReportFromTape); }
Result<Certificate> ParseCertificate(std::string_view json_text) {
  return ParseWith(json_text, CertificateFromTape);
}
Result<Optimization> ParseOptimization(std::string_view json_text) {
  return ParseWith(json_text, OptimizationFromTape);
}
Result<StateLayout> ParseStateLayout(std::string_view json_text) {
  return ParseWith(json_text, StateLayoutFromTape);
}
Result<ReshardPlan> ParseReshard(std::string_view json_text) { return ParseWith(json_text, ReshardFromTape); }

Result<Document> ParseDocument(std::string_view json_text) {
  if (std::optional<Plan> plan = ReadPlanByParts(json_text)) return Document(std::move(*plan));
  const Result<JsonTape> tape = JsonTape::Parse(json_text);
  if (!tape.has_value()) return std::unexpected(tape.error());
  const Result<std::string_view> schema = SchemaOf(*tape);
  if (!schema.has_value()) return std::unexpected(schema.error());
  if (*schema == kTraceSchema) return AsDocument(TraceFromTape(*tape));
  if (*schema == kClusterSchema) return AsDocument(ClusterFromTape(*tape));
  if (*schema == kStrategySchema) return AsDocument(StrategyFromTape(*tape));
  if (*schema == kPlanSchema) return AsDocument(PlanFromTape(*tape));
  if (*schema == kReportSchema) return AsDocument(ReportFromTape(*tape));
  if (*schema == kStateLayoutSchema) return AsDocument(StateLayoutFromTape(*tape));
  if (*schema == kReshardSchema) return AsDocument(ReshardFromTape(*tape));
  return MakeInputError("/schema", "unknown kind or version of document", fmt::format("\"{}\"", *schema),
                        std::string(kAllSchemas));
}

Result<Trace> ReadTrace(const std::string& path) { return ReadWith(path, ParseTrace); }
Result<Cluster> ReadCluster(const std::string& path) { return ReadWith(path, ParseCluster); }
Result<Strategy> ReadStrategy(const std::string& path) { return ReadWith(path, ParseStrategy); }
Result<Plan> ReadPlan(const std::string& path) {
  if (std::optional<Plan> plan = PlanInFile(path)) return std::move(*plan);
  return ReadWith(path, ParsePlanInAnyForm);
}
Result<Report> ReadReport(const std::string& path) { return ReadWith(path, ParseReport); }
Result<Certificate> ReadCertificate(const std::string& path) { return ReadWith(path, ParseCertificate); }
Result<Optimization> ReadOptimization(const std::string& path) { return ReadWith(path, ParseOptimization); }
Result<Document> ReadDocument(const std::string& path) {
  if (std::optional<Plan> plan = PlanInFile(path)) return Document(std::move(*plan));
  return ReadWith(path, ParseDocumentInAnyForm);
}

}  // namespace shardplan
