// SPDX-License-Identifier: Apache-2.0
// Reads the words of a line of the plan's text form (plan_words.h says what a word is).
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "shardplan/schemas/error.h"

namespace shardplan {

// A word of a line: `text` is the name (unquoted), the keyword, or the key of key=value.
struct PlanWord {
  std::string text;
  bool quoted = false;                 // a quoted word is never a keyword
  bool has_name = true;                // false: "#7" alone
  std::optional<std::int64_t> number;  // 7 of "name#7"
  bool is_key = false;                 // a "=" follows
};

class WordReader {
 public:
  explicit WordReader(std::string_view line) : rest_(line) {}

  // The next word; nullopt at the end of the line or where no word starts.
  std::optional<PlanWord> Next();
  // The next word if it is a plain name.
  std::optional<std::string> NextName();
  // Skips `c` if it is next.
  bool Skip(char c);
  bool AtEnd();
  std::string_view rest() const { return rest_; }

 private:
  std::string_view rest_;
};

// "pre_forward layers.0 mb=1" / "wait done on compute" as the beginning (without the closing brace) / the
// whole of the JSON object. The error's pointer is left empty.
Result<std::string> TriggerJson(std::string_view line);
Result<std::string> InstructionJson(std::string_view line);
// "repeat the last 12 triggers 3 times" as the whole of the JSON object.
Result<std::string> RepetitionJson(std::string_view line);

}  // namespace shardplan
