// SPDX-License-Identifier: Apache-2.0
// The oracle, second half: tries every order in which host and streams can run a program, with symbolic
// values.
//
// Every piece of work writes a value made of its own number and what it read. Run in host order this gives
// each read its right value. Then all interleavings: the streams run behind the host as they please, as far
// as waits allow. Memory that was freed is reused in the worst way: an allocation may take any freed block of
// its pool, so writing to it destroys what any of them held, and late work on a freed block destroys the new
// owner's value.
#pragma once

#include <cstdint>
#include <string>

#include "shardplan/schemas/plan.h"

namespace shardplan::test {

struct OracleOptions {
  // The host runs ahead as far as it can, and records and waits are passed as soon as possible: that only
  // enables more, so nothing is missed. Off: every single order.
  bool reduce = true;
  std::int64_t max_states = 400'000;
};

struct OracleVerdict {
  std::string problem;       // in host order already; empty: none
  bool wrong_value = false;  // some order makes some read see another value
  bool race = false;         // at some moment two streams may do conflicting accesses next
  bool complete = true;      // false: gave up at max_states
  std::int64_t states = 0;

  bool IsGood() const { return problem.empty() && !wrong_value && !race; }
};

OracleVerdict AskOracle(const Plan& plan, const OracleOptions& options = {});

}  // namespace shardplan::test
