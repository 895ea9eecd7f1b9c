// SPDX-License-Identifier: Apache-2.0
// Reads value types from a tape by their field lists. Nothing is trusted: the first thing that is wrong ends
// the reading with an error that has the pointer, what was found and what was expected.
#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <functional>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <variant>
#include <vector>

#include "json/fields.h"
#include "json/tape.h"
#include "json/types.h"
#include "names/enum_names.h"
#include "shardplan/schemas/error.h"
#include "shardplan/schemas/program.h"
#include "shardplan/schemas/shared_list.h"
#include "shardplan/schemas/strategy.h"

namespace shardplan {

// The schema field and the extensions, which every document has besides its own fields.
inline constexpr std::string_view kSchemaField = "schema";
inline constexpr std::string_view kExtensionsField = "extensions";

// Facts of one document that the readers of its parts share.
struct ReadingContext {
  struct RefTable {
    bool defined =
        false;  // otherwise references are not limited (a segment's module ids: the trace is not here)
    std::int64_t size = 0;
    std::unordered_map<std::string_view, std::int64_t> ids;  // -1: several elements have the name
    void Add(std::string_view name, std::int64_t id) {
      const auto [entry, added] = ids.emplace(name, id);
      if (!added) entry->second = -1;
    }
  };
  // A list that was read; it stays where it is.
  template <typename T>
  void Define(RefKind kind, const std::vector<T>& list) {
    RefTable& table = refs[static_cast<std::size_t>(kind)];
    table = {.defined = true, .size = std::ssize(list)};
    for (std::size_t i = 0; i < list.size(); ++i) table.Add(list[i].name, static_cast<std::int64_t>(i));
  }

  std::array<RefTable, kRefKinds> refs;
  std::map<std::string, SharedText, std::less<>> texts;
  InstructionSharing sharing;
};

class JsonReader {
 public:
  JsonReader(const JsonTape& tape, ReadingContext& context) : tape_(tape), context_(context) {}

  // Reads the root object. Every Read function returns false after an error.
  template <typename T>
  bool ReadDocument(T& value) {
    const JsonIndex extensions = tape_.Find(0, kExtensionsField);
    if (extensions != 0 && tape_[extensions].kind != JsonKind::kObject) {
      return Wrong(extensions, "extensions must be an object", "an object");
    }
    return ReadObject(0, &value, JsonObjectTypeOf<T>(), {kSchemaField, kExtensionsField});
  }
  // Reads the root as one more element of the list.
  template <typename T>
  bool ReadElementOf(std::vector<T>& list, const Spec& spec) {
    return ReadElement(0, list, spec);
  }
  Error TakeError() { return std::move(error_); }

  // A value of any type that documents have.
  template <typename T>
  bool Read(JsonIndex node, T& value, const Spec& spec) {
    if constexpr (std::is_same_v<T, bool>) {
      return ReadBool(node, value);
    } else if constexpr (std::is_same_v<T, std::string>) {
      return ReadString(node, value);
    } else if constexpr (std::is_same_v<T, SharedText>) {
      return ReadText(node, value);
    } else if constexpr (std::is_same_v<T, double>) {
      return ReadReal(node, value, spec);
    } else if constexpr (std::is_integral_v<T>) {
      std::int64_t integer = 0;
      const std::int64_t max = std::min<std::int64_t>(spec.max, std::numeric_limits<T>::max());
      const bool ok = spec.ref == RefKind::kNone ? ReadInteger(node, spec.min, max, integer)
                                                 : ReadReference(node, spec.ref, spec.min, integer);
      value = static_cast<T>(integer);
      return ok;
    } else if constexpr (std::is_enum_v<T>) {
      return ReadEnum(node, value);
    } else if constexpr (requires { value.value += 1; }) {  // Bytes, Nanoseconds
      return ReadInteger(node, spec.min, kMaxExact, value.value);
    } else {
      return ReadCompound(node, value, spec);
    }
  }

