// SPDX-License-Identifier: Apache-2.0
// Changes good inputs into others: the bytes of a text, or the values of the JSON documents in it.
//
// An input is one text or several, kPartEnd between them. A part that is JSON is changed by structure, too: a
// field gets another value that fields of its place have in any seed, or one near its own; entries of lists
// and fields are dropped, doubled, swapped, or taken from another seed. So most of what comes out passes the
// reader's checks of types and ends deep behind them.
#pragma once

#include <cstdint>
#include <map>
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <string_view>
#include <vector>

namespace shardplan::test {

inline constexpr char kPartEnd = '\x1e';

std::vector<std::string_view> PartsOf(std::string_view input);

class Mutator {
 public:
  // `keeps_form`: no bytes of JSON are changed, for what begins behind the reader.
  Mutator(std::vector<std::string> seeds, std::uint64_t seed, bool keeps_form);

  // A seed with one to four changes.
  std::string Next();

 private:
  using Json = nlohmann::ordered_json;
  // A part of a seed: JSON, or text.
  struct Part {
    Json json;  // null: text only
    std::string text;
  };
  // A value in a document, and the kind of its place: the path to it without indices.
  struct Place {
    Json* holder = nullptr;  // an object or a list; null: the document itself
    std::string key;         // in an object
    std::size_t index = 0;   // in a list
    Json& Value(Json& document) const;
  };
  using Places = std::map<std::string, std::vector<Place>>;

  std::size_t Below(std::size_t limit) { return limit == 0 ? 0 : engine_() % limit; }

  // Calls visit(kind, place, value) for every value below `value`.
  template <typename Visit>
  static void ForEachPlace(Json& value, const Place& place, const std::string& kind, const Visit& visit);
  void Learn(std::size_t part, Json& document);

  void ChangeStructure(std::size_t part, Json& document);
  void ChangeValue(const std::string& kind, Json& value);
  void ChangeList(Json& list);
  bool ChangeHolder(const Place& place);
  void AddField(const std::string& kind, Json& object);
  Json OtherNumber(const Json& number);

  void ChangeBytes(std::string& text);
  void ReplaceNumber(std::string& text, std::size_t at);
  void ReplaceLine(std::string& text, std::size_t at);

  std::vector<std::string> seeds_;
  std::vector<std::vector<Part>> parts_;                    // of the seeds
  std::map<std::string, std::vector<Json>> known_;          // values by the kind of their place
  std::map<std::string, std::vector<std::string>> fields_;  // of objects by the kind of their place
  std::mt19937_64 engine_;
  const bool keeps_form_;
};

}  // namespace shardplan::test
