// SPDX-License-Identifier: Apache-2.0
#include "replay/watchdog.h"

#include <utility>

namespace shardplan::executor {

Watchdog::Watchdog(std::chrono::milliseconds timeout, std::chrono::milliseconds interval, Backend backend)
    : timeout_(timeout), interval_(interval), backend_(std::move(backend)) {}

Watchdog::~Watchdog() { Stop(); }

void Watchdog::Start() {
  thread_ = std::thread([this] { Watch(); });
}

void Watchdog::Stop() {
  {
    const std::unique_lock lock = Lock();
    stopping_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
}

void Watchdog::Watch() {
  std::unique_lock lock = Lock();
  backend_.enter_thread();
  while (!stopping_) {
    changed_.wait_for(lock, interval_);
    if (!stopping_ && !failure_) WatchOnce(lock);
  }
}

void Watchdog::WatchOnce(std::unique_lock<std::mutex>& lock) {
  std::optional<std::string> reason;
  // Collectives of different streams finish in any order.
  std::erase_if(in_flight_, [&](const InFlight& flight) {
    const std::expected<bool, std::string> done = backend_.is_done(flight);
    if (!done) reason = done.error();
    if (!done || !*done) return false;
    backend_.ended(flight);
    return true;
  });
  if (in_flight_.empty()) return;
  const InFlight oldest = in_flight_.front();
  if (!reason) reason = backend_.is_broken();
  if (!reason && std::chrono::steady_clock::now() - oldest.issued > timeout_) reason = "timed out";
  if (!reason) return;
  backend_.failing();
  lock.unlock();
  std::string message = backend_.explain(oldest, *reason);
  lock.lock();
  Fail(std::move(message));
}

void Watchdog::Fail(std::string message) {
  if (!failure_) failure_ = Error{ErrorCode::kEnvironment, std::move(message), {}, {}, {}, {}};
  if (!std::exchange(aborted_, true)) backend_.abort();
}

Status Watchdog::Check() {
  const std::unique_lock lock = Lock();
  if (failure_) return std::unexpected(*failure_);
  return {};
}

void Watchdog::Abort(const std::string& reason) {
  const std::unique_lock lock = Lock();
  backend_.failing();
  Fail(reason);
}

}  // namespace shardplan::executor
