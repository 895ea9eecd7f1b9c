// SPDX-License-Identifier: Apache-2.0
#include "json/reader.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

namespace shardplan {
namespace {

constexpr std::array<std::string_view, kRefKinds> kRefNames = {
    "",       "module", "parameter",    "tensor",       "forward", "backward",
    "thread", "place",  "stream",       "communicator", "unit",    "buffer",
    "stream", "event",  "communicator", "segment",      "exchange"};
static_assert(!kRefNames.back().empty(), "every kind has a name");

std::string_view RefName(RefKind kind) { return kRefNames[static_cast<std::size_t>(kind)]; }

// JSON has one kind of number: 3.0 and 3e0 are the integer 3.
std::optional<std::int64_t> ExactInteger(const JsonNode& node) {
  if (node.kind == JsonKind::kInteger) return node.integer;
  constexpr double kTwoTo63 = 9223372036854775808.0;
  if (node.kind != JsonKind::kReal || !(node.real >= -kTwoTo63 && node.real < kTwoTo63)) return std::nullopt;
  if (std::trunc(node.real) != node.real) return std::nullopt;
  return static_cast<std::int64_t>(node.real);
}

std::string FieldNames(const JsonObjectType& type) {
  std::string names;
  for (const JsonField& field : type.fields) {
    if (!names.empty()) names += ", ";
    names += field.name;
  }
  return names;
}

}  // namespace

bool JsonReader::ReadObject(JsonIndex node, void* value, const JsonObjectType& type,
                            std::pair<std::string_view, std::string_view> also) {
  if (tape_[node].kind != JsonKind::kObject) return Wrong(node, "wrong type", "an object");
  // First the lists that others refer to, or a wrong list would be told as wrong references.
  for (const JsonField& field : type.fields) {
    if (field.defines == RefKind::kNone) continue;
    const JsonIndex list = tape_.Find(node, field.name);
    if (list == 0 && field.required) return Missing(node, field.name);
    if (!Define(field.defines, list)) return false;
  }
  if (!ReadFields(node, value, type, also)) return false;
  if (type.after_reading != nullptr) type.after_reading(value, context_.sharing);
  return true;
}

bool JsonReader::ReadFields(JsonIndex node, void* value, const JsonObjectType& type,
                            std::pair<std::string_view, std::string_view> also) {
  std::uint64_t seen = 0;  // a bit for each field of the type, then the two of `also`
  const std::size_t fields = type.fields.size();
  for (JsonIndex key = node + 1; key < tape_[node].end; key = tape_[key + 1].end) {
    const std::string_view name = tape_.String(key);
    std::size_t at = 0;
    while (at < fields && type.fields[at].name != name) ++at;
    const bool known = at < fields || (!name.empty() && (name == also.first || name == also.second));
    if (!known) return Unknown(key, FieldNames(type));
    if (at == fields && name == also.second) ++at;
    const std::uint64_t bit = std::uint64_t{1} << at;
    if ((seen & bit) != 0) return Wrong(key, fmt::format("the field \"{}\" is there twice", name), "one");
    seen |= bit;
    if (at >= fields) continue;
    const JsonField& field = type.fields[at];
    if (!field.type->read(*this, key + 1, field.in(value), field.spec)) return false;
  }
  for (std::size_t at = 0; at < fields; ++at) {
    const bool there = ((seen >> at) & 1) != 0;
    if (type.fields[at].required && !there) return Missing(node, type.fields[at].name);
  }
  return true;
}

bool JsonReader::ReadEvent(JsonIndex node, void* value, const JsonObjectType& type) {
  const std::size_t least =
      1 + static_cast<std::size_t>(std::ranges::count(type.fields, true, &JsonField::required));
  const std::size_t size = tape_[node].size;
  if (size < least || size > 1 + type.fields.size()) {
    return Wrong(node, fmt::format("wrong number of elements for \"{}\"", type.tag),
                 fmt::format("[\"{}\", {}]", type.tag, FieldNames(type)));
  }
  JsonIndex element = node + 2;  // after the tag
  for (const JsonField& field : type.fields) {
    if (element == tape_[node].end) break;
    if (!field.type->read(*this, element, field.in(value), field.spec)) return false;
    element = tape_[element].end;
  }
  return true;
}

bool JsonReader::ReadVariant(JsonIndex node, void* variant, std::span<const JsonAlternative> alternatives) {
  const auto is_event = [](const JsonAlternative& alternative) { return alternative.type().is_event; };
  std::string_view tag;
  const JsonIndex tag_node = FindTag(node, std::ranges::all_of(alternatives, is_event), tag);
  if (tag_node == 0) return false;
  std::string choices;
  for (const JsonAlternative& alternative : alternatives) {
    const JsonObjectType& type = alternative.type();
    if (tag == type.tag) {
      void* const value = alternative.emplace(variant);
      return type.is_event ? ReadEvent(node, value, type) : ReadObject(node, value, type, {kTagField, {}});
    }
    choices += fmt::format("{}\"{}\"", choices.empty() ? "one of " : ", ", type.tag);
  }
  return Wrong(tag_node, "unknown kind", choices);
}

bool JsonReader::ReadCompound(JsonIndex node, std::map<std::string, KnobValue>& value, const Spec& /*spec*/) {
  if (tape_[node].kind != JsonKind::kObject) return Wrong(node, "wrong type", "an object");
  for (JsonIndex key = node + 1; key < tape_[node].end; key = tape_[key + 1].end) {
    const auto [knob, added] = value.try_emplace(std::string(tape_.String(key)));
    if (!added) return Wrong(key, fmt::format("the field \"{}\" is there twice", knob->first), "one");
    const JsonNode& given = tape_[key + 1];
    if (given.kind == JsonKind::kBool) {
      knob->second = given.integer != 0;
    } else if (given.kind == JsonKind::kString) {
      knob->second = std::string(tape_.String(key + 1));
    } else if (const std::optional<std::int64_t> integer = ExactInteger(given)) {
      knob->second = *integer;
    } else if (given.kind == JsonKind::kReal) {
      knob->second = given.real;
    } else {
      return Wrong(key + 1, "wrong type", "a number, a string, true or false");
    }
  }
  return true;
}

bool JsonReader::ReadCompound(JsonIndex node, std::variant<bool, std::int64_t>& value, const Spec& /*spec*/) {
  if (tape_[node].kind == JsonKind::kBool) {
    value = tape_[node].integer != 0;
    return true;
  }
  const std::optional<std::int64_t> size = ExactInteger(tape_[node]);
  if (!size.has_value() || *size < 1)
    return Wrong(node, "wrong value", "true, false or a number of ranks from 1");
  value = *size;
  return true;
}

bool JsonReader::FitsExact(const std::vector<std::int64_t>& shape) {
  std::int64_t elements = 1;
  for (const std::int64_t dimension : shape) {
    if (dimension == 0) return true;
  }
  for (const std::int64_t dimension : shape) {
    if (dimension > kMaxExact / elements) return false;
    elements *= dimension;
  }
  return true;
}

bool JsonReader::ReadBool(JsonIndex node, bool& value) {
  if (tape_[node].kind != JsonKind::kBool) return Wrong(node, "wrong type", "true or false");
  value = tape_[node].integer != 0;
  return true;
}

bool JsonReader::ReadString(JsonIndex node, std::string& value) {
  if (tape_[node].kind != JsonKind::kString) return Wrong(node, "wrong type", "a string");
  value = tape_.String(node);
  return true;
}

bool JsonReader::ReadText(JsonIndex node, SharedText& value) {
  if (tape_[node].kind != JsonKind::kString) return Wrong(node, "wrong type", "a string");
  const std::string_view text = tape_.String(node);
  const auto known = context_.texts.find(text);
  value = known != context_.texts.end() ? known->second : SharedText(text);
  if (known == context_.texts.end()) context_.texts.emplace(text, value);
  return true;
}

bool JsonReader::ReadReal(JsonIndex node, double& value, const Spec& spec) {
  const JsonNode& number = tape_[node];
  if (number.kind == JsonKind::kInteger) {
    value = static_cast<double>(number.integer);
  } else if (number.kind == JsonKind::kReal) {
    value = number.real;
  } else {
    return Wrong(node, "wrong type", "a number");
  }
  if (spec.positive && !(value > 0)) return Wrong(node, "number out of range", "a number above 0");
  return true;
}

bool JsonReader::ReadInteger(JsonIndex node, std::int64_t min, std::int64_t max, std::int64_t& value) {
  const JsonKind kind = tape_[node].kind;
  const std::optional<std::int64_t> integer = ExactInteger(tape_[node]);
  if (integer.has_value() && *integer >= min && *integer <= max) {
    value = *integer;
    return true;
  }
  const bool is_number = kind == JsonKind::kInteger || kind == JsonKind::kReal;
  return Wrong(node, is_number ? "number out of range" : "wrong type",
               fmt::format("an integer from {} to {}", min, max));
}

bool JsonReader::ReadReference(JsonIndex node, RefKind kind, std::int64_t min, std::int64_t& value) {
  const ReadingContext::RefTable& table = context_.refs[static_cast<std::size_t>(kind)];
  if (!IsNamed(kind) || tape_[node].kind != JsonKind::kString) {
    constexpr std::int64_t kMaxId = std::numeric_limits<std::int32_t>::max();
    if (!table.defined) return ReadInteger(node, min, kMaxId, value);
    if (ReadInteger(node, min, std::min(kMaxId, table.size - 1), value)) return true;
    error_.message = fmt::format("not a {} of this document", RefName(kind));
    if (table.size == 0) error_.expected = fmt::format("none: there is no {}", RefName(kind));
    if (IsNamed(kind) && table.size > 0)
      error_.expected += fmt::format(", or the name of a {}", RefName(kind));
    return false;
  }
  const auto found = table.ids.find(tape_.String(node));
  if (found == table.ids.end()) {
    return Wrong(node, fmt::format("there is no {} of that name", RefName(kind)),
                 fmt::format("the name or number of one of {} {}s", table.size, RefName(kind)));
  }
  if (found->second < 0) {
    return Wrong(node, fmt::format("several {}s have that name", RefName(kind)),
                 fmt::format("the number of one of {} {}s", table.size, RefName(kind)));
  }
  value = found->second;
  return true;
}

JsonIndex JsonReader::FindTag(JsonIndex node, bool is_event, std::string_view& tag) {
  JsonIndex tag_node = 0;
  if (is_event) {
    if (tape_[node].kind != JsonKind::kArray || tape_[node].size == 0) {
      Wrong(node, "wrong type", "a list that starts with its kind");
      return 0;
    }
    tag_node = node + 1;
  } else {
    if (tape_[node].kind != JsonKind::kObject) {
      Wrong(node, "wrong type", "an object");
      return 0;
    }
    tag_node = tape_.Find(node, kTagField);
    if (tag_node == 0) {
      Missing(node, kTagField);
      return 0;
    }
  }
  if (tape_[tag_node].kind != JsonKind::kString) {
    Wrong(tag_node, "wrong type", "a string");
    return 0;
  }
  tag = tape_.String(tag_node);
  return tag_node;
}

bool JsonReader::Define(RefKind kind, JsonIndex list) {
  ReadingContext::RefTable& table = context_.refs[static_cast<std::size_t>(kind)];
  table = {.defined = true};
  if (list == 0) return true;
  if (tape_[list].kind != JsonKind::kArray) return Wrong(list, "wrong type", "a list");
  table.size = tape_[list].size;
  if (!IsNamed(kind)) return true;
  std::int64_t id = 0;
  for (JsonIndex element = list + 1; element < tape_[list].end; element = tape_[element].end, ++id) {
    JsonIndex name = element;
    if (tape_[element].kind == JsonKind::kObject)
      name = tape_.Find(element, kind == RefKind::kUnit ? "fqn" : "name");
    if (name == 0 || tape_[name].kind != JsonKind::kString) continue;
    table.Add(tape_.String(name), id);
  }
  return true;
}

bool JsonReader::Wrong(JsonIndex node, std::string message, std::string expected) {
  error_ = {.code = ErrorCode::kBadInput,
            .message = std::move(message),
            .pointer = tape_.Pointer(node),
            .found = tape_.Describe(node),
            .expected = std::move(expected)};
  return false;
}

bool JsonReader::Missing(JsonIndex object, std::string_view field) {
  error_ = {.code = ErrorCode::kBadInput,
            .message = fmt::format("the field \"{}\" is missing", field),
            .pointer = tape_.Pointer(object)};
  return false;
}

bool JsonReader::Unknown(JsonIndex key, const std::string& known) {
  error_ = {.code = ErrorCode::kBadInput,
            .message = fmt::format("unknown field \"{}\"", tape_.String(key)),
            .pointer = tape_.Pointer(key),
            .expected = "one of " + known};
  return false;
}

}  // namespace shardplan
