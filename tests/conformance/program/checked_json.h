// SPDX-License-Identifier: Apache-2.0
// A recording's JSON, read with checks: whatever is missing, of another type or out of range is an error that
// names the place, never undefined behaviour.
#pragma once

#include <concepts>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "shardplan/schemas/error.h"

namespace shardplan::conformance {

// Thrown inside a converter, caught at its border.
class JsonError : public std::exception {
 public:
  explicit JsonError(Error error) : error_(std::move(error)) {}
  const Error& error() const { return error_; }
  const char* what() const noexcept override { return error_.message.c_str(); }

 private:
  Error error_;
};

template <typename T>
concept JsonScalar =
    std::same_as<T, std::string> || std::same_as<T, bool> || std::same_as<T, double> || std::integral<T>;

// A value of a document, which must outlive it, and its JSON pointer.
class CheckedJson {
 public:
  explicit CheckedJson(const nlohmann::json& document) : value_(&document) {}

  // Members and elements that must be there.
  CheckedJson operator[](const std::string& key) const;
  CheckedJson operator[](const char* key) const { return (*this)[std::string(key)]; }
  template <std::integral Index>
  CheckedJson operator[](Index index) const {
    return Element(static_cast<std::size_t>(index));
  }
  bool Has(const std::string& key) const;

  // The member's value, or a default where it is missing.
  template <typename T>
  T Value(const std::string& key, T missing) const {
    return Has(key) ? (*this)[key].Get<T>() : std::move(missing);
  }

  bool IsNull() const { return value_->is_null(); }
  bool IsBool() const { return value_->is_boolean(); }
  bool IsNumber() const { return value_->is_number(); }
  bool IsString() const { return value_->is_string(); }
  bool IsObject() const { return value_->is_object(); }

  template <JsonScalar T>
  T Get() const {
    if constexpr (std::same_as<T, std::string>) {
      return String();
    } else if constexpr (std::same_as<T, bool>) {
      return Bool();
    } else if constexpr (std::same_as<T, double>) {
      return Number();
    } else {
      const std::int64_t number = Integer();
      if (!std::in_range<T>(number)) Fail("a number that fits");
      return static_cast<T>(number);
    }
  }
  template <JsonScalar T>
  operator T() const {  // NOLINT(google-explicit-constructor): a member initialises a field of its type
    return Get<T>();
  }
  template <JsonScalar T>
  std::vector<T> List() const {
    std::vector<T> list;
    for (const CheckedJson& element : Elements()) list.push_back(element.Get<T>());
    return list;
  }
  // False for a value that is no string.
  friend bool operator==(const CheckedJson& json, std::string_view text) {
    return json.IsString() && json.value_->get_ref<const std::string&>() == text;
  }

  // The elements of an array.
  std::vector<CheckedJson> Elements() const;
  // The members of an object, by name.
  std::vector<std::pair<std::string, CheckedJson>> Members() const;
  std::size_t size() const;

  // The element of `map` that this name or number stands for.
  template <typename Map>
  auto& In(Map& map, std::string_view expected) const {
    const auto found = map.find(Get<typename Map::key_type>());
    if (found == map.end()) Fail(expected);
    return found->second;
  }
  // The element of `list` that this index stands for.
  template <typename List>
  auto& InList(List& list, std::string_view expected) const {
    const std::int64_t index = Integer();
    if (index < 0 || index >= std::ssize(list)) Fail(expected);
    return list[static_cast<std::size_t>(index)];
  }

  // Throws: something else was expected here.
  [[noreturn]] void Fail(std::string_view expected) const;

 private:
  CheckedJson(const nlohmann::json& value, std::string pointer)
      : value_(&value), pointer_(std::move(pointer)) {}
  CheckedJson Element(std::size_t index) const;
  std::string String() const;
  bool Bool() const;
  double Number() const;
  std::int64_t Integer() const;

  const nlohmann::json* value_;
  std::string pointer_;
};

// `convert` of the document `text`; the error of what it finds wrong, without the file.
template <typename Converted, typename Convert>
Result<Converted> ConvertJson(const std::string& text, Convert convert) {
  try {
    const nlohmann::json document = nlohmann::json::parse(text);
    return convert(CheckedJson(document));
  } catch (const JsonError& error) {
    return std::unexpected(error.error());
  } catch (const nlohmann::json::exception& error) {
    return MakeInputError("", error.what());
  }
}

}  // namespace shardplan::conformance
