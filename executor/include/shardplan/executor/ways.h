// SPDX-License-Identifier: Apache-2.0
// Ways: ranks that follow one plan, and one of them leaves it. Before anything is communicated that the
// others do not expect, each says where it is.
//
// [Note: ways] A rank sees by itself that its model leaves the plan: another point, or a gradient that was
// not made. Ranks that leave it at the same point go on together, on demand. A rank that does not leave it is
// in a collective that the others do not come to, or will be. It looks from time to time, while it waits for
// a collective, whether another rank has said that it left; then it says so, too, and all have the same
// verdict. While ranks follow their plan nothing is asked and nothing is sent.
//
//   rank 0   pre_backward ... reduce_scatter |.. waits ..| sees it, meets: "as planned"        | verdict
//   rank 1   pre_backward ... no gradient: says it, meets: "left the plan at post_backward"    | verdict
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

#include "shardplan/executor/peers.h"
#include "shardplan/schemas/error.h"

namespace shardplan::executor {

// Where a rank is that leaves its plan, or that waits for one that did.
struct Whereabouts {
  bool leaves = false;  // its plan; false: it follows it
  // It would go on with zeros for the gradients that were not made: all else is as planned.
  bool may_go_on = false;
  std::string place;  // of the plan; ranks that leave it together say the same
  std::string text;   // for people
};

enum class Way : std::uint8_t {
  kTogether,  // all leave the plan at the same place
  kGoOn,      // some follow it: those that may go on do so, as planned
};

class Ways {
 public:
  // store: of these ranks and of one applied plan. place: of this rank among `names`, the ranks as people
  // know them. speak: told that a wait is in vain, at once, from any thread: it may last long. May be null.
  Ways(c10::intrusive_ptr<c10d::Store> store, std::int64_t place, std::vector<std::int64_t> names,
       std::chrono::milliseconds timeout, std::shared_ptr<Peers> peers,
       std::function<void(const std::string& text)> speak = nullptr);

  // This rank leaves its plan, after so many collectives by communicator. meets: it calls Meet next; else it
  // fails.
  void Leave(const std::vector<std::int64_t>& issued, const std::string& text, bool meets);
  // This rank waits for the collective number `sequence` of a communicator. Has another one left its plan
  // before it? It says where it is (`text`) and has the verdict: nothing where the wait goes on, or why it is
  // in vain.
  std::optional<std::string> WhyInVain(std::int32_t communicator, std::int64_t sequence,
                                       const std::string& text);
  // All ranks', when one has left its plan. kNegative: they go different ways, and which; kEnvironment: some
  // do not come.
  Result<Way> Meet(const Whereabouts& here);
  // What all ranks say, by place; "" for those that do not within some seconds. Each calls it as often.
  std::vector<std::string> Tell(const std::string& text);
  // "rank 0: ...; rank 1: ...": of each text the ranks that say it.
  std::string InWords(const std::vector<std::string>& texts) const;

 private:
  c10d::Store& store();
  std::optional<std::string> Look(std::int32_t communicator, std::int64_t sequence, const std::string& text);
  Result<Way> MeetOthers(const Whereabouts& here);
  Result<Way> Lead(const Whereabouts& here);
  Result<Way> Follow(const Whereabouts& here);
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
  std::int64_t meetings_ = 0;  // that ended with a way
  std::int64_t told_ = 0;
};

}  // namespace shardplan::executor
