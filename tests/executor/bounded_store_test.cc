// SPDX-License-Identifier: Apache-2.0
// A store that does not answer costs its limit once, and nothing after that.
#include "torch/bounded_store.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "torch/agreement.h"

namespace shardplan::executor {
namespace {

using std::chrono::milliseconds;
using ::testing::HasSubstr;

// A TCPStore whose server is stopped: every call hangs until the server goes on.
class Server {
 public:
  void Stop() { Set(true); }
  void GoOn() { Set(false); }
  void Answer() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return !stopped_; });
  }

 private:
  void Set(bool stopped) {
    const std::lock_guard lock(mutex_);
    stopped_ = stopped;
    changed_.notify_all();
  }
  std::mutex mutex_;
  std::condition_variable changed_;
  bool stopped_ = false;
};

class ServedStore final : public c10d::HashStore {
 public:
  explicit ServedStore(std::shared_ptr<Server> server) : server_(std::move(server)) {}
  using c10d::HashStore::set;
  void set(const std::string& key, const std::vector<std::uint8_t>& value) override {
    server_->Answer();
    HashStore::set(key, value);
  }
  std::vector<std::uint8_t> get(const std::string& key) override {
    server_->Answer();
    return HashStore::get(key);
  }
  bool check(const std::vector<std::string>& keys) override {
    server_->Answer();
    return HashStore::check(keys);
  }
  void wait(const std::vector<std::string>& keys, const milliseconds& timeout) override {
    server_->Answer();
    HashStore::wait(keys, timeout);
  }

 private:
  const std::shared_ptr<Server> server_;
};

class BoundedStoreTest : public ::testing::Test {
 protected:
  // A call that is given up hangs no longer than the test.
  void TearDown() override { server_->GoOn(); }

  static milliseconds TimeOf(const std::function<void()>& call) {
    const auto start = std::chrono::steady_clock::now();
    call();
    return std::chrono::duration_cast<milliseconds>(std::chrono::steady_clock::now() - start);
  }

  const std::shared_ptr<Server> server_ = std::make_shared<Server>();
  const c10::intrusive_ptr<c10d::Store> served_ = c10::make_intrusive<ServedStore>(server_);
};

TEST_F(BoundedStoreTest, GivesWhatTheStoreGives) {
  const auto store = MakeBoundedStore(served_, milliseconds(10'000));
  store->set("a", "1");
  EXPECT_EQ(store->get_to_str("a"), "1");
  EXPECT_EQ(store->add("n", 2), 2);
  EXPECT_FALSE(store->check({"b"}));
  EXPECT_EQ(store->compareSet("c", "", "first"), "first");
  EXPECT_EQ(store->compareSet("c", "", "second"), "first");
  EXPECT_TRUE(store->deleteKey("a"));
  store->clone()->set("d", "2");
  EXPECT_EQ(served_->get_to_str("d"), "2");
}

TEST_F(BoundedStoreTest, ACallThatIsNotAnsweredThrowsInTimeAndLaterOnesAtOnce) {
  const auto store = MakeBoundedStore(served_, milliseconds(300));
  server_->Stop();
  const milliseconds first = TimeOf([&] { EXPECT_THROW((void)store->check({"a"}), std::exception); });
  EXPECT_GE(first, milliseconds(300));
  EXPECT_LT(first, milliseconds(5'000));
  EXPECT_LT(TimeOf([&] { EXPECT_THROW(store->set("a", "1"), std::exception); }), milliseconds(250));
  server_->GoOn();
  EXPECT_THROW((void)store->check({"a"}), std::exception);  // what it gave up may still be on its way
}

TEST_F(BoundedStoreTest, AWaitHasTheTimeThatItsCallerGives) {
  const auto store = MakeBoundedStore(served_, milliseconds(100));
  std::thread later([&] {
    std::this_thread::sleep_for(milliseconds(400));
    served_->set("a", "1");
  });
  store->wait({"a"}, milliseconds(10'000));
  later.join();
  server_->Stop();
  EXPECT_LT(TimeOf([&] { EXPECT_THROW(store->wait({"b"}, milliseconds(200)), std::exception); }),
            milliseconds(5'000));
}

TEST_F(BoundedStoreTest, GivesUpForAReason) {
  const auto store = MakeBoundedStore(served_, milliseconds(60'000),
                                      [] { return std::optional<std::string>("rank 2 has died"); });
  server_->Stop();
  try {
    (void)store->check({"a"});
    FAIL() << "it answered";
  } catch (const std::exception& exception) {
    EXPECT_THAT(exception.what(), HasSubstr("rank 2 has died"));
  }
}

TEST_F(BoundedStoreTest, AConnectionThatDoesNotComeAboutIsGivenUp) {
  server_->Stop();
  const auto connect = [server = server_] {
    server->Answer();
    return c10::intrusive_ptr<c10d::Store>(c10::make_intrusive<c10d::HashStore>());
  };
  EXPECT_THROW((void)ConnectWithin(milliseconds(100), connect), std::exception);
  server_->GoOn();
  EXPECT_TRUE(ConnectWithin(milliseconds(10'000), connect));
}

TEST_F(BoundedStoreTest, RanksDoNotAgreeForeverThroughAStoreThatDoesNotAnswer) {
  server_->Stop();
  const milliseconds taken = TimeOf([&] {
    const Status status =
        Agree(served_, 1, {0, 1}, {.facts = {{"the plan", "a"}}, .failure = {}}, milliseconds(300));
    ASSERT_FALSE(status.has_value());
    EXPECT_EQ(status.error().code, ErrorCode::kEnvironment);
    EXPECT_THAT(status.error().message, HasSubstr("does not answer"));
  });
  EXPECT_LT(taken, milliseconds(10'000));
}

}  // namespace
}  // namespace shardplan::executor
