// SPDX-License-Identifier: Apache-2.0
#include "shardplan/schemas/printable.h"

#include <fmt/format.h>

#include <cstdint>

#include "names/unicode.h"

namespace shardplan {
namespace {

// The smallest code point of a sequence of so many bytes; a smaller one has a shorter form.
constexpr char32_t SmallestOf(std::size_t bytes) { return bytes == 2 ? 0x80 : bytes == 3 ? 0x800 : 0x10000; }

void AppendEscape(std::string& out, char32_t code) {
  switch (code) {
    case '\n':
      out += "\\n";
      break;
    case '\r':
      out += "\\r";
      break;
    case '\t':
      out += "\\t";
      break;
    default: {
      const auto number = static_cast<std::uint32_t>(code);
      out += code < 0x80 ? fmt::format("\\x{:02x}", number) : fmt::format("\\u{:04x}", number);
    }
  }
}

std::string Escaped(std::string_view text, std::string_view kept) {
  std::string out;
  out.reserve(text.size());
  while (!text.empty()) {
    const Utf8Character first = FirstCharacter(text);
    if (first.bytes == 0) {
      out += fmt::format("\\x{:02x}", static_cast<unsigned>(static_cast<unsigned char>(text.front())));
    } else if (IsHiddenCharacter(first.code) && kept.find(text.front()) == std::string_view::npos) {
      AppendEscape(out, first.code);
    } else {
      out += text.substr(0, first.bytes);
    }
    text.remove_prefix(first.bytes == 0 ? 1 : first.bytes);
  }
  return out;
}

}  // namespace

Utf8Character FirstCharacter(std::string_view text) {
  const auto lead = static_cast<unsigned char>(text.front());
  if (lead < 0x80) return {lead, 1};
  const std::size_t bytes = lead >= 0xf0 ? 4 : lead >= 0xe0 ? 3 : 2;
  if (lead < 0xc2 || lead > 0xf4 || text.size() < bytes) return {};
  char32_t code = lead & (0x7fU >> bytes);
  for (const char c : text.substr(1, bytes - 1)) {
    const auto next = static_cast<unsigned char>(c);
    if ((next & 0xc0U) != 0x80) return {};
    code = (code << 6U) | (next & 0x3fU);
  }
  const bool surrogate = code >= 0xd800 && code <= 0xdfff;
  if (code < SmallestOf(bytes) || code > 0x10ffff || surrogate) return {};
  return {code, bytes};
}

bool IsHiddenCharacter(char32_t code) {
  const auto in = [&](char32_t first, char32_t last) { return code >= first && code <= last; };
  return code < 0x20 || in(0x7f, 0x9f) || code == 0x61c || in(0x200e, 0x200f) || in(0x2028, 0x202e) ||
         in(0x2066, 0x2069);
}

std::string Printable(std::string_view text) { return Escaped(text, ""); }
std::string PrintableLines(std::string_view text) { return Escaped(text, "\n\t"); }

bool IsUtf8(std::string_view text) {
  while (!text.empty()) {
    const std::size_t bytes = FirstCharacter(text).bytes;
    if (bytes == 0) return false;
    text.remove_prefix(bytes);
  }
  return true;
}

}  // namespace shardplan
