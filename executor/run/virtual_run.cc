// SPDX-License-Identifier: Apache-2.0
// `shardplan run --device virtual`: does the schedule hold when the streams run in the worst order?
#include <fmt/format.h>

#include "shardplan/executor/virtual_backend.h"
#include "shardplan/schemas/io.h"
#include "shardplan/schemas/printable.h"
#include "worker.h"

namespace shardplan::run {

Status RunVirtual(const Plan& plan, const RunOptions& options) {
  if (Status status = executor::ReplayFiller(plan, options.seed, options.steps); !status) return status;
  return WriteStandardOutput(fmt::format(
      "{} {}: {} ranks on virtual, {} steps, seed {}: every instruction ran, nothing was overwritten\n",
      Printable(plan.model), Printable(plan.policy), plan.world_size, options.steps, options.seed));
}

}  // namespace shardplan::run
