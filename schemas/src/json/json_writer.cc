#include "json/json_writer.h"

#include <fmt/format.h>

#include <array>
#include <charconv>

namespace shardplan {
namespace {

void AppendJsonString(std::string& out, std::string_view text) {
  out += '"';
  for (const char c : text) {
    switch (c) {
      case '"':
        out += "\\\"";
        break;
      case '\\':
        out += "\\\\";
        break;
      case '\n':
        out += "\\n";
        break;
      case '\r':
        out += "\\r";
        break;
      case '\t':
        out += "\\t";
        break;
      case '\b':
        out += "\\b";
        break;
      case '\f':
        out += "\\f";
        break;
      default:
        if (static_cast<unsigned char>(c) < 0x20) {
          out += fmt::format("\\u{:04x}", static_cast<unsigned>(c));
        } else {
          out += c;
        }
    }
  }
  out += '"';
}

}  // namespace

void JsonWriter::Append(std::int64_t value) {
  std::array<char, 24> digits;
  const auto result = std::to_chars(digits.data(), digits.data() + digits.size(), value);
  out_.append(digits.data(), result.ptr);
}

void JsonWriter::Append(double value) {
  std::array<char, 40> digits;
  if (value == 0) value = 0;  // not "-0", which reads back as the integer 0
  const auto result = std::to_chars(digits.data(), digits.data() + digits.size(), value);
  out_.append(digits.data(), result.ptr);
}

void JsonWriter::Append(std::string_view text) { AppendJsonString(out_, text); }

void JsonWriter::AppendReference(std::int64_t id, RefKind kind) {
  if (names_ != nullptr && IsNamed(kind) && names_->IsUnique(kind, id)) {
    Append(names_->Name(kind, id));
  } else {
    Append(id);
  }
}

std::string JsonString(std::string_view text) {
  std::string out;
  AppendJsonString(out, text);
  return out;
}

}  // namespace shardplan
