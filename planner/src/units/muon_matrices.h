// SPDX-License-Identifier: Apache-2.0
// Which parameters Muon steps, and by which rule each has an owner.
#pragma once

#include <string>

#include "shardplan/schemas/error.h"
#include "shardplan/schemas/plan.h"
#include "shardplan/schemas/strategy.h"
#include "shardplan/schemas/trace.h"

namespace shardplan {

// If a strategy names no matrices, Muon's are those that the trace marks: the tracer knows what a module
// is (tools/python/shardplan/tracer/muon_matrices.py), and records their steps. A batch of matrices, of three
// dimensions, is Muon's where a rule gives it owners.

// The strategy with FQNs in Muon::matrices where it has none, and as it is without Muon. Errors are
// kBadInput, with the FQN: a pattern matches nothing or what is no matrix, a parameter is under two rules.
Result<Strategy> WithMuonMatrices(const Trace& trace, Strategy strategy);

// The rule of a matrix's owner; null: it is stepped sharded.
const MatrixRule* RuleOf(const Muon& muon, const UnitParameter& parameter);

}  // namespace shardplan
