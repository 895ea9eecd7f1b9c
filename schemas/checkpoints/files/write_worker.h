// SPDX-License-Identifier: Apache-2.0
// A thread that does writes in their order while the next bytes are read.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>

#include "shardplan/schemas/error.h"

namespace shardplan {

class WriteWorker {
 public:
  WriteWorker() : thread_([this] { Run(); }) {}
  WriteWorker(const WriteWorker&) = delete;
  WriteWorker& operator=(const WriteWorker&) = delete;
  ~WriteWorker() {
    {
      const std::lock_guard lock(mutex_);
      ends_ = true;
    }
    changed_.notify_all();
    thread_.join();
  }

  // After one has failed no other is done. The number of this one.
  std::int64_t Push(std::function<Status()> write) {
    const std::lock_guard lock(mutex_);
    waiting_.push_back(std::move(write));
    changed_.notify_all();
    return ++pushed_;
  }
  // Until the one of that number, and all before, are done; what went wrong.
  Status WaitFor(std::int64_t number) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return done_ >= number; });
    return status_;
  }
  Status WaitForAll() { return WaitFor(pushed_); }

 private:
  void Run() {
    std::unique_lock lock(mutex_);
    while (true) {
      changed_.wait(lock, [&] { return ends_ || !waiting_.empty(); });
      if (waiting_.empty()) return;
      std::function<Status()> write = std::move(waiting_.front());
      waiting_.pop_front();
      const bool runs = status_.has_value() && !ends_;
      lock.unlock();
      Status status;
      if (runs) status = write();
      lock.lock();
      if (status_.has_value() && !status) status_ = std::move(status);
      ++done_;
      changed_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<Status()>> waiting_;
  std::int64_t pushed_ = 0;
  std::int64_t done_ = 0;
  bool ends_ = false;
  Status status_;
  std::thread thread_;  // last: it uses the others
};

}  // namespace shardplan
