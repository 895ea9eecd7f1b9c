// SPDX-License-Identifier: Apache-2.0
// Points and instructions of a plan as people read them in reports.
#pragma once

#include <string>

#include "shardplan/schemas/plan.h"

namespace shardplan::internal {

// "pre_forward layers.0"; "mb1" and "#1" after it for a later micro-batch or occurrence.
std::string TriggerText(const Plan& plan, const Trigger& trigger);
// "all_gather layers.0", "forward layers.0" (a segment's name), "wait layers.0".
std::string InstructionText(const Plan& plan, const Instruction& instruction);
// An entry of the instruction's segment on a stream: a collective of the model on that of its
// communicator, or the wait of the compute stream for one. null: neither.
const OperatorEvent* ModelCollectiveAt(const Plan& plan, const Instruction& instruction, std::int32_t entry);
bool WaitsForModelCollective(const Plan& plan, const Instruction& instruction, StreamId stream,
                             std::int32_t entry);
// "all_to_all on ep", "wait all_to_all on ep"; the instruction's text where the entry is neither.
std::string EntryText(const Plan& plan, const Instruction& instruction, StreamId stream, std::int32_t entry);

}  // namespace shardplan::internal
