// SPDX-License-Identifier: Apache-2.0
#include "documents/document_json.h"

#include <fmt/format.h>

#include <optional>

#include "documents/plan_parts.h"
#include "shardplan/schemas/io.h"

namespace shardplan {
namespace {

constexpr std::string_view kAllSchemas =
    "\"shardplan.trace/1\", \"shardplan.cluster/1\", \"shardplan.strategy/1\", \"shardplan.plan/1\", "
    "\"shardplan.report/1\", \"shardplan.state_layout/1\", \"shardplan.reshard/1\" or "
    "\"shardplan.recording/1\"";

template <typename T>
Result<T> ParseWith(std::string_view json_text, Result<T> (*read)(const JsonTape&)) {
  const Result<JsonTape> tape = JsonTape::Parse(json_text);
  if (!tape.has_value()) return std::unexpected(tape.error());
  return read(*tape);
}

template <typename T>
Result<Document> AsDocument(Result<T> value) {
  if (!value.has_value()) return std::unexpected(std::move(value.error()));
  return Document(std::move(*value));
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
Result<Recording> ParseRecording(std::string_view json_text) {
  return ParseWith(json_text, RecordingFromTape);
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
  if (*schema == kRecordingSchema) return AsDocument(RecordingFromTape(*tape));
  return MakeInputError("/schema", "unknown kind or version of document", fmt::format("\"{}\"", *schema),
                        std::string(kAllSchemas));
}

}  // namespace shardplan
