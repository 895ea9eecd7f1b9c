// SPDX-License-Identifier: Apache-2.0
// Agreement: before anything is communicated all ranks find out whether they are about to do the same.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

#include "shardplan/executor/peers.h"
#include "shardplan/schemas/error.h"

namespace shardplan::executor {

// Something that is the same on every rank: {"plan", "sha256:..."}.
struct Fact {
  std::string name, value;
};

// The description that one rank publishes.
struct Statement {
  std::vector<Fact> facts;  // the same names in the same order on every rank
  std::string failure;      // why this rank cannot take part; "": it can
};

// Tells the other ranks `statement` through the store and waits for theirs. `ranks`: of all that take part,
// as people know them; `place`: this one's position among them. The store is used by this agreement alone (a
// prefix of its own). kNegative on every rank when they differ, or one has failed: which ranks say what.
// kEnvironment when some do not come within the timeout: which ones. A rank with a failure returns at once,
// but for the first one, which tells the others what it knows. With `peers` a rank that dies ends it at once,
// and is named. No call of the store outlasts the timeout.
Status Agree(const c10::intrusive_ptr<c10d::Store>& store, std::int64_t place,
             const std::vector<std::int64_t>& ranks, const Statement& statement,
             std::chrono::milliseconds timeout, const Peers* peers = nullptr);

// "rank 3", "ranks 0 to 3 and 7". Ascending numbers.
std::string RanksText(const std::vector<std::int64_t>& ranks);

}  // namespace shardplan::executor
