// SPDX-License-Identifier: Apache-2.0
// The mesh of a strategy that gives none, of a model whose parameters lie on mesh dimensions of their own.
#pragma once

#include <cstdint>

#include "shardplan/schemas/error.h"
#include "shardplan/schemas/strategy.h"
#include "shardplan/schemas/trace.h"

namespace shardplan {

// [Note: the mesh of a trace]
// FSDP shards a parameter over the ranks that hold the same of it and work on other data (torchtitan 0.3.0,
// ParallelDims: `fsdp` is all of them, `efsdp` those of one expert). A dimension along which ranks work on
// one batch (tensor parallelism) is none of FSDP's. Along others (expert parallelism) dense parameters are
// sharded, too, and those that lie on it are not:
//
//   64 ranks, ep = 8        mesh {shard: 8, ep: 8}    dense over shard, ep    experts over shard
//   64 ranks, tp = 8        mesh {shard: 8, tp: 8}    all over shard
//
// Parameters of two meshes in one unit are two of its parameter groups (ShardPlacementResult of 2.15). Before
// 2.15 the modules that have the experts are units of their own.

// The fsdp2 strategy with mesh, data_parallel and the parameters' own meshes in its units; as it is, where it
// has a mesh, or no parameter lies on a dimension. kBadInput: the trace does not say where a dimension lies,
// or dimensions overlap: the user has to give a mesh.
Result<Strategy> WithMeshOf(const Trace& trace, Strategy strategy, std::int64_t ranks);

}  // namespace shardplan
