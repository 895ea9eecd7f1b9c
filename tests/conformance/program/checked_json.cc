// SPDX-License-Identifier: Apache-2.0
#include "checked_json.h"

#include <utility>

namespace shardplan::conformance {
namespace {

constexpr std::size_t kShown = 60;  // characters of a value in an error

// A member's name in a JSON pointer (RFC 6901).
std::string Escaped(std::string_view key) {
  std::string text;
  for (const char c : key) {
    if (c == '~') {
      text += "~0";
    } else if (c == '/') {
      text += "~1";
    } else {
      text += c;
    }
  }
  return text;
}

}  // namespace

void CheckedJson::Fail(std::string_view expected) const {
  std::string found = value_->dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
  if (found.size() > kShown) found = found.substr(0, kShown) + "...";
  throw JsonError(
      {ErrorCode::kBadInput, "the recording is damaged", "", pointer_, found, std::string(expected)});
}

CheckedJson CheckedJson::operator[](const std::string& key) const {
  if (!value_->is_object()) Fail("an object with \"" + key + "\"");
  const auto found = value_->find(key);
  if (found == value_->end()) Fail("a member \"" + key + "\"");
  return {*found, pointer_ + "/" + Escaped(key)};
}

CheckedJson CheckedJson::Element(std::size_t index) const {
  if (!value_->is_array() || index >= value_->size()) {
    Fail("an array of at least " + std::to_string(index + 1));
  }
  return {(*value_)[index], pointer_ + "/" + std::to_string(index)};
}

bool CheckedJson::Has(const std::string& key) const {
  if (!value_->is_object()) Fail("an object");
  return value_->contains(key);
}

std::vector<CheckedJson> CheckedJson::Elements() const {
  if (!value_->is_array()) Fail("an array");
  std::vector<CheckedJson> elements;
  for (std::size_t i = 0; i < value_->size(); ++i) elements.push_back((*this)[i]);
  return elements;
}

std::vector<std::pair<std::string, CheckedJson>> CheckedJson::Members() const {
  if (!value_->is_object()) Fail("an object");
  std::vector<std::pair<std::string, CheckedJson>> members;
  for (const auto& [key, value] : value_->items()) {
    members.emplace_back(key, CheckedJson(value, pointer_ + "/" + Escaped(key)));
  }
  return members;
}

std::size_t CheckedJson::size() const {
  if (!value_->is_array()) Fail("an array");
  return value_->size();
}

std::string CheckedJson::String() const {
  if (!value_->is_string()) Fail("a string");
  return value_->get<std::string>();
}

bool CheckedJson::Bool() const {
  if (!value_->is_boolean()) Fail("true or false");
  return value_->get<bool>();
}

double CheckedJson::Number() const {
  if (!value_->is_number()) Fail("a number");
  return value_->get<double>();
}

std::int64_t CheckedJson::Integer() const {
  if (!value_->is_number_integer()) Fail("an integer");
  if (value_->is_number_unsigned() && !std::in_range<std::int64_t>(value_->get<std::uint64_t>())) {
    Fail("a number that fits");
  }
  return value_->get<std::int64_t>();
}

}  // namespace shardplan::conformance
