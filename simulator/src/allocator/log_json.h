// SPDX-License-Identifier: Apache-2.0
// Reading JSON with the place of each value: for the reader of allocator logs.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>

#include "shardplan/schemas/error.h"

namespace shardplan::allocator_log {

using Json = nlohmann::json;

inline constexpr std::int64_t kLargestNumber = std::int64_t{1} << 60;

// Thrown and caught inside the reader of logs.
struct BadLog {
  Error error;
};

[[noreturn]] inline void Fail(std::string pointer, std::string message, std::string found,
                              std::string expected) {
  throw BadLog{
      MakeInputError(std::move(pointer), std::move(message), std::move(found), std::move(expected)).error()};
}

inline std::string Brief(const Json& value) {
  std::string text = value.dump(-1, ' ', false, Json::error_handler_t::replace);
  return text.size() > 60 ? text.substr(0, 57) + "..." : text;
}

// A value and where it is.
struct Node {
  const Json& value;
  std::string pointer;

  Node At(std::size_t index) const {
    if (!value.is_array() || index >= value.size()) {
      Fail(pointer, "too short", Brief(value), "an array of more than " + std::to_string(index) + " values");
    }
    return {value[index], pointer + "/" + std::to_string(index)};
  }
  const Json& Array() const {
    if (!value.is_array()) Fail(pointer, "wrong type", Brief(value), "an array");
    return value;
  }
  std::int64_t Integer(std::int64_t least) const {
    const bool integer = value.is_number_unsigned()
                             ? value.get<std::uint64_t>() <= static_cast<std::uint64_t>(kLargestNumber)
                             : value.is_number_integer();
    if (!integer || value.get<std::int64_t>() < least || value.get<std::int64_t>() > kLargestNumber) {
      Fail(pointer, "wrong value", Brief(value), "an integer from " + std::to_string(least));
    }
    return value.get<std::int64_t>();
  }
  // Addresses of a log may be relative to any of them.
  std::int64_t Address() const { return Integer(-kLargestNumber); }
  std::string String() const {
    if (!value.is_string()) Fail(pointer, "wrong type", Brief(value), "a string");
    return value.get<std::string>();
  }
};

}  // namespace shardplan::allocator_log

namespace shardplan {

struct AllocatorLog;

// Fills log.settings from the "allocator_settings" of a log. `says_expandable`: whether they mention
// expandable_segments.
void ParseLogSettings(const nlohmann::json& settings, AllocatorLog& log, bool& says_expandable);

}  // namespace shardplan
