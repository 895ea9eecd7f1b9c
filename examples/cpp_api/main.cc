// SPDX-License-Identifier: Apache-2.0
// Which prefetch distance is best for this model on this machine? Plans, verifies and simulates each.
//   size_a_job TRACE CLUSTER
#include <cstdio>

#include "shardplan/planner/planner.h"
#include "shardplan/schemas/io.h"
#include "shardplan/simulator/simulate.h"
#include "shardplan/verifier/verifier.h"

int main(int argc, char** argv) {
  if (argc != 3) return 2;
  const auto trace = shardplan::ReadTrace(argv[1]);
  const auto cluster = shardplan::ReadCluster(argv[2]);
  if (!trace || !cluster) {
    std::fprintf(stderr, "%s\n", ToString(trace ? cluster.error() : trace.error()).c_str());
    return 3;
  }
  for (const int distance : {0, 1, 2}) {
    shardplan::Strategy strategy;
    strategy.units = {{.modules = {"layers.*"}}, {.modules = {""}}};
    strategy.optimizer.kind = shardplan::OptimizerKind::kNone;
    strategy.fsdp2.forward_prefetch = distance;
    strategy.fsdp2.backward_prefetch = distance;
    const auto planned = MakePlan(*trace, strategy, *cluster);
    if (!planned) {
      std::fprintf(stderr, "%s\n", ToString(planned.error()).c_str());
      return 3;
    }
    const std::size_t violations = Verify(planned->plan).size();
    const auto simulation = Simulate(planned->plan);
    if (!simulation) return 70;
    const shardplan::Report& report = simulation->report;
    std::printf("prefetch %d: step %.1f ms, exposed communication %.1f ms, peak %lld bytes, %zu violations\n",
                distance, static_cast<double>(report.step_ns.value) / 1e6,
                static_cast<double>(report.exposed_communication_ns.value) / 1e6,
                static_cast<long long>(report.memory.peak_bytes.value), violations);
  }
  return 0;
}
