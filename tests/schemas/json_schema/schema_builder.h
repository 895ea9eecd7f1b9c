// JSON Schema of a value type, by its field list (schemas/src/json/json_fields.h).
#pragma once

#include <concepts>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "schemas/src/documents/enum_names.h"
#include "schemas/src/json/json_fields.h"
#include "schemas/src/json/json_writer.h"

namespace shardplan {

using Json = nlohmann::ordered_json;

// "Unit: bytes." for a field whose name ends in a unit of measure, else "".
std::string UnitOfMeasure(std::string_view field_name);
// "Index into the trace's modules." and the like, for the elements of a list.
std::string ElementWords(const Spec& spec);
// `says`, and how a reference by name is written.
std::string FieldWords(std::string_view field_name, std::string_view says, const Spec& spec);

// What C++ makes of a type: told apart as json_reader.h does.
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

// The schema of one document: its "$defs" fill up as types are used.
class SchemaBuilder {
 public:
  explicit SchemaBuilder(std::string document) : document_(std::move(document)) {}

  // The whole file of the document type T. `schema` is the value of its schema field.
  template <typename T>
  Json File(std::string_view schema) {
    const std::string name(kDefinition<T>.name);
    Json file = {{"$schema", "https://json-schema.org/draft/2020-12/schema"},
                 {"$id", "https://shardplan.dev/schemas/" + document_ + ".schema.json"},
                 {"$comment",
                  "Written by tools/update_schemas from schemas/src/documents/" + document_ + "_fields.h."},
                 {"title", "shardplan " + document_},
                 {"description", kDefinition<T>.says},
                 {"$ref", "#/$defs/" + name}};
    file["properties"] = {
        {"schema", {{"const", schema}, {"description", "Kind and major version of the document."}}},
        {"extensions", {{"type", "object"}, {"description", "Anything; ignored, and not written again."}}}};
    file["required"] = Json::array({"schema"});
    file["unevaluatedProperties"] = false;
    // Open, as the file adds two fields; whoever else refers to it closes it (Reference).
    Json definition = Object<T>(std::nullopt);
    definition.erase("description");
    definition.erase("additionalProperties");
    defs_[name] = std::move(definition);
    file["$defs"] = std::move(defs_);
    return file;
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
      Json reference = {{"$ref", std::string(kHome.document) + ".schema.json" + pointer}};
      if (kHome.name == kHome.document) reference["unevaluatedProperties"] = false;  // a whole document
      return reference;
    }
    if (!defs_.contains(name)) {
      Json definition = Written<T>({});
      if (!definition.contains("description")) definition["description"] = kHome.says;
      defs_[name] = std::move(definition);
    }
    return {{"$ref", pointer}};
  }

  template <typename T>
  Json Written(const Spec& spec) {
    if constexpr (std::is_same_v<T, bool>) {
      return {{"type", "boolean"}};
    } else if constexpr (std::is_same_v<T, std::string> || std::is_same_v<T, SharedText>) {
      return {{"type", "string"}};
    } else if constexpr (std::is_same_v<T, double>) {
      Json number = {{"type", "number"}};
      if (spec.positive) number["exclusiveMinimum"] = 0;
      return number;
    } else if constexpr (std::is_integral_v<T>) {
      return Integer(spec, std::numeric_limits<T>::max());
    } else if constexpr (std::is_enum_v<T>) {
      return {{"enum", kEnumNames<T>}};
    } else if constexpr (BytesOrTime<T>) {
      return Integer(spec, kMaxExact);
    } else if constexpr (kIsOptional<T>) {
      return Of<typename T::value_type>(spec);
    } else if constexpr (kIsList<T>) {
      Json element = Of<typename T::value_type>(spec);
      if constexpr (Repeatable<typename T::value_type>) {
        element = {
            {"anyOf", {std::move(element), Of<typename Repeats<typename T::value_type>::Entry>(spec)}}};
      }
      const std::string words = ElementWords(spec);
      if (!words.empty() && !kIsList<typename T::value_type>) element["description"] = words;
      return {{"type", "array"}, {"items", std::move(element)}};
    } else if constexpr (std::is_same_v<T, std::variant<bool, std::int64_t>>) {
      return {
          {"anyOf", {{{"type", "boolean"}}, Integer({.min = 1}, std::numeric_limits<std::int64_t>::max())}}};
    } else if constexpr (kIsVariant<T>) {
      return AnyOf(std::type_identity<T>{});
    } else {
      return Object<T>(std::nullopt);
    }
  }

