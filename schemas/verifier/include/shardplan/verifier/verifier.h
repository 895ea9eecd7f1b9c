// SPDX-License-Identifier: Apache-2.0
// The verifier: proves by abstract interpretation, with one vector clock per stream and one for the host,
// that a plan is safe to run. It knows nothing of the planner. docs/reference/verifier.md lists the rules
// with an example each.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "shardplan/schemas/error.h"
#include "shardplan/schemas/plan.h"

namespace shardplan {

enum class Rule : std::uint8_t {
  kReference,  // an id is out of range, or an instruction lacks an operand it needs / has the wrong role
  kUseBeforeUnshard,   // a segment reads a unit that is not bound unsharded, or whose copy_out its stream has
                       // not waited for
  kReadBeforeWrite,    // an instruction reads a buffer that is not written, or not visibly to its stream
  kUseUnallocated,     // an instruction touches a buffer that is not alive
  kUseAfterFree,       // ... that was freed
  kFreeBeforeLastUse,  // freed while a use on another stream is not ordered before the allocation stream's
                       // future work
  kDoubleFree,
  kDoubleAllocate,
  kLeak,              // alive at step end and not alive at the start of the step that follows
  kWriteRace,         // two accesses of a buffer, one a write, on streams not ordered with each other
  kGradNotReduced,    // a gradient made in the step is never reduced (nor accumulated on purpose), or twice
  kGradDivision,      // the gradient's total divisor differs from what the strategy asks for
  kWaitBeforeRecord,  // wait on an event that was not recorded in host order before
  kDeadlock,          // a host or stream wait that can never finish
  kCollectiveOrder,   // ranks issue different collectives, or in a different order, on a communicator
  kSteadyState,       // the steady step does not end where it began
  kLayout,            // sizes, dtypes or arrangement of a buffer do not fit what moves through it
  kWrongValue,        // what is read is not what has to be there: other pieces, or not all of them
  kComputeOrder,      // a segment does not run, runs twice, elsewhere, or before what it needs
  kOptimizerStep,     // the optimizer does not step what was reduced, or steps without its own memory
  kTables,            // the plan's tables contradict its strategy, its program or each other
};
std::string_view Name(Rule rule);  // "use_before_unshard"

struct Violation {
  Rule rule = Rule::kReference;
  std::int32_t step = -1;
  std::int32_t trigger = -1;       // index in the step
  std::int32_t instruction = -1;   // index in the trigger
  std::string message;             // the instruction, the trigger and what is wrong
  std::vector<std::string> chain;  // the chain of earlier instructions that was broken, in host order
  std::int32_t rank = -1;          // of VerifyRanks: whose program
  std::int32_t procedure = -1;     // index into Plan::procedures; then there is no step and no trigger
  bool operator==(const Violation&) const = default;
};

// All violations in program order; empty: the plan verifies. Each step is interpreted in order, then the
// steady step a second time from its own end state.
std::vector<Violation> Verify(const Plan& plan);
// Violations of kReference alone: ids and operands. A plan without them may be worked with before it
// verifies.
std::vector<Violation> VerifyReferences(const Plan& plan);

// Remarks: the plan is correct, but this is seldom meant.
enum class RemarkKind : std::uint8_t {
  kGatherForNothing,  // an all-gather whose result nothing reads
  kStaysUnsharded,    // a sharded unit that is still gathered when the step that repeats is over
  kStaleParameters,   // a segment reads parameters gathered before the optimizer updated them
};
std::string_view Name(RemarkKind kind);  // "gather_for_nothing"

struct Remark {
  RemarkKind kind = RemarkKind::kGatherForNothing;
  std::int32_t step = -1;
  std::int32_t trigger = -1;
  UnitId unit = -1;
  std::string message;  // what, and where
  bool operator==(const Remark&) const = default;
};

// In program order; of a plan that verifies. Every step once, then those that repeat a second time, each
// remark once.
std::vector<Remark> Remarks(const Plan& plan);

// The programs of several ranks (each a plan): every rank's own verification and the same collectives in the
// same order with the same sizes per communicator group.
std::vector<Violation> VerifyRanks(const std::vector<Plan>& plans_by_rank);

// A paragraph a person can act on.
std::string Explain(const Plan& plan, const Violation& violation);

// Verified before use: whoever simulates or replays a plan asks CheckForUse first. A plan that does what
// PyTorch does wrong, too, carries those faults (Plan::known_faults); nothing else that does not verify
// passes.

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
