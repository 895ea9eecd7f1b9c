// SPDX-License-Identifier: Apache-2.0
// A plan's instructions in a profiler: a range for each, inside of those that go by FSDP2's names.
//
//   FSDP::all_gather (layers.1)
//   |--- shardplan::allocate layers.1
//   |--- shardplan::copy_in layers.1
//   |--- shardplan::all_gather layers.1
//
// A compute instruction has none: the model runs behind it.
#pragma once

#include <ATen/record_function.h>

#include <array>
#include <optional>
#include <string>
#include <vector>

#include "shardplan/schemas/plan.h"

namespace shardplan::executor {

class InstructionRanges {
 public:
  // `plan` outlives this.
  explicit InstructionRanges(const Plan& plan) : plan_(plan) {}

  // One at a time. Called while somebody listens.
  void Begin(const Instruction& instruction);
  void End() { record_.reset(); }

 private:
  const std::string& NameOf(const Instruction& instruction);

  const Plan& plan_;
  std::vector<std::array<std::string, kInstructionKinds>>
      names_;  // by unit, the last of none; "": not made yet
  std::optional<at::RecordFunction> record_;
};

}  // namespace shardplan::executor
