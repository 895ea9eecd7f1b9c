// SPDX-License-Identifier: Apache-2.0
#include "torch/bounded_store.h"

#include <fmt/format.h>

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <functional>
#include <future>
#include <memory>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace shardplan::executor {
namespace {

using std::chrono::milliseconds;

// The time that the store itself needs to say that a key did not come, after the time it was given.
constexpr milliseconds kAnswer{500};
constexpr milliseconds kAskInterval{50};

// One thread that makes calls, in order. It outlives this object when it is given up in the midst of one.
class CallThread {
 public:
  CallThread() : queue_(std::make_shared<Queue>()), thread_([queue = queue_] { Serve(*queue); }) {}
  ~CallThread() {
    Close();
    if (given_up_) {
      thread_.detach();
    } else {
      thread_.join();
    }
  }
  CallThread(const CallThread&) = delete;
  CallThread& operator=(const CallThread&) = delete;

  void Post(std::function<void()> call) {
    {
      const std::lock_guard lock(queue_->mutex);
      queue_->calls.push_back(std::move(call));
    }
    queue_->changed.notify_one();
  }
  void GiveUp() { given_up_ = true; }

 private:
  struct Queue {
    std::mutex mutex;
    std::condition_variable changed;
    std::deque<std::function<void()>> calls;
    bool closed = false;
  };

  static void Serve(Queue& queue) {
    std::unique_lock lock(queue.mutex);
    while (true) {
      queue.changed.wait(lock, [&] { return queue.closed || !queue.calls.empty(); });
      if (queue.calls.empty()) return;
      std::function<void()> call = std::move(queue.calls.front());
      queue.calls.pop_front();
      lock.unlock();
      call();
      call = nullptr;
      lock.lock();
    }
  }
  void Close() {
    {
      const std::lock_guard lock(queue_->mutex);
      queue_->closed = true;
    }
    queue_->changed.notify_one();
  }

  const std::shared_ptr<Queue> queue_;
  bool given_up_ = false;
  std::thread thread_;
};

class BoundedStore final : public c10d::Store {
 public:
  using Bytes = std::vector<std::uint8_t>;
  using Keys = std::vector<std::string>;

  BoundedStore(c10::intrusive_ptr<c10d::Store> store, milliseconds limit, executor::GiveUp give_up)
      : Store(limit), store_(std::move(store)), limit_(limit), give_up_(std::move(give_up)) {}

  c10::intrusive_ptr<c10d::Store> clone() override {
    auto copy = Within(limit_, [](c10d::Store& store) { return store.clone(); });
    return c10::make_intrusive<BoundedStore>(std::move(copy), limit_, give_up_);
  }
  using c10d::Store::set;
  void set(const std::string& key, const Bytes& value) override {
    Within(limit_, [=](c10d::Store& store) { store.set(key, value); });
  }
  using c10d::Store::compareSet;
  Bytes compareSet(const std::string& key, const Bytes& expected, const Bytes& desired) override {
    return Within(limit_, [=](c10d::Store& store) { return store.compareSet(key, expected, desired); });
  }
  Bytes get(const std::string& key) override {
    return Within(limit_, [=](c10d::Store& store) { return store.get(key); });
  }
  std::int64_t add(const std::string& key, std::int64_t value) override {
    return Within(limit_, [=](c10d::Store& store) { return store.add(key, value); });
  }
  bool deleteKey(const std::string& key) override {
    return Within(limit_, [=](c10d::Store& store) { return store.deleteKey(key); });
  }
  bool check(const Keys& keys) override {
    return Within(limit_, [=](c10d::Store& store) { return store.check(keys); });
  }
  std::int64_t getNumKeys() override {
    return Within(limit_, [](c10d::Store& store) { return store.getNumKeys(); });
  }
  void wait(const Keys& keys) override { wait(keys, timeout_); }
  void wait(const Keys& keys, const milliseconds& timeout) override {
    Within(timeout + kAnswer, [=](c10d::Store& store) { store.wait(keys, timeout); });
  }
  void append(const std::string& key, const Bytes& value) override {
    Within(limit_, [=](c10d::Store& store) { store.append(key, value); });
  }
  std::vector<Bytes> multiGet(const Keys& keys) override {
    return Within(limit_, [=](c10d::Store& store) { return store.multiGet(keys); });
  }
  void multiSet(const Keys& keys, const std::vector<Bytes>& values) override {
    Within(limit_, [=](c10d::Store& store) { store.multiSet(keys, values); });
  }
  bool hasExtendedApi() const override { return store_->hasExtendedApi(); }
  void queuePush(const std::string& key, const Bytes& value) override {
    Within(limit_, [=](c10d::Store& store) { store.queuePush(key, value); });
  }
  Bytes queuePop(const std::string& key, bool block) override {
    return Within(limit_, [=](c10d::Store& store) { return store.queuePop(key, block); });
  }
  std::int64_t queueLen(const std::string& key) override {
    return Within(limit_, [=](c10d::Store& store) { return store.queueLen(key); });
  }
  Keys listKeys() override {
    return Within(limit_, [](c10d::Store& store) { return store.listKeys(); });
  }

