// SPDX-License-Identifier: Apache-2.0
// Arrivals: after a failure, who is to blame. Whoever is seen to be dead, gone or stopped (Peers) is. Else
// each rank that fails writes how many collectives it issued on each communicator, so that who reads can tell
// which members of a group did not arrive at the one that failed; and then whom it holds for the cause, which
// those take over that failed because of it.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <utility>
#include <vector>

#include "shardplan/executor/collectives.h"
#include "shardplan/executor/peers.h"
#include "shardplan/schemas/plan.h"

namespace shardplan::executor {

// How long to wait for other ranks to report, after a failure.
inline constexpr std::chrono::milliseconds kPatience{3000};

// Who else there is.
struct Others {
  c10::intrusive_ptr<c10d::Store> store;  // null: errors do not say who did not arrive
  std::shared_ptr<Peers> peers;           // null: nobody watches
  std::vector<std::int64_t> names;        // of the plan's ranks, as people know them; empty: the same numbers
};

// "all_gather 3 on communicator shard, into layers.0.all_gather_output"
std::string DescribeCollective(const Plan& plan, const CollectiveSpec& spec, std::int64_t sequence);
// "exchange 3 on communicator world"
std::string DescribeExchange(const Plan& plan, CommunicatorId communicator, std::int64_t sequence);

class Arrivals {
 public:
  explicit Arrivals(Others others) : others_(std::move(others)) {}

  // This rank has failed after issuing `issued` collectives, by communicator. The first call counts.
  void Report(std::int64_t rank, const std::vector<std::int64_t>& issued);
  // Because of which ranks the group's collective number `sequence` failed on this one, after waiting for the
  // others to report: "rank 2 did not arrive: it has died". "" when nothing is known or all arrived.
  std::string Missing(const std::vector<std::int64_t>& group, std::int64_t rank, CommunicatorId communicator,
                      std::int64_t sequence);

 private:
  struct Reports {
    std::vector<std::int64_t> silent;  // have said nothing
    std::vector<std::int64_t> behind;  // failed, too, before they came to the collective
    std::string cause;                 // what one of those says
  };
  std::string Search(const std::vector<std::int64_t>& group, std::int64_t rank, CommunicatorId communicator,
                     std::int64_t sequence);
  Reports Ask(const std::vector<std::int64_t>& group, std::int64_t rank, CommunicatorId communicator,
              std::int64_t sequence);
  std::vector<std::int64_t> Named(const std::vector<std::int64_t>& ranks) const;
  c10d::Store& store();

  const Others others_;
  c10::intrusive_ptr<c10d::Store> bounded_;
  bool reported_ = false;
};

}  // namespace shardplan::executor
