// SPDX-License-Identifier: Apache-2.0
#include "diff/field_diff.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <string_view>

#include "json/writer.h"

namespace shardplan {
namespace {

// A value as inline JSON, shortened.
std::string ShortJson(const void* value, const JsonValueType& type, const PlanNames* names) {
  constexpr std::size_t kMaxBytes = 120;
  JsonWriter writer(names);
  writer.WriteInline(value, type);
  std::string text = writer.Take();
  if (text.size() > kMaxBytes) text = text.substr(0, kMaxBytes) + "...";
  return text;
}

std::string Reference(const PlanNames* names, RefKind kind, std::int32_t id) {
  if (id < 0) return "none";
  if (names == nullptr || id >= names->Size(kind)) return fmt::format("#{}", id);
  return fmt::format("\"{}\"", names->Name(kind, id));
}

const JsonObjectType* ObjectOf(const JsonValueType& type) {
  return type.object != nullptr ? &type.object() : nullptr;
}

bool HaveSameKeys(const JsonListType& list, const void* a, const void* b) {
  const std::size_t size = list.size(a);
  if (size != list.size(b)) return false;
  const JsonObjectType* const object = ObjectOf(*list.element);
  for (std::size_t i = 0; i < size; ++i) {
    if (ElementKey(list.at(a, i), object, i) != ElementKey(list.at(b, i), object, i)) return false;
  }
  return true;
}

}  // namespace

std::string ElementKey(const void* element, const JsonObjectType* type, std::size_t position) {
  if (type == nullptr) return fmt::format("{}", position);
  for (const std::string_view name : {"fqn", "name"}) {
    const auto field = std::ranges::find(type->fields, name, &JsonField::name);
    if (field == type->fields.end() || !field->type->is_string) continue;
    const auto& key = *static_cast<const std::string*>(field->Of(element));
    return name == "fqn" ? DisplayName(key) : key;
  }
  return fmt::format("{}", position);
}

void FieldDiff::CompareObjects(const std::string& path, const void* a, const void* b,
                               const JsonObjectType& type) {
  for (const JsonField& field : type.fields) {
    CompareValues(fmt::format("{} {}", path, field.name), field, field.Of(a), field.Of(b));
  }
}

void FieldDiff::CompareValues(const std::string& name, const JsonField& field, const void* a, const void* b) {
  const JsonValueType& type = *field.type;
  if (type.object != nullptr) return CompareObjects(name, a, b, type.object());
  if (type.list != nullptr) return CompareLists(name, type, a, b);
  if (type.given != nullptr) {
    const auto text = [&](const void* value, const PlanNames* names) {
      return type.given(value) ? ShortJson(value, type, names) : "not given";
    };
    return Report(name, text(a, names_a_), text(b, names_b_), type.equal(a, b));
  }
  if (type.is_id && IsNamed(field.spec.ref)) {
    const auto text = [&](const void* id, const PlanNames* names) {
      return Reference(names, field.spec.ref, *static_cast<const std::int32_t*>(id));
    };
    return Report(name, text(a, names_a_), text(b, names_b_), false);
  }
  Report(name, ShortJson(a, type, names_a_), ShortJson(b, type, names_b_), type.equal(a, b));
}

void FieldDiff::CompareLists(const std::string& name, const JsonValueType& type, const void* a,
                             const void* b) {
  const JsonListType& list = *type.list;
  const JsonObjectType* const object = ObjectOf(*list.element);
  if (object == nullptr || !HaveSameKeys(list, a, b)) {
    return Report(name, ShortJson(a, type, names_a_), ShortJson(b, type, names_b_), type.equal(a, b));
  }
  for (std::size_t i = 0; i < list.size(a); ++i) {
    const std::string key = ElementKey(list.at(a, i), object, i);
    CompareObjects(fmt::format("{} {}", name, key), list.at(a, i), list.at(b, i), *object);
  }
}

void FieldDiff::Report(const std::string& name, const std::string& a, const std::string& b, bool equal) {
  // Values that differ beyond what is shown still have to be told apart.
  if (equal || (a == b && !a.ends_with("..."))) return;
  sentences_.push_back(a == b ? fmt::format("{}: differs after {}", name, a)
                              : fmt::format("{}: {} in A, {} in B", name, a, b));
}

}  // namespace shardplan
