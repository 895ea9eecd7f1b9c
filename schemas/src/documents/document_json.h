// SPDX-License-Identifier: Apache-2.0
// Helpers that the readers of the documents share.
#pragma once

#include <string_view>

#include "json/reader.h"
#include "json/tape.h"
#include "shardplan/schemas/io.h"

namespace shardplan {

inline constexpr std::string_view kTraceSchema = "shardplan.trace/1";
inline constexpr std::string_view kClusterSchema = "shardplan.cluster/1";
inline constexpr std::string_view kStrategySchema = "shardplan.strategy/1";
inline constexpr std::string_view kPlanSchema = "shardplan.plan/1";
inline constexpr std::string_view kReportSchema = "shardplan.report/1";
// Not told apart by ParseDocument: the one program that reads a certificate knows what it reads.
inline constexpr std::string_view kCertificateSchema = "shardplan.certificate/1";
inline constexpr std::string_view kOptimizationSchema = "shardplan.optimization/1";
inline constexpr std::string_view kRecordingSchema = "shardplan.recording/1";
inline constexpr std::string_view kStateLayoutSchema = "shardplan.state_layout/1";
inline constexpr std::string_view kReshardSchema = "shardplan.reshard/1";

// The value of the `schema` field of the root object.
Result<std::string_view> SchemaOf(const JsonTape& tape);
// An error unless the document has that schema.
Status ExpectSchema(const JsonTape& tape, std::string_view schema);

template <typename T>
Result<T> ReadDocumentAs(const JsonTape& tape, std::string_view schema) {
  if (Status status = ExpectSchema(tape, schema); !status) return std::unexpected(status.error());
  T value;
  ReadingContext context;
  JsonReader reader(tape, context);
  if (!reader.ReadDocument(value)) return std::unexpected(reader.TakeError());
  return value;
}

// From a tape, checks included that go beyond single fields.
Result<Trace> TraceFromTape(const JsonTape& tape);
Result<Cluster> ClusterFromTape(const JsonTape& tape);
Result<Strategy> StrategyFromTape(const JsonTape& tape);
Result<Plan> PlanFromTape(const JsonTape& tape);
Result<Report> ReportFromTape(const JsonTape& tape);
Result<Certificate> CertificateFromTape(const JsonTape& tape);
Result<Optimization> OptimizationFromTape(const JsonTape& tape);
Result<Recording> RecordingFromTape(const JsonTape& tape);
Result<StateLayout> StateLayoutFromTape(const JsonTape& tape);
Result<ReshardPlan> ReshardFromTape(const JsonTape& tape);

}  // namespace shardplan
