// SPDX-License-Identifier: Apache-2.0
#include "texts/python_literals.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <charconv>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>
#include <variant>

namespace shardplan::cli {
namespace {

using Json = nlohmann::ordered_json;

// The code point at `at` of UTF-8, which moves behind it.
std::uint32_t CodePoint(const std::string& text, std::size_t& at) {
  const auto byte = [&](std::size_t index) { return static_cast<unsigned char>(text[index]); };
  const unsigned char first = byte(at++);
  const int more = first < 0x80 ? 0 : first < 0xe0 ? 1 : first < 0xf0 ? 2 : 3;
  std::uint32_t point = more == 0 ? first : first & (0x3fU >> more);
  for (int i = 0; i < more && at < text.size(); ++i) point = point << 6 | (byte(at++) & 0x3fU);
  return point;
}

// "layers.12" is number 12 of "layers.".
std::optional<std::pair<std::string, std::int64_t>> Numbered(const std::string& name) {
  const std::size_t dot = name.rfind('.');
  if (dot == std::string::npos || dot + 1 == name.size()) return std::nullopt;
  std::int64_t number = 0;
  const char* end = name.data() + name.size();
  const auto [read, error] = std::from_chars(name.data() + dot + 1, end, number);
  if (error != std::errc{} || read != end || fmt::format("{}", number) != name.substr(dot + 1))
    return std::nullopt;
  return std::pair(name.substr(0, dot + 1), number);
}

// An f-string of `prefix` and the loop's number.
std::string NumberedLiteral(const std::string& prefix) {
  std::string text = Literal(prefix);
  std::string doubled;
  for (const char c : text.substr(1, text.size() - 2)) {
    if (c == '{' || c == '}') doubled += c;
    doubled += c;
  }
  return "f\"" + doubled + "{i}\"";
}

}  // namespace

// JSON's escapes are Python's, but for what is beyond 16 bits.
std::string Literal(const std::string& text) {
  const std::string json = Json(text).dump();
  std::string literal;
  for (std::size_t at = 0; at < json.size();) {
    const std::uint32_t point = CodePoint(json, at);
    if (point < 0x7f) {
      literal += static_cast<char>(point);
    } else {
      literal += point <= 0xffff ? fmt::format("\\u{:04x}", point) : fmt::format("\\U{:08x}", point);
    }
  }
  return literal;
}
std::string Literal(bool value) { return value ? "True" : "False"; }
std::string Literal(double value) { return Json(value).dump(); }
std::string Literal(const ReshardAfterForward& value) {
  return std::holds_alternative<bool>(value) ? Literal(std::get<bool>(value))
                                             : fmt::format("{}", std::get<std::int64_t>(value));
}
std::string Literal(DType dtype) { return fmt::format("torch.{}", Name(dtype)); }

std::string Tuple(const std::vector<std::string>& texts) {
  std::vector<std::string> literals;
  for (const std::string& text : texts) literals.push_back(Literal(text));
  return fmt::format("({}{})", fmt::join(literals, ", "), texts.size() == 1 ? "," : "");
}

std::string List(const std::vector<std::string>& texts) {
  std::vector<std::string> literals;
  for (const std::string& text : texts) literals.push_back(Literal(text));
  return fmt::format("[{}]", fmt::join(literals, ", "));
}

std::string NamesExpression(const std::vector<std::string>& names) {
  std::vector<std::string> parts;
  bool only_names = true;
  for (std::size_t at = 0; at < names.size();) {
    const auto first = Numbered(names[at]);
    std::size_t end = at + 1;
    while (first && end < names.size()) {
      const auto next = Numbered(names[end]);
      if (!next || next->first != first->first ||
          next->second != first->second + static_cast<std::int64_t>(end - at))
        break;
      ++end;
    }
    if (end - at < 3) {
      parts.push_back(Literal(names[at]));
      ++at;
      continue;
    }
    only_names = false;
    const std::int64_t count = static_cast<std::int64_t>(end - at);
    const std::string range = first->second == 0
                                  ? fmt::format("range({})", count)
                                  : fmt::format("range({}, {})", first->second, first->second + count);
    parts.push_back(fmt::format("{} for i in {}", NumberedLiteral(first->first), range));
    at = end;
  }
  if (parts.size() == 1 && !only_names) return "[" + parts.front() + "]";
  for (std::string& part : parts) {
    if (part.starts_with("f\"")) part = "*(" + part + ")";
  }
  return fmt::format("[{}]", fmt::join(parts, ", "));
}

}  // namespace shardplan::cli
