// SPDX-License-Identifier: Apache-2.0
// A wait that is looked after, where the work ends, fails or hangs at each moment of it.
#include "torch/lookout.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <functional>
#include <optional>
#include <stdexcept>
#include <string>

namespace shardplan::executor {
namespace {

using std::chrono::milliseconds;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

// A work like c10d's: wait() returns once it is over, throws its error, or says that the wait was too short.
// It ends at the `ends`-th event: each wait and each question whether it is over is one.
class ScriptedWork final : public c10d::Work {
 public:
  ScriptedWork(int ends, std::string error) : ends_(ends), error_(std::move(error)) {}
  bool wait(milliseconds /*timeout*/) override {
    if (!Over()) throw std::runtime_error("Operation timed out!");
    if (!error_.empty()) throw std::runtime_error(error_);
    return true;
  }
  bool isCompleted() override { return Over(); }

 private:
  bool Over() { return ++events_ > ends_; }
  const int ends_;
  const std::string error_;
  int events_ = 0;
};

std::optional<std::string> Wait(ScriptedWork& work, milliseconds timeout = std::chrono::hours(1)) {
  return WaitAndLook(work, timeout, milliseconds(1), milliseconds(2), [] { return std::nullopt; });
}

TEST(WaitAndLook, AWorkThatEndsAtAnyMomentIsOver) {
  for (int ends = 0; ends < 12; ++ends) {
    ScriptedWork work(ends, {});
    EXPECT_EQ(Wait(work), std::nullopt) << "at event " << ends;
  }
}

TEST(WaitAndLook, AWorkThatFailsAtAnyMomentSaysWhy) {
  for (int ends = 0; ends < 12; ++ends) {
    ScriptedWork work(ends, "Connection closed by peer");
    EXPECT_THAT([&] { Wait(work); }, ThrowsMessage<std::runtime_error>(HasSubstr("closed by peer")))
        << "at event " << ends;
  }
}

TEST(WaitAndLook, WhatIsFoundEndsTheWait) {
  ScriptedWork work(1000, {});
  int looks = 0;
  const auto found = WaitAndLook(work, std::chrono::hours(1), milliseconds(1), milliseconds(2), [&] {
    return ++looks == 3 ? std::optional<std::string>("left") : std::nullopt;
  });
  EXPECT_EQ(found, "left");
  EXPECT_EQ(looks, 3);
}

TEST(WaitAndLook, TheTimeIsBounded) {
  ScriptedWork work(1 << 30, {});
  EXPECT_THAT([&] { Wait(work, milliseconds(5)); },
              ThrowsMessage<std::runtime_error>(HasSubstr("timed out")));
}

}  // namespace
}  // namespace shardplan::executor
