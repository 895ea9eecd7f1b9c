#include "documents/document_json.h"
#include "documents/strategy_fields.h"
#include "json/json_writer.h"
#include "shardplan/schemas/io.h"

namespace shardplan {

Result<Strategy> StrategyFromTape(const JsonTape& tape) {
  return ReadDocumentAs<Strategy>(tape, kStrategySchema);
}

std::string ToJson(const Strategy& strategy) {
  JsonWriter writer;
  writer.WriteDocument(kStrategySchema, strategy);
  return writer.Take();
}

}  // namespace shardplan