  static Json Integer(const Spec& spec, std::int64_t most) {
    // An id's limit is that of the list it indexes, which a schema cannot say.
    const std::int64_t max = spec.ref == RefKind::kNone ? std::min(spec.max, most) : most;
    Json integer = {{"type", "integer"}, {"minimum", spec.min}, {"maximum", max}};
    if (!IsNamed(spec.ref)) return integer;
    return {{"anyOf", {{{"type", "string"}}, std::move(integer)}}};
  }

  template <typename... T>
  Json AnyOf(std::type_identity<std::variant<T...>> /*type*/) {
    Json alternatives = Json::array();
    (alternatives.push_back(Alternative<T>()), ...);
    return {{"anyOf", std::move(alternatives)}};
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
      return {{"$ref", "#/$defs/" + name}};
    }
  }

  // [tag, field, ...]
  template <typename T>
  Json Event() {
    Json elements = Json::array();
    elements.push_back({{"const", kTag<T>}});
    std::size_t least = 1;
    ForEachField<T>([&](const auto& field) {
      elements.push_back(Field<T>(field));
      elements.back().erase("default");
      least += field.required ? 1 : 0;
      return true;
    });
    return {{"type", "array"},
            {"description", Words<T>()},
            {"prefixItems", std::move(elements)},
            {"items", false},
            {"minItems", least}};
  }

  template <typename T>
  Json Object(std::optional<std::string_view> tag) {
    Json properties = Json::object();
    Json required = Json::array();
    if (tag.has_value()) {
      properties[kTagField] = {{"const", *tag}};
      required.push_back(kTagField);
    }
    ForEachField<T>([&](const auto& field) {
      properties[field.name] = Field<T>(field);
      if (field.required) required.push_back(field.name);
      return true;
    });
    Json object = {{"type", "object"}, {"description", Words<T>()}, {"properties", std::move(properties)}};
    if (!required.empty()) object["required"] = std::move(required);
    object["additionalProperties"] = false;
    return object;
  }

  template <typename T, typename FieldType>
  Json Field(const FieldType& field) {
    using Member = std::remove_cvref_t<decltype(std::declval<T>().*field.member)>;
    Json schema = Of<Member>(field.spec);
    if (field.says.empty())
      wordless_.push_back(std::string(kDefinition<T>.says) + ": " + std::string(field.name));
    schema["description"] = FieldWords(field.name, field.says, kIsList<Member> ? Spec{} : field.spec);
    if (field.not_empty) schema["minItems"] = 1;
    if (!field.required) AddDefault(schema, T{}.*field.member, field.spec);
    return schema;
  }

  // What a document means that leaves the field out; nothing where the type has a state of its own for that.
  template <typename Member>
  static void AddDefault(Json& schema, const Member& value, const Spec& spec) {
    if constexpr (!kIsOptional<Member> && !kIsVariant<Member> && !WithFields<Member>) {
      if (IsNamed(spec.ref) && !kIsList<Member>) return;  // -1, which is written by leaving it out
      JsonWriter writer;
      writer.WriteInline(value);
      schema["default"] = Json::parse(writer.Take());
    }
  }

  template <typename T>
  std::string Words() {
    if (kDefinition<T>.says.empty()) wordless_.push_back("a type with the tag " + std::string(kTag<T>));
    return std::string(kDefinition<T>.says);
  }

  std::string document_;
  Json defs_ = Json::object();
  std::vector<std::string> wordless_;
};

}  // namespace shardplan
