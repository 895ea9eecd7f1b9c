#include "documents/document_json.h"
#include "documents/trace_fields.h"
#include "json/json_writer.h"
#include "shardplan/schemas/io.h"
#include "shardplan/schemas/trace_check.h"

namespace shardplan {
Result<Trace> TraceFromTape(const JsonTape& tape) {
  Result<Trace> trace = ReadDocumentAs<Trace>(tape, kTraceSchema);
  if (!trace.has_value()) return trace;
  if (Status status = CheckTrace(*trace); !status) return std::unexpected(std::move(status.error()));
  return trace;
}

std::string ToJson(const Trace& trace) {
  JsonWriter writer;
  writer.WriteDocument(kTraceSchema, trace);
  return writer.Take();
}

}  // namespace shardplan
