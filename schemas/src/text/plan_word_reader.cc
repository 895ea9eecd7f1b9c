// SPDX-License-Identifier: Apache-2.0
#include "text/plan_word_reader.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <set>
#include <vector>

#include "json/tape.h"
#include "json/writer.h"
#include "names/enum_names.h"
#include "text/plan_words.h"

namespace shardplan {
namespace {

constexpr std::string_view kWordEnd = " =,#\"";

Error Wrong(std::string message, std::string_view found, std::string expected) {
  return {.code = ErrorCode::kBadInput,
          .message = std::move(message),
          .found = std::string(found.substr(0, 60)),
          .expected = std::move(expected)};
}

// Bytes of the JSON string that `text` starts with, quotes included; npos when it does not end.
std::size_t QuotedLength(std::string_view text) {
  for (std::size_t i = 1; i < text.size(); ++i) {
    if (text[i] == '\\') {
      ++i;
    } else if (text[i] == '"') {
      return i + 1;
    }
  }
  return std::string_view::npos;
}

// A reference as JSON: by number where one is given, else by name.
std::string ReferenceJson(const PlanWord& word) {
  if (word.number.has_value()) return fmt::format("{}", *word.number);
  return JsonString(!word.quoted && word.text == kRootName ? "" : word.text);
}

// The fields of one JSON object, each at most once.
class ObjectText {
 public:
  bool Add(const std::string& field, const std::string& json) {
    if (!names_.insert(field).second) return false;
    text_ += fmt::format("{}\"{}\": {}", text_.empty() ? "{" : ", ", field, json);
    return true;
  }
  std::string Take() { return std::move(text_); }

