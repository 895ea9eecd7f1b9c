// SPDX-License-Identifier: Apache-2.0
// The oracle, first half: reads a plan in host order, as if every instruction finished before the next is
// issued.
//
// Deliberately naive and independent of the verifier: maps instead of tables, gradients as sums with
// coefficients instead of states. A fault in that order is a problem of its own; the rest is a program of
// memory accesses whose orders oracle.h tries one by one.
#pragma once

#include <cstdint>
#include <set>
#include <string>
#include <vector>

#include "shardplan/schemas/plan.h"

namespace shardplan::test {

// One allocation: the same buffer allocated twice is two instances.
struct Instance {
  BufferId buffer = -1;  // -1: the model's own memory
  StreamId pool = -1;    // -1: host memory or a persistent buffer, never reused
};

struct Item {
  enum class Kind : std::uint8_t { kWork, kAllocate, kFree, kRecord, kWait, kHostWait };
  Kind kind = Kind::kWork;
  StreamId stream = -1;              // work, record, wait; -1: the host does it
  std::vector<int> reads, writes;    // work: instances
  int instance = -1;                 // allocate, free
  std::vector<StreamId> safe_after;  // free
  int record = -1;                   // record: its number; wait, host_wait: the number waited for
};

struct Program {
  std::vector<Instance> instances;
  std::vector<Item> items;
  // Problems in host order already: "double_free", "lost_gradient", ... Empty: right if nothing overtakes.
  std::set<std::string> problems;
};

// All steps once, then those that repeat once more.
Program ReadInHostOrder(const Plan& plan);

}  // namespace shardplan::test
