// SPDX-License-Identifier: Apache-2.0
#include "json/writer.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cstdint>

#include "names/unicode.h"

namespace shardplan {
namespace {

// The escape of a character that has a short one.
char ShortEscape(char c) {
  switch (c) {
    case '"':
    case '\\':
      return c;
    case '\n':
      return 'n';
    case '\r':
      return 'r';
    case '\t':
      return 't';
    case '\b':
      return 'b';
    case '\f':
      return 'f';
    default:
      return 0;
  }
}

// A reader of the file sees every character that is not escaped. document.py of the tracer writes the same.
void AppendJsonString(std::string& out, std::string_view text) {
  out += '"';
  while (!text.empty()) {
    const char c = text.front();
    std::size_t bytes = 1;
    if (c > 0x1f && c < 0x7f && c != '"' && c != '\\') {
      out += c;
    } else if (const char escape = ShortEscape(c); escape != 0) {
      out += '\\';
      out += escape;
    } else {
      const Utf8Character character = FirstCharacter(text);
      bytes = std::max<std::size_t>(1, character.bytes);
      if (character.bytes > 0 && IsHiddenCharacter(character.code)) {
        out += fmt::format("\\u{:04x}", static_cast<std::uint32_t>(character.code));
      } else {
        out += text.substr(0, bytes);
      }
    }
    text.remove_prefix(bytes);
  }
  out += '"';
}

// An optional field that has the default of its value type.
bool IsLeftOut(const JsonField& field, const void* object, const JsonObjectType& type) {
  return !field.required && field.type->equal(field.Of(object), field.Of(type.defaults()));
}

}  // namespace

void JsonWriter::WriteObject(const void* value, const JsonObjectType& type, int indent) {
  out_ += '{';
  if (indent == kInline) {
    WriteInlineFields(value, type, true);
  } else {
    WriteBlockFields(value, type, indent + 2, true);
    NewLine(indent);
  }
  out_ += '}';
}

void JsonWriter::WriteTagged(const void* value, const JsonObjectType& type) {
  if (!type.is_event) {
    out_ += '{';
    Append(kTagField);
    out_ += ": ";
    Append(type.tag);
    WriteInlineFields(value, type, false);
    out_ += '}';
    return;
  }
  out_ += '[';
  Append(type.tag);
  for (const JsonField& field : type.fields) {
    if (IsLeftOut(field, value, type)) continue;
    out_ += ", ";
    field.type->write(*this, field.Of(value), field.spec, kInline);
  }
  out_ += ']';
}

void JsonWriter::WriteInlineFields(const void* value, const JsonObjectType& type, bool first) {
  for (const JsonField& field : type.fields) {
    if (IsLeftOut(field, value, type)) continue;
    if (!first) out_ += ", ";
    first = false;
    Append(field.name);
    out_ += ": ";
    field.type->write(*this, field.Of(value), field.spec, kInline);
  }
}

void JsonWriter::WriteBlockFields(const void* value, const JsonObjectType& type, int indent, bool first) {
  for (const JsonField& field : type.fields) {
    if (IsLeftOut(field, value, type)) continue;
    if (!first) out_ += ',';
    first = false;
    NewLine(indent);
    Append(field.name);
    out_ += ": ";
    field.type->write(*this, field.Of(value), field.spec,
                      field.lines || field.type->is_block ? indent : kInline);
  }
}

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
