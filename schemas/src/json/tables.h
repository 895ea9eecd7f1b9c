// SPDX-License-Identifier: Apache-2.0
// The tables of the types that a document has. For the one file of the document that defines them.
#pragma once

#include <array>
#include <cstddef>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "json/reader.h"
#include "json/types.h"
#include "json/writer.h"

namespace shardplan {

template <typename T>
struct JsonListOf;  // below

template <typename T>
constexpr const JsonListType* ListTypeOf() {
  if constexpr (requires { JsonListOf<T>::kType; }) {
    return &JsonListOf<T>::kType;
  } else {
    return nullptr;
  }
}
template <typename T>
constexpr auto ObjectTypeOrNull() -> const JsonObjectType& (*)() {
  if constexpr (kHasFields<T>) {
    return JsonObjectTypeOf<T>;
  } else {
    return nullptr;
  }
}
template <typename T>
constexpr auto GivenOrNull() -> bool (*)(const void*) {
  if constexpr (requires(T value) { value.has_value(); }) {
    return [](const void* value) { return static_cast<const T*>(value)->has_value(); };
  } else {
    return nullptr;
  }
}

template <typename T>
inline constexpr JsonValueType kJsonValueType = {
    .read = [](JsonReader& reader, JsonIndex node, void* value,
               const Spec& spec) { return reader.Read(node, *static_cast<T*>(value), spec); },
    .write = [](JsonWriter& writer, const void* value, const Spec& spec,
                int indent) { writer.Write(*static_cast<const T*>(value), spec, indent); },
    .equal = [](const void* a,
                const void* b) { return *static_cast<const T*>(a) == *static_cast<const T*>(b); },
    .is_block = kIsBlock<T>,
    .is_string = std::is_same_v<T, std::string>,
    .is_id = std::is_same_v<T, std::int32_t>,
    .given = GivenOrNull<T>(),
    .list = ListTypeOf<T>(),
    .object = ObjectTypeOrNull<T>()};

template <typename T>
struct JsonListOf<std::vector<T>> {
  using List = std::vector<T>;
  static constexpr JsonListType kType = {
      .element = &kJsonValueType<T>,
      .size = [](const void* list) { return static_cast<const List*>(list)->size(); },
      .at = [](const void* list, std::size_t position) -> const void* {
        return &(*static_cast<const List*>(list))[position];
      }};
};

template <typename T, std::size_t I>
void* FieldIn(void* object) {
  constexpr auto kMember = std::get<I>(kFields<T>).member;
  return &(static_cast<T*>(object)->*kMember);
}

template <typename T, std::size_t I>
constexpr JsonField JsonFieldOf() {
  const auto& field = std::get<I>(kFields<T>);
  using Member = std::remove_reference_t<decltype(std::declval<T&>().*field.member)>;
  return {.name = field.name,
          .required = field.required,
          .lines = field.lines,
          .spec = field.spec,
          .defines = field.defines,
          .type = &kJsonValueType<Member>,
          .in = FieldIn<T, I>};
}

template <typename T>
inline constexpr auto kJsonFields = []<std::size_t... I>(std::index_sequence<I...>) {
  return std::array<JsonField, sizeof...(I)>{JsonFieldOf<T, I>()...};
}
(std::make_index_sequence<std::tuple_size_v<std::remove_cvref_t<decltype(kFields<T>)>>>{});

template <typename T>
const void* JsonDefaults() {
  static const T kDefaults{};
  return &kDefaults;
}

template <typename T>
constexpr auto JsonAfterReading() -> void (*)(void*, InstructionSharing&) {
  if constexpr (requires(T & value, InstructionSharing & sharing) { AfterReading(value, sharing); }) {
    return [](void* value, InstructionSharing& sharing) { AfterReading(*static_cast<T*>(value), sharing); };
  } else {
    return nullptr;
  }
}

template <typename T>
inline constexpr JsonObjectType kJsonObjectType = {.fields = kJsonFields<T>,
                                                   .tag = kTag<T>,
                                                   .is_event = kIsEvent<T>,
                                                   .defaults = JsonDefaults<T>,
                                                   .after_reading = JsonAfterReading<T>()};

template <typename T>
const JsonObjectType& JsonObjectTypeOf() {
  return kJsonObjectType<T>;
}

}  // namespace shardplan
