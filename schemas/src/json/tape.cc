// SPDX-License-Identifier: Apache-2.0
#include "json/tape.h"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>

namespace shardplan {
namespace {

constexpr std::size_t kMaxDepth = 64;
constexpr std::size_t kMaxTextBytes = std::size_t{1} << 31;
constexpr std::size_t kMaxFoundBytes = 60;

std::string LineAndColumn(std::string_view text, std::size_t position) {
  const std::string_view before = text.substr(0, std::min(position, text.size()));
  const auto line = std::count(before.begin(), before.end(), '\n') + 1;
  const std::size_t line_start = before.rfind('\n');
  const std::size_t column =
      line_start == std::string_view::npos ? before.size() : before.size() - line_start - 1;
  return fmt::format("line {}, column {}", line, column + 1);
}

// nlohmann's sentence without its "[json.exception...] parse error at line 1, column 2: " part.
std::string ShortReason(std::string_view what) {
  const std::size_t column = what.find("column ");
  std::size_t start = column == std::string_view::npos ? what.find("] ") : what.find(": ", column);
  start = start == std::string_view::npos ? 0 : start + 2;
  std::string reason(what.substr(start));
  std::erase_if(reason, [](char c) { return static_cast<unsigned char>(c) < 0x20; });
  return reason;
}

}  // namespace

// Receives nlohmann's SAX events (the member names are nlohmann's).
class TapeBuilder {
 public:
  TapeBuilder(std::string_view text, JsonTape& tape) : text_(text), tape_(tape) {}

  bool null() { return Leaf({.kind = JsonKind::kNull}); }
  bool boolean(bool value) { return Leaf({.kind = JsonKind::kBool, .integer = value ? 1 : 0}); }
  bool number_integer(std::int64_t value) { return Leaf({.kind = JsonKind::kInteger, .integer = value}); }
  bool number_unsigned(std::uint64_t value) {
    if (value > static_cast<std::uint64_t>(INT64_MAX)) return Real(static_cast<double>(value));
    return number_integer(static_cast<std::int64_t>(value));
  }
  bool number_float(double value, const std::string& /*token*/) { return Real(value); }
  bool string(const std::string& value) { return Leaf(StringNode(value)); }
  bool binary(nlohmann::json::binary_t& /*value*/) { return false; }
  bool key(const std::string& value) {
    tape_.nodes_[open_.back()].size += 1;
    return Append(StringNode(value));
  }
  bool start_object(std::size_t /*size*/) { return Open(JsonKind::kObject); }
  bool start_array(std::size_t /*size*/) { return Open(JsonKind::kArray); }
  bool end_object() { return Close(); }
  bool end_array() { return Close(); }

  bool parse_error(std::size_t position, const std::string& /*token*/, const std::exception& reason) {
    // nlohmann counts the characters read, and the end of the file as one.
    const bool at_end = position > text_.size();
    error_.pointer = LineAndColumn(text_, position == 0 ? 0 : position - 1);
    if (text_.find_first_not_of(" \t\r\n") == text_.npos) {
      error_.message = "the file is empty";
      error_.expected = "a JSON object";
    } else if (at_end) {
      error_.message = "the file ends in the middle of the document: it is truncated";
    } else {
      error_.message = "not valid JSON: " + ShortReason(reason.what());
    }
    return false;
  }

  Error TakeError() {
    error_.code = ErrorCode::kBadInput;
    if (error_.message.empty()) error_.message = "not valid JSON";
    return std::move(error_);
  }

