// SPDX-License-Identifier: Apache-2.0
// Output for a person at a terminal and nobody else: colours, and a bar that is drawn over again. There is
// neither if standard error is a file or a pipe, or TERM is unset or "dumb"; colours go if NO_COLOR is set to
// anything, too (no-color.org).
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>

namespace shardplan::cli {

bool IsATerminal();

// The text, which is to be seen at once: red and bold.
std::string Alarming(std::string_view text);

// One line, as long as the work goes on: what it is, how much of it is done, and the time that is left at
// this pace. Without a terminal: a line every two seconds.
class ProgressBar {
 public:
  ProgressBar(bool quiet, std::string_view what, std::string_view unit);
  ~ProgressBar();
  ProgressBar(const ProgressBar&) = delete;
  ProgressBar& operator=(const ProgressBar&) = delete;

  void Update(std::int64_t done, std::int64_t total);
  // Takes the bar away, for a line that is printed; the next Update draws it again.
  void Clear();

 private:
  using Clock = std::chrono::steady_clock;

  const bool quiet_;
  const bool drawn_over_;
  const std::string what_, unit_;
  const Clock::time_point begin_;
  Clock::time_point last_;
};

// "[=======>            ]  43 %  0:35 left", of done out of total, both above 0, after so long.
std::string BarText(std::int64_t done, std::int64_t total, std::chrono::nanoseconds passed);

}  // namespace shardplan::cli
