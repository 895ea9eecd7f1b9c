// Rule tables: what the plan's tables say of its strategy and of each other. No instruction is looked at:
// a plan whose tables contradict each other may be judged by the wrong one.
#pragma once

#include <string>

#include "shardplan/schemas/plan.h"
#include "verifier/words/verifier_report.h"

namespace shardplan::verifier {

// Each answers what contradicts, and "" where nothing does.

// The mesh has world_size ranks and is the strategy's. A plan without a mesh says nothing of it.
std::string TablesOfMesh(const Plan& plan);
// The plan's policy, where it says one, is its strategy's.
std::string TablesOfPolicy(const Plan& plan);
// The unit is laid out as its policy lays out units.
std::string TablesOfLayout(const Plan& plan, const Unit& unit);
// The unit is sharded and replicated over dimensions of the mesh that the strategy gives to some unit.
std::string TablesOfRanks(const Plan& plan, const Unit& unit);
// The unit gathers, computes and reduces in the dtypes of a mixed_precision that the strategy gives to some
// unit.
std::string TablesOfPrecision(const Plan& plan, const Unit& unit);

// Asks these. `plan` has passed CheckTables.
void CheckStrategy(const Plan& plan, Reporter& reporter);

}  // namespace shardplan::verifier
