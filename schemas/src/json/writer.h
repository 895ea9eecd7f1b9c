// SPDX-License-Identifier: Apache-2.0
// Writes value types as canonical JSON text by their field lists (docs/reference/trace-format.md, "Canonical
// text").
#pragma once

#include <concepts>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "json/fields.h"
#include "json/types.h"
#include "names/enum_names.h"
#include "names/plan_names.h"
#include "shardplan/schemas/io.h"
#include "shardplan/schemas/shared_list.h"
#include "shardplan/schemas/strategy.h"

namespace shardplan {

class JsonWriter {
 public:
  static constexpr int kInline = -1;

  // `names`: references are written by name where the name is unique. May be null.
  explicit JsonWriter(const PlanNames* names = nullptr) : names_(names) {}
  // Gives the text away in pieces, as it comes.
  JsonWriter(const PlanNames* names, JsonSink sink, MicrobatchText microbatches)
      : names_(names), sink_(std::move(sink)), repeats_(microbatches == MicrobatchText::kEqualOnesOnce) {}

  template <typename T>
  void WriteDocument(std::string_view schema, const T& value) {
    out_ += "{\n  \"schema\": ";
    Append(schema);
    WriteBlockFields(&value, JsonObjectTypeOf<T>(), 2, false);
    out_ += "\n}\n";
  }
  // On one line.
  template <typename T>
  void WriteInline(const T& value) {
    Write(value, Spec{}, kInline);
  }
  void WriteInline(const void* value, const JsonValueType& type) {
    type.write(*this, value, Spec{}, kInline);
  }
  std::string Take() { return std::move(out_); }

  // `indent`: of the line that the value starts on; kInline: all on that line.
  template <typename T>
  void Write(const T& value, const Spec& spec, int indent) {
    if constexpr (std::is_same_v<T, bool>) {
      out_ += value ? "true" : "false";
    } else if constexpr (std::is_same_v<T, std::string>) {
      Append(value);
    } else if constexpr (std::is_same_v<T, SharedText>) {
      Append(value.str());
    } else if constexpr (std::is_same_v<T, double>) {
      Append(value);
    } else if constexpr (std::is_integral_v<T>) {
      AppendReference(value, spec.ref);
    } else if constexpr (std::is_enum_v<T>) {
      Append(EnumName(value));
    } else if constexpr (requires { value.value + 1; }) {  // Bytes, Nanoseconds
      Append(static_cast<std::int64_t>(value.value));
    } else {
      WriteCompound(value, spec, indent);
    }
  }

 private:
  template <typename T>
  void WriteCompound(const std::optional<T>& value, const Spec& spec, int indent) {
    if (value.has_value()) {
      Write(*value, spec, indent);
    } else {
      out_ += "null";
    }
  }
  template <typename T>
  void WriteCompound(const std::vector<T>& value, const Spec& spec, int indent) {
    const bool lines = indent != kInline && !value.empty();
    out_ += '[';
    bool first = true;
    const auto begin_element = [&] {
      if (!first) out_ += lines ? "," : ", ";
      first = false;
      if (lines) NewLine(indent + 2);
    };
    const auto write = [&](std::size_t begin, std::size_t end) {
      for (std::size_t i = begin; i < end; ++i) {
        begin_element();
        Write<T>(value[i], spec, lines && kIsBlock<T> ? indent + 2 : kInline);
      }
    };
    std::size_t next = 0;
    if constexpr (Repeatable<T>) {
      std::vector<typename Repeats<T>::Place> places;
      if (repeats_) places = Repeats<T>::Find(value);
      for (const auto& repeated : places) {
        write(next, repeated.at);
        begin_element();
        WriteInline(repeated.entry);
        next = repeated.at + repeated.count();
      }
    }
    write(next, value.size());
    if (lines) NewLine(indent);
    out_ += ']';
  }
  // SharedList, IdList
  template <typename T>
  requires requires(T list) { list.Edit(); }
  void WriteCompound(const T& value, const Spec& spec, int indent) {
    WriteCompound(value.list(), spec, indent);
  }
  void WriteCompound(const std::variant<bool, std::int64_t>& value, const Spec& spec, int /*indent*/) {
    std::visit([&](const auto& alternative) { Write(alternative, spec, kInline); }, value);
  }
  void WriteCompound(const std::map<std::string, KnobValue>& value, const Spec& spec, int /*indent*/) {
    out_ += '{';
    for (const char* separator = ""; const auto& [name, knob] : value) {
      out_ += std::exchange(separator, ", ");
      Append(std::string_view(name));
      out_ += ": ";
      std::visit([&](const auto& alternative) { Write(alternative, spec, kInline); }, knob);
    }
    out_ += '}';
  }
  template <typename... T>
  void WriteCompound(const std::variant<T...>& value, const Spec& /*spec*/, int /*indent*/) {
    std::visit([&]<typename A>(const A& alternative) { WriteTagged(&alternative, JsonObjectTypeOf<A>()); },
               value);
  }
  template <typename T>
  void WriteCompound(const T& value, const Spec& /*spec*/, int indent) {
    static_assert(kHasFields<T>);
    if constexpr (requires { AsWritten(value); }) {
      const T written = AsWritten(value);
      WriteObject(&written, JsonObjectTypeOf<T>(), indent);
    } else {
      WriteObject(&value, JsonObjectTypeOf<T>(), indent);
    }
  }
  void WriteObject(const void* value, const JsonObjectType& type, int indent);
  void WriteTagged(const void* value, const JsonObjectType& type);
  void WriteInlineFields(const void* value, const JsonObjectType& type, bool first);
  void WriteBlockFields(const void* value, const JsonObjectType& type, int indent, bool first);
  void NewLine(int indent) {
    constexpr std::size_t kPieceBytes = std::size_t{1} << 16;
    if (sink_ && out_.size() >= kPieceBytes) {
      sink_(out_);
      out_.clear();
    }
    out_ += '\n';
    out_.append(static_cast<std::size_t>(indent), ' ');
  }
  void Append(std::int64_t value);
  void Append(double value);
  void Append(std::string_view text);
  void AppendReference(std::int64_t id, RefKind kind);

  std::string out_;
  const PlanNames* names_;
  JsonSink sink_;
  bool repeats_ = true;  // lists have entries that stand for elements again
};

// A JSON string of `text`, quotes included.
std::string JsonString(std::string_view text);

}  // namespace shardplan
