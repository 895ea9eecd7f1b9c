// SPDX-License-Identifier: Apache-2.0
// Peers: which of a run's ranks are alive, so that an error names the one that died and not its victims.
//
// [Note: who died]
// When a rank dies, ranks that communicate with it fail and leave, and those that communicate with these fail
// in turn: whoever looks then finds several that are gone. So every rank watches the processes of its own
// machine (a pidfd becomes readable in the moment in which its process ends) and remembers who was first. It
// tells the store, for ranks on other machines. A rank that leaves in good order, or because of another one,
// says so to its machine's ranks before it ends, through a datagram socket: the store may be the dead one's.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

namespace shardplan::executor {

struct PeersOptions {
  c10::intrusive_ptr<c10d::Store> store;  // that all ranks share; used through a connection of its own
  std::int64_t rank = 0;                  // as people know it
  std::int64_t ranks = 1;                 // how many there are
  // The rank whose process serves the store, where it is a rank's and known.
  std::optional<std::int64_t> store_rank;
  // Told of the first death, once, from another thread, in the moment in which it happens. May be null.
  std::function<void(const std::string& text)> speak;
};

class Peers {
 public:
  // Returns at once: what is said through the store is said in the background.
  explicit Peers(PeersOptions options);
  ~Peers();  // Leave
  Peers(const Peers&) = delete;
  Peers& operator=(const Peers&) = delete;

  // This process is about to end, or takes no part any longer: no peer is to take that for a death.
  void Leave();
  // This rank has failed because of others, and may end: it is not the cause.
  void Fail();

  // The first rank that died: "rank 3 did not arrive: it has died". Asks the store, too, which may take
  // seconds if it does not answer.
  std::optional<std::string> Dead() const;
  // The ranks of this machine that have ended in good order, and not because of others.
  std::optional<std::string> Ended() const;
  // The stopped ranks of this machine.
  std::optional<std::string> Stopped() const;
  // The rank that serves the store, if it is known and the store does not answer.
  std::optional<std::string> SilentStore() const;

 private:
  class Watcher;
  const std::unique_ptr<Watcher> watcher_;
};

// Whoever knows of a death tells it to all; the first one counts. `how`: "was killed by signal 9". Does not
// fail: there is nobody to tell it.
void PublishDeath(c10d::Store& store, std::int64_t rank, const std::string& how);

// A dead rank's connections close before its process is seen to end.
inline constexpr std::chrono::milliseconds kEndPatience{300};
// Who is to be blamed for a failure of `waited` ago, as far as can be seen: somebody dead; after kEndPatience
// somebody who has ended or is stopped. "": nobody, or `peers` is null.
std::string Culprit(const Peers* peers, std::chrono::steady_clock::duration waited);
// The same, looked for until it is there or patience is at its end.
std::string AwaitCulprit(const Peers* peers, std::chrono::milliseconds patience);

// "rank 3 did not arrive", "ranks 0 and 1 did not arrive". Ascending numbers.
std::string DidNotArrive(const std::vector<std::int64_t>& ranks);

}  // namespace shardplan::executor
