// SPDX-License-Identifier: Apache-2.0
// JSON Schema of a value type, by its field list (schemas/src/json/fields.h).
#pragma once

#include <concepts>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "schemas/src/json/fields.h"
#include "schemas/src/json/writer.h"
#include "schemas/src/names/enum_names.h"

namespace shardplan {

using Json = nlohmann::ordered_json;

// "Unit: bytes." for a field whose name ends in a unit of measure, else "".
std::string UnitOfMeasure(std::string_view field_name);
// "Index into the trace's modules." and the like, for the elements of a list.
std::string ElementWords(const Spec& spec);
// `says`, and how a reference by name is written.
std::string FieldWords(std::string_view field_name, std::string_view says, const Spec& spec);

// The kind of a C++ type: told apart as json/reader.h does.
template <typename T>
inline constexpr bool kIsOptional = false;
template <typename T>
inline constexpr bool kIsOptional<std::optional<T>> = true;
template <typename T>
inline constexpr bool kIsList = false;
template <typename T>
inline constexpr bool kIsList<std::vector<T>> = true;
template <typename T>
inline constexpr bool kIsList<SharedList<T>> = true;
template <>
inline constexpr bool kIsList<IdList> = true;
template <typename T>
inline constexpr bool kIsVariant = false;
template <typename... T>
inline constexpr bool kIsVariant<std::variant<T...>> = true;
template <typename T>
concept BytesOrTime = requires(T value) {
  value.value += 1;
};  // Bytes, Nanoseconds
template <typename T>
concept WithFields = !std::is_same_v<std::remove_cvref_t<decltype(kFields<T>)>, std::nullptr_t>;

// The values above as JSON. No templates: each line of nlohmann's lists costs the compiler much, and there
// are some hundred fields.
struct FieldSchema {
  std::string_view name;
  Json schema;
  bool required = false;
};
Json TypeNamed(std::string_view type);
Json OneOf(std::span<const std::string_view> names);
Json AnyOf(std::vector<Json> alternatives);
Json ListOf(Json element, std::string_view element_words);
Json ReferenceTo(const std::string& pointer, bool closed);
Json IntegerUpTo(const Spec& spec, std::int64_t most);
// {field: ...}; with `tag`, the tag first.
Json ObjectOf(std::optional<std::string_view> tag, std::string_view words, std::vector<FieldSchema> fields);
// [tag, field, ...]
Json EventOf(std::string_view tag, std::string_view words, std::vector<FieldSchema> fields);
// The file of the document whose type is `name` in `defs`.
Json FileOf(const std::string& document, std::string_view schema, const Definition& of, Json definition,
            Json defs);
void SetDefault(Json& schema, const std::string& json);

// The schema of one document: its "$defs" fill up as types are used.
class SchemaBuilder {
 public:
  explicit SchemaBuilder(std::string document) : document_(std::move(document)) {}

  // The whole file of the document type T. `schema` is the value of its schema field.
  template <typename T>
  Json File(std::string_view schema) {
    Json definition = Object<T>(std::nullopt);
    return FileOf(document_, schema, kDefinition<T>, std::move(definition), std::move(defs_));
  }

  // Types and fields that say nothing of themselves.
  const std::vector<std::string>& wordless() const { return wordless_; }

 private:
  template <typename T>
  Json Of(const Spec& spec) {
    if constexpr (!kDefinition<T>.name.empty()) {
      return Reference<T>();
    } else {
      return Written<T>(spec);
    }
  }

  template <typename T>
  Json Reference() {
    constexpr Definition kHome = kDefinition<T>;
    const std::string name(kHome.name);
    const std::string pointer = "#/$defs/" + name;
    if (kHome.document != document_) {
      // A whole document is open, as its file adds two fields.
      return ReferenceTo(std::string(kHome.document) + ".schema.json" + pointer,
                         kHome.name == kHome.document);
    }
    if (!defs_.contains(name)) {
      Json definition = Written<T>({});
      if (!definition.contains("description")) definition["description"] = kHome.says;
      defs_[name] = std::move(definition);
    }
    return ReferenceTo(pointer, false);
  }

