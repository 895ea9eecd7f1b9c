// SPDX-License-Identifier: Apache-2.0
// Libraries whose policy cannot be used, each in another way.
#ifdef OLD
#undef SHARDPLAN_POLICY_HEADERS
#define SHARDPLAN_POLICY_HEADERS "shardplan 0.1.0 with headers 000000000000"
#endif
#include <stdexcept>

#include "shardplan/planner/policy.h"

namespace {

[[maybe_unused]] std::unique_ptr<shardplan::Policy> Make(const shardplan::PolicyInput&,
                                                         shardplan::ProgramBuilder&) {
  return nullptr;
}

[[maybe_unused]] shardplan::PolicyDescription Describe() {
#if defined(TAKEN)
  return {.name = "fsdp2", .knobs = {}, .make = Make, .library = {}};
#elif defined(THROWS)
  throw std::runtime_error("no description today");
#elif defined(UNMADE)
  return {.name = "unmade", .knobs = {}, .make = nullptr, .library = {}};
#elif defined(TWICE)
  return {.name = "twice", .knobs = {{"a", 1, "", ""}, {"a", 2, "", ""}}, .make = Make, .library = {}};
#else
  return {.name = "old", .knobs = {}, .make = Make, .library = {}};
#endif
}

}  // namespace

#ifndef NONE
SHARDPLAN_POLICY(Describe)
#endif
