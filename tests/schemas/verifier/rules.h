// SPDX-License-Identifier: Apache-2.0
// Helpers that the tests of the verifier's rules share: good plans, and how to name a spot in them.
#pragma once

#include <gtest/gtest.h>

#include <set>
#include <string>
#include <vector>

#include "shardplan/verifier/verifier.h"
#include "tests/schemas/verifier/mutations.h"
#include "tests/support/small_plans.h"

namespace shardplan::test {

std::set<std::string> RulesOf(const std::vector<Violation>& violations);
std::set<std::string> RulesOf(const Plan& plan);

// The test fails if there is none.
BufferId BufferNamed(const Plan& plan, const std::string& name);
StreamId StreamNamed(const Plan& plan, const std::string& name);

// The spots in the steady step of the instructions of one kind that name a buffer (as src or dst).
std::vector<Spot> Steady(const Plan& plan, InstructionKind kind, const std::string& buffer = "");

// The last wait of `stream` before the spot, in the spot's step.
Spot WaitBefore(const Plan& plan, Spot spot, StreamId stream);

class Rules : public ::testing::Test {
 protected:
  Plan good_ = Fsdp2LikePlan({.units = 2});
  Plan hsdp_ = Fsdp2LikePlan({.units = 2, .replicas = 2});
};

}  // namespace shardplan::test
