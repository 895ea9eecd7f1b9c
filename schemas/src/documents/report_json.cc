// SPDX-License-Identifier: Apache-2.0
#include "documents/document_json.h"
#include "documents/report_fields.h"
#include "json/tables.h"
#include "shardplan/schemas/io.h"

namespace shardplan {

template const JsonObjectType& JsonObjectTypeOf<Report>();

Result<Report> ReportFromTape(const JsonTape& tape) { return ReadDocumentAs<Report>(tape, kReportSchema); }

std::string ToJson(const Report& report) {
  JsonWriter writer;
  writer.WriteDocument(kReportSchema, report);
  return writer.Take();
}

}  // namespace shardplan
