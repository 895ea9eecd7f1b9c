// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <exception>
#include <string>

namespace shardplan::executor {

// LibTorch's messages go on with a stack trace.
inline std::string FirstLine(const std::exception& exception) {
  const std::string text = exception.what();
  return text.substr(0, text.find('\n'));
}

}  // namespace shardplan::executor
