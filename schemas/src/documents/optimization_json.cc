// SPDX-License-Identifier: Apache-2.0
#include "documents/document_json.h"
#include "documents/optimization_fields.h"
#include "json/tables.h"
#include "shardplan/schemas/io.h"

namespace shardplan {

template const JsonObjectType& JsonObjectTypeOf<Certificate>();
template const JsonObjectType& JsonObjectTypeOf<Optimization>();

Result<Certificate> CertificateFromTape(const JsonTape& tape) {
  return ReadDocumentAs<Certificate>(tape, kCertificateSchema);
}
Result<Optimization> OptimizationFromTape(const JsonTape& tape) {
  return ReadDocumentAs<Optimization>(tape, kOptimizationSchema);
}

std::string ToJson(const Certificate& certificate) {
  JsonWriter writer;
  writer.WriteDocument(kCertificateSchema, certificate);
  return writer.Take();
}
std::string ToJson(const Optimization& optimization) {
  JsonWriter writer;
  writer.WriteDocument(kOptimizationSchema, optimization);
  return writer.Take();
}

}  // namespace shardplan
