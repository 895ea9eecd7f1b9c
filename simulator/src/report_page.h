// The report's style sheet and script, simulator/page/report.css and report.js, built into the library.
#pragma once

#include <string_view>

namespace shardplan::internal {

std::string_view ReportStyle();
std::string_view ReportScript();

}  // namespace shardplan::internal
