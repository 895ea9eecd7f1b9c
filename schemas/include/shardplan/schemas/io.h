// Reading and writing the five documents. Every kind has a `schema` field "shardplan.<kind>/1" and a JSON
// Schema file in schemas/json. Reading never trusts: errors carry the file, the JSON pointer, what was found
// and expected; unknown fields are errors except under "extensions". Writing a value that was read gives the
// same bytes.
#pragma once

#include <string>
#include <string_view>
#include <variant>

#include "shardplan/schemas/cluster.h"
#include "shardplan/schemas/error.h"
#include "shardplan/schemas/plan.h"
#include "shardplan/schemas/report.h"
#include "shardplan/schemas/strategy.h"
#include "shardplan/schemas/trace.h"

namespace shardplan {

Result<Trace> ParseTrace(std::string_view json_text);
Result<Cluster> ParseCluster(std::string_view json_text);
Result<Strategy> ParseStrategy(std::string_view json_text);
Result<Plan> ParsePlan(std::string_view json_text);
Result<Report> ParseReport(std::string_view json_text);

// Canonical JSON text, newline at the end, stable key order, one array element a line where that helps
// reading.
std::string ToJson(const Trace& trace);
std::string ToJson(const Cluster& cluster);
std::string ToJson(const Strategy& strategy);
std::string ToJson(const Plan& plan);
std::string ToJson(const Report& report);

using Document = std::variant<Trace, Cluster, Strategy, Plan, Report>;
// Any of the five, told apart by the `schema` field.
Result<Document> ParseDocument(std::string_view json_text);

// Reads a whole file. kBadInput when it cannot be read; the errors of the Parse functions get `file` filled
// in by the Read functions.
Result<std::string> ReadFile(const std::string& path);
Result<Trace> ReadTrace(const std::string& path);
Result<Cluster> ReadCluster(const std::string& path);
Result<Strategy> ReadStrategy(const std::string& path);
Result<Plan> ReadPlan(const std::string& path);
Result<Document> ReadDocument(const std::string& path);

// Writes to a temporary file in the same folder, flushes, then renames: `path` has the old bytes or all the
// new ones. kEnvironment on a full disk or a missing folder.
Status WriteFileAtomically(const std::string& path, std::string_view bytes);

// "sha256:<hex>" of the bytes.
std::string Digest(std::string_view bytes);

}  // namespace shardplan
