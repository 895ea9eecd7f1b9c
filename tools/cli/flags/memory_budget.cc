// SPDX-License-Identifier: Apache-2.0
#include "flags/memory_budget.h"

#include <charconv>

#include "flags/flag_group.h"
#include "support.h"

namespace shardplan::cli {

std::optional<std::int64_t> WithSuffix(std::string_view text, std::initializer_list<Suffix> suffixes) {
  double number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  const std::string_view rest(end, text.data() + text.size());
  for (const Suffix& suffix : suffixes) {
    if (error != std::errc{} || rest != suffix.name) continue;
    const double value = number * static_cast<double>(suffix.factor);
    constexpr double kMost = 9007199254740992.0;  // 2^53
    if (!(value >= 1) || value > kMost) return std::nullopt;
    return static_cast<std::int64_t>(value);
  }
  return std::nullopt;
}

Result<std::optional<Bytes>> ParseMemoryBudget(const std::string& text) {
  if (text.empty() || text == "device") return std::nullopt;
  const auto bytes = WithSuffix(text, {{"", 1},
                                       {"B", 1},
                                       {"KiB", std::int64_t{1} << 10},
                                       {"MiB", std::int64_t{1} << 20},
                                       {"GiB", std::int64_t{1} << 30},
                                       {"TiB", std::int64_t{1} << 40},
                                       {"KB", 1'000},
                                       {"MB", 1'000'000},
                                       {"GB", 1'000'000'000},
                                       {"TB", 1'000'000'000'000}});
  if (bytes) return Bytes{*bytes};
  return BadFlag("--memory-budget", text, "bytes, say 60GiB or 80GB, or device");
}

}  // namespace shardplan::cli
