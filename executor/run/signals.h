// SPDX-License-Identifier: Apache-2.0
// The signals that a launcher passes on to its ranks.
#pragma once

#include <chrono>
#include <csignal>
#include <optional>

namespace shardplan::run {

// Takes the signals that end a program (and those of children) out of their handlers' hands: from here on
// they are waited for, in this thread and in those that it starts. Signals that the parent has this program
// ignore (nohup) stay ignored.
class Signals {
 public:
  Signals();
  // The next signal within that time; SIGCHLD: a child has changed.
  std::optional<int> Next(std::chrono::milliseconds within) const;
  // The mask that a child is to have blocked: the one before.
  const sigset_t& before() const { return before_; }

 private:
  sigset_t awaited_{};
  sigset_t before_{};
};

}  // namespace shardplan::run
