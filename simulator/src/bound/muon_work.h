// SPDX-License-Identifier: Apache-2.0
// How short no optimizer's step with Muon is.
#pragma once

#include "shardplan/schemas/plan.h"
#include "shardplan/schemas/trace.h"
#include "shardplan/simulator/cost_model.h"

namespace shardplan::internal {

// [Note: a bound for a matrix optimizer]
// A plan steps each matrix in one of a few ways. Each has a least time of a mean rank's compute stream, and
// one of the stream of exchanges:
//
//   owners in each replica   compute R I / N       exchanges S(M - p) there, S(M - p) back
//   owners among all ranks   compute I / N         exchanges A(M - p) there, A(R M - p) back
//   every rank has it        compute I             exchanges G(M)
//   no owner                 compute max(operators, collectives) of the step that was traced
//
// I: its iterations; N: the ranks of the job; R: replicas; M: its bytes; p: those of the largest piece, which
// an owner may have already. S and A are the least time of bytes in an all_to_all among the shards of a
// replica and among all (TrafficOf), whatever the buckets, and G that in an all_gather. Exchanges follow one
// another on their stream. A matrix in blocks of rows is the sum of its blocks.
//
// The optimizer's step is no shorter than either stream: no shorter than w compute + (1 - w) exchanges, with
// any w from 0 to 1. For a given w each matrix takes its cheapest way by itself. The bound is the most of
// some w. That it mixes ways where the planner takes one for all makes it less, never wrong.

// `mesh`: a unit whose communicators are those of all others; null: units have different ones, and nothing is
// known of exchanges. other_ns: of the compute stream, beside Muon.
Nanoseconds LeastMuonTime(const Trace& trace, const Plan& job, const CostModel& costs, const Unit* mesh,
                          Nanoseconds other_ns);

}  // namespace shardplan::internal
