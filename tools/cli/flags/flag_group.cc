// SPDX-License-Identifier: Apache-2.0
#include "flags/flag_group.h"

#include <fmt/format.h>

namespace shardplan::cli {

std::unexpected<Error> BadFlag(std::string_view flag, std::string_view found, std::string_view expected) {
  Error error;
  error.code = ErrorCode::kUsage;
  error.message = fmt::format("{} has a value that it does not take", flag);
  error.found = found;
  error.expected = expected;
  return std::unexpected(error);
}

}  // namespace shardplan::cli
