// SPDX-License-Identifier: Apache-2.0
// Plans with one instruction broken: does the virtual machine notice, and does the verifier say the same?
#pragma once

#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "shardplan/schemas/plan.h"
#include "shardplan/verifier/verifier.h"
#include "tests/executor/virtual/expected_values.h"
#include "tests/executor/virtual/field_mutations.h"

namespace shardplan::test {

enum class MutationKind : std::uint8_t {
  kRemovedWait,
  kRemovedRecord,
  kRemovedHostWait,
  kEarlyFree,           // at the beginning of its trigger
  kEarlierFree,         // at the end of the trigger before
  kForgottenStream,     // safe_after is empty
  kSwappedCollectives,  // with the next one of its communicator, on the last rank only
};
inline constexpr int kMutationKinds = 7;
std::string_view Name(MutationKind kind);

struct Mutation {
  MutationKind kind = MutationKind::kRemovedWait;
  std::size_t step = 0, trigger = 0, instruction = 0;
  std::size_t other_trigger = 0, other_instruction = 0;  // kSwappedCollectives
};

// Everything of the plan that can be broken in these ways.
std::vector<Mutation> MutationsOf(const Plan& plan);
Plan Mutated(const Plan& plan, const Mutation& mutation);
std::string Describe(const Plan& plan, const Mutation& mutation);

enum class Verdict : std::uint8_t {
  kCaught,           // the verifier objects, and some order of execution goes wrong
  kHarmless,         // the verifier has a proof, and no order goes wrong
  kMissedByVirtual,  // the verifier objects, no order that was tried goes wrong
  kMissedByVerifier,
  kIdle,  // the verifier objects, but only to work that no number depends on (effects.h): nothing can go
          // wrong
  // No number is wrong, but the document contradicts itself: rules `reference`, `layout` and `tables`, or the
  // order of the model's tensors, which the machine does not have.
  kMisstated,
  kLeft,  // no number is wrong, but memory is left over in every step, or for ever (leftovers.h)
};
inline constexpr int kVerdicts = 7;

struct Judgement {
  Verdict verdict = Verdict::kHarmless;
  std::uint64_t seeds = 0;    // orders that were tried
  std::string verifier, run;  // what each of them says
};

// Judges changed versions of one plan, which the virtual machine runs right.
class PlanJudge {
 public:
  // `plan` and `expected` outlive this. `stale`: what runs of the plan itself find. Tries at most
  // `seeds_to_find` orders of a version that the verifier objects to, `seeds_to_trust` of one that it
  // accepts.
  PlanJudge(const Plan& plan, ExpectedValues& expected, std::set<std::string> stale,
            std::uint64_t seeds_to_find, std::uint64_t seeds_to_trust);

  Judgement Judge(const Mutation& mutation) const;
  // The judgement of a changed field. Work that is done again and changes nothing is idle; a buffer that says
  // that it is for something else, and is used as before, is misstated.
  Judgement Judge(const FieldMutation& mutation) const;

 private:
  // Any other version of the plan, on all ranks or on the last one alone.
  Judgement JudgeVersion(const Plan& version, bool on_last_rank, std::uint64_t seeds_to_find) const;
  std::optional<Violation> Objection(const Plan& version, bool on_last_rank) const;
  // A wrong number that some order of execution gives, and how many orders were tried.
  std::string Run(const Plan& version, bool on_last_rank, std::uint64_t seeds, std::uint64_t& tried) const;

  const Plan& plan_;
  ExpectedValues& expected_;
  const std::set<std::string> stale_;
  const std::uint64_t seeds_to_find_, seeds_to_trust_;
  const std::vector<Violation> before_;  // what the plan itself breaks
};

}  // namespace shardplan::test
