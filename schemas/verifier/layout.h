// SPDX-License-Identifier: Apache-2.0
// The contents of a buffer follow from its role and its unit's layout, and so do its size and its dtype. A
// copy moves a parameter from where it lies in src to where it lies in dst; a collective knows no parameters
// and moves what is there.
// [Note: arrangements] in buffer_roles.h says how parameters lie in it.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "shardplan/schemas/buffer_roles.h"
#include "shardplan/schemas/plan.h"
#include "verifier/clocks.h"
#include "verifier/words/report.h"

namespace shardplan::verifier {

// fsdp1: whether the optimizer gets the gradients of some units, or of all that compute in a lower precision,
// in that (keep_low_precision_grads).
bool SomeKeepLowPrecision(const Strategy& strategy);
bool AllKeepLowPrecision(const Strategy& strategy);
// The dtype of the unit's reductions: a compressing hook of fsdp1 has its own.
DType ReducedIn(const Plan& plan, const Unit& unit);

// ---- rule layout: what a buffer of the role has to be ----

// "": the buffer's parts are as large as its unit's layout asks for. Else what is wrong with them.
std::string LayoutOfParts(const Plan& plan, const Buffer& buffer);
// The fault in the sizes of a buffer of a per_parameter unit that is cut into `pieces`: a part for each
// parameter, or all of them in one. "" if there is none.
std::string PartsCutInto(const Plan& plan, const Buffer& buffer, std::int64_t pieces);
// "": its dtype is the one that its unit gathers, computes, reduces or keeps in.
// `is_zeroed`: a grad_zero fills it.
std::string LayoutOfDType(const Plan& plan, const Buffer& buffer, bool is_zeroed);
// "": it is in the kind of memory that the role is for.
std::string LayoutOfMemory(const Plan& plan, const Buffer& buffer);

// Memory that says it is for reduced gradients, is taken, and never gets one: zero_grad would free it.
bool LayoutOfUnfilled(const Buffer& buffer, bool is_allocated, bool is_touched);

// ---- rule layout: what an instruction moves ----

// "": both have a parameter in common, and the copy knows where it lies in either.
std::string LayoutOfCopy(const Plan& plan, const Instruction& copy, bool is_view);
// "": the sizes are as the communicator asks for, the dtypes are the same, gradients are reduced in the
// unit's, and what comes out is arranged as the role of dst says.
std::string LayoutOfCollective(const Plan& plan, const Instruction& collective);
// "": who works on a buffer can reach the memory that it is in.
std::string LayoutOfReach(const Plan& plan, const Instruction& instruction, bool is_view);

// Asks these of all buffers, and of an instruction.
void CheckBuffers(const Plan& plan, Reporter& reporter);
void CheckMovement(const Plan& plan, const Instruction& instruction, bool is_view, Position at,
                   Reporter& reporter);

}  // namespace shardplan::verifier
