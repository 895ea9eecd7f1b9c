// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "cost/fixed_log.h"
#include "shardplan/simulator/cost_model.h"
#include "shardplan/simulator/engine.h"
#include "shardplan/simulator/simulate.h"
#include "text/format.h"

namespace shardplan {
namespace {

constexpr std::int64_t kOne = 1'000'000;
constexpr std::size_t kBarWidth = 32;

// Scales one figure; a thing that costs nothing still costs nothing.
class Scaling {
 public:
  explicit Scaling(std::int64_t factor_ppm) : factor_ppm_(std::max<std::int64_t>(1, factor_ppm)) {}

  void Time(Nanoseconds& time) const {
    time.value = internal::Limited(internal::MulDiv(time.value, factor_ppm_, kOne));
  }
  void Rate(std::int64_t& rate) const {
    if (rate > 0) rate = std::max<std::int64_t>(1, internal::MulDiv(rate, kOne, factor_ppm_));
  }
  // Multiplies the part that is lost of a whole.
  void Loss(std::int64_t& kept_ppm) const {
    const std::int64_t lost = internal::MulDiv(kOne - kept_ppm, factor_ppm_, kOne);
    kept_ppm = std::clamp<std::int64_t>(kOne - lost, 1, kOne);
  }
  void Rates(std::vector<ComputeRate>& rates) const {
    for (ComputeRate& rate : rates) {
      Rate(rate.flops_per_second);
      for (MatmulRow& row : rate.shapes) {
        for (MatmulPoint& point : row.points) Time(point.duration_ns);
      }
    }
  }
  void OfLink(Link& link) const {
    Time(link.latency_ns);
    Time(link.base_latency_ns);
    Rate(link.bytes_per_second);
    for (LinkProtocol& protocol : link.protocols) Time(protocol.latency_ns);
  }

