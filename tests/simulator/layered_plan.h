// SPDX-License-Identifier: Apache-2.0
// A model of equal layers under the schedule of FSDP2, written by hand: short enough to derive its times on
// paper.
#pragma once

#include <cstdint>

#include "shardplan/schemas/plan.h"

namespace shardplan::test {

constexpr std::int64_t kMillisecond = 1'000'000;

struct LayeredOptions {
  int layers = 3;
  std::int64_t forward_ns = 25 * kMillisecond;  // of a layer, one operator
  std::int64_t backward_ns = 50 * kMillisecond;
  std::int64_t collective_ns = 10 * kMillisecond;  // every all_gather and reduce_scatter
  std::int64_t all_reduce_ns = 0;                  // > 0: HSDP, after each reduce_scatter
  bool reshard_after_forward = true;
  bool backward_prefetch = true;
  bool one_communicator = true;  // for all_gathers and reduce_scatters
  int all_gather_limit = 0;      // > 0: the host waits until that many layers back is computed
};

// Streams: compute, all_gather, reduce_scatter, all_reduce. Host and copies cost nothing.
Plan LayeredPlan(const LayeredOptions& options);

// A cluster on which every collective of `ranks` ranks lasts `collective_ns`, and nothing else costs
// anything.
Cluster ConstantCluster(std::int64_t ranks, std::int64_t collective_ns, std::int64_t all_reduce_ns);

// An operator that takes exactly that long.
OperatorEvent FixedOperator(std::int64_t duration_ns);

}  // namespace shardplan::test
