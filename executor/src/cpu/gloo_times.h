// SPDX-License-Identifier: Apache-2.0
// When Gloo's threads begin and end a collective.
//
// [Note: how Gloo's threads are asked]
// c10d's works queue up for a few threads of their group. For profilers each carries an at::RecordFunction
// that is made where it is issued, begun by the thread that takes it out of the queue, and ended by it; and
// it has the thread-local state of the issuing thread with it. So a callback that is there while the
// collective is issued is called in those moments, and finds in that state whom it is about.
#pragma once

#include <ATen/record_function.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include <atomic>
#include <cstdint>
#include <memory>

namespace shardplan::executor {

// On the steady clock; -1: not yet. Several works have the first begin and the last end.
class GlooTimes final : public c10::DebugInfoBase, public std::enable_shared_from_this<GlooTimes> {
 public:
  void Began(std::int64_t now_ns);
  void Ended(std::int64_t now_ns);
  // It is known to be over; nobody may have said when (a group that is no Gloo's).
  void EndedBy(std::int64_t now_ns);

  std::int64_t begin_ns() const { return begin_ns_; }
  std::int64_t end_ns() const { return end_ns_; }

 private:
  std::atomic<std::int64_t> begin_ns_{-1};
  std::atomic<std::int64_t> end_ns_{-1};
};

// While it lives, the collectives that this thread issues tell `times`.
class TimedIssue {
 public:
  explicit TimedIssue(std::shared_ptr<GlooTimes> times);
  ~TimedIssue();
  TimedIssue(const TimedIssue&) = delete;
  TimedIssue& operator=(const TimedIssue&) = delete;

 private:
  const at::CallbackHandle callback_;
  const c10::DebugInfoGuard info_;
};

}  // namespace shardplan::executor
