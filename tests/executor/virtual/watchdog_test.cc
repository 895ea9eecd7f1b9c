// SPDX-License-Identifier: Apache-2.0
// The thread that ends collectives which do not end by themselves. ThreadSanitizer looks at the locks of what
// is tested here for its results.
#include "executor/src/replay/watchdog.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <set>

namespace shardplan::executor {
namespace {

using std::chrono::milliseconds;
using ::testing::HasSubstr;

constexpr milliseconds kNever{3'600'000};
constexpr milliseconds kOften{1};

// Collectives are done when the test says so. All of it is guarded by the watchdog's lock, but for
// `explained`.
class FakeBackend {
 public:
  explicit FakeBackend(milliseconds timeout) : watchdog_(timeout, kOften, Functions()) { watchdog_.Start(); }

  Watchdog& watchdog() { return watchdog_; }
  // Like a backend's Issue.
  Status Issue(CollectiveId id) {
    const std::unique_lock lock = watchdog_.Lock();
    if (watchdog_.Failed()) return std::unexpected(*watchdog_.Failed());
    EXPECT_EQ(aborts_, 0) << "a communicator is used that was aborted";
    watchdog_.Add({.collective = id, .issued = std::chrono::steady_clock::now()});
    return {};
  }
  void Finish(CollectiveId id) {
    const std::unique_lock lock = watchdog_.Lock();
    done_.insert(id);
  }
  void Break(std::string reason) {
    const std::unique_lock lock = watchdog_.Lock();
    broken_ = std::move(reason);
  }
  void LoseDevice() {
    const std::unique_lock lock = watchdog_.Lock();
    lost_ = true;
  }
  int aborts() {
    const std::unique_lock lock = watchdog_.Lock();
    return aborts_;
  }
  std::size_t in_flight() {
    const std::unique_lock lock = watchdog_.Lock();
    return watchdog_.in_flight().size();
  }
  std::string WaitForFailure() {
    while (true) {
      const Status status = watchdog_.Check();
      if (!status) return status.error().message;
      std::this_thread::sleep_for(kOften);
    }
  }
  std::atomic<int> explained = 0;
  std::function<void()> while_explaining = [] {};

 private:
  Watchdog::Backend Functions() {
    return {.enter_thread = [this] { thread_ = std::this_thread::get_id(); },
            .is_done = [this](const InFlight& flight) -> std::expected<bool, std::string> {
              if (lost_) return std::unexpected("the device is lost");
              return done_.contains(flight.collective);
            },
            .ended = [this](const InFlight& flight) { EXPECT_TRUE(done_.contains(flight.collective)); },
            .is_broken = [this] { return broken_; },
            .failing = [this] { ++told_; },
            .explain =
                [this](const InFlight& flight, const std::string& reason) {
                  EXPECT_EQ(std::this_thread::get_id(), thread_);
                  ++explained;
                  while_explaining();
                  return "collective " + std::to_string(flight.collective) + ": " + reason;
                },
            .abort =
                [this] {
                  EXPECT_GT(told_, 0);
                  ++aborts_;
                }};
  }

  std::thread::id thread_;
  std::set<CollectiveId> done_;
  std::optional<std::string> broken_;
  bool lost_ = false;
  int told_ = 0;
  int aborts_ = 0;
  Watchdog watchdog_;
};

TEST(Watchdog, TheOldestThatIsLateIsNamedAndEverythingAborted) {
  FakeBackend backend(milliseconds(20));
  ASSERT_TRUE(backend.Issue(1).has_value());
  ASSERT_TRUE(backend.Issue(2).has_value());
  backend.Finish(1);
  EXPECT_EQ(backend.WaitForFailure(), "collective 2: timed out");
  EXPECT_EQ(backend.aborts(), 1);
  EXPECT_FALSE(backend.Issue(3).has_value());
}

TEST(Watchdog, WhatEndsInTimeIsForgottenInAnyOrder) {
  FakeBackend backend(kNever);
  for (CollectiveId id = 0; id < 200; ++id) ASSERT_TRUE(backend.Issue(id).has_value());
  for (CollectiveId id = 200; id-- > 0;) backend.Finish(id);
  while (backend.in_flight() > 0) std::this_thread::sleep_for(kOften);
  EXPECT_TRUE(backend.watchdog().Check().has_value());
  EXPECT_EQ(backend.aborts(), 0);
}

TEST(Watchdog, AnErrorOfACommunicatorOrOfTheDeviceDoesNotWaitForTheTimeout) {
  FakeBackend broken(kNever);
  ASSERT_TRUE(broken.Issue(7).has_value());
  broken.Break("remote process exited");
  EXPECT_EQ(broken.WaitForFailure(), "collective 7: remote process exited");
  FakeBackend lost(kNever);
  ASSERT_TRUE(lost.Issue(8).has_value());
  lost.LoseDevice();
  EXPECT_EQ(lost.WaitForFailure(), "collective 8: the device is lost");
}

TEST(Watchdog, AnIdleOneAsksNobody) {
  FakeBackend backend(milliseconds(0));
  backend.Break("nobody is waiting for it");
  std::this_thread::sleep_for(20 * kOften);
  EXPECT_TRUE(backend.watchdog().Check().has_value());
}

// The host issues without a pause while the watchdog gives up: nothing is issued on what was aborted.
TEST(Watchdog, TheHostNeverUsesWhatIsAborted) {
  FakeBackend backend(milliseconds(5));
  CollectiveId id = 0;
  while (backend.Issue(id).has_value()) {
    if (id % 3 != 0) backend.Finish(id);
    ++id;
  }
  EXPECT_THAT(backend.watchdog().Check().error().message, HasSubstr(": timed out"));
  EXPECT_EQ(backend.aborts(), 1);
}

TEST(Watchdog, AnAbortOfTheHostsWhileAFailureIsExplainedIsTheErrorAndTheOnlyAbort) {
  FakeBackend backend(milliseconds(0));
  backend.while_explaining = [&] { backend.watchdog().Abort("the model deviates from the plan"); };
  ASSERT_TRUE(backend.Issue(1).has_value());
  EXPECT_EQ(backend.WaitForFailure(), "the model deviates from the plan");
  backend.watchdog().Stop();
  EXPECT_EQ(backend.explained, 1);
  EXPECT_EQ(backend.aborts(), 1);
}

TEST(Watchdog, ItStopsWithCollectivesInFlight) {
  FakeBackend backend(kNever);
  ASSERT_TRUE(backend.Issue(1).has_value());
  backend.watchdog().Stop();
  EXPECT_EQ(backend.in_flight(), 1U);
  backend.watchdog().Abort("later");
  EXPECT_EQ(backend.aborts(), 1);
}

}  // namespace
}  // namespace shardplan::executor
