// SPDX-License-Identifier: Apache-2.0
#include "documents/document_json.h"
#include "documents/reshard_fields.h"
#include "json/tables.h"
#include "shardplan/schemas/io.h"

namespace shardplan {

template const JsonObjectType& JsonObjectTypeOf<StateLayout>();
template const JsonObjectType& JsonObjectTypeOf<ReshardPlan>();

Result<StateLayout> StateLayoutFromTape(const JsonTape& tape) {
  return ReadDocumentAs<StateLayout>(tape, kStateLayoutSchema);
}

Result<ReshardPlan> ReshardFromTape(const JsonTape& tape) {
  return ReadDocumentAs<ReshardPlan>(tape, kReshardSchema);
}

std::string ToJson(const StateLayout& layout) {
  JsonWriter writer;
  writer.WriteDocument(kStateLayoutSchema, layout);
  return writer.Take();
}

std::string ToJson(const ReshardPlan& plan) {
  JsonWriter writer;
  writer.WriteDocument(kReshardSchema, plan);
  return writer.Take();
}

}  // namespace shardplan
