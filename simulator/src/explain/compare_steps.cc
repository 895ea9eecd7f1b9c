// SPDX-License-Identifier: Apache-2.0
#include <map>
#include <memory>
#include <utility>

#include "shardplan/simulator/cost_model.h"
#include "shardplan/simulator/critical_path.h"
#include "shardplan/simulator/simulate.h"

namespace shardplan {
namespace {

// Reserved memory beside what is allocated at the peak: fragments, and what kernels take.
constexpr const char* kNotAllocated = "reserved beyond the peak";

struct Side {
  Nanoseconds step_ns;
  TimeByCause times;
  MemoryReport memory;
};

Result<Side> SideOf(const Plan& plan) {
  const Result<Simulation> simulation = Simulate(plan, {.record_timeline = false});
  if (!simulation) return std::unexpected(simulation.error());
  const std::unique_ptr<CostModel> costs = MakeCostModel(plan.cluster);
  const Result<EngineProgram> program = LowerPlan(plan, plan.cluster, *costs);
  if (!program) return std::unexpected(program.error());
  const Result<CriticalPath> path = FindCriticalPath(plan, *program);
  if (!path) return std::unexpected(path.error());
  return Side{path->step_ns, SumByCause(*path), simulation->report.memory};
}

}  // namespace

Result<Comparison> CompareSteps(const Plan& a, const Plan& b) {
  const Result<Side> of_a = SideOf(a);
  if (!of_a) return std::unexpected(of_a.error());
  const Result<Side> of_b = SideOf(b);
  if (!of_b) return std::unexpected(of_b.error());
  Comparison made{.step_a_ns = of_a->step_ns,
                  .step_b_ns = of_b->step_ns,
                  .memory_a_bytes = NeededBytes(of_a->memory),
                  .memory_b_bytes = NeededBytes(of_b->memory),
                  .fits_a = of_a->memory.fits,
                  .fits_b = of_b->memory.fits};
  for (std::size_t c = 0; c < kTimeCauses; ++c) {
    const Difference difference{std::string(Name(static_cast<TimeCause>(c))), of_a->times[c].value,
                                of_b->times[c].value};
    if (difference.a != 0 || difference.b != 0) made.time_ns.push_back(difference);
  }
  std::map<std::string, std::pair<Bytes, Bytes>> memory;
  for (const CategoryBytes& entry : of_a->memory.peak_by_category)
    memory[entry.category].first += entry.size_bytes;
  for (const CategoryBytes& entry : of_b->memory.peak_by_category)
    memory[entry.category].second += entry.size_bytes;
  memory[kNotAllocated] = {of_a->memory.reserved_bytes - of_a->memory.peak_bytes,
                           of_b->memory.reserved_bytes - of_b->memory.peak_bytes};
  for (const auto& [category, bytes] : memory)
    made.memory_bytes.push_back({category, bytes.first.value, bytes.second.value});
  return made;
}

}  // namespace shardplan
