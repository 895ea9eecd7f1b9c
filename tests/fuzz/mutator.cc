// SPDX-License-Identifier: Apache-2.0
#include "tests/fuzz/mutator.h"

#include <algorithm>
#include <array>
#include <limits>
#include <utility>

namespace shardplan::test {
namespace {

constexpr std::size_t kMostKnown = 400;       // values of one kind that are kept
constexpr std::size_t kLargestKnown = 2'000;  // characters

constexpr std::array<const char*, 14> kTokens = {"{",    "}",    "[", "]",   ",", ":",    "\"",
                                                 "null", "true", "-", "\\u", "#", "\xff", "->"};
constexpr std::array<const char*, 10> kNumbers = {
    "0", "1", "2", "3", "7", "9007199254740992", "2147483647", "9223372036854775807", "-1", "1e999"};
constexpr std::array<std::int64_t, 14> kIntegers = {0,
                                                    1,
                                                    2,
                                                    3,
                                                    7,
                                                    8,
                                                    -1,
                                                    1 << 20,
                                                    16'777'215,
                                                    2147483647,
                                                    2147483648,
                                                    std::int64_t{1} << 53,
                                                    (std::int64_t{1} << 53) + 1,
                                                    std::numeric_limits<std::int64_t>::max()};
constexpr std::array<double, 8> kReals = {0, -1, 0.5, 2, 3, 1e-300, 1e300, 4294967296.5};

}  // namespace

std::vector<std::string_view> PartsOf(std::string_view input) {
  std::vector<std::string_view> parts;
  for (std::size_t end = 0; (end = input.find(kPartEnd)) != std::string_view::npos;) {
    parts.push_back(input.substr(0, end));
    input.remove_prefix(end + 1);
  }
  parts.push_back(input);
  return parts;
}

Mutator::Json& Mutator::Place::Value(Json& document) const {
  if (holder == nullptr) return document;
  return holder->is_object() ? (*holder)[key] : (*holder)[index];
}

template <typename Visit>
void Mutator::ForEachPlace(Json& value, const Place& place, const std::string& kind, const Visit& visit) {
  visit(kind, place, value);
  if (value.is_object()) {
    for (auto field = value.begin(); field != value.end(); ++field) {
      ForEachPlace(field.value(), {.holder = &value, .key = field.key()}, kind + "/" + field.key(), visit);
    }
  } else if (value.is_array()) {
    // The elements of an event are fields.
    const bool tagged = value.size() > 1 && value[0].is_string() && kind.ends_with("/events/*");
    const std::string event = tagged ? kind + "/" + value[0].get_ref<const std::string&>() : kind;
    for (std::size_t i = 0; i < value.size(); ++i) {
      ForEachPlace(value[i], {.holder = &value, .index = i},
                   tagged ? event + "/" + std::to_string(i) : kind + "/*", visit);
    }
  }
}

Mutator::Mutator(std::vector<std::string> seeds, std::uint64_t seed, bool keeps_form)
    : seeds_(std::move(seeds)), engine_(seed), keeps_form_(keeps_form) {
  for (const std::string& text : seeds_) {
    std::vector<Part>& parts = parts_.emplace_back();
    for (const std::string_view part : PartsOf(text)) {
      Json json = Json::parse(part.begin(), part.end(), nullptr, /*allow_exceptions=*/false);
      if (!json.is_structured()) json = nullptr;
      parts.push_back({.json = std::move(json), .text = std::string(part)});
      if (!parts.back().json.is_null()) Learn(parts.size() - 1, parts.back().json);
    }
  }
}

void Mutator::Learn(std::size_t part, Json& document) {
  ForEachPlace(document, {}, std::to_string(part),
               [&](const std::string& kind, const Place& place, Json& value) {
                 if (value.is_object()) {
                   std::vector<std::string>& names = fields_[kind];
                   for (auto field = value.begin(); field != value.end(); ++field) {
                     if (std::ranges::find(names, field.key()) == names.end()) names.push_back(field.key());
                   }
                 }
                 std::vector<Json>& values = known_[kind];
                 if (place.holder == nullptr || values.size() >= kMostKnown) return;
                 if (value.is_structured() && value.dump().size() > kLargestKnown) return;
                 if (std::ranges::find(values, value) == values.end()) values.push_back(value);
               });
}

std::string Mutator::Next() {
  const std::size_t which = Below(seeds_.size());
  std::vector<Part> parts = parts_[which];
  const std::size_t changes = 1 + Below(4);
  // Whole documents of another seed beside the rest of this one.
  if (parts.size() > 1 && Below(4) == 0) {
    const std::vector<Part>& other = parts_[Below(parts_.size())];
    const std::size_t part = Below(parts.size());
    if (part < other.size()) parts[part] = other[part];
  }
  for (std::size_t change = 0; change < changes; ++change) {
    const std::size_t part = Below(parts.size());
    Part& changed = parts[part];
    const bool is_json = !changed.json.is_null();
    if (is_json && (keeps_form_ || Below(4) != 0)) {
      ChangeStructure(part, changed.json);
      changed.text = changed.json.dump(-1, ' ', false, Json::error_handler_t::replace);
    } else {
      ChangeBytes(changed.text);
      // Later changes are of these bytes.
      if (is_json) changed.json = nullptr;
    }
  }
  std::string text;
  for (const Part& part : parts) {
    if (!text.empty()) text += kPartEnd;
    text += part.text;
  }
  return text;
}

void Mutator::ChangeStructure(std::size_t part, Json& document) {
  Places places;
  ForEachPlace(document, {}, std::to_string(part),
               [&](const std::string& kind, const Place& place, Json&) { places[kind].push_back(place); });
  // By kind: a list of a thousand events has as good a chance as a knob.
  const auto kind = std::next(places.begin(), static_cast<std::ptrdiff_t>(Below(places.size())));
  const Place& place = kind->second[Below(kind->second.size())];
  Json& value = place.Value(document);
  switch (Below(8)) {
    case 0:
      if (ChangeHolder(place)) return;
      break;
    case 1:
      // Another value of the same kind in this document.
      value = Json(kind->second[Below(kind->second.size())].Value(document));
      return;
    case 2:
      if (value.is_object()) return AddField(kind->first, value);
      if (value.is_array()) return ChangeList(value);
      break;
    default:
      break;
  }
  ChangeValue(kind->first, value);
}

void Mutator::ChangeValue(const std::string& kind, Json& value) {
  const std::vector<Json>& values = known_[kind];
  if (!values.empty() && Below(2) == 0) {
    value = values[Below(values.size())];
  } else if (value.is_boolean()) {
    value = !value.get<bool>();
  } else if (value.is_number()) {
    value = OtherNumber(value);
  } else if (value.is_array()) {
    ChangeList(value);
  } else if (value.is_object()) {
    AddField(kind, value);
  } else if (value.is_string()) {
    value = Below(2) == 0 ? std::string() : value.get<std::string>() + "x";
  }
}

Mutator::Json Mutator::OtherNumber(const Json& number) {
  if (number.is_number_float() || Below(40) == 0) return kReals[Below(kReals.size())];
  constexpr std::int64_t kLarge = std::int64_t{1} << 61;
  const std::int64_t old = std::clamp(number.get<std::int64_t>(), -kLarge, kLarge);
  switch (Below(6)) {
    case 0:
      return old + 1;
    case 1:
      return old - 1;
    case 2:
      return old * 2;
    case 3:
      return old + static_cast<std::int64_t>(Below(9)) - 4;
    default:
      return kIntegers[Below(kIntegers.size())];
  }
}

void Mutator::ChangeList(Json& list) {
  if (list.empty()) return;
  const std::size_t at = Below(list.size());
  const std::size_t other = Below(list.size());
  const Json entry = list[at];
  switch (Below(5)) {
    case 0:
      list.erase(list.begin() + static_cast<std::ptrdiff_t>(at));
      break;
    case 1:
      list.insert(list.begin() + static_cast<std::ptrdiff_t>(other), entry);
      break;
    case 2:
      std::swap(list[at], list[other]);
      break;
    case 3:
      list[other] = entry;
      break;
    default:  // moved
      list.erase(list.begin() + static_cast<std::ptrdiff_t>(at));
      list.insert(list.begin() + static_cast<std::ptrdiff_t>(std::min(other, list.size())), entry);
  }
}

// The entry or field is dropped, or doubled where it stands. False: it is the document itself.
bool Mutator::ChangeHolder(const Place& place) {
  if (place.holder == nullptr) return false;
  if (place.holder->is_object()) {
    place.holder->erase(place.key);
  } else if (Below(2) == 0) {
    place.holder->erase(place.holder->begin() + static_cast<std::ptrdiff_t>(place.index));
  } else {
    const Json entry = (*place.holder)[place.index];
    place.holder->insert(place.holder->begin() + static_cast<std::ptrdiff_t>(place.index), entry);
  }
  return true;
}

// A field that such objects have in a seed, with a value that it has there.
void Mutator::AddField(const std::string& kind, Json& object) {
  const std::vector<std::string>& names = fields_[kind];
  if (names.empty()) return;
  const std::string& name = names[Below(names.size())];
  const std::vector<Json>& values = known_[kind + "/" + name];
  if (!values.empty()) object[name] = values[Below(values.size())];
}

void Mutator::ChangeBytes(std::string& text) {
  const std::size_t at = Below(text.size());
  const std::size_t length = std::min(1 + Below(1 + Below(64)), text.size() - at);
  switch (Below(8)) {
    case 0:
      if (!text.empty()) text[at] = static_cast<char>(Below(256));
      break;
    case 1:
      text.erase(at, length);
      break;
    case 2:
      text.insert(at, text.substr(at, length));
      break;
    case 3:
      text.resize(at);
      break;
    case 4: {  // a piece of another input
      const std::string& other = seeds_[Below(seeds_.size())];
      const std::size_t from = Below(other.size());
      text.replace(at, length, other.substr(from, 1 + Below(64)));
      break;
    }
    case 5:
      ReplaceNumber(text, at);
      break;
    case 6:
      ReplaceLine(text, at);
      break;
    default:
      text.insert(at, kTokens[Below(kTokens.size())]);
  }
}

// Another number instead of the next one after `at`: the document stays well-formed.
void Mutator::ReplaceNumber(std::string& text, std::size_t at) {
  const std::size_t start = text.find_first_of("0123456789", at);
  if (start == std::string::npos) return;
  const std::size_t end = std::min(text.find_first_not_of("0123456789", start), text.size());
  text.replace(start, end - start, kNumbers[Below(kNumbers.size())]);
}

// The line at `at` is dropped, or moved to another place.
void Mutator::ReplaceLine(std::string& text, std::size_t at) {
  const std::size_t start = text.rfind('\n', at);
  const std::size_t end = text.find('\n', at);
  if (start == std::string::npos || end == std::string::npos || end <= start) return;
  const std::string line = text.substr(start, end - start);
  text.erase(start, end - start);
  const std::size_t to = text.find('\n', Below(text.size()));
  if (to != std::string::npos && Below(2) == 0) text.insert(to, line);
}

}  // namespace shardplan::test
