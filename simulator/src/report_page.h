// Style sheet and scripts of the pages, simulator/page, built into the library.
#pragma once

#include <string_view>

namespace shardplan::internal {

std::string_view ReportStyle();
std::string_view ReportScript();
std::string_view MemoryScript();

}  // namespace shardplan::internal
