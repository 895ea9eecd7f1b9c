// SPDX-License-Identifier: Apache-2.0
// Errors and results. No exception crosses a public header: functions that can fail return Result<T>.
#pragma once

#include <cstdint>
#include <expected>
#include <string>
#include <utility>

namespace shardplan {

// The kind of an error. It decides the exit code.
enum class ErrorCode : std::uint8_t {
  kNegative,     // the answer is no: does not fit, does not verify, differs        -> exit 1
  kUsage,        // the caller asked for something that makes no sense             -> exit 2
  kBadInput,     // a document or file is wrong                                    -> exit 3
  kEnvironment,  // no GPU, no NCCL, no disk space, a missing program              -> exit 4
  kInternal,     // a bug of shardplan                                             -> exit 70
};

// A failure as a person needs it: what, where in which document, what was found, what was expected.
struct Error {
  ErrorCode code = ErrorCode::kInternal;
  std::string message;   // one sentence: what is wrong and what to do
  std::string file;      // path of the document, empty when there is none
  std::string pointer;   // JSON pointer (RFC 6901) or "line N", empty when the whole document is meant
  std::string found;     // empty when not applicable
  std::string expected;  // empty when not applicable

  bool operator==(const Error&) const = default;
};

template <typename T>
using Result = std::expected<T, Error>;
using Status = std::expected<void, Error>;

// The process exit code of an error (docs/internals/architecture.md, "Errors"): 1, 2, 3, 4 or 70.
int ExitCode(ErrorCode code);

// "file: /pointer: message (found X, expected Y)"; parts that are empty are left out. Safe to print
// (printable.h).
std::string ToString(const Error& error);

// Shorthand for `return std::unexpected(Error{...})`.
std::unexpected<Error> MakeError(ErrorCode code, std::string message);
std::unexpected<Error> MakeInputError(std::string pointer, std::string message, std::string found = {},
                                      std::string expected = {});

}  // namespace shardplan
