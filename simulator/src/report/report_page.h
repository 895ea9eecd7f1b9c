// Style sheet and scripts of the pages, simulator/page, built into the library.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>

namespace shardplan::internal {

// A page is PageHead, its data as JSON, PageTail. `title` and `body` are HTML.
std::string PageHead(std::string_view title, std::string_view body);
std::string PageTail(std::string_view script);
// `data` as it may stand inside a <script>: without "<".
std::string ScriptJson(const nlohmann::ordered_json& data);
// Puts `with` in place of the first `what`, which is there.
void Replace(std::string& text, std::string_view what, std::string_view with);

std::string_view ReportStyle();
std::string_view ReportScript();
std::string_view MemoryScript();

}  // namespace shardplan::internal
