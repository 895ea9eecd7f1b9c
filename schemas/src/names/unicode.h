// SPDX-License-Identifier: Apache-2.0
// Characters of UTF-8, and those that a reader does not see.
#pragma once

#include <cstddef>
#include <string_view>

namespace shardplan {

struct Utf8Character {
  char32_t code = 0;
  std::size_t bytes = 0;  // 0: no UTF-8
};

// The first character of `text`, which is not empty.
Utf8Character FirstCharacter(std::string_view text);

// Hidden by Unicode's classes: controls, separators of lines, marks and overrides of direction.
bool IsHiddenCharacter(char32_t code);

}  // namespace shardplan
