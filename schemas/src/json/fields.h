// SPDX-License-Identifier: Apache-2.0
// How a value type looks in JSON, declared once per type as a list of fields: reader.h and writer.h
// work from that list, and dev/update_schemas writes the JSON Schema files from it.
//
//   template <>
//   inline constexpr Definition kDefinition<ModuleBuffer> = {"trace", "buffer", "A module buffer."};
//   template <>
//   inline constexpr auto kFields<ModuleBuffer> = FieldList(
//       // must be there, always written
//       Required("fqn", &ModuleBuffer::fqn, "Fully qualified name."),
//       // may be missing: the default of the value type, and is left out when it has that default
//       Optional("storage", &ModuleBuffer::storage, "Its storage id when operators read it.").OrNone());
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <string_view>
#include <tuple>
#include <type_traits>

#include "names/ref_kind.h"

namespace shardplan {

inline constexpr std::int64_t kNoLimit = std::numeric_limits<std::int64_t>::max();
// Largest integer that every JSON reader has exactly; the limit of bytes and nanoseconds.
inline constexpr std::int64_t kMaxExact = std::int64_t{1} << 53;
// Storage ids may be used to index a vector.
inline constexpr std::int64_t kMaxStorageId = (std::int64_t{1} << 24) - 1;

// Limits for the numbers of a field (its elements, when it is a list).
struct Spec {
  std::int64_t min = 0;
  std::int64_t max = kNoLimit;  // narrowed to what the type holds
  bool positive = false;        // floating point: > 0
  bool shape = false;           // a tensor's shape: the product of the list is limited, too
  RefKind ref = RefKind::kNone;
};

template <typename T, typename Member>
struct FieldDef {
  std::string_view name;
  Member T::*member = nullptr;
  bool required = true;
  std::string_view says;   // what it is, for the JSON Schema file; the unit of measure comes from the name
  bool lines = false;      // a list with one element a line
  bool not_empty = false;  // a list with at least one element; the document's own checks see to it
  Spec spec;
  RefKind defines = RefKind::kNone;  // the list that references of this kind index

  constexpr FieldDef AtLeast(std::int64_t min) const {
    return With([&](FieldDef& f) { f.spec.min = min; });
  }
  constexpr FieldDef AtMost(std::int64_t max) const {
    return With([&](FieldDef& f) { f.spec.max = max; });
  }
  // -1 is allowed, too.
  constexpr FieldDef OrNone() const { return AtLeast(-1); }
  constexpr FieldDef Positive() const {
    return With([](FieldDef& f) { f.spec.positive = true; });
  }
  constexpr FieldDef Shape() const {
    return With([](FieldDef& f) { f.spec.shape = true; });
  }
  constexpr FieldDef Ref(RefKind kind) const {
    return With([&](FieldDef& f) { f.spec.ref = kind; });
  }
  constexpr FieldDef Defines(RefKind kind) const {
    return With([&](FieldDef& f) { f.defines = kind; });
  }
  constexpr FieldDef Lines() const {
    return With([](FieldDef& f) { f.lines = true; });
  }
  constexpr FieldDef NotEmpty() const {
    return With([](FieldDef& f) { f.not_empty = true; });
  }
  constexpr FieldDef Storage() const { return AtMost(kMaxStorageId); }

 private:
  template <typename Change>
  constexpr FieldDef With(Change change) const {
    FieldDef copy = *this;
    change(copy);
    return copy;
  }
};

template <typename T, typename Member>
constexpr FieldDef<T, Member> Required(std::string_view name, Member T::*member, std::string_view says = {}) {
  return {.name = name, .member = member, .required = true, .says = says};
}
template <typename T, typename Member>
constexpr FieldDef<T, Member> Optional(std::string_view name, Member T::*member, std::string_view says = {}) {
  return {.name = name, .member = member, .required = false, .says = says};
}
template <typename... Defs>
constexpr std::tuple<Defs...> FieldList(Defs... defs) {
  return {defs...};
}

// The fields of T; specialised for every struct of a document.
template <typename T>
inline constexpr std::nullptr_t kFields = nullptr;

template <typename T>
inline constexpr bool kHasFields = !std::is_same_v<std::remove_cvref_t<decltype(kFields<T>)>, std::nullptr_t>;

// The definition of T in the JSON Schema files: in "$defs" of this document's file under this name. Without a
// name it is written out where it is used.
struct Definition {
  std::string_view document;
  std::string_view name;
  std::string_view says;
};
template <typename T>
inline constexpr Definition kDefinition{};

// T's fields have a line each (instead of the whole object on one line).
template <typename T>
inline constexpr bool kIsBlock = false;

// A list of T may hold entries that stand for elements before them again. Specialised with the type `Entry`
// of such an entry (an object whose one field T has not), Append(list, entry) and Find(list).
template <typename T>
struct Repeats {};
template <typename T>
concept Repeatable = requires {
  typename Repeats<T>::Entry;
};

// Alternatives of a variant are told apart by a tag. An event is an array [tag, field, ...] of which optional
// fields at the end may be missing; anything else is an object with the tag in the field "call".
template <typename T>
inline constexpr std::string_view kTag{};
template <typename T>
inline constexpr bool kIsEvent = false;
inline constexpr std::string_view kTagField = "call";

// Calls visit(field) for every field of T in order until one returns false; false if one did.
template <typename T, typename Visit>
constexpr bool ForEachField(Visit visit) {
  return std::apply([&](const auto&... field) { return (visit(field) && ...); }, kFields<T>);
}

}  // namespace shardplan
