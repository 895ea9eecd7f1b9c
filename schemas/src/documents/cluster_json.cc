#include "documents/cluster_fields.h"
#include "documents/document_json.h"
#include "json/json_writer.h"
#include "shardplan/schemas/io.h"

namespace shardplan {

Result<Cluster> ClusterFromTape(const JsonTape& tape) {
  return ReadDocumentAs<Cluster>(tape, kClusterSchema);
}

std::string ToJson(const Cluster& cluster) {
  JsonWriter writer;
  writer.WriteDocument(kClusterSchema, cluster);
  return writer.Take();
}

}  // namespace shardplan
