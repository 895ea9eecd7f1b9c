// SPDX-License-Identifier: Apache-2.0
#include "texts/explain_time.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <utility>
#include <vector>

#include "shardplan/schemas/exchanges.h"
#include "shardplan/schemas/printable.h"
#include "shardplan/simulator/cost_model.h"
#include "shardplan/simulator/critical_path.h"
#include "shardplan/simulator/memory_history.h"
#include "texts/figures.h"

namespace shardplan::cli {
namespace {

constexpr std::size_t kMostLines = 12;

std::string Part(Nanoseconds time, Nanoseconds step) {
  const double part =
      step.value == 0 ? 0 : 100 * static_cast<double>(time.value) / static_cast<double>(step.value);
  return fmt::format("{:12.3f} ms {:5.1f} %", InMilliseconds(time), part);
}

std::string CausesText(const CriticalPath& path) {
  std::string text = "\nwhere the step's time goes: its critical path, cause by cause\n";
  const TimeByCause sums = SumByCause(path);
  for (std::size_t c = 0; c < kTimeCauses; ++c) {
    if (sums[c].value == 0) continue;
    text += fmt::format("  {:<20} {}\n", Name(static_cast<TimeCause>(c)), Part(sums[c], path.step_ns));
  }
  return text + fmt::format("  {:<20} {}\n", "step", Part(path.step_ns, path.step_ns));
}

bool IsTheModels(TimeCause cause) {
  return cause == TimeCause::kForward || cause == TimeCause::kBackward || cause == TimeCause::kRecompute ||
         cause == TimeCause::kOptimizer || cause == TimeCause::kKernelsSlowed;
}

// The longest work that is not the model's own, by unit.
std::string LongestText(const Plan& plan, const CriticalPath& path) {
  std::map<std::pair<TimeCause, UnitId>, Nanoseconds> by_unit;
  for (const PathPart& part : path.parts) {
    if (!IsTheModels(part.cause)) by_unit[{part.cause, part.unit}] += part.duration_ns;
  }
  std::vector<std::pair<std::pair<TimeCause, UnitId>, Nanoseconds>> sorted(by_unit.begin(), by_unit.end());
  std::ranges::stable_sort(sorted, [](const auto& a, const auto& b) { return a.second > b.second; });
  if (sorted.empty()) return {};
  std::string text = "\nnot the model's own work, the longest first\n";
  for (std::size_t i = 0; i < std::min(sorted.size(), kMostLines); ++i) {
    const auto& [what, time] = sorted[i];
    const std::string unit = what.second < 0 ? "(no unit)" : Printable(UnitText(plan, what.second));
    text += fmt::format("  {} {} {}\n", Part(time, path.step_ns), Name(what.first), unit);
  }
  if (sorted.size() > kMostLines) text += fmt::format("  and {} more\n", sorted.size() - kMostLines);
  return text;
}

std::string WhatIfText(const std::vector<WhatIf>& trials, Nanoseconds step) {
  if (trials.empty()) return "\nno single cause makes the step longer\n";
  std::string text = "\nthe step without single causes, everything else as it is\n";
  for (std::size_t i = 0; i < std::min(trials.size(), kMostLines); ++i) {
    const WhatIf& trial = trials[i];
    text += fmt::format("  without {}: -{:.3f} ms", trial.without, InMilliseconds(step - trial.step_ns));
    text += trial.knob.empty() ? "\n" : fmt::format(" ({})\n", trial.knob);
  }
  if (trials.size() > kMostLines) text += fmt::format("  and {} more\n", trials.size() - kMostLines);
  return text;
}

// Bytes of whole matrices that a rank has of one exchange: of the rank with the most, and of a mean one.
struct WholeBytes {
  Bytes most, mean;
};

WholeBytes LargestWhole(const Plan& plan) {
  WholeBytes found;
  for (const Exchange& exchange : plan.exchanges) {
    const ExchangeLayout layout(plan, exchange);
    const std::int64_t each = SizeBytes(exchange.dtype);
    const Bytes most{layout.WholeNumel(layout.LargestOwner()) * each};
    if (most <= found.most) continue;
    std::int64_t in_all = 0;
    for (std::int64_t rank = 0; rank < layout.ranks(); ++rank) in_all += layout.WholeNumel(rank) * each;
    found = {most, Bytes{in_all / layout.ranks()}};
  }
  return found;
}

std::string OwnersText(const Plan& plan, const EngineProgram& program) {
  const OwnedTimes times = TimesOfOwners(program, program.steps.back());
  if (times.matrices == 0) return {};
  const Nanoseconds mean{times.in_all_ns.value / std::max<std::int64_t>(times.ranks, 1)};
  const WholeBytes whole = LargestWhole(plan);
  return fmt::format(
      "\nowners of matrices: {} orthogonalised on {} of {} ranks\n"
      "  Newton-Schulz  {:.3f} ms on the busiest, {:.3f} ms if all had the same\n"
      "  whole matrices of an exchange  {:.3g} MiB on the rank with the most, {:.3g} MiB on a mean one\n",
      times.matrices, times.owners, times.ranks, InMilliseconds(times.most_ns), InMilliseconds(mean),
      InMebibytes(whole.most), InMebibytes(whole.mean));
}

}  // namespace

Result<std::string> TimeText(const Plan& plan) {
  const std::unique_ptr<CostModel> costs = MakeCostModel(plan.cluster);
  const Result<EngineProgram> program = LowerPlan(plan, plan.cluster, *costs);
  if (!program) return std::unexpected(program.error());
  const Result<CriticalPath> path = FindCriticalPath(plan, *program);
  if (!path) return std::unexpected(path.error());
  const Result<std::vector<WhatIf>> trials = WithoutEach(plan, *program);
  if (!trials) return std::unexpected(trials.error());
  return CausesText(*path) + OwnersText(plan, *program) + LongestText(plan, *path) +
         WhatIfText(*trials, path->step_ns);
}

}  // namespace shardplan::cli
