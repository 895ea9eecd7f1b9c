// SPDX-License-Identifier: Apache-2.0
#include "report/page.h"

#include <nlohmann/json.hpp>
#include <ranges>

namespace shardplan::internal {

std::string PageHead(std::string_view title, std::string_view body) {
  std::string out = "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\n";
  out += "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n<title>";
  out += title;
  out += "</title>\n<style>\n";
  out += ReportStyle();
  out += "</style></head><body>";
  out += body;
  out += "<script type=\"application/json\" id=\"data\">";
  return out;
}

std::string PageTail(std::string_view script) {
  std::string out = "</script>\n<script>\n";
  out += script;
  out += "</script></body></html>\n";
  return out;
}

// "<" occurs in strings only, where it may be written as an escape.
std::string ScriptJson(const nlohmann::ordered_json& data) {
  std::string text;
  for (const char c : data.dump(-1, ' ', true, nlohmann::ordered_json::error_handler_t::replace)) {
    if (c == '<') {
      text += "\\u003c";
    } else {
      text += c;
    }
  }
  return text;
}

void Fill(std::string& body, const std::vector<Place>& places) {
  // The last first: what fills a place may look like one.
  for (const Place& place : places | std::views::reverse)
    body.replace(body.find(place.mark), place.mark.size(), place.text);
}

}  // namespace shardplan::internal
