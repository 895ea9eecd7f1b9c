// SPDX-License-Identifier: Apache-2.0
#include "texts/moved_step.h"

#include <fmt/format.h>

#include <filesystem>
#include <set>

#include "flags/cluster_choice.h"
#include "shardplan/planner/planner.h"
#include "shardplan/schemas/io.h"
#include "shardplan/schemas/printable.h"
#include "shardplan/simulator/simulate.h"
#include "support.h"

namespace shardplan::cli {
namespace {

constexpr const char* kReference = "llama_4_layers";

Result<Trace> ReferenceTrace() {
  const std::string name = fmt::format("{}.json", kReference);
  for (const std::filesystem::path& folder : DataFolders("clusters/reference", "tools/clusters/reference")) {
    if (const std::string path = (folder / name).string(); IsThere(path)) return ReadTrace(path);
  }
  return std::unexpected(Error{
      .code = ErrorCode::kEnvironment, .message = "the reference trace is not installed", .found = name});
}

Result<Nanoseconds> StepOn(const Trace& trace, const Cluster& cluster, std::int64_t ranks) {
  const Result<Cluster> some = WithRanks(cluster, ranks);
  if (!some) return std::unexpected(some.error());
  Strategy strategy;
  strategy.mixed_precision = MixedPrecision{.param_dtype = DType::kBFloat16, .reduce_dtype = DType::kFloat32};
  const Result<PlannerOutput> planned = MakePlan(trace, strategy, *some);
  if (!planned) return std::unexpected(planned.error());
  const Result<Simulation> simulated = Simulate(planned->plan, {.record_timeline = false});
  if (!simulated) return std::unexpected(simulated.error());
  return simulated->report.step_ns;
}

}  // namespace

std::string MovedStepText(const Cluster& before, const Cluster& after) {
  const Result<Trace> trace = ReferenceTrace();
  if (!trace) return fmt::format("step         not simulated: {}\n", Printable(ToString(trace.error())));
  std::string text;
  for (const std::int64_t ranks : std::set{std::min(before.ranks, before.ranks_per_node), before.ranks}) {
    const Result<Nanoseconds> was = StepOn(*trace, before, ranks);
    const Result<Nanoseconds> is = StepOn(*trace, after, ranks);
    text += fmt::format("step         {} under fsdp2 on {} ranks: ", kReference, ranks);
    if (!was || !is) {
      text += fmt::format("not simulated: {}\n", Printable((was ? is : was).error().message));
      continue;
    }
    const double to = static_cast<double>(is->value);
    const double from = static_cast<double>(was->value);
    text +=
        fmt::format("{:.2f} ms, was {:.2f} ms ({:+.1f} %)\n", to / 1e6, from / 1e6, 100 * (to / from - 1));
  }
  return text;
}

}  // namespace shardplan::cli
