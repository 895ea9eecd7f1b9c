// SPDX-License-Identifier: Apache-2.0
#include "shardplan/schemas/error.h"

#include <fmt/format.h>

#include "shardplan/schemas/printable.h"

namespace shardplan {

int ExitCode(ErrorCode code) {
  switch (code) {
    case ErrorCode::kNegative:
      return 1;
    case ErrorCode::kUsage:
      return 2;
    case ErrorCode::kBadInput:
      return 3;
    case ErrorCode::kEnvironment:
      return 4;
    case ErrorCode::kInternal:
      return 70;
  }
  return 70;
}

std::string ToString(const Error& error) {
  std::string text;
  if (!error.file.empty()) text += Printable(error.file) + ": ";
  if (!error.pointer.empty()) text += Printable(error.pointer) + ": ";
  text += PrintableLines(error.message);
  const std::string found = Printable(error.found), expected = Printable(error.expected);
  if (!found.empty() && !expected.empty()) {
    text += fmt::format(" (found {}, expected {})", found, expected);
  } else if (!found.empty()) {
    text += fmt::format(" (found {})", found);
  } else if (!expected.empty()) {
    text += fmt::format(" (expected {})", expected);
  }
  return text;
}

std::unexpected<Error> MakeError(ErrorCode code, std::string message) {
  return std::unexpected(Error{.code = code, .message = std::move(message)});
}

std::unexpected<Error> MakeInputError(std::string pointer, std::string message, std::string found,
                                      std::string expected) {
  return std::unexpected(Error{.code = ErrorCode::kBadInput,
                               .message = std::move(message),
                               .pointer = std::move(pointer),
                               .found = std::move(found),
                               .expected = std::move(expected)});
}

}  // namespace shardplan
