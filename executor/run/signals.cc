// SPDX-License-Identifier: Apache-2.0
#include "signals.h"

#include <cerrno>

namespace shardplan::run {

Signals::Signals() {
  sigemptyset(&awaited_);
  sigaddset(&awaited_, SIGCHLD);
  for (const int number : {SIGTERM, SIGINT, SIGHUP, SIGQUIT}) {
    struct sigaction action {};
    if (sigaction(number, nullptr, &action) == 0 && action.sa_handler != SIG_IGN)
      sigaddset(&awaited_, number);
  }
  (void)pthread_sigmask(SIG_BLOCK, &awaited_, &before_);
}

std::optional<int> Signals::Next(std::chrono::milliseconds within) const {
  const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(within);
  timespec limit{};
  limit.tv_sec = seconds.count();
  limit.tv_nsec = std::chrono::nanoseconds(within - seconds).count();
  const int number = sigtimedwait(&awaited_, nullptr, &limit);
  return number > 0 ? std::optional(number) : std::nullopt;
}

}  // namespace shardplan::run
