// SPDX-License-Identifier: Apache-2.0
// Verified before use: whoever simulates or replays a plan asks CheckForUse first. A plan that does what
// PyTorch does wrong, too, carries those faults (Plan::known_faults); nothing else that does not verify
// passes.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "shardplan/schemas/error.h"
#include "shardplan/schemas/plan.h"
#include "shardplan/verifier/verifier.h"

namespace shardplan {

std::string_view Name(PyTorchFault fault);  // "fsdp1_lost_gradient"
// One sentence: the fault of PyTorch.
std::string_view Why(PyTorchFault fault);
// Whether the verifier calls what PyTorch does there by this rule, in plans of this policy.
bool Explains(PyTorchFault fault, Rule rule, std::string_view policy);

struct FoundFault {
  PyTorchFault fault = PyTorchFault::kFsdp1LostGradient;
  Violation violation;
  bool operator==(const FoundFault&) const = default;
};

// A paragraph for each fault: "FSDP1 does ...", how often it is found, the verifier's words of the first
// time.
std::vector<std::string> Explain(const Plan& plan, const std::vector<FoundFault>& found);

// Puts into the plan what it carries: for each violation the first of `possible` that explains it, and the
// digest of the program that they were found in. Returns what was put in. kInternal: a violation that none of
// them explains, which is in the message.
Result<std::vector<FoundFault>> CarryFaults(Plan& plan, const std::vector<PyTorchFault>& possible);

// Compares the verifier's violations with the faults that the plan carries.
struct Judgement {
  std::vector<FoundFault> carried;    // found, and carried by the plan
  std::vector<Violation> violations;  // found, and not carried
  std::string distrust;               // why the list that the plan carries does not count; empty: it does
  bool good() const { return violations.empty() && distrust.empty(); }
};
Judgement Judge(const Plan& plan);

// The digest of the plan without the list of faults and without this digest.
std::string ProgramDigest(const Plan& plan);

// Warnings, a paragraph for each fault of PyTorch's that the plan carries. kNegative when anything else is
// wrong: the pointer is that of the instruction, and the message has the verifier's words of the first
// violation, how many there are, and `way_out` ("--no-verify uses it as it is").
Result<std::vector<std::string>> CheckForUse(const Plan& plan, std::string_view way_out);

}  // namespace shardplan
