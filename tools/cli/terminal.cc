// SPDX-License-Identifier: Apache-2.0
#include "terminal.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>

#include "support.h"

namespace shardplan::cli {
namespace {

constexpr auto kRedraw = std::chrono::milliseconds(100);
constexpr auto kLines = std::chrono::seconds(2);
constexpr std::string_view kClear = "\r\x1b[K";

// PrintError shows control characters as escapes.
void Raw(std::string_view text) {
  while (!text.empty()) {
    const ssize_t written = write(STDERR_FILENO, text.data(), text.size());
    if (written <= 0) return;
    text.remove_prefix(static_cast<std::size_t>(written));
  }
}

bool IsSet(const char* name) {
  const char* value = std::getenv(name);
  return value != nullptr && *value != '\0';
}

}  // namespace

bool IsATerminal() {
  return isatty(STDERR_FILENO) == 1 && IsSet("TERM") && std::string_view(std::getenv("TERM")) != "dumb";
}

std::string Alarming(std::string_view text) {
  return IsATerminal() && !IsSet("NO_COLOR") ? fmt::format("\x1b[1;31m{}\x1b[0m", text) : std::string(text);
}

std::string BarText(std::int64_t done, std::int64_t total, std::chrono::nanoseconds passed) {
  constexpr std::int64_t kWidth = 24;
  const double part = std::clamp(static_cast<double>(done) / static_cast<double>(total), 0.0, 1.0);
  const auto full = static_cast<std::size_t>(part * kWidth);
  std::string bar(full, '=');
  if (full < kWidth) bar += '>';
  const double left_s = part > 0 ? static_cast<double>(passed.count()) / 1e9 * (1 - part) / part : 0;
  const auto seconds = static_cast<std::int64_t>(left_s + 0.5);
  const std::int64_t minutes = seconds / 60;
  const std::string left = minutes < 60 ? fmt::format("{}:{:02}", minutes, seconds % 60)
                                        : fmt::format("{}:{:02} h", minutes / 60, minutes % 60);
  return fmt::format("[{:<{}}] {:3.0f} %  {} left", bar, kWidth, 100 * part, left);
}

ProgressBar::ProgressBar(bool quiet, std::string_view what, std::string_view unit)
    : quiet_(quiet),
      drawn_over_(IsATerminal()),
      what_(what),
      unit_(unit),
      begin_(Clock::now()),
      last_(begin_) {}

ProgressBar::~ProgressBar() { Clear(); }

void ProgressBar::Clear() {
  if (!quiet_ && drawn_over_) Raw(kClear);
}

void ProgressBar::Update(std::int64_t done, std::int64_t total) {
  const auto now = Clock::now();
  if (quiet_ || done <= 0 || total <= 0 ||
      now - last_ < (drawn_over_ ? Clock::duration(kRedraw) : Clock::duration(kLines)))
    return;
  last_ = now;
  if (drawn_over_) {
    Raw(fmt::format("{}{} {}  {} of {} {}", kClear, what_, BarText(done, total, now - begin_), done, total,
                    unit_));
  } else {
    Progress(false, fmt::format("{} of {} {}", done, total, unit_));
  }
}

}  // namespace shardplan::cli
