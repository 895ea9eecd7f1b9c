// SPDX-License-Identifier: Apache-2.0
#include "shardplan/simulator/simulate_recording.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <map>
#include <memory>
#include <set>
#include <string_view>
#include <utility>
#include <vector>

#include "cost/fixed_log.h"
#include "recorded/lower_recording.h"
#include "recorded/steps.h"
#include "report/builder.h"
#include "shardplan/schemas/printable.h"
#include "shardplan/simulator/cost_model.h"
#include "shardplan/simulator/engine.h"

namespace shardplan {
namespace {

using internal::LoweredRecording;
using internal::MulDiv;

constexpr std::int64_t kPartsPerMillion = 1'000'000, kSecond = 1'000'000'000;

std::string StreamName(const LoweredRecording& lowered, std::size_t s) {
  return fmt::format("stream {}", lowered.streams[s]);
}

// Ranks that work on one batch: those of tensor parallelism, by the names that groups have.
std::int64_t RanksOfABatch(const Recording& recording) {
  std::int64_t ranks = 1;
  std::set<std::string> seen;
  for (const RecordedCommunicator& communicator : recording.communicators) {
    const bool is_tp = communicator.name == "tp" || communicator.name == "mesh_tp";
    if (is_tp && seen.insert(communicator.name).second) ranks *= communicator.size;
  }
  return ranks;
}

std::string CommunicatorName(const Recording& recording, RecordedId id) {
  const std::string& name = recording.communicators[static_cast<std::size_t>(id)].name;
  return name.empty() ? fmt::format("communicator {}", id) : name;
}

// "2.11" of "torch 2.11.0+cu130"; "" of another program.
std::string_view MinorRelease(std::string_view program) {
  constexpr std::string_view kTorch = "torch ";
  if (!program.starts_with(kTorch)) return {};
  program.remove_prefix(kTorch.size());
  const std::size_t first = program.find('.');
  return first == std::string_view::npos ? program : program.substr(0, program.find('.', first + 1));
}

// The cluster's figures that were measured with another minor release of torch than the job's; "": none is
// known.
std::string OtherReleases(const Recording& recording, const Cluster& cluster) {
  const std::string_view own = MinorRelease(recording.recorded_with);
  if (own.empty()) return {};
  std::map<std::string_view, std::vector<std::string_view>> figures;  // by release
  for (const FigureSource& source : cluster.sources) {
    const std::string_view release = MinorRelease(source.measured_with);
    if (!release.empty() && release != own) figures[release].push_back(Name(source.figure));
  }
  std::string text;
  for (const auto& [release, names] : figures) {
    text += fmt::format("{}{} of the cluster with torch {}", text.empty() ? "" : ", ", fmt::join(names, ", "),
                        Printable(release));
  }
  return text.empty() ? text
                      : fmt::format("measured with other releases: {}; the job ran with torch {}", text,
                                    Printable(own));
}

void FillNotes(const LoweredRecording& lowered, const Cluster& cluster, std::int32_t step, Report& report) {
  report.notes.push_back(step > 0 ? fmt::format("step {} of the recording", step)
                                  : std::string("no step of the recording ended: all of it"));
  report.notes.push_back(fmt::format("operators: {} by roofline with the efficiency curve of {}",
                                     lowered.program.modelled_operators,
                                     cluster.device.name.empty() ? cluster.name : cluster.device.name));
  report.notes.push_back("the step begins with an idle device; the other ranks do the same as this one");
  std::int64_t again = 0;
  for (const auto& [dtype, flops] : lowered.recomputed_flops) again += flops;
  if (again > 0) {
    report.notes.push_back(
        fmt::format("{} TFLOP of matrix work is recomputation and left out of the utilization",
                    again / 1'000'000'000'000));
  }
  for (const std::string& note : lowered.program.notes) report.notes.push_back(note);
}

Report ReportOf(const Recording& recording, const Cluster& cluster, const LoweredRecording& lowered,
                const EngineResult& result, const EngineResult& synchronized,
                const RecordingOptions& options) {
  const EngineStep& step = lowered.program.steps.front();
  Report report;
  report.model = recording.job;
  report.policy = "rehearsed";
  report.cluster = cluster.name;
  report.world_size = recording.world_size;
  internal::FillTimes(step, result, synchronized, report);
  const std::int64_t tokens =
      options.tokens_per_step > 0
          ? options.tokens_per_step
          : lowered.tokens * std::max<std::int64_t>(1, recording.world_size / RanksOfABatch(recording));
  if (result.end_ns.value > 0) {
    report.tokens_per_second_per_rank =
        MulDiv(tokens, kSecond, result.end_ns.value) / std::max<std::int64_t>(1, recording.world_size);
    report.model_flops_utilization_ppm =
        MulDiv(internal::AtPeak(lowered.flops, cluster).value, kPartsPerMillion, result.end_ns.value);
  }
  for (std::size_t s = 0; s < lowered.streams.size(); ++s) {
    report.streams.push_back({StreamName(lowered, s), result.stream_busy_ns[s], result.stream_operations[s]});
  }
  internal::FillCollectives(
      step, result, [&](RecordedId id) { return CommunicatorName(recording, id); }, report);
  report.operators = lowered.operators;
  return report;
}

}  // namespace

Result<RecordingSimulation> SimulateRecording(const Recording& recording, const Cluster& cluster,
                                              const RecordingOptions& options) {
  if (cluster.ranks < recording.world_size) {
    return MakeInputError("/ranks", "the cluster has fewer ranks than the recorded job",
                          fmt::format("{}", cluster.ranks), fmt::format("{} or more", recording.world_size));
  }
  const std::unique_ptr<CostModel> costs = MakeCostModel(cluster);
  const internal::RecordedStep step = internal::LastStep(recording);
  Result<LoweredRecording> lowered = internal::LowerRecording(recording, step, cluster, *costs);
  if (!lowered) return std::unexpected(std::move(lowered.error()));
  EngineTimeline timeline;
  const Result<EngineResult> result = RunStep(lowered->program, 0, &timeline, {.activities = true});
  if (!result) return std::unexpected(result.error());
  const Result<EngineResult> synchronized =
      RunStep(lowered->program, 0, nullptr, {.synchronize_phases = true});
  if (!synchronized) return std::unexpected(synchronized.error());
  RecordingSimulation simulation;
  simulation.step = step.number;
  simulation.report = ReportOf(recording, cluster, *lowered, *result, *synchronized, options);
  FillNotes(*lowered, cluster, step.number, simulation.report);
  simulation.other_releases = OtherReleases(recording, cluster);
  if (!simulation.other_releases.empty()) simulation.report.notes.push_back(simulation.other_releases);
  for (const EngineSpan& span : timeline.spans) {
    const auto i = static_cast<std::size_t>(span.instruction);
    const RecordedId stream = span.stream < 0 ? -1 : lowered->streams[static_cast<std::size_t>(span.stream)];
    simulation.spans.push_back({stream, lowered->events[i], span.start_ns, span.end_ns,
                                span.stream < 0 ? Nanoseconds{} : timeline.issued_ns[i]});
  }
  return simulation;
}

std::string RecordedTimeText(const RecordingSimulation& simulation) {
  const Report& report = simulation.report;
  const auto ms = [](Nanoseconds time) {
    return fmt::format("{:.2f} ms", static_cast<double>(time.value) / 1e6);
  };
  std::vector<std::pair<std::string, std::string>> rows = {
      {"step", ms(report.step_ns)},
      {"  forward, timed alone", ms(report.forward_ns)},
      {"  backward, timed alone", ms(report.backward_ns)},
      {"  optimizer, timed alone", ms(report.optimizer_ns)},
      {"compute busy", ms(report.compute_ns)},
      {"communication", ms(report.communication_ns)},
      {"  exposed", ms(report.exposed_communication_ns)},
      {"host busy", ms(report.host_ns)}};
  if (report.tokens_per_second_per_rank > 0) {
    rows.emplace_back("tokens/s per GPU", fmt::format("{}", report.tokens_per_second_per_rank));
  }
  rows.emplace_back("model FLOPs utilization",
                    fmt::format("{:.1f} %", static_cast<double>(report.model_flops_utilization_ppm) / 1e4));
  std::size_t left = 0, right = 0;
  for (const auto& [label, value] : rows) {
    left = std::max(left, label.size());
    right = std::max(right, value.size());
  }
  std::string text = fmt::format("time of step {} on {}, {} ranks\n", simulation.step,
                                 Printable(report.cluster), report.world_size);
  for (const auto& [label, value] : rows) text += fmt::format("{:<{}}  {:>{}}\n", label, left, value, right);
  for (const CollectiveReport& collective : report.collectives) {
    text += fmt::format("{} {}: {} x, {:.2f} GB, {} ({} exposed), {}\n", collective.kind,
                        Printable(collective.communicator), collective.count,
                        static_cast<double>(collective.full_tensor_bytes.value) / 1e9, ms(collective.busy_ns),
                        ms(collective.exposed_ns), collective.cost_source);
  }
  if (!simulation.other_releases.empty()) text += fmt::format("{}\n", simulation.other_releases);
  return text;
}

}  // namespace shardplan
