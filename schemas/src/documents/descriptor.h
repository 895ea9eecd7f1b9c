// SPDX-License-Identifier: Apache-2.0
// POSIX files: descriptors that close themselves, and errors that say what the system said.
#pragma once

#include <fmt/format.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <string>
#include <utility>

#include "shardplan/schemas/error.h"

namespace shardplan {

class Descriptor {
 public:
  explicit Descriptor(int value) : value_(value) {}
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  Descriptor(Descriptor&& other) noexcept : value_(std::exchange(other.value_, -1)) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    std::swap(value_, other.value_);
    return *this;
  }
  ~Descriptor() {
    if (value_ >= 0) ::close(value_);
  }
  int value() const { return value_; }
  // close() reports what a network file system could not write.
  bool Close() { return ::close(std::exchange(value_, -1)) == 0; }

 private:
  int value_;
};

// "cannot <action>: <what errno says>"
inline std::unexpected<Error> SystemError(ErrorCode code, const std::string& path,
                                          const std::string& action) {
  const int reason = errno;
  return std::unexpected(Error{
      .code = code, .message = fmt::format("cannot {}: {}", action, std::strerror(reason)), .file = path});
}

}  // namespace shardplan
