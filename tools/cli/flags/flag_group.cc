// SPDX-License-Identifier: Apache-2.0
#include "flags/flag_group.h"

#include <fmt/format.h>

#include <memory>
#include <utility>
#include <vector>

namespace shardplan::cli {
namespace {

constexpr std::string_view kRare = "Rarely set";

// Help as CLI11 writes it, without the groups of flags that are rarely set unless all is asked for.
class HelpWithoutRareFlags : public CLI::Formatter {
 public:
  std::string make_help(const CLI::App* command, std::string name, CLI::AppFormatMode mode) const override {
    if (mode == CLI::AppFormatMode::All) return CLI::Formatter().make_help(command, std::move(name), mode);
    return CLI::Formatter::make_help(command, std::move(name), mode);
  }
  std::string make_group(std::string group, bool is_positional,
                         std::vector<const CLI::Option*> options) const override {
    if (group == kRare) return fmt::format("\n{} more knobs, rarely set: --help-all\n", options.size());
    return CLI::Formatter::make_group(std::move(group), is_positional, std::move(options));
  }
};

}  // namespace

FlagGroup FlagGroup::Rare() {
  if (command_.get_help_all_ptr() == nullptr) {
    command_.set_help_all_flag("--help-all", "Print the knobs that are rarely set, too, and exit");
    command_.formatter(std::make_shared<HelpWithoutRareFlags>());
  }
  return {command_, std::string(kRare)};
}

std::unexpected<Error> BadFlag(std::string_view flag, std::string_view found, std::string_view expected) {
  Error error;
  error.code = ErrorCode::kUsage;
  error.message = fmt::format("{} has a value that it does not take", flag);
  error.found = found;
  error.expected = expected;
  return std::unexpected(error);
}

}  // namespace shardplan::cli
