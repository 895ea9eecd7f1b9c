// SPDX-License-Identifier: Apache-2.0
// Small traces for planner tests: layered models and random module trees, executed leaf by leaf.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "shardplan/schemas/cluster.h"
#include "shardplan/schemas/trace.h"

namespace shardplan::testing {

struct TreeModule {
  std::string name;
  std::string class_name = "Module";
  std::vector<std::vector<std::int64_t>> parameters;  // shapes
  bool trainable = true;
  std::vector<TreeModule> children;  // run in this order; a module without children is one operator
};

// Trace of a model whose leaves run one after the other, each reading the previous one's output and saving
// its own. Backward runs them in reverse. `flops` per leaf and direction.
Trace TraceOf(const TreeModule& root, std::int64_t flops = 1'000'000);

// `layers` equal blocks "layers.i" with one weight [rows, columns] each; `root_rows` > 0 gives the root an
// embedding of its own in front.
Trace LayeredTrace(int layers, std::int64_t rows, std::int64_t columns, std::int64_t root_rows = 0);

// A step of one product of kFlopsOfIterations for each row, which on several ranks is gathered first. Its
// storages begin at `next`.
inline constexpr std::int64_t kFlopsOfIterations = 40'000'000;
TracedOptimizerStep MuonStepOf(const std::vector<std::int64_t>& shape, std::int64_t ranks,
                               std::int64_t replicas, StorageId& next);
// Muon's steps of every matrix on one rank and on these: shards and replicas. Muon's are all but embed and
// lm_head.
void AddMuon(Trace& trace, const std::vector<std::pair<std::int64_t, std::int64_t>>& ranks);

Cluster ClusterOf(std::int64_t ranks);
// Kernels and links of small models take about as long here.
Cluster BalancedCluster(std::int64_t ranks, std::int64_t ranks_per_node, std::int64_t link_bytes_per_second);

}  // namespace shardplan::testing
