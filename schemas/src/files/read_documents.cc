// SPDX-License-Identifier: Apache-2.0
// Documents in files, as they are or compressed by gzip; plans in either form.
#include <optional>
#include <utility>
#include <variant>

#include "documents/plan_parts.h"
#include "files/available_memory.h"
#include "files/file_bytes.h"
#include "files/foreign_file.h"
#include "shardplan/schemas/io.h"
#include "shardplan/schemas/plan_text.h"

namespace shardplan {
namespace {

template <typename T>
Result<T> ReadWith(const std::string& path, Result<T> (*parse)(std::string_view)) {
  Result<std::string> text = ReadFile(path);
  if (text && IsGzip(*text)) {
    text = Gunzip(*text);
    if (!text) text.error().file = path;
  }
  if (!text.has_value()) return std::unexpected(text.error());
  Result<T> value = parse(*text);
  if (value.has_value()) return value;
  if (std::optional<Error> foreign = ForeignFile(*text)) value = std::unexpected(std::move(*foreign));
  value.error().file = path;
  return value;
}

std::optional<Plan> PlanInFile(const std::string& path) {
  FileBytes bytes(path);
  if (!CheckMemory("", static_cast<std::int64_t>(bytes.size()))) return std::nullopt;  // ReadFile says so
  return ReadPlanByParts(bytes);
}

// The text of a plan begins with a word. JSON refuses everything else that is no JSON object.
bool IsPlanText(std::string_view text) {
  const std::size_t first = text.find_first_not_of(" \t\r\n");
  return first != std::string_view::npos && text[first] != '{';
}

Result<Plan> ParsePlanInAnyForm(std::string_view text) {
  return IsPlanText(text) ? ParsePlanText(text) : ParsePlan(text);
}

Result<Document> ParseDocumentInAnyForm(std::string_view text) {
  if (!IsPlanText(text)) return ParseDocument(text);
  Result<Plan> plan = ParsePlanText(text);
  if (!plan) return std::unexpected(std::move(plan.error()));
  return Document(std::move(*plan));
}

using PlanOrRecording = std::variant<Plan, Recording>;

template <typename T>
Result<PlanOrRecording> Either(Result<T> value) {
  if (!value) return std::unexpected(std::move(value.error()));
  return PlanOrRecording(std::move(*value));
}

Result<PlanOrRecording> ParsePlanOrRecording(std::string_view text) {
  constexpr std::size_t kHead = 256;  // writers write the schema first
  const bool is_recording = text.substr(0, kHead).find("shardplan.recording/") != std::string_view::npos;
  return is_recording ? Either(ParseRecording(text)) : Either(ParsePlanInAnyForm(text));
}

}  // namespace

Result<Trace> ReadTrace(const std::string& path) { return ReadWith(path, ParseTrace); }
Result<Cluster> ReadCluster(const std::string& path) { return ReadWith(path, ParseCluster); }
Result<Strategy> ReadStrategy(const std::string& path) { return ReadWith(path, ParseStrategy); }
Result<Plan> ReadPlan(const std::string& path) {
  if (std::optional<Plan> plan = PlanInFile(path)) return std::move(*plan);
  return ReadWith(path, ParsePlanInAnyForm);
}
Result<PlanOrRecording> ReadPlanOrRecording(const std::string& path) {
  if (std::optional<Plan> plan = PlanInFile(path)) return PlanOrRecording(std::move(*plan));
  return ReadWith(path, ParsePlanOrRecording);
}
Result<Report> ReadReport(const std::string& path) { return ReadWith(path, ParseReport); }
Result<Recording> ReadRecording(const std::string& path) { return ReadWith(path, ParseRecording); }
Result<Certificate> ReadCertificate(const std::string& path) { return ReadWith(path, ParseCertificate); }
Result<Optimization> ReadOptimization(const std::string& path) { return ReadWith(path, ParseOptimization); }
Result<Document> ReadDocument(const std::string& path) {
  if (std::optional<Plan> plan = PlanInFile(path)) return Document(std::move(*plan));
  return ReadWith(path, ParseDocumentInAnyForm);
}

}  // namespace shardplan
