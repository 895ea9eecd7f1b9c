#include "document_json.h"
#include "json_writer.h"
#include "shardplan/schemas/io.h"
#include "strategy_fields.h"

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
