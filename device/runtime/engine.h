// SPDX-License-Identifier: Apache-2.0
// The order in which the work of all streams of this process is done.
//
// [Note: modes]
// inline: a task runs as soon as it may: its stream's earlier tasks and all points that it needs are done.
// Only
//   a collective whose peers have not come stays.
// serial: the host goes on when a task is done, its peers' parts included. So numbers are those of one order,
//   that of the host, whatever wait is missing.
// lazy: nothing runs until somebody waits (a thread of this process, or a peer in a collective, or the host
// has
//   issued nothing for a while), and then in an order chosen by the seed: for stretches of random length only
//   what the waiter needs, or whatever may run, or anything but one stream. So what the host forgot to order
//   comes in another order than the host's.
// late:NUMBER: as inline, but a stream of that number does only what somebody waits for. So whatever else is
//   not ordered behind its tasks is done before them.
// null: tasks have no content. null:slow: as lazy, but only what a waiting host needs is ever done.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "device/runtime/settings.h"

namespace shardplan::softdevice {

class Stream;

// A place in a stream: behind its first `position` tasks. The empty point has been passed.
struct Point {
  std::shared_ptr<Stream> stream;
  std::uint64_t position = 0;
};

struct Task {
  std::string name;
  std::vector<Point> needs;
  // False: it cannot end yet, and is called again. An exception breaks the device.
  std::function<bool()> run;
};

class Stream {
 public:
  // number: 0 is the device's default stream, others are counted in the order in which they are made.
  Stream(int device, int priority, int number) : device(device), priority(priority), number(number) {}
  const int device;
  const int priority;
  const int number;
  // The capture that takes what is issued here; 0: none.
  std::atomic<unsigned long long> capture = 0;
  // Up to where another stream or the host has been told to wait for this one.
  std::atomic<std::uint64_t> awaited = 0;

 private:
  friend class Engine;
  std::deque<Task> queue_;
  std::uint64_t issued_ = 0;
  std::uint64_t completed_ = 0;
  bool busy_ = false;     // a thread runs its first task
  bool stalled_ = false;  // its first task could not end when it was last tried
};

class Engine {
 public:
  static Engine& Get();

  Point Enqueue(const std::shared_ptr<Stream>& stream, Task task);
  Point LastOf(const std::shared_ptr<Stream>& stream);
  bool IsDone(const Point& point);
  // Runs what may run until the point is passed, or the device is broken.
  void Wait(const Point& point);
  void WaitForDevice(int device);
  // Runs what the point needs, as far as it goes without waiting for anybody.
  void Nudge(const Point& point);

  // Somebody waits for it now.
  static void Await(const Point& point);

  // A point that peers wait for here: asked between tasks. Returned: for Forget.
  using Demand = std::function<std::optional<Point>()>;
  int AddDemand(Demand demand);
  void ForgetDemand(int id);

  // Ranks of one seed get orders of their own.
  void MixSeed(std::uint64_t number);

  // The first error of a task; empty: none. A broken device does no more work.
  std::string WhatBrokeIt();

 private:
  using Lock = std::unique_lock<std::mutex>;
  using Clock = std::chrono::steady_clock;
  enum class Taste { kNeeded, kAny, kAvoid };

  explicit Engine(const Settings& settings)
      : lazy_(settings.lazy),
        serial_(settings.serial),
        only_needed_(settings.null),
        late_(settings.late),
        random_(settings.seed) {}
  bool IsPassed(const Point& point) const;
  bool MayRun(const Stream& stream) const;
  // True: the task is done.
  bool RunFirst(const std::shared_ptr<Stream>& stream, Lock& lock);
  bool RunAll(Lock& lock);
  void Needed(const Point& point, std::vector<std::shared_ptr<Stream>>& found, int depth) const;
  bool RunNeeded(const Point& point, Lock& lock);
  std::shared_ptr<Stream> Choose(const Point* target);
  bool Step(const Point* target, Lock& lock);
  void Progress();
  void ServeDemands(Lock& lock);

  const bool lazy_;
  const bool serial_;
  const bool only_needed_;  // lazy: nothing but what a waiting host needs
  const int late_;          // number of the streams that do only what somebody waits for; -1: none
  std::mutex mutex_;
  std::condition_variable changed_;
  std::condition_variable work_;
  std::vector<std::shared_ptr<Stream>> active_;  // streams with tasks
  std::vector<std::pair<int, Demand>> demands_;
  int next_demand_ = 0;
  bool has_thread_ = false;
  Clock::time_point last_issue_;
  std::string broken_;
  std::mt19937_64 random_;
  Taste taste_ = Taste::kNeeded;
  std::uint64_t stretch_ = 0;
  std::shared_ptr<Stream> avoided_;
};

}  // namespace shardplan::softdevice
