// SPDX-License-Identifier: Apache-2.0
// Style sheet and scripts of the pages, simulator/src/report/page, built into the library.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>
#include <vector>

namespace shardplan::internal {

// A page is PageHead, its data as JSON, PageTail. `title` and `body` are HTML.
std::string PageHead(std::string_view title, std::string_view body);
std::string PageTail(std::string_view script);
// `data` as it may stand inside a <script>: without "<".
std::string ScriptJson(const nlohmann::ordered_json& data);
struct Place {
  std::string_view mark;
  std::string text;
};
// Puts the texts in place of their marks, which stand in the body in this order.
void Fill(std::string& body, const std::vector<Place>& places);

std::string_view ReportStyle();
std::string_view ReportScript();
std::string_view MemoryScript();

}  // namespace shardplan::internal
