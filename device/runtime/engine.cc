// SPDX-License-Identifier: Apache-2.0
#include "device/runtime/engine.h"

#include <algorithm>
#include <cstdio>
#include <exception>
#include <thread>
#include <utility>

namespace shardplan::softdevice {
namespace {

constexpr std::chrono::microseconds kPeerPoll{100};
constexpr std::chrono::milliseconds kIdle{10};  // lazy: then the host is taken to wait
constexpr int kDeepest = 64;
constexpr std::uint64_t kLongestStretch = 24;

// A thread that asks again and again, and does nothing else, waits.
bool AsksInALoop(const Point& point) {
  constexpr int kMany = 1000;
  constexpr std::chrono::milliseconds kApart{5};  // torch's watchdog asks less often
  thread_local std::pair<const Stream*, std::uint64_t> asked;
  thread_local std::chrono::steady_clock::time_point last;
  thread_local int times = 0;
  const auto now = std::chrono::steady_clock::now();
  const std::pair<const Stream*, std::uint64_t> asks = {point.stream.get(), point.position};
  times = asks == asked && now - last < kApart ? times + 1 : 0;
  asked = asks;
  last = now;
  return times >= kMany;
}

}  // namespace

// Never destroyed: threads of other libraries use it until the process ends.
Engine& Engine::Get() {
  static Engine* const engine = new Engine(TheSettings());
  return *engine;
}

bool Engine::IsPassed(const Point& point) const {
  return point.stream == nullptr || point.stream->completed_ >= point.position;
}

bool Engine::MayRun(const Stream& stream) const {
  if (stream.busy_ || stream.queue_.empty()) return false;
  return std::ranges::all_of(stream.queue_.front().needs, [&](const Point& p) { return IsPassed(p); });
}

bool Engine::RunFirst(const std::shared_ptr<Stream>& stream, Lock& lock) {
  stream->busy_ = true;
  // A deque's first element stays where it is when others are added.
  Task& task = stream->queue_.front();
  bool done = true;
  std::string error;
  if (broken_.empty()) {
    lock.unlock();
    try {
      done = task.run();
    } catch (const std::exception& exception) {
      error = task.name + ": " + exception.what();
    }
    lock.lock();
  }
  stream->busy_ = false;
  stream->stalled_ = !done;
  if (!error.empty() && broken_.empty()) {
    broken_ = error;
    std::fprintf(stderr, "device in software: %s\n", error.c_str());
  }
  if (!done) return false;
  Task ended = std::move(stream->queue_.front());
  stream->queue_.pop_front();
  ++stream->completed_;
  if (stream->queue_.empty()) std::erase(active_, stream);
  changed_.notify_all();
  // The task's captures are released without the lock: they may call the device.
  lock.unlock();
  ended = {};
  lock.lock();
  return true;
}

// Everything that may run, each collective that waits for its peers tried once.
bool Engine::RunAll(Lock& lock) {
  bool any = false;
  for (bool progress = true; progress;) {
    progress = false;
    const std::vector<std::shared_ptr<Stream>> streams = active_;
    for (const std::shared_ptr<Stream>& stream : streams) {
      while (stream->number != late_ && MayRun(*stream) && RunFirst(stream, lock)) progress = true;
    }
    any = any || progress;
  }
  return any;
}

// The streams whose first task has to run before the point is passed.
void Engine::Needed(const Point& point, std::vector<std::shared_ptr<Stream>>& found, int depth) const {
  if (IsPassed(point) || depth > kDeepest || std::ranges::find(found, point.stream) != found.end()) return;
  if (point.stream->busy_ || point.stream->queue_.empty()) return;
  if (MayRun(*point.stream)) {
    found.push_back(point.stream);
    return;
  }
  for (const Point& need : point.stream->queue_.front().needs) Needed(need, found, depth + 1);
}

// One task of a late stream that the point needs.
bool Engine::RunNeeded(const Point& point, Lock& lock) {
  std::vector<std::shared_ptr<Stream>> able;
  Needed(point, able, 0);
  return std::ranges::any_of(
      able, [&](const auto& stream) { return stream->number == late_ && RunFirst(stream, lock); });
}

std::shared_ptr<Stream> Engine::Choose(const Point* target) {
  if (!only_needed_ && stretch_-- == 0) {
    stretch_ = random_() % kLongestStretch;
    taste_ = static_cast<Taste>(random_() % 3);
    avoided_ = active_.empty() ? nullptr : active_[random_() % active_.size()];
  }
  std::vector<std::shared_ptr<Stream>> able;
  if (target != nullptr) Needed(*target, able, 0);
  std::erase_if(able, [](const auto& stream) { return stream->stalled_; });
  if (target == nullptr || taste_ != Taste::kNeeded) {
    const bool avoid = taste_ == Taste::kAvoid;
    std::vector<std::shared_ptr<Stream>> any;
    for (const std::shared_ptr<Stream>& stream : active_) {
      if (MayRun(*stream) && !stream->stalled_ && !(avoid && stream == avoided_)) any.push_back(stream);
    }
    if (!any.empty()) able = std::move(any);
  }
  return able.empty() ? nullptr : able[random_() % able.size()];
}

// One task of the seed's choice; when there is none, what waits for peers is tried again.
bool Engine::Step(const Point* target, Lock& lock) {
  if (!lazy_) return RunAll(lock) || (late_ >= 0 && target != nullptr && RunNeeded(*target, lock));
  if (const std::shared_ptr<Stream> stream = Choose(target)) {
    (void)RunFirst(stream, lock);
    return true;
  }
  bool progress = false;
  const std::vector<std::shared_ptr<Stream>> streams = active_;
  for (const std::shared_ptr<Stream>& stream : streams) {
    if (stream->stalled_ && MayRun(*stream)) progress = RunFirst(stream, lock) || progress;
  }
  return progress;
}

Point Engine::Enqueue(const std::shared_ptr<Stream>& stream, Task task) {
  Lock lock(mutex_);
  std::erase_if(task.needs, [&](const Point& point) { return IsPassed(point); });
  if (stream->queue_.empty()) active_.push_back(stream);
  stream->queue_.push_back(std::move(task));
  const Point point = {stream, ++stream->issued_};
  if (lazy_) last_issue_ = Clock::now();
  if (!lazy_) (void)RunAll(lock);
  const bool serve = (lazy_ && !only_needed_) || !demands_.empty();
  if (serve && !IsPassed(point) && !std::exchange(has_thread_, true)) {
    std::thread([this] { Progress(); }).detach();
  }
  if (has_thread_ && !active_.empty()) work_.notify_one();
  if (serial_) {
    lock.unlock();
    Wait(point);
  }
  return point;
}

Point Engine::LastOf(const std::shared_ptr<Stream>& stream) {
  const Lock lock(mutex_);
  return {stream, stream->issued_};
}

bool Engine::IsDone(const Point& point) {
  Lock lock(mutex_);
  if (!lazy_ && !IsPassed(point)) (void)RunAll(lock);
  if (late_ >= 0 && !IsPassed(point) && AsksInALoop(point)) {
    while (!IsPassed(point) && Step(&point, lock)) {
    }
  }
  return IsPassed(point);
}

void Engine::Wait(const Point& point) {
  Await(point);
  Lock lock(mutex_);
  while (!IsPassed(point)) {
    if (!Step(&point, lock) && !IsPassed(point)) changed_.wait_for(lock, kPeerPoll);
  }
}

void Engine::Await(const Point& point) {
  if (point.stream == nullptr) return;
  std::uint64_t known = point.stream->awaited;
  while (known < point.position && !point.stream->awaited.compare_exchange_weak(known, point.position)) {
  }
}

void Engine::Nudge(const Point& point) {
  Lock lock(mutex_);
  while (!IsPassed(point) && Step(&point, lock)) {
  }
}

void Engine::WaitForDevice(int device) {
  std::vector<Point> points;
  {
    const Lock lock(mutex_);
    for (const std::shared_ptr<Stream>& stream : active_) {
      if (stream->device == device) points.push_back({stream, stream->issued_});
    }
  }
  for (const Point& point : points) Wait(point);
}

int Engine::AddDemand(Demand demand) {
  const Lock lock(mutex_);
  demands_.emplace_back(next_demand_, std::move(demand));
  return next_demand_++;
}

void Engine::ForgetDemand(int id) {
  const Lock lock(mutex_);
  std::erase_if(demands_, [&](const auto& demand) { return demand.first == id; });
}

void Engine::MixSeed(std::uint64_t number) {
  const Lock lock(mutex_);
  random_.discard(number + 1);
}

std::string Engine::WhatBrokeIt() {
  const Lock lock(mutex_);
  return broken_;
}

void Engine::ServeDemands(Lock& lock) {
  const std::vector<std::pair<int, Demand>> demands = demands_;
  lock.unlock();
  std::vector<Point> wanted;
  for (const auto& [id, demand] : demands) {
    if (const std::optional<Point> point = demand()) wanted.push_back(*point);
  }
  lock.lock();
  for (const Point& point : wanted) {
    while (!IsPassed(point) && Step(&point, lock)) {
    }
  }
}

// A thread of its own: what peers wait for is done even if nobody waits here.
void Engine::Progress() {
  Lock lock(mutex_);
  while (true) {
    work_.wait(lock, [&] { return !active_.empty(); });
    if (!lazy_) {
      if (late_ >= 0) ServeDemands(lock);
      if (!RunAll(lock)) changed_.wait_for(lock, kPeerPoll);
      continue;
    }
    ServeDemands(lock);
    const bool idle = Clock::now() - last_issue_ > kIdle;
    if (!(idle && Step(nullptr, lock))) changed_.wait_for(lock, kPeerPoll);
  }
}

}  // namespace shardplan::softdevice
