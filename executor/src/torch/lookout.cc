// SPDX-License-Identifier: Apache-2.0
#include "torch/lookout.h"

#include <algorithm>
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

}  // namespace shardplan::executor
