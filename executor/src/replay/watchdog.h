// SPDX-License-Identifier: Apache-2.0
// Watchdog: a thread that sees to it that collectives in flight come to an end.
//
// [Note: timeouts]
// A collective that runs on a device and waits for a rank that is gone never ends by itself. The backend adds
// every collective that it issues; the watchdog looks at them from time to time and, when the oldest is older
// than the timeout or the backend reports an error, has the backend explain it and abort. From then on Check
// returns that error.
//
// [Note: aborting what somebody is using]
// Aborting frees communicators. The host issues on them under Lock(), which the watchdog takes to abort:
// after Lock() the host asks Failed() first and, if all is well, may use them until it lets go of the lock.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <expected>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <thread>

#include "shardplan/executor/collectives.h"
#include "shardplan/schemas/error.h"

namespace shardplan::executor {

struct InFlight {
  CollectiveId collective = -1;
  std::int64_t sequence = 0;
  void* done = nullptr;  // the backend's
  std::chrono::steady_clock::time_point issued;
};

class Watchdog {
 public:
  // How the backend is asked. Everything is called with the lock held, except `explain`.
  struct Backend {
    std::function<void()> enter_thread;  // once, first in the thread
    // False: not yet. The error says why it never will be.
    std::function<std::expected<bool, std::string>(const InFlight&)> is_done;
    std::function<void(const InFlight&)> ended;             // it was done
    std::function<std::optional<std::string>()> is_broken;  // why communicators cannot go on
    std::function<void()> failing;  // before `explain`: tell others how far this rank is
    // `reason`: in a few words. May take seconds, without the lock.
    std::function<std::string(const InFlight&, const std::string& reason)> explain;
    std::function<void()> abort;  // once
  };

  Watchdog(std::chrono::milliseconds timeout, std::chrono::milliseconds interval, Backend backend);
  ~Watchdog();
  Watchdog(const Watchdog&) = delete;
  Watchdog& operator=(const Watchdog&) = delete;

  void Start();
  // Ends the thread. Collectives in flight stay so.
  void Stop();

  std::unique_lock<std::mutex> Lock() { return std::unique_lock(mutex_); }
  // With the lock held.
  const std::optional<Error>& Failed() const { return failure_; }
  void Add(InFlight flight) { in_flight_.push_back(flight); }
  const std::deque<InFlight>& in_flight() const { return in_flight_; }
  bool aborted() const { return aborted_; }

  Status Check();
  // An earlier failure stays the error.
  void Abort(const std::string& reason);

 private:
  void Watch();
  void WatchOnce(std::unique_lock<std::mutex>& lock);
  void Fail(std::string message);

  const std::chrono::milliseconds timeout_;
  const std::chrono::milliseconds interval_;
  const Backend backend_;
  std::mutex mutex_;  // of everything below
  std::deque<InFlight> in_flight_;
  std::optional<Error> failure_;
  bool aborted_ = false;
  bool stopping_ = false;
  std::condition_variable changed_;
  std::thread thread_;
};

}  // namespace shardplan::executor
