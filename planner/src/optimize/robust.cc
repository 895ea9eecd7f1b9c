// SPDX-License-Identifier: Apache-2.0
#include "optimize/robust.h"

#include <algorithm>
#include <initializer_list>

#include "optimize/search.h"
#include "shardplan/schemas/assert.h"
#include "shardplan/simulator/simulate.h"

namespace shardplan::optimize {
namespace {

constexpr std::int64_t kOnePpm = 1'000'000;
// So many of the fastest of the nominal search are judged, too.
constexpr std::size_t kOfNominal = 64;

Cluster With(Cluster cluster, std::initializer_list<ClusterFigure> figures, std::int64_t factor_ppm) {
  for (const ClusterFigure figure : figures) cluster = WithFigure(std::move(cluster), figure, factor_ppm);
  return cluster;
}

Cluster At(const Cluster& cluster, const CornerReport& corner) {
  using enum ClusterFigure;
  Cluster at = With(cluster, {kMatmul, kAttention, kVector, kMemory, kKernelOverhead}, corner.compute_ppm);
  at = With(std::move(at), {kCollectives, kInnerLink, kNetwork, kHostLink}, corner.links_ppm);
  return With(std::move(at), {kComputeSlowdown, kCommunicationSlowdown}, corner.overlap_ppm);
}

std::vector<CornerReport> CornersOf(std::int64_t off_ppm) {
  std::vector<CornerReport> corners;
  for (const std::int64_t compute : {off_ppm, -off_ppm}) {
    for (const std::int64_t links : {off_ppm, -off_ppm}) {
      for (const std::int64_t overlap : {off_ppm, -off_ppm}) {
        corners.push_back({.compute_ppm = kOnePpm + compute,
                           .links_ppm = kOnePpm + links,
                           .overlap_ppm = kOnePpm + overlap});
      }
    }
  }
  return corners;
}

}  // namespace

Robust::Robust(const Trace& trace, const Job& job, const Cluster& cluster, const OptimizeOptions& options,
               Evaluator& nominal)
    : job_(job), options_(options), nominal_(nominal), corners_(CornersOf(options.robust_ppm)) {
  for (const CornerReport& corner : corners_) clusters_.push_back(At(cluster, corner));
  for (const Cluster& at : clusters_) at_.push_back(std::make_unique<Evaluator>(trace, job, at, options));
}

void Robust::Search(const std::set<Choice>& refused) {
  (void)optimize::Search(*at_.front(), job_, options_).Run(refused);
}

// Reserved memory may depend on the device's speed, where memory waits for other streams.
bool Robust::Fits(const Choice& choice) { return at_.front()->Fits(choice) && nominal_.Fits(choice); }

std::vector<Nanoseconds> Robust::StepsOf(const Choice& choice) {
  std::vector<Nanoseconds> steps;
  std::vector<Evaluator*> evaluators;
  for (const auto& at : at_) evaluators.push_back(at.get());
  evaluators.push_back(&nominal_);
  for (Evaluator* evaluator : evaluators) {
    const Evaluation e = evaluator->Evaluate({choice}, true).front();
    if (!e.planned) return {};
    steps.push_back(e.step_ns);
  }
  return steps;
}

std::optional<Choice> Robust::Best(const Choice& plain, const std::set<Choice>& refused) {
  std::vector<std::pair<Nanoseconds, Choice>> fastest;
  for (const auto& [choice, e] : nominal_.known()) {
    if (e.planned && !e.over) fastest.emplace_back(e.step_ns, choice);
  }
  std::ranges::sort(fastest);
  if (fastest.size() > kOfNominal) fastest.resize(kOfNominal);
  std::vector<Choice> of_nominal = {plain};
  for (const auto& [step_ns, choice] : fastest) of_nominal.push_back(choice);
  (void)at_.front()->Evaluate(of_nominal, true);

  std::vector<std::pair<Nanoseconds, Choice>> order;
  for (const auto& [choice, e] : at_.front()->known()) {
    if (e.planned && !e.over && !refused.contains(choice)) order.emplace_back(e.step_ns, choice);
  }
  std::ranges::sort(order);
  std::optional<Choice> best;
  std::pair<Nanoseconds, Nanoseconds> best_ns;  // the longest step, and at the nominal costs
  for (const auto& [slow_ns, choice] : order) {
    if (best && slow_ns > best_ns.first) break;
    if (!Fits(choice)) continue;
    const std::vector<Nanoseconds> steps = StepsOf(choice);
    if (steps.empty()) continue;
    const std::pair ns{*std::ranges::max_element(steps), steps.back()};
    if (best && ns >= best_ns) continue;
    best = choice;
    best_ns = ns;
  }
  return best;
}

RobustReport Robust::ReportOf(const Choice& choice, const Choice& plain) {
  const std::vector<Nanoseconds> steps = StepsOf(choice), plains = StepsOf(plain);
  SHARDPLAN_ASSERT(!steps.empty() && !plains.empty(), "both were planned");
  RobustReport report{.off_ppm = options_.robust_ppm,
                      .worst_ns = *std::ranges::max_element(steps),
                      .plain_step_ns = plains.back(),
                      .plain_worst_ns = *std::ranges::max_element(plains),
                      .corners = corners_};
  for (std::size_t c = 0; c < corners_.size(); ++c) {
    report.corners[c].step_ns = steps[c];
    report.corners[c].plain_step_ns = plains[c];
  }
  return report;
}

std::int64_t Robust::evaluations() const {
  std::int64_t evaluations = 0;
  for (const auto& at : at_) evaluations += at->evaluations();
  return evaluations;
}

}  // namespace shardplan::optimize
