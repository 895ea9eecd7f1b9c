// SPDX-License-Identifier: Apache-2.0
// The exception of a training: inside of a forward or a backward there is nobody to return a Status to.
#pragma once

#include <stdexcept>
#include <string>

#include "shardplan/schemas/error.h"

namespace shardplan::executor {

class TrainingError : public std::runtime_error {
 public:
  // `message`: for a person, safe to print. That of an error inside of another has the name already.
  TrainingError(ErrorCode code, const std::string& message)
      : std::runtime_error(message.starts_with("shardplan: ") ? message : "shardplan: " + message),
        code_(code) {}

  // kNegative: the model does something else than its plan. kUsage: a call that does not belong there.
  // kEnvironment: a rank died, is stopped or did not come in time; the message names it. kInternal: a bug of
  // shardplan. ExitCode(code()) is the exit code that the shardplan commands have for it.
  ErrorCode code() const { return code_; }

 private:
  ErrorCode code_;
};

}  // namespace shardplan::executor