 private:
  std::string text_;
  std::set<std::string> names_;
};

// A number as JSON has it; empty when it is none.
std::string NumberJson(WordReader& words) {
  const std::optional<std::string> word = words.NextName();
  double value = 0;
  if (!word.has_value()) return "";
  const auto result = std::from_chars(word->data(), word->data() + word->size(), value);
  if (result.ec != std::errc() || result.ptr != word->data() + word->size() || !std::isfinite(value))
    return "";
  return NumberWord(value);
}

std::string ReferenceListJson(WordReader& words) {
  std::string list = "[";
  do {
    const std::optional<PlanWord> word = words.Next();
    if (!word.has_value()) return "";
    if (list.size() > 1) list += ", ";
    list += ReferenceJson(*word);
  } while (words.Skip(','));
  return list + "]";
}

// Numbers, separated by commas.
std::string NumberListJson(WordReader& words) {
  std::string list = "[";
  do {
    const std::string number = NumberJson(words);
    if (number.empty()) return "";
    list += (list.size() > 1 ? ", " : "") + number;
  } while (words.Skip(','));
  return list + "]";
}

struct Clause {
  std::string_view word;   // as in the text
  std::string_view field;  // as in the JSON
};
constexpr std::array<Clause, 4> kClauses = {
    {{"on", "stream"}, {"via", "communicator"}, {"for", "unit"}, {kArrow, "dst"}}};

// The value of `key=`, as JSON; empty when it does not parse. `field` gets the JSON name.
std::string KeyValueJson(const std::string& key, WordReader& words, std::string& field) {
  field = key == "mb" ? "microbatch" : (key == "occ" ? "occurrence" : (key == "op" ? "reduce_op" : key));
  if (key == "mb" || key == "occ" || key == "divisor" || key == "parameter" || key == "matrix")
    return NumberJson(words);
  if (key == "safe_after") return ReferenceListJson(words);
  if (key == "parts") return NumberListJson(words);
  if (key == "op") {
    const std::optional<std::string> word = words.NextName();
    return word.has_value() ? JsonString(*word) : "";
  }
  if (key == "src" || key == "dst" || key == "event" || key == "segment" || key == "exchange") {
    const std::optional<PlanWord> word = words.Next();
    return word.has_value() ? ReferenceJson(*word) : "";
  }
  return "";
}

// The clauses after the kind. `first_field`: what a word that is no keyword stands for.
std::optional<Error> AddClauses(WordReader& words, std::string_view first_field, ObjectText& object) {
  bool first = true;
  while (!words.AtEnd()) {
    const std::string_view before = words.rest();
    const std::optional<PlanWord> word = words.Next();
    if (!word.has_value()) return Wrong("this is no word", before, "a name, or a string in quotes");
    std::string field(first_field);
    std::string json;
    const auto clause = std::ranges::find(kClauses, word->text, &Clause::word);
    if (word->is_key) {
      json = KeyValueJson(word->text, words, field);
    } else if (!word->quoted && !word->number.has_value() && word->text == "because") {
      field = "reason";
      const std::optional<std::string> reason = words.NextName();
      if (reason.has_value()) json = JsonString(*reason);
    } else if (!word->quoted && !word->number.has_value() && clause != kClauses.end()) {
      field = clause->field;
      const std::optional<PlanWord> value = words.Next();
      if (value.has_value() && !value->is_key) json = ReferenceJson(*value);
    } else if (first) {
      json = ReferenceJson(*word);
    }
    first = false;
    if (json.empty())
      return Wrong("this does not parse", before,
                   "an operand, \"on\", \"via\", \"for\", \"because\" or key=value");
    if (!object.Add(field, json)) return Wrong(fmt::format("{} is given twice", field), before, "one");
  }
  return std::nullopt;
}

}  // namespace

std::optional<PlanWord> WordReader::Next() {
  if (AtEnd()) return std::nullopt;
  PlanWord word;
  if (rest_.front() == '"') {
    const std::size_t length = QuotedLength(rest_);
    if (length == std::string_view::npos) return std::nullopt;
    const Result<JsonTape> tape = JsonTape::Parse(rest_.substr(0, length));
    if (!tape.has_value()) return std::nullopt;
    word.text = tape->String(0);
    word.quoted = true;
    rest_.remove_prefix(length);
  } else {
    const std::size_t length = std::min(rest_.find_first_of(kWordEnd), rest_.size());
    word.text = rest_.substr(0, length);
    const bool special = word.text == kRootName || word.text == kArrow;
    if (!special && !std::ranges::all_of(word.text, IsBareCharacter)) return std::nullopt;
    word.has_name = length > 0;
    rest_.remove_prefix(length);
  }
  if (Skip('#')) {
    std::int64_t number = 0;
    const auto result = std::from_chars(rest_.data(), rest_.data() + rest_.size(), number);
    if (result.ec != std::errc()) return std::nullopt;
    word.number = number;
    rest_.remove_prefix(static_cast<std::size_t>(result.ptr - rest_.data()));
  } else if (!word.has_name) {
    return std::nullopt;
  }
  word.is_key = !word.quoted && !word.number.has_value() && Skip('=');
  return word;
}

std::optional<std::string> WordReader::NextName() {
  std::optional<PlanWord> word = Next();
  if (!word.has_value() || word->number.has_value() || word->is_key) return std::nullopt;
  return std::move(word->text);
}

bool WordReader::Skip(char c) {
  if (rest_.empty() || rest_.front() != c) return false;
  rest_.remove_prefix(1);
  return true;
}

bool WordReader::AtEnd() {
  while (Skip(' ')) {
  }
  return rest_.empty();
}

Result<std::string> TriggerJson(std::string_view line) {
  WordReader words(line);
  const std::optional<std::string> name = words.NextName();
  if (!name.has_value() || !EnumFromName<TriggerKind>(*name).has_value()) {
    return std::unexpected(Wrong("unknown trigger", line, EnumChoices<TriggerKind>()));
  }
  ObjectText object;
  object.Add("kind", JsonString(*name));
  if (auto error = AddClauses(words, "unit", object)) return std::unexpected(std::move(*error));
  return object.Take();
}

Result<std::string> RepetitionJson(std::string_view line) {
  constexpr std::array<std::string_view, 7> kWords = {"repeat", "the", "last", "", "triggers", "", "times"};
  const auto wrong = [&] {
    return std::unexpected(Wrong("not a repetition", line, "repeat the last N triggers K times"));
  };
  std::vector<std::string> numbers;
  WordReader words(line);
  for (const std::string_view expected : kWords) {
    const std::optional<std::string> word = words.NextName();
    if (!word.has_value() || (!expected.empty() && *word != expected)) return wrong();
    if (!expected.empty()) continue;
    const bool is_number =
        word->size() < 10 && std::ranges::all_of(*word, [](char c) { return c >= '0' && c <= '9'; });
    if (!is_number) return wrong();
    numbers.push_back(fmt::format("{}", std::stol(*word)));
  }
  if (!words.AtEnd()) return wrong();
  return fmt::format("{{\"repeat\": {{\"triggers\": {}, \"times\": {}}}}}", numbers[0], numbers[1]);
}

Result<std::string> InstructionJson(std::string_view line) {
  WordReader words(line);
  const std::optional<std::string> name = words.NextName();
  const auto kind = name.has_value() ? EnumFromName<InstructionKind>(*name) : std::nullopt;
  if (!kind.has_value()) {
    return std::unexpected(Wrong("unknown instruction", line, EnumChoices<InstructionKind>()));
  }
  constexpr std::array<std::string_view, 4> kFirstFields = {"segment", "event", "src", "dst"};
  ObjectText object;
  object.Add("kind", JsonString(*name));
  const std::string_view first_field = kFirstFields[static_cast<std::size_t>(FirstOperandOf(*kind))];
  if (auto error = AddClauses(words, first_field, object)) return std::unexpected(std::move(*error));
  return object.Take() + "}";
}

}  // namespace shardplan
