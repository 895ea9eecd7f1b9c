// SPDX-License-Identifier: Apache-2.0
// Lookout: a thread that looks, while the host is in a wait that cannot be divided, whether it is in vain.
//
// Gloo's reduce_scatter neither says that it is done before it is waited for, nor ends its wait in time. So
// the wait goes on until a connection closes or Gloo gives up; why it was in vain is known, and told, before.
//
// WaitAndLook: a wait that can be divided.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "shardplan/executor/collectives.h"

namespace shardplan::executor {

class Lookout {
 public:
  // look(collective, sequence): why a wait for it is in vain. Called from the thread, after `first` and then
  // after twice as long each time, at most `longest`.
  using Look = std::function<std::optional<std::string>(CollectiveId, std::int64_t)>;
  Lookout(std::chrono::milliseconds first, std::chrono::milliseconds longest, Look look)
      : first_(first), longest_(longest), look_(std::move(look)) {}
  ~Lookout();
  Lookout(const Lookout&) = delete;
  Lookout& operator=(const Lookout&) = delete;

  // The host begins to wait, and is over with it. End: what was found meanwhile.
  void Begin(CollectiveId collective, std::int64_t sequence);
  std::optional<std::string> End();

 private:
  struct Waiting {
    CollectiveId collective = -1;
    std::int64_t sequence = 0;
    std::chrono::steady_clock::time_point next;
    std::chrono::milliseconds pause;
  };
  void Run();

  const std::chrono::milliseconds first_, longest_;
  const Look look_;
  std::mutex mutex_;  // of everything below
  std::optional<Waiting> waiting_;
  std::optional<std::string> found_;
  bool stopping_ = false;
  std::condition_variable changed_;
  std::thread thread_;  // from the first wait on
};

// Waits for `work`, and looks after `first`, then after twice as long each time, at most `longest`, whether
// it is in vain: what `look` found, if anything. Throws what the work throws, and what it says of a wait that
// was too short once `timeout` is over.
std::optional<std::string> WaitAndLook(c10d::Work& work, std::chrono::milliseconds timeout,
                                       std::chrono::milliseconds first, std::chrono::milliseconds longest,
                                       const std::function<std::optional<std::string>()>& look);

}  // namespace shardplan::executor
