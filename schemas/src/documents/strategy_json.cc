// SPDX-License-Identifier: Apache-2.0
#include "documents/document_json.h"
#include "documents/strategy_fields.h"
#include "json/tables.h"
#include "shardplan/schemas/checks.h"
#include "shardplan/schemas/io.h"

namespace shardplan {

template const JsonObjectType& JsonObjectTypeOf<Strategy>();
template const JsonObjectType& JsonObjectTypeOf<StrategyMeshDim>();

Result<Strategy> StrategyFromTape(const JsonTape& tape) {
  Result<Strategy> strategy = ReadDocumentAs<Strategy>(tape, kStrategySchema);
  if (!strategy) return strategy;
  if (Status status = CheckStrategy(*strategy); !status) return std::unexpected(std::move(status.error()));
  return strategy;
}

std::string ToJson(const Strategy& strategy) {
  JsonWriter writer;
  writer.WriteDocument(kStrategySchema, strategy);
  return writer.Take();
}

}  // namespace shardplan
