// SPDX-License-Identifier: Apache-2.0
#include "text/sentence_groups.h"

#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <map>
#include <optional>

namespace shardplan {
namespace {

constexpr std::size_t kMaxDigits = 9;

bool IsDigit(char c) { return std::isdigit(static_cast<unsigned char>(c)) != 0; }
bool IsWordCharacter(char c) { return std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '_'; }

// Length of the layer number that starts at `i`, the position after a '.'; 0 when there is none.
std::size_t LayerNumberLength(const std::string& text, std::size_t i) {
  if (i < 2 || text[i - 1] != '.' || !IsWordCharacter(text[i - 2]) || IsDigit(text[i - 2])) return 0;
  std::size_t end = i;
  while (end < text.size() && IsDigit(text[end])) ++end;
  if (end < text.size() && IsWordCharacter(text[end])) return 0;
  return end - i <= kMaxDigits ? end - i : 0;
}

struct Template {
  std::string text;  // with {n}, {n+1}, ...
  std::optional<long long> n;
};

Template TemplateOf(const std::string& sentence) {
  Template result;
  for (std::size_t i = 0; i < sentence.size();) {
    const std::size_t length = LayerNumberLength(sentence, i);
    if (length == 0) {
      result.text += sentence[i++];
      continue;
    }
    const long long number = std::stoll(sentence.substr(i, length));
    if (!result.n.has_value()) result.n = number;
    const long long distance = number - *result.n;
    result.text += distance == 0 ? "{n}" : fmt::format("{{n{:+}}}", distance);
    i += length;
  }
  return result;
}

}  // namespace

std::string NumberRanges(const std::vector<long long>& numbers) {
  std::string text;
  for (std::size_t i = 0; i < numbers.size();) {
    std::size_t last = i;
    while (last + 1 < numbers.size() && numbers[last + 1] == numbers[last] + 1) ++last;
    if (!text.empty()) text += ", ";
    text += last == i ? fmt::format("{}", numbers[i]) : fmt::format("{}..{}", numbers[i], numbers[last]);
    i = last + 1;
  }
  return text;
}

std::vector<std::string> GroupSentences(const std::vector<std::string>& sentences) {
  struct Group {
    std::string first;
    Template form;
    std::vector<long long> numbers;
    std::size_t count = 0;
  };
  std::vector<Group> groups;
  std::map<std::string, std::size_t> index;
  for (const std::string& sentence : sentences) {
    Template form = TemplateOf(sentence);
    const auto [entry, added] = index.emplace(form.text, groups.size());
    if (added) groups.push_back({sentence, form, {}, 0});
    Group& group = groups[entry->second];
    ++group.count;
    if (form.n.has_value()) group.numbers.push_back(*form.n);
  }
  std::vector<std::string> result;
  for (Group& group : groups) {
    if (group.count == 1) {
      result.push_back(group.first);
    } else if (group.numbers.empty()) {
      result.push_back(fmt::format("{} ({} times)", group.first, group.count));
    } else {
      std::ranges::sort(group.numbers);
      const auto repeated = std::ranges::unique(group.numbers);
      group.numbers.erase(repeated.begin(), repeated.end());
      result.push_back(
          fmt::format("{} (n = {}: {} times)", group.form.text, NumberRanges(group.numbers), group.count));
    }
  }
  return result;
}

}  // namespace shardplan
