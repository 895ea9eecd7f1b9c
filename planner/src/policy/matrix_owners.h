// SPDX-License-Identifier: Apache-2.0
// Owners of matrices: longest processing time first.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace shardplan {

// A matrix that needs an owner.
struct MatrixLoad {
  std::int64_t work = 0;   // of its Newton-Schulz iterations
  std::int64_t bytes = 0;  // decides between matrices of equal work
  std::string name;        // decides between equal ones
  // The ranks that may own it, ascending; empty: all.
  std::vector<std::int32_t> ranks;
};

// Multiplications of the iterations of a matrix: each has two products of s x s x l and one of s x s x s, s
// and l its short and long side.
std::int64_t NewtonSchulzWork(std::int64_t rows, std::int64_t columns, std::int64_t iterations);

// The owner of each of the matrices that are exchanged together. They go in the order of their work, the most
// first, each to the rank with the least work in this exchange. Among several it is the one with the least
// bytes, then the least work in earlier exchanges, then the first. `earlier_work` has that by rank and gets
// added to. So does torchtitan 0.3.0's DistMuon (_balance_loads_across_partitions).
std::vector<std::int32_t> AssignOwners(const std::vector<MatrixLoad>& matrices,
                                       std::vector<std::int64_t>& earlier_work);

}  // namespace shardplan
