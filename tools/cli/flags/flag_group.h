// SPDX-License-Identifier: Apache-2.0
// Helpers that the files of flags share.
#pragma once

#include <CLI/CLI.hpp>
#include <cstddef>
#include <deque>
#include <expected>
#include <string>
#include <string_view>

#include "flags/file_flag.h"
#include "shardplan/schemas/error.h"

namespace shardplan::cli {

// Adds options and flags to one group of a command's help.
class FlagGroup {
 public:
  FlagGroup(CLI::App& command, std::string name) : command_(command), name_(std::move(name)) {}

  // The group of the flags that are rarely set. --help leaves it out and says so, --help-all has it.
  FlagGroup Rare();

  template <typename T>
  CLI::Option* Option(const std::string& flag, T& value, const std::string& help) {
    return command_.add_option(flag, value, help)->group(name_);
  }
  CLI::Option* File(const std::string& flag, std::string& path, const std::string& help) {
    return AddFile(command_, flag, path, help)->group(name_);
  }
  CLI::Option* Flag(const std::string& flag, bool& value, const std::string& help) {
    return command_.add_flag(flag, value, help)->group(name_);
  }

 private:
  CLI::App& command_;
  std::string name_;
};

// Flags without a value that set a knob: one row each.
template <typename Knobs>
struct Switch {
  const char* flag;
  bool Knobs::*knob;
  const char* help;
};
template <typename Rows>
void AddSwitches(FlagGroup& group, const Rows& rows, std::deque<bool>& given) {
  for (const auto& row : rows) group.Flag(row.flag, given.emplace_back(false), row.help);
}
template <typename Rows, typename Knobs>
void ApplySwitches(const Rows& rows, const std::deque<bool>& given, Knobs& knobs) {
  for (std::size_t s = 0; s < given.size(); ++s) {
    if (given[s]) knobs.*rows[s].knob = true;
  }
}

// kUsage: `flag` was given `found`.
std::unexpected<Error> BadFlag(std::string_view flag, std::string_view found, std::string_view expected);

}  // namespace shardplan::cli