 private:
  const std::int64_t factor_ppm_;
};

Result<Nanoseconds> StepOn(const Plan& plan, const Cluster& cluster) {
  const Result<EngineProgram> program = LowerPlan(plan, cluster, *MakeCostModel(cluster));
  if (!program) return std::unexpected(program.error());
  const auto last = static_cast<std::int32_t>(program->steps.size()) - 1;
  const Result<EngineResult> run = RunStep(*program, last, nullptr);
  if (!run) return std::unexpected(run.error());
  return run->end_ns;
}

Nanoseconds Width(const FigureEffect& effect) {
  return {std::abs((effect.worse_ns - effect.better_ns).value)};
}

// The root of the sum of the squares of what figures change on one side.
std::int64_t Combined(const Sensitivity& sensitivity, bool worse) {
  double squares = 0;
  for (const FigureEffect& effect : sensitivity.effects) {
    // Work that moves can make a step shorter where a figure is worse.
    const std::int64_t a = (effect.worse_ns - sensitivity.step_ns).value;
    const std::int64_t b = (effect.better_ns - sensitivity.step_ns).value;
    const auto change =
        static_cast<double>(worse ? std::max({a, b, std::int64_t{0}}) : std::min({a, b, std::int64_t{0}}));
    squares += change * change;
  }
  return std::llround(std::sqrt(squares));
}

std::string KnownAs(const FigureSource& source) {
  return fmt::format("{}, {}", Name(source.origin), internal::Percent(source.off_ppm));
}

}  // namespace

Cluster WithFigure(Cluster cluster, ClusterFigure figure, std::int64_t factor_ppm) {
  const Scaling scaling(factor_ppm);
  Device& device = cluster.device;
  switch (figure) {
    case ClusterFigure::kMatmul:
      scaling.Rates(device.matmul);
      break;
    case ClusterFigure::kAttention:
      scaling.Rates(device.attention);
      scaling.Rates(device.attention_backward);
      break;
    case ClusterFigure::kVector:
      scaling.Rate(device.vector_flops_per_second);
      break;
    case ClusterFigure::kMemory:
      scaling.Rate(device.memory_bytes_per_second);
      break;
    case ClusterFigure::kKernelOverhead:
      scaling.Time(device.kernel_overhead_ns);
      break;
    case ClusterFigure::kHost:
      for (Nanoseconds* time :
           {&cluster.host.operator_issue_ns, &cluster.host.optimizer_issue_ns,
            &cluster.host.collective_issue_ns, &cluster.host.copy_issue_ns, &cluster.host.allocate_ns,
            &cluster.host.event_ns, &cluster.host.trigger_ns}) {
        scaling.Time(*time);
      }
      break;
    case ClusterFigure::kHostMemory:
      scaling.Rate(cluster.host.memory_bytes_per_second);
      break;
    case ClusterFigure::kHostLink:
      scaling.Rate(cluster.host_link_bytes_per_second);
      break;
    case ClusterFigure::kCollectives:
      for (CollectiveTable& table : cluster.collectives) {
        for (CollectivePoint& point : table.points) scaling.Time(point.duration_ns);
      }
      break;
    case ClusterFigure::kInnerLink:
      if (!cluster.links.empty()) scaling.OfLink(cluster.links[0]);
      break;
    case ClusterFigure::kNetwork:
      if (cluster.links.size() > 1) scaling.OfLink(cluster.links[1]);
      break;
    case ClusterFigure::kComputeSlowdown:
      scaling.Loss(cluster.compute_rate_while_communicating_ppm);
      break;
    case ClusterFigure::kCommunicationSlowdown:
      scaling.Loss(cluster.communication_rate_while_computing_ppm);
      break;
  }
  return cluster;
}

Result<Sensitivity> AnalyseSensitivity(const Plan& plan, const Cluster& cluster) {
  if (plan.steps.empty()) {
    return std::unexpected(
        Error{ErrorCode::kBadInput, "the plan has no step", "", "/steps", "0", "1 or more"});
  }
  Sensitivity made;
  Result<Nanoseconds> step = StepOn(plan, cluster);
  if (!step) return std::unexpected(step.error());
  made.step_ns = *step;
  for (const FigureSource& source : cluster.sources) {
    const std::int64_t worse = kOne + source.off_ppm;
    const Result<Nanoseconds> high = StepOn(plan, WithFigure(cluster, source.figure, worse));
    const Result<Nanoseconds> low =
        StepOn(plan, WithFigure(cluster, source.figure, internal::MulDiv(kOne, kOne, worse)));
    if (!high || !low) return std::unexpected(high ? low.error() : high.error());
    made.effects.push_back({source, *low, *high});
  }
  std::ranges::stable_sort(made.effects, [](const auto& a, const auto& b) { return Width(a) > Width(b); });
  made.low_ns = std::max(Nanoseconds{0}, made.step_ns - Nanoseconds{Combined(made, false)});
  made.high_ns = made.step_ns + Nanoseconds{Combined(made, true)};
  return made;
}

void FillInterval(const Sensitivity& sensitivity, Report& report) {
  report.step_low_ns = sensitivity.low_ns;
  report.step_high_ns = sensitivity.high_ns;
  for (const FigureEffect& effect : sensitivity.effects) {
    report.figures.push_back({std::string(Name(effect.source.figure)),
                              std::string(Name(effect.source.origin)), effect.source.off_ppm,
                              effect.better_ns, effect.worse_ns});
  }
}

std::string IntervalText(const Sensitivity& sensitivity) {
  if (sensitivity.effects.empty()) return {};
  const FigureEffect& widest = sensitivity.effects.front();
  std::string text =
      fmt::format("step {}, {} to {} two times in three", internal::Milliseconds(sensitivity.step_ns),
                  internal::Milliseconds(sensitivity.low_ns), internal::Milliseconds(sensitivity.high_ns));
  if (Width(widest).value > 0)
    text += fmt::format(", most of it from {} ({})", Name(widest.source.figure), KnownAs(widest.source));
  return text;
}

std::string SensitivityText(const Sensitivity& sensitivity) {
  std::string text = fmt::format("{:<24} {:<20} {:>12} {:>12}\n", "figure", "known as", "better", "worse");
  Nanoseconds least = sensitivity.step_ns, most = sensitivity.step_ns;
  for (const FigureEffect& effect : sensitivity.effects) {
    least = std::min({least, effect.better_ns, effect.worse_ns});
    most = std::max({most, effect.better_ns, effect.worse_ns});
  }
  const std::int64_t span = std::max<std::int64_t>(1, (most - least).value);
  const auto column = [&](Nanoseconds time) {
    return static_cast<std::size_t>(internal::MulDiv((time - least).value, kBarWidth - 1, span));
  };
  for (const FigureEffect& effect : sensitivity.effects) {
    std::string bar(kBarWidth, ' ');
    const auto [from, to] = std::minmax(column(effect.better_ns), column(effect.worse_ns));
    for (std::size_t i = from; i <= to; ++i) bar[i] = '=';
    bar[column(sensitivity.step_ns)] = '|';
    text +=
        fmt::format("{:<24} {:<20} {:>12} {:>12}  {}\n", Name(effect.source.figure), KnownAs(effect.source),
                    internal::Milliseconds(effect.better_ns), internal::Milliseconds(effect.worse_ns), bar);
  }
  return text;
}

}  // namespace shardplan
