// SPDX-License-Identifier: Apache-2.0
// Parsed JSON as a tape: every value is one node, children follow their parent, a container knows where it
// ends. A tape is an order of magnitude smaller and faster to build than a tree of maps. It keeps the order
// of fields and repeated fields visible, and can tell the JSON pointer of any node when an error has to be
// reported.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "shardplan/schemas/error.h"

namespace shardplan {

enum class JsonKind : std::uint8_t { kNull, kBool, kInteger, kReal, kString, kArray, kObject };

using JsonIndex = std::uint32_t;

// An object's children come in pairs: a kString node with the field's name, then its value.
struct JsonNode {
  JsonKind kind = JsonKind::kNull;
  JsonIndex end = 0;   // index after the last node below this one
  JsonIndex size = 0;  // elements of an array, fields of an object, bytes of a string
  union {
    std::int64_t integer = 0;  // kInteger; kBool: 0 or 1; kString: offset into the text pool
    double real;               // kReal; also integers beyond 64 bits
  };
};

class JsonTape {
 public:
  // kBadInput with pointer "line L, column C" where the text is not JSON or nests deeper than 64 levels.
  static Result<JsonTape> Parse(std::string_view text);

  const JsonNode& operator[](JsonIndex node) const { return nodes_[node]; }
  std::string_view String(JsonIndex node) const {
    return std::string_view(strings_).substr(static_cast<std::size_t>(nodes_[node].integer),
                                             nodes_[node].size);
  }
  // The node of a field's value; 0 (the root, which is nobody's field) when the object has no such field.
  JsonIndex Find(JsonIndex object, std::string_view field) const;

  // RFC 6901 pointer of a node ("" for the root). Walks down from the root: for error messages only.
  std::string Pointer(JsonIndex node) const;
  // The value in a few words for an error message: "-3", "\"fp16\"", "a list of 2".
  std::string Describe(JsonIndex node) const;

 private:
  friend class TapeBuilder;
  std::vector<JsonNode> nodes_;
  std::string strings_;
};

// A field's name as a step of a JSON pointer ("~" and "/" escaped).
std::string PointerToken(std::string_view field);

}  // namespace shardplan
