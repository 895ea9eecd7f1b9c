#include "document_json.h"
#include "json_writer.h"
#include "report_fields.h"
#include "shardplan/schemas/io.h"

namespace shardplan {

Result<Report> ReportFromTape(const JsonTape& tape) { return ReadDocumentAs<Report>(tape, kReportSchema); }

std::string ToJson(const Report& report) {
  JsonWriter writer;
  writer.WriteDocument(kReportSchema, report);
  return writer.Take();
}

}  // namespace shardplan
