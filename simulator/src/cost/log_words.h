// SPDX-License-Identifier: Apache-2.0
// Lines of a job's log.
#pragma once

#include <algorithm>
#include <charconv>
#include <optional>
#include <string_view>
#include <system_error>
#include <vector>

namespace shardplan::internal {

inline std::vector<std::string_view> Words(std::string_view text) {
  std::vector<std::string_view> words;
  while (true) {
    const std::size_t start = text.find_first_not_of(" \t\r");
    if (start == std::string_view::npos) return words;
    const std::size_t end = std::min(text.find_first_of(" \t\r", start), text.size());
    words.push_back(text.substr(start, end - start));
    text.remove_prefix(end);
  }
}

template <typename Number>
std::optional<Number> NumberOf(std::string_view text) {
  Number value{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return value;
}

// Without the tag that a launcher puts before each line: "[1,0]<stdout>:" of mpirun, "0: " of srun.
inline std::string_view WithoutTag(std::string_view line) {
  if (line.starts_with('[')) {
    const std::size_t end = line.find(">:");
    if (end != std::string_view::npos && line.substr(0, end).find("<std") != std::string_view::npos)
      line.remove_prefix(end + 2);
    return line;
  }
  const std::size_t digits = line.find_first_not_of(" 0123456789");
  if (digits != std::string_view::npos && digits > 0 && line.substr(digits).starts_with(": "))
    line.remove_prefix(digits + 2);
  return line;
}

}  // namespace shardplan::internal
