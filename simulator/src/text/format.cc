// SPDX-License-Identifier: Apache-2.0
#include "text/format.h"

#include <fmt/format.h>

#include "cost/fixed_log.h"
#include "shardplan/schemas/printable.h"

namespace shardplan::internal {
namespace {

// `value` / `unit` with two decimals, rounded to nearest.
std::string Hundredths(std::int64_t value, std::int64_t unit) {
  const std::int64_t hundredths = MulDiv(value, 100, unit);
  const std::int64_t size = hundredths < 0 ? -hundredths : hundredths;
  return fmt::format("{}{}.{:02}", hundredths < 0 ? "-" : "", size / 100, size % 100);
}

}  // namespace

std::string Milliseconds(Nanoseconds time) { return Hundredths(time.value, 1'000'000) + " ms"; }
std::string Gibibytes(Bytes size) { return Hundredths(size.value, std::int64_t{1} << 30) + " GiB"; }

std::string Percent(std::int64_t ppm) {
  const std::int64_t tenths = MulDiv(ppm, 1, 1000);
  const std::int64_t size = tenths < 0 ? -tenths : tenths;
  return fmt::format("{}{}.{} %", tenths < 0 ? "-" : "", size / 10, size % 10);
}

std::string Thousands(std::int64_t number) {
  std::string digits = std::to_string(number);
  for (std::ptrdiff_t at = std::ssize(digits) - 3; at > (number < 0 ? 1 : 0); at -= 3) {
    digits.insert(static_cast<std::size_t>(at), ",");
  }
  return digits;
}

std::string HtmlText(std::string_view text) {
  std::string out;
  for (const char c : Printable(text)) {
    switch (c) {
      case '&':
        out += "&amp;";
        break;
      case '<':
        out += "&lt;";
        break;
      case '>':
        out += "&gt;";
        break;
      case '"':
        out += "&quot;";
        break;
      case '\'':
        out += "&#39;";
        break;
      default:
        out += c;
    }
  }
  return out;
}

}  // namespace shardplan::internal
