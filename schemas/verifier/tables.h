// SPDX-License-Identifier: Apache-2.0
// Rule tables: what the plan's tables say of its strategy and of each other. A plan whose tables contradict
// each other may be judged by the wrong one.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "shardplan/schemas/plan.h"
#include "verifier/words/report.h"

namespace shardplan::verifier {

// ---- the strategy: tables.cc ----
// Each answers what contradicts, and "" where nothing does.

// The mesh has world_size ranks and is the strategy's. A plan without a mesh says nothing of it.
std::string TablesOfMesh(const Plan& plan);
// A strategy without a mesh has the mesh "shard" and, behind it, the dimensions that the model's parameters
// lie on.
std::string TablesOfDefaultMesh(const Plan& plan);
// The plan's policy, where it says one, is its strategy's.
std::string TablesOfPolicy(const Plan& plan);
// The unit is laid out as its policy lays out units.
std::string TablesOfLayout(const Plan& plan, const Unit& unit);
// The unit is sharded and replicated over dimensions of the mesh that the strategy gives to some unit.
std::string TablesOfRanks(const Plan& plan, const Unit& unit);
// The unit gathers, computes and reduces in the dtypes of a mixed_precision that the strategy gives to some
// unit.
std::string TablesOfPrecision(const Plan& plan, const Unit& unit);
// Parameter groups of the same modules are units one after the other.
std::string TablesOfGroup(const Plan& plan, UnitId id);

// ---- the program's tables: tables_program.cc ----

// The segment reads the units whose parameters its operators read. It may read others: autograd keeps views
// of parameters that no operator of the segment names.
std::string TablesOfReads(const Plan& plan, const Segment& segment);
// The segment makes gradients of parameters that train.
std::string TablesOfGradients(const Plan& plan, const Segment& segment);
// The gradients of units' parameters that a backward of the model allocates (entries) and that no segment of
// it makes.
struct UnmadeGradient {
  std::int32_t pass = -1;
  ParameterId parameter = -1;
  UnitId unit = -1;
};
std::vector<UnmadeGradient> TablesOfUnmadeGradients(const Plan& plan);
// Kinds of procedures that the unit lacks: others of their group are there (accumulate needs
// accumulate_again), or another unit has them.
std::vector<ProcedureKind> TablesOfProcedures(const Plan& plan, UnitId unit);
// The first wait of the procedure for an event that it has not recorded before: an index into its
// instructions, -1 for none. An event that only another procedure records need not have been recorded.
std::int32_t WaitBeforeRecordInProcedure(const Procedure& procedure);
// The trigger prepares what is prepared once, in a step that repeats.
bool SteadyStateOfLazyInit(const Plan& plan, std::int32_t step, const Trigger& trigger);
// The first step, counted on beyond the plan's own, for which the plan goes on with one that has other calls
// in the strategy's program, of which the last step repeats for ever. -1: none.
std::int32_t TablesOfRepeatedStep(const Plan& plan);

// ---- the triggers: tables_triggers.cc ----

// The trigger names a unit in the backward, and none where its kind is of none; no micro-batch where its kind
// is of none. A step's begin and end are where it begins and ends.
std::string TablesOfTrigger(const PlanStep& step, std::int32_t index);
// Segments of a unit that run where a unit is entered, forward or backward, are that unit's. Recomputed
// segments are of the checkpointed module's unit.
std::string TablesOfEntered(const Plan& plan, const Trigger& trigger);
// The first trigger of the step whose `occurrence` is not how often the same was passed before; -1: none.
std::int32_t TablesOfOccurrences(const PlanStep& step);
// The first trigger of the step that leaves the forward of a unit that is not entered; -1: none. Some modules
// of a group may be left in another forward.
std::int32_t TablesOfLeft(const Plan& plan, const PlanStep& step);
// The first trigger that is not of the call of the user that it stands in, and why. The index is -1 where
// there is none, and that behind the last where a call has not ended.
struct CallFault {
  std::int32_t trigger = -1;
  std::string what;
};
CallFault TablesOfCalls(const Plan& plan, std::int32_t step);

// Each asks its part. `plan` has passed CheckTables.
void CheckStrategy(const Plan& plan, Reporter& reporter);
void CheckProgramTables(const Plan& plan, Reporter& reporter);
void CheckTriggers(const Plan& plan, Reporter& reporter);

}  // namespace shardplan::verifier
