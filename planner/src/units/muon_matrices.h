// SPDX-License-Identifier: Apache-2.0
// Which parameters Muon steps, and by which rule each has an owner.
#pragma once

#include <string>

#include "shardplan/schemas/error.h"
#include "shardplan/schemas/plan.h"
#include "shardplan/schemas/strategy.h"
#include "shardplan/schemas/trace.h"

namespace shardplan {

// [Note: matrices that people give to Muon]
// Trainable parameters of two dimensions (of three, a batch of matrices, where a rule gives them owners), but
// no embedding and no output head: torch.optim.Muon's documentation leaves these to AdamW, as do torchtitan's
// recipes. An embedding is a parameter of a module whose class says so, or that the model calls its input
// embeddings. The head is what the model calls its output embeddings, or a Linear in no numbered block with
// one of the names that models give it. A tied parameter is what each of its modules is. The tracer records
// steps of the same matrices (tools/python/shardplan/tracer/muon_matrices.py).

// The strategy with FQNs in Muon::matrices where it has none, and as it is without Muon. Errors are
// kBadInput, with the FQN: a pattern matches nothing or what is no matrix, a parameter is under two rules.
Result<Strategy> WithMuonMatrices(const Trace& trace, Strategy strategy);

// The rule of a matrix's owner; null: it is stepped sharded.
const MatrixRule* RuleOf(const Muon& muon, const UnitParameter& parameter);

}  // namespace shardplan
