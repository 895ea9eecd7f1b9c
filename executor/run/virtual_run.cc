// `shardplan run --device virtual`: does the schedule hold when the streams run in the worst order?
#include <cstdio>

#include "shardplan/executor/virtual_backend.h"
#include "worker.h"

namespace shardplan::run {

Status RunVirtual(const Plan& plan, const RunOptions& options) {
  if (Status status = executor::ReplayFiller(plan, options.seed, options.steps); !status) return status;
  std::printf(
      "%s %s: %lld ranks on virtual, %lld steps, seed %llu: every instruction ran, nothing was overwritten\n",
      plan.model.c_str(), plan.policy.c_str(), static_cast<long long>(plan.world_size),
      static_cast<long long>(options.steps), static_cast<unsigned long long>(options.seed));
  return {};
}

}  // namespace shardplan::run
