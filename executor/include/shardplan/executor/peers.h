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
#include <mutex>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

#include "shardplan/schemas/error.h"

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

// DeviationConsensus: ranks that follow one plan, and one of them leaves it. Before anything is communicated
// that the others do not expect, each says where it is.
//
// [Note: deviations] A rank sees by itself that its model leaves the plan: another point, or a gradient that
// was not made. Ranks that leave it at the same point go on together, on demand. A rank that does not leave
// it is in a collective that the others do not come to, or will be. It looks from time to time, while it
// waits for a collective, whether another rank has said that it left; then it says so, too, and all have the
// same verdict. While ranks follow their plan nothing is asked and nothing is sent.
//
//   rank 0   pre_backward ... reduce_scatter |.. waits ..| sees it, meets: "as planned"        | verdict
//   rank 1   pre_backward ... no gradient: says it, meets: "left the plan at post_backward"    | verdict

// The place of a rank that leaves its plan, or that waits for one that did.
struct Whereabouts {
  bool leaves = false;  // its plan; false: it follows it
  // It would go on with zeros for the gradients that were not made: all else is as planned.
  bool may_go_on = false;
  std::string place;  // of the plan; ranks that leave it together say the same
  std::string text;   // for people
};

enum class DeviationVerdict : std::uint8_t {
  kTogether,  // all leave the plan at the same place
  kGoOn,      // some follow it: those that may go on do so, as planned
};

class DeviationConsensus {
 public:
  // store: of these ranks and of one applied plan. place: of this rank among `names`, the ranks as people
  // know them. speak: told that a wait is in vain, at once, from any thread: it may last long. May be null.
  DeviationConsensus(c10::intrusive_ptr<c10d::Store> store, std::int64_t place,
                     std::vector<std::int64_t> names, std::chrono::milliseconds timeout,
                     std::shared_ptr<Peers> peers,
                     std::function<void(const std::string& text)> speak = nullptr);

  // This rank leaves its plan, after so many collectives by communicator. meets: it calls Meet next; else it
  // fails.
  void Leave(const std::vector<std::int64_t>& issued, const std::string& text, bool meets);
  // This rank waits for the collective number `sequence` of a communicator. Has another one left its plan
  // before it? It says where it is (`text`) and has the verdict: nothing where the wait goes on, or why it is
  // in vain.
  std::optional<std::string> WhyInVain(std::int32_t communicator, std::int64_t sequence,
                                       const std::string& text);
  // The verdict of all ranks, when one has left its plan. kNegative: they go different ways, and which;
  // kEnvironment: some do not come.
  Result<DeviationVerdict> Meet(const Whereabouts& here);
  // The texts of all ranks, by place; "" for those that do not within some seconds. Each calls it as often.
  std::vector<std::string> Tell(const std::string& text);
  // "rank 0: ...; rank 1: ...": of each text the ranks that say it.
  std::string InWords(const std::vector<std::string>& texts) const;

 private:
  c10d::Store& store();
  std::optional<std::string> Look(std::int32_t communicator, std::int64_t sequence, const std::string& text);
  Result<DeviationVerdict> MeetOthers(const Whereabouts& here);
  Result<DeviationVerdict> Lead(const Whereabouts& here);
  Result<DeviationVerdict> Follow(const Whereabouts& here);
  std::optional<std::string> WaitFor(const std::string& key, std::chrono::milliseconds patience);
  std::string Key(const std::string& what) const;
  Error DidNotCome(const std::vector<std::int64_t>& places) const;

  const c10::intrusive_ptr<c10d::Store> given_;
  const std::int64_t place_;
  const std::vector<std::int64_t> names_;
  const std::chrono::milliseconds timeout_;
  const std::shared_ptr<Peers> peers_;
  const std::function<void(const std::string&)> speak_;
  std::mutex meeting_;  // one at a time: a watchdog looks, too
  std::mutex mutex_;    // of store_
  c10::intrusive_ptr<c10d::Store> store_;
  std::int64_t meetings_ = 0;  // that ended with a verdict
  std::int64_t told_ = 0;
};

}  // namespace shardplan::executor