 private:
  // The result of `call`. It owns what it uses: nobody may be there any more when it ends.
  template <typename Call>
  auto Within(milliseconds limit, Call call) -> decltype(call(std::declval<c10d::Store&>())) {
    using Value = decltype(call(std::declval<c10d::Store&>()));
    const std::lock_guard lock(mutex_);
    if (!gone_.empty()) throw std::runtime_error(gone_);
    auto task = std::make_shared<std::packaged_task<Value()>>(
        [store = store_, call = std::move(call)] { return call(*store); });
    std::future<Value> answer = task->get_future();
    thread_.Post([task = std::move(task)] { (*task)(); });
    Await(answer, limit);
    return answer.get();
  }
  template <typename Value>
  void Await(const std::future<Value>& answer, milliseconds limit) {
    const auto deadline = std::chrono::steady_clock::now() + limit;
    while (true) {
      const auto next = give_up_ ? std::chrono::steady_clock::now() + kAskInterval : deadline;
      if (answer.wait_until(std::min(deadline, next)) == std::future_status::ready) return;
      if (std::chrono::steady_clock::now() >= deadline) {
        gone_ = fmt::format("the store has not answered for {} s", static_cast<double>(limit.count()) / 1e3);
      } else if (const std::optional<std::string> why = give_up_ ? give_up_() : std::nullopt) {
        gone_ = *why;
      }
      if (gone_.empty()) continue;
      thread_.GiveUp();
      throw std::runtime_error(gone_);
    }
  }

  const c10::intrusive_ptr<c10d::Store> store_;
  const milliseconds limit_;
  const executor::GiveUp give_up_;
  std::mutex mutex_;
  std::string gone_;  // why the store is given up
  CallThread thread_;
};

}  // namespace

c10::intrusive_ptr<c10d::Store> MakeBoundedStore(c10::intrusive_ptr<c10d::Store> store, milliseconds limit,
                                                 GiveUp give_up) {
  return c10::make_intrusive<BoundedStore>(std::move(store), limit, std::move(give_up));
}

c10::intrusive_ptr<c10d::Store> ConnectWithin(milliseconds limit,
                                              std::function<c10::intrusive_ptr<c10d::Store>()> connect) {
  std::packaged_task<c10::intrusive_ptr<c10d::Store>()> task(std::move(connect));
  std::future<c10::intrusive_ptr<c10d::Store>> store = task.get_future();
  std::thread(std::move(task)).detach();
  if (store.wait_for(limit + kAnswer) == std::future_status::ready) return store.get();
  throw std::runtime_error(
      fmt::format("the store has not answered for {} s", static_cast<double>(limit.count()) / 1e3));
}

}  // namespace shardplan::executor