 private:
  static JsonNode Sized(JsonKind kind, std::size_t size, std::int64_t integer) {
    return {.kind = kind, .size = static_cast<JsonIndex>(size), .integer = integer};
  }
  JsonNode StringNode(const std::string& value) {
    const auto offset = static_cast<std::int64_t>(tape_.strings_.size());
    tape_.strings_ += value;
    return Sized(JsonKind::kString, value.size(), offset);
  }
  bool Real(double value) {
    JsonNode node{.kind = JsonKind::kReal};
    node.real = value;
    return Leaf(node);
  }
  bool Append(JsonNode node) {
    node.end = static_cast<JsonIndex>(tape_.nodes_.size() + 1);
    tape_.nodes_.push_back(node);
    return true;
  }
  bool Leaf(JsonNode node) {
    CountElement();
    return Append(node);
  }
  void CountElement() {
    if (!open_.empty() && tape_.nodes_[open_.back()].kind == JsonKind::kArray)
      tape_.nodes_[open_.back()].size += 1;
  }
  bool Open(JsonKind kind) {
    if (open_.size() == kMaxDepth) {
      error_.message = fmt::format("lists and objects nest deeper than {} levels", kMaxDepth);
      return false;
    }
    CountElement();
    open_.push_back(static_cast<JsonIndex>(tape_.nodes_.size()));
    return Append({.kind = kind});
  }
  bool Close() {
    tape_.nodes_[open_.back()].end = static_cast<JsonIndex>(tape_.nodes_.size());
    open_.pop_back();
    return true;
  }

  std::string_view text_;
  JsonTape& tape_;
  std::vector<JsonIndex> open_;
  Error error_;
};

Result<JsonTape> JsonTape::Parse(std::string_view text) {
  if (text.size() >= kMaxTextBytes) {
    return MakeInputError("", "the document is too large", fmt::format("{} bytes", text.size()),
                          fmt::format("less than {} bytes", kMaxTextBytes));
  }
  JsonTape tape;
  tape.nodes_.reserve(text.size() / 6 + 1);
  TapeBuilder builder(text, tape);
  if (!nlohmann::json::sax_parse(text.begin(), text.end(), &builder)) {
    return std::unexpected(builder.TakeError());
  }
  return tape;
}

JsonIndex JsonTape::Find(JsonIndex object, std::string_view field) const {
  if (nodes_[object].kind != JsonKind::kObject) return 0;
  for (JsonIndex key = object + 1; key < nodes_[object].end; key = nodes_[key + 1].end) {
    if (String(key) == field) return key + 1;
  }
  return 0;
}

std::string JsonTape::Pointer(JsonIndex node) const {
  std::string pointer;
  JsonIndex at = 0;
  while (at != node) {
    const bool is_object = nodes_[at].kind == JsonKind::kObject;
    JsonIndex child = at + 1;
    for (std::size_t position = 0;; ++position) {
      const JsonIndex value = is_object ? child + 1 : child;
      if (node < nodes_[value].end) {
        pointer += is_object ? "/" + PointerToken(String(child)) : fmt::format("/{}", position);
        if (node < value) return pointer;  // the node is the field's name
        at = value;
        break;
      }
      child = nodes_[value].end;
    }
  }
  return pointer;
}

std::string JsonTape::Describe(JsonIndex node) const {
  const JsonNode& value = nodes_[node];
  switch (value.kind) {
    case JsonKind::kNull:
      return "null";
    case JsonKind::kBool:
      return value.integer != 0 ? "true" : "false";
    case JsonKind::kInteger:
      return fmt::format("{}", value.integer);
    case JsonKind::kReal:
      return fmt::format("{}", value.real);
    case JsonKind::kString: {
      const std::string_view text = String(node);
      return text.size() <= kMaxFoundBytes ? fmt::format("\"{}\"", text)
                                           : fmt::format("\"{}...\"", text.substr(0, kMaxFoundBytes));
    }
    case JsonKind::kArray:
      return fmt::format("a list of {}", value.size);
    case JsonKind::kObject:
      return "an object";
  }
  return "";
}

std::string PointerToken(std::string_view field) {
  std::string token;
  for (const char c : field) {
    if (c == '~') {
      token += "~0";
    } else if (c == '/') {
      token += "~1";
    } else {
      token += c;
    }
  }
  return token;
}

}  // namespace shardplan
