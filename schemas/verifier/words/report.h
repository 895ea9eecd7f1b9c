// SPDX-License-Identifier: Apache-2.0
// Collects violations, and puts instructions and triggers into words for them.
#pragma once

#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "shardplan/verifier/verifier.h"
#include "verifier/clocks.h"

namespace shardplan::verifier {

class Reporter {
 public:
  explicit Reporter(const Plan& plan) : plan_(plan) {}

  // Adds a violation unless the same rule was already reported at `at` about `subject` (a buffer, unit, ...):
  // the steady step is interpreted twice, and a mistake in it is one mistake.
  void Add(Rule rule, Position at, std::int64_t subject, std::string message,
           std::vector<std::string> chain = {});

  // How many there are; and back to fewer.
  std::size_t Count() const { return violations_.size(); }
  void Forget(std::size_t count);

  bool HasViolations() const { return !violations_.empty(); }
  // The violations in program order.
  std::vector<Violation> Take();

  const Plan& plan() const { return plan_; }
  std::string BufferName(BufferId buffer) const;
  std::string UnitName(UnitId unit) const;
  std::string StreamName(std::int32_t stream) const;  // "the host" for the host's own work
  // Short, for use in a sentence that names the buffers: "copy_out on compute".
  std::string Instruction(Position at) const;
  // Whole: "copy_out layers.0.all_gather_output -> layers.0.param_unsharded on compute because pre_forward,
  // at pre_forward layers.0 (step steady)".
  std::string Describe(Position at) const;

 private:
  const Plan& plan_;
  std::vector<Violation> violations_;
  std::set<std::tuple<Rule, Position, std::int64_t>> reported_;
};

}  // namespace shardplan::verifier
