// SPDX-License-Identifier: Apache-2.0
// Reading and writing the documents. Every kind has a `schema` field "shardplan.<kind>/1" and a JSON
// Schema file in schemas/json. Reading never trusts: errors carry the file, the JSON pointer, what was found
// and expected; unknown fields are errors except under "extensions". Writing a value that was read gives the
// same bytes.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <variant>

#include "shardplan/schemas/cluster.h"
#include "shardplan/schemas/error.h"
#include "shardplan/schemas/optimization.h"
#include "shardplan/schemas/plan.h"
#include "shardplan/schemas/recording.h"
#include "shardplan/schemas/report.h"
#include "shardplan/schemas/reshard.h"
#include "shardplan/schemas/strategy.h"
#include "shardplan/schemas/trace.h"

namespace shardplan {

Result<Trace> ParseTrace(std::string_view json_text);
Result<Cluster> ParseCluster(std::string_view json_text);
Result<Strategy> ParseStrategy(std::string_view json_text);
Result<Plan> ParsePlan(std::string_view json_text);
Result<Report> ParseReport(std::string_view json_text);
// Written beside a plan by the optimising planner. They are no Documents.
Result<Certificate> ParseCertificate(std::string_view json_text);
Result<Optimization> ParseOptimization(std::string_view json_text);
Result<Recording> ParseRecording(std::string_view json_text);
Result<StateLayout> ParseStateLayout(std::string_view json_text);
Result<ReshardPlan> ParseReshard(std::string_view json_text);

// Canonical JSON text, newline at the end, stable key order, one array element a line where that helps
// reading.
std::string ToJson(const Trace& trace);
std::string ToJson(const Cluster& cluster);
std::string ToJson(const Strategy& strategy);
std::string ToJson(const Plan& plan);
// The same text in pieces: that of a plan of ten thousand units is larger than the plan.
using JsonSink = std::function<void(std::string_view piece)>;
enum class MicrobatchText : std::uint8_t { kEqualOnesOnce, kAll };
void WriteJson(const Plan& plan, const JsonSink& sink,
               MicrobatchText microbatches = MicrobatchText::kEqualOnesOnce);
std::string ToJson(const Report& report);
std::string ToJson(const Certificate& certificate);
std::string ToJson(const Optimization& optimization);
std::string ToJson(const Recording& recording);
std::string ToJson(const StateLayout& layout);
std::string ToJson(const ReshardPlan& plan);

using Document = std::variant<Trace, Cluster, Strategy, Plan, Report, StateLayout, ReshardPlan, Recording>;
// Any of them, told apart by the `schema` field.
Result<Document> ParseDocument(std::string_view json_text);

// Reads a whole file. kBadInput when it cannot be read; the errors of the Parse functions get `file` filled
// in by the Read functions.
Result<std::string> ReadFile(const std::string& path);
Result<Trace> ReadTrace(const std::string& path);
Result<Cluster> ReadCluster(const std::string& path);
Result<Strategy> ReadStrategy(const std::string& path);
// A plan may have the form of text, too, that plan_text.h writes.
Result<Plan> ReadPlan(const std::string& path);
// A plan in either form, or a recording, by the `schema` field; what is neither is no plan.
Result<std::variant<Plan, Recording>> ReadPlanOrRecording(const std::string& path);
Result<Report> ReadReport(const std::string& path);
Result<Recording> ReadRecording(const std::string& path);
Result<Certificate> ReadCertificate(const std::string& path);
Result<Optimization> ReadOptimization(const std::string& path);
Result<Document> ReadDocument(const std::string& path);

// Writes a file without a name in the same folder (a hidden one where the file system has none), flushes it,
// and gives it the name `path`, with the owner and the mode of the file that had that name. `path` has the
// old bytes or all the new ones, and no signal leaves anything beside it. The next writer in the folder
// removes what a killed one left. A link stays a link. Pipes and devices are written to. kEnvironment when it
// cannot be done: a full disk, a missing folder, a folder in place of a file, no permission.
Status WriteFileAtomically(const std::string& path, std::string_view bytes);

// The file that a write to `path` makes or replaces: links followed, its folder in canonical form.
// kEnvironment when it could not be written, as far as that can be told before.
Result<std::string> WritableTarget(const std::string& path);

// kEnvironment when not all bytes can be written: a full disk, a pipe that nobody reads (if SIGPIPE is
// ignored), a closed descriptor.
Status WriteStandardOutput(std::string_view bytes);

// "sha256:<hex>" of the bytes.
std::string Digest(std::string_view bytes);
// Digest(ToJson(plan)), without the text.
std::string DigestOfJson(const Plan& plan, MicrobatchText microbatches = MicrobatchText::kEqualOnesOnce);

// Compressed text.

// A gzip file (RFC 1952) of one member without name and time: the same bytes for the same text.
std::string Gzip(std::string_view text);

// Whether the bytes begin as a gzip file does.
bool IsGzip(std::string_view bytes);

// The text of a gzip file of one member. kBadInput: it is damaged, or something follows it. kEnvironment: its
// text needs more memory than there is.
Result<std::string> Gunzip(std::string_view bytes);

// Writing what is larger than memory should hold: the text comes in pieces and is never whole.

// Gives its text to a sink, piece by piece. It may be asked once.
using TextInPieces = std::function<void(const JsonSink& sink)>;

// The functions of io.h for text in pieces, with the same errors. After a piece that cannot be written the
// others are dropped.
Status WriteFileAtomically(const std::string& path, const TextInPieces& text);
Status WriteStandardOutput(const TextInPieces& text);

}  // namespace shardplan
