#include "format.h"
#include "shardplan/simulator/simulate.h"

namespace shardplan {

std::string ReportHtml(const std::vector<const Plan*>&, const std::vector<const Simulation*>& simulations) {
  std::vector<Report> reports;
  for (const Simulation* simulation : simulations) reports.push_back(simulation->report);
  return "<!doctype html><meta charset=\"utf-8\"><title>shardplan report</title><pre>" +
         internal::HtmlText(ComparisonTable(reports)) + "</pre>\n";
}

}  // namespace shardplan
