// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "documents/document_json.h"
#include "documents/trace_fields.h"
#include "json/tables.h"
#include "shardplan/schemas/checks.h"
#include "shardplan/schemas/io.h"

namespace shardplan {

template const JsonObjectType& JsonObjectTypeOf<Trace>();
template const JsonObjectType& JsonObjectTypeOf<TracedOptimizerStep>();
template const JsonObjectType& JsonObjectTypeOf<TraceInput>();
template const JsonObjectType& JsonObjectTypeOf<ModuleBuffer>();
template const JsonObjectType& JsonObjectTypeOf<ParameterPlacement>();
template const JsonObjectType& JsonObjectTypeOf<EnterEvent>();
template const JsonObjectType& JsonObjectTypeOf<ExitEvent>();
template const JsonObjectType& JsonObjectTypeOf<OperatorEvent>();
template const JsonObjectType& JsonObjectTypeOf<AllocateEvent>();
template const JsonObjectType& JsonObjectTypeOf<FreeEvent>();
template const JsonObjectType& JsonObjectTypeOf<OutputGradReadyEvent>();
template const JsonObjectType& JsonObjectTypeOf<InputsGradDoneEvent>();
template const JsonObjectType& JsonObjectTypeOf<ParameterGradEvent>();
template const JsonObjectType& JsonObjectTypeOf<RecomputeEnterEvent>();
template const JsonObjectType& JsonObjectTypeOf<RecomputeExitEvent>();
template const JsonObjectType& JsonObjectTypeOf<BackwardEndEvent>();
template const JsonObjectType& JsonObjectTypeOf<ReleaseEvent>();
template const JsonObjectType& JsonObjectTypeOf<CollectiveWaitEvent>();
template const JsonObjectType& JsonObjectTypeOf<ModelCollective>();
template const JsonObjectType& JsonObjectTypeOf<Communicator>();
template const JsonObjectType& JsonObjectTypeOf<CommunicatorDim>();

bool IsPlaceInTrace(std::string_view pointer) {
  if (!pointer.starts_with('/')) return false;
  pointer.remove_prefix(1);
  const std::span<const JsonField> fields = JsonObjectTypeOf<Trace>().fields;
  return std::ranges::find(fields, pointer.substr(0, pointer.find('/')), &JsonField::name) != fields.end();
}

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