  template <typename T>
  Json Written(const Spec& spec) {
    if constexpr (std::is_same_v<T, bool>) {
      return TypeNamed("boolean");
    } else if constexpr (std::is_same_v<T, std::string> || std::is_same_v<T, SharedText>) {
      return TypeNamed("string");
    } else if constexpr (std::is_same_v<T, double>) {
      Json number = TypeNamed("number");
      if (spec.positive) number["exclusiveMinimum"] = 0;
      return number;
    } else if constexpr (std::is_integral_v<T>) {
      return IntegerUpTo(spec, std::numeric_limits<T>::max());
    } else if constexpr (std::is_enum_v<T>) {
      return OneOf(kEnumNames<T>);
    } else if constexpr (BytesOrTime<T>) {
      return IntegerUpTo(spec, kMaxExact);
    } else if constexpr (kIsOptional<T>) {
      return Of<typename T::value_type>(spec);
    } else if constexpr (kIsList<T>) {
      Json element = Of<typename T::value_type>(spec);
      if constexpr (Repeatable<typename T::value_type>)
        element = AnyOf({std::move(element), Of<typename Repeats<typename T::value_type>::Entry>(spec)});
      return ListOf(std::move(element), kIsList<typename T::value_type> ? "" : ElementWords(spec));
    } else if constexpr (std::is_same_v<T, std::variant<bool, std::int64_t>>) {
      return AnyOf({TypeNamed("boolean"), IntegerUpTo({.min = 1}, std::numeric_limits<std::int64_t>::max())});
    } else if constexpr (std::is_same_v<T, std::map<std::string, KnobValue>>) {
      Json knobs = TypeNamed("object");
      knobs["additionalProperties"] = AnyOf({TypeNamed("boolean"), TypeNamed("number"), TypeNamed("string")});
      return knobs;
    } else if constexpr (kIsVariant<T>) {
      return Alternatives(std::type_identity<T>{});
    } else {
      return Object<T>(std::nullopt);
    }
  }

  template <typename... T>
  Json Alternatives(std::type_identity<std::variant<T...>> /*type*/) {
    return AnyOf({Alternative<T>()...});
  }
  template <typename T>
  Json Alternative() {
    if constexpr (!kIsEvent<T>) {
      return Object<T>(kTag<T>);
    } else if constexpr (kDefinition<T>.name.empty()) {
      return Event<T>();
    } else if (kDefinition<T>.document != document_) {
      return Reference<T>();
    } else {
      const std::string name(kDefinition<T>.name);
      if (!defs_.contains(name)) defs_[name] = Event<T>();
      return ReferenceTo("#/$defs/" + name, false);
    }
  }

  template <typename T>
  Json Event() {
    return EventOf(kTag<T>, Words(kTag<T>, kDefinition<T>), FieldsOf<T>());
  }

  template <typename T>
  Json Object(std::optional<std::string_view> tag) {
    return ObjectOf(tag, Words(kTag<T>, kDefinition<T>), FieldsOf<T>());
  }

  template <typename T>
  std::vector<FieldSchema> FieldsOf() {
    std::vector<FieldSchema> fields;
    const T blank{};
    ForEachField<T>([&](const auto& field) {
      using Member = std::remove_cvref_t<decltype(blank.*field.member)>;
      Json schema = Of<Member>(field.spec);
      if (field.says.empty()) Wordless(kDefinition<T>, field.name);
      schema["description"] = FieldWords(field.name, field.says, kIsList<Member> ? Spec{} : field.spec);
      if (field.not_empty) schema["minItems"] = 1;
      if (!field.required) AddDefault(schema, blank.*field.member, field.spec);
      fields.push_back({field.name, std::move(schema), field.required});
      return true;
    });
    return fields;
  }

  // The meaning of a document that leaves the field out; nothing where the type has a state of its own for
  // that.
  template <typename Member>
  static void AddDefault(Json& schema, const Member& value, const Spec& spec) {
    if constexpr (!kIsOptional<Member> && !kIsVariant<Member> && !WithFields<Member>) {
      if (IsNamed(spec.ref) && !kIsList<Member>) return;  // -1, which is written by leaving it out
      JsonWriter writer;
      writer.WriteInline(value);
      SetDefault(schema, writer.Take());
    }
  }

  void Wordless(const Definition& of, std::string_view field);
  std::string_view Words(std::string_view tag, const Definition& of);

  std::string document_;
  Json defs_ = Json::object();
  std::vector<std::string> wordless_;
};

}  // namespace shardplan