 private:
  template <typename T>
  bool ReadCompound(JsonIndex node, std::optional<T>& value, const Spec& spec) {
    return Read(node, value.emplace(), spec);
  }
  template <typename T>
  bool ReadCompound(JsonIndex node, std::vector<T>& value, const Spec& spec) {
    if (tape_[node].kind != JsonKind::kArray) return Wrong(node, "wrong type", "a list");
    value.clear();  // the default of a list need not be empty
    value.reserve(tape_[node].size);
    for (JsonIndex child = node + 1; child < tape_[node].end; child = tape_[child].end) {
      if (!ReadElement(child, value, spec)) return false;
    }
    if constexpr (std::is_same_v<T, std::int64_t>) {
      if (spec.shape && !FitsExact(value))
        return Wrong(node, "too many elements", "a shape of at most 2^53 elements");
    }
    return true;
  }
  template <typename T>
  bool ReadElement(JsonIndex node, std::vector<T>& list, const Spec& spec) {
    if constexpr (Repeatable<T>) {
      typename Repeats<T>::Entry entry;
      const std::string_view name = std::get<0>(kFields<typename Repeats<T>::Entry>).name;
      if (tape_.Find(node, name) != 0) {
        if (!ReadObject(node, &entry, JsonObjectTypeOf<typename Repeats<T>::Entry>(), {})) return false;
        const std::string expected = Repeats<T>::Append(list, entry);
        return expected.empty() || Wrong(tape_.Find(node, name), "cannot be repeated so", expected);
      }
    }
    return Read(node, list.emplace_back(), spec);
  }
  // SharedList, IdList
  template <typename T>
  requires requires(T list) { list.Edit(); }
  bool ReadCompound(JsonIndex node, T& value, const Spec& spec) {
    std::vector<typename T::value_type> values;
    const bool ok = ReadCompound(node, values, spec);
    value = std::move(values);
    return ok;
  }
  // Knobs of a policy that is not built in, by name.
  bool ReadCompound(JsonIndex node, std::map<std::string, KnobValue>& value, const Spec& spec);
  // ReshardAfterForward: a bool, or the size of a smaller mesh.
  bool ReadCompound(JsonIndex node, std::variant<bool, std::int64_t>& value, const Spec& spec);
  template <typename... T>
  bool ReadCompound(JsonIndex node, std::variant<T...>& value, const Spec& /*spec*/) {
    using Variant = std::variant<T...>;
    static constexpr std::array<JsonAlternative, sizeof...(T)> kAlternatives = {
        JsonAlternative{.type = JsonObjectTypeOf<T>, .emplace = [](void* variant) -> void* {
                          return &static_cast<Variant*>(variant)->template emplace<T>();
                        }}...};
    return ReadVariant(node, &value, kAlternatives);
  }
  template <typename T>
  bool ReadCompound(JsonIndex node, T& value, const Spec& /*spec*/) {
    static_assert(kHasFields<T>);
    return ReadObject(node, &value, JsonObjectTypeOf<T>(), {});
  }

  // `also` names fields that are allowed but not the type's.
  bool ReadObject(JsonIndex node, void* value, const JsonObjectType& type,
                  std::pair<std::string_view, std::string_view> also);
  bool ReadFields(JsonIndex node, void* value, const JsonObjectType& type,
                  std::pair<std::string_view, std::string_view> also);
  bool ReadEvent(JsonIndex node, void* value, const JsonObjectType& type);
  bool ReadVariant(JsonIndex node, void* variant, std::span<const JsonAlternative> alternatives);

  template <typename Enum>
  bool ReadEnum(JsonIndex node, Enum& value) {
    std::optional<Enum> found;
    if (tape_[node].kind == JsonKind::kString) found = EnumFromName<Enum>(tape_.String(node));
    if (!found.has_value()) return Wrong(node, "unknown value", EnumChoices<Enum>());
    value = *found;
    return true;
  }
  // The product of the dimensions is at most kMaxExact.
  static bool FitsExact(const std::vector<std::int64_t>& shape);
  bool ReadBool(JsonIndex node, bool& value);
  bool ReadString(JsonIndex node, std::string& value);
  // Equal texts of a document share their characters.
  bool ReadText(JsonIndex node, SharedText& value);
  bool ReadReal(JsonIndex node, double& value, const Spec& spec);
  bool ReadInteger(JsonIndex node, std::int64_t min, std::int64_t max, std::int64_t& value);
  // An index into, or the name of an element of, the list that defines `kind`.
  bool ReadReference(JsonIndex node, RefKind kind, std::int64_t min, std::int64_t& value);
  // The node of the tag of a variant's value, 0 after an error.
  JsonIndex FindTag(JsonIndex node, bool is_event, std::string_view& tag);

  // Notes the size and the names of the list at `list` (0: there is none) for references.
  bool Define(RefKind kind, JsonIndex list);

  bool Wrong(JsonIndex node, std::string message, std::string expected);
  bool Missing(JsonIndex object, std::string_view field);
  bool Unknown(JsonIndex key, const std::string& known);

  const JsonTape& tape_;
  ReadingContext& context_;
  Error error_;
};

}  // namespace shardplan
