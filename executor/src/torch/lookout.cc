// SPDX-License-Identifier: Apache-2.0
#include "torch/lookout.h"

#include <algorithm>
#include <exception>
#include <utility>

namespace shardplan::executor {

Lookout::~Lookout() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
}

void Lookout::Begin(CollectiveId collective, std::int64_t sequence) {
  const std::lock_guard lock(mutex_);
  waiting_ = {collective, sequence, std::chrono::steady_clock::now() + first_, first_};
  if (!thread_.joinable()) thread_ = std::thread([this] { Run(); });
}

std::optional<std::string> Lookout::End() {
  const std::lock_guard lock(mutex_);
  waiting_.reset();
  return found_;
}

void Lookout::Run() {
  std::unique_lock lock(mutex_);
  while (!stopping_) {
    changed_.wait_for(lock, first_);
    if (stopping_ || found_ || !waiting_ || std::chrono::steady_clock::now() < waiting_->next) continue;
    const Waiting looked_at = *waiting_;
    lock.unlock();
    std::optional<std::string> found = look_(looked_at.collective, looked_at.sequence);
    lock.lock();
    if (found) found_ = std::move(found);
    if (!waiting_) continue;
    waiting_->pause = std::min(2 * waiting_->pause, longest_);
    waiting_->next = std::chrono::steady_clock::now() + waiting_->pause;
  }
}

// A work may end between a wait that was too short and the question whether it has: only a second wait tells
// the end of the wait from a failure of the work.
std::optional<std::string> WaitAndLook(c10d::Work& work, std::chrono::milliseconds timeout,
                                       std::chrono::milliseconds first, std::chrono::milliseconds longest,
                                       const std::function<std::optional<std::string>()>& look) {
  const auto deadline = std::chrono::steady_clock::now() + timeout;
  for (auto slice = first; std::chrono::steady_clock::now() + slice < deadline;
       slice = std::min(2 * slice, longest)) {
    try {
      work.wait(slice);
      return std::nullopt;
    } catch (const std::exception&) {
      if (work.isCompleted()) break;
    }
    if (std::optional<std::string> found = look()) return found;
  }
  work.wait(first);
  return std::nullopt;
}

}  // namespace shardplan::executor
