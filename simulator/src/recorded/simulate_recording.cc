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
#include "engine/step_account.h"
#include "recorded/joined_ranks.h"
#include "recorded/lower_recording.h"
#include "recorded/meetings.h"
#include "recorded/steps.h"
#include "report/builder.h"
#include "shardplan/schemas/printable.h"
#include "shardplan/simulator/cost_model.h"
#include "shardplan/simulator/engine.h"

namespace shardplan {
namespace {

using internal::LoweredRecording;
using internal::Meeting;
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

std::vector<std::string> RemarksOn(const Recording& recording, const Cluster& cluster,
                                   const LoweredRecording& lowered, bool is_alone) {
  std::vector<std::string> remarks;
  const std::vector<std::int64_t> absent = internal::AbsentPartners(recording, lowered);
  if (is_alone && !absent.empty()) {
    remarks.push_back(
        fmt::format("rank {} exchanges messages with rank{} {}, not recorded here: nobody is waited for",
                    recording.rank, absent.size() > 1 ? "s" : "", fmt::join(absent, ", ")));
  }
  for (const std::string& dtype : lowered.program.dtypes_without_rate) {
    remarks.push_back(internal::WithoutRateText(dtype));
  }
  if (lowered.flops.contains(DType::kFloat32) || lowered.recomputed_flops.contains(DType::kFloat32)) {
    remarks.push_back(
        "products of float32 have the rate of TF32, which torch uses where the program allows it");
  }
  if (std::string releases = OtherReleases(recording, cluster); !releases.empty()) {
    remarks.push_back(std::move(releases));
  }
  return remarks;
}

void FillNotes(const LoweredRecording& lowered, const Cluster& cluster, std::int32_t step,
               const std::string& ranks, Report& report) {
  report.notes.push_back(step > 0 ? fmt::format("step {} of the recording", step)
                                  : std::string("no step of the recording ended: all of it"));
  report.notes.push_back(fmt::format("operators: {} by roofline with the efficiency curve of {}",
                                     lowered.program.modelled_operators,
                                     cluster.device.name.empty() ? cluster.name : cluster.device.name));
  report.notes.push_back("the step begins with an idle device; " + ranks);
  std::int64_t again = 0;
  for (const auto& [dtype, flops] : lowered.recomputed_flops) again += flops;
  if (again > 0) {
    report.notes.push_back(
        fmt::format("{} TFLOP of matrix work is recomputation and left out of the utilization",
                    again / 1'000'000'000'000));
  }
  for (const std::string& note : lowered.program.notes) report.notes.push_back(note);
}

// The whole job in one step.
struct JobWork {
  std::int64_t tokens = 0;
  Nanoseconds step_ns;
  Nanoseconds peak_ns;  // of one rank's matrix work at the peak rates, in the mean of the ranks
};

Report ReportOf(const Recording& recording, const Cluster& cluster, const LoweredRecording& lowered,
                EngineResult result, const EngineResult& synchronized, const JobWork& job) {
  const EngineStep& step = lowered.program.steps.front();
  // The rank is idle until the last one is done.
  result.activity_ns[static_cast<std::size_t>(DeviceActivity::kIdle)] += job.step_ns - result.end_ns;
  result.end_ns = job.step_ns;
  Report report;
  report.model = recording.job;
  report.policy = "rehearsed";
  report.cluster = cluster.name;
  report.world_size = recording.world_size;
  internal::FillTimes(step, result, synchronized, report);
  if (job.step_ns.value > 0) {
    report.tokens_per_second_per_rank =
        MulDiv(job.tokens, kSecond, job.step_ns.value) / std::max<std::int64_t>(1, recording.world_size);
    report.model_flops_utilization_ppm = MulDiv(job.peak_ns.value, kPartsPerMillion, job.step_ns.value);
  }
  for (std::size_t s = 0; s < lowered.streams.size(); ++s) {
    report.streams.push_back({StreamName(lowered, s), result.stream_busy_ns[s], result.stream_operations[s]});
  }
  internal::FillCollectives(
      step, result, [&](RecordedId id) { return CommunicatorName(recording, id); }, report);
  report.operators = lowered.operators;
  return report;
}

JobWork WorkOf(const std::vector<const Recording*>& recordings, const std::vector<LoweredRecording>& lowered,
               const std::vector<internal::JoinedRank>& joined, std::int64_t ranks_of_a_pipeline,
               const Cluster& cluster, const RecordingOptions& options) {
  JobWork job;
  const Recording& first = *recordings.front();
  const std::int64_t of_a_batch = RanksOfABatch(first) * ranks_of_a_pipeline;
  for (std::size_t r = 0; r < recordings.size(); ++r) {
    job.tokens = std::max(job.tokens, lowered[r].tokens);
    job.step_ns = std::max(job.step_ns, joined[r].result.end_ns);
    job.peak_ns += internal::AtPeak(lowered[r].flops, cluster);
  }
  job.peak_ns = {job.peak_ns.value / std::ssize(recordings)};
  job.tokens *= std::max<std::int64_t>(1, first.world_size / of_a_batch);
  if (options.tokens_per_step > 0) job.tokens = options.tokens_per_step;
  return job;
}

// Ranks that messages connect with the first; 1: none.
std::int64_t RanksOfAPipeline(const std::vector<Meeting>& meetings) {
  std::set<std::int32_t> reached = {0};
  for (std::size_t before = 0; before != reached.size();) {
    before = reached.size();
    for (const Meeting& meeting : meetings) {
      if (!meeting.is_message) continue;
      const std::int32_t a = meeting.members.front().rank, b = meeting.members.back().rank;
      if (reached.contains(a) || reached.contains(b)) reached.insert({a, b});
    }
  }
  return std::ssize(reached);
}

}  // namespace

Result<RecordingSimulation> SimulateRecording(const Recording& recording, const Cluster& cluster,
                                              const RecordingOptions& options) {
  Result<std::vector<RecordingSimulation>> alone = SimulateRecordings({&recording}, cluster, options);
  if (!alone) return std::unexpected(std::move(alone.error()));
  return std::move(alone->front());
}

Result<std::vector<RecordingSimulation>> SimulateRecordings(const std::vector<const Recording*>& recordings,
                                                            const Cluster& cluster,
                                                            const RecordingOptions& options) {
  if (Status alike = internal::CheckOneJob(recordings); !alike) return std::unexpected(alike.error());
  const std::unique_ptr<CostModel> costs = MakeCostModel(cluster);
  std::vector<LoweredRecording> lowered;
  std::vector<std::int32_t> steps;
  for (const Recording* recording : recordings) {
    if (cluster.ranks < recording->world_size) {
      return MakeInputError("/ranks", "the cluster has fewer ranks than the recorded job",
                            fmt::format("{}", cluster.ranks),
                            fmt::format("{} or more", recording->world_size));
    }
    const internal::RecordedStep step = internal::LastStep(*recording);
    Result<LoweredRecording> one = internal::LowerRecording(*recording, step, cluster, *costs);
    if (!one) return std::unexpected(std::move(one.error()));
    lowered.push_back(std::move(*one));
    steps.push_back(step.number);
  }
  const Result<std::vector<Meeting>> meetings = internal::MeetingsOf(recordings, lowered);
  if (!meetings) return std::unexpected(meetings.error());
  const Result<std::vector<internal::JoinedRank>> joined =
      internal::RunJoined(recordings, lowered, *meetings);
  if (!joined) return std::unexpected(joined.error());
  const std::int64_t pipeline = RanksOfAPipeline(*meetings);
  const JobWork job = WorkOf(recordings, lowered, *joined, pipeline, cluster, options);
  const std::string others =
      recordings.size() == 1
          ? std::string("the other ranks do the same as this one")
          : fmt::format("{} ranks wait for each other, the other ranks do the same as these",
                        recordings.size());
  std::vector<RecordingSimulation> simulations;
  for (std::size_t r = 0; r < recordings.size(); ++r) {
    const Result<EngineResult> synchronized =
        RunStep(lowered[r].program, 0, nullptr, {.synchronize_phases = true});
    if (!synchronized) return std::unexpected(synchronized.error());
    RecordingSimulation simulation;
    simulation.rank = recordings[r]->rank;
    simulation.step = steps[r];
    simulation.end_ns = (*joined)[r].result.end_ns;
    simulation.report =
        ReportOf(*recordings[r], cluster, lowered[r], (*joined)[r].result, *synchronized, job);
    FillNotes(lowered[r], cluster, steps[r], others, simulation.report);
    simulation.remarks = RemarksOn(*recordings[r], cluster, lowered[r], recordings.size() == 1);
    for (const std::string& remark : simulation.remarks) simulation.report.notes.push_back(remark);
    const EngineTimeline& timeline = (*joined)[r].timeline;
    const EngineStep& step = lowered[r].program.steps.front();
    for (const EngineSpan& span : timeline.spans) {
      const auto i = static_cast<std::size_t>(span.instruction);
      const RecordedId stream =
          span.stream < 0 ? -1 : lowered[r].streams[static_cast<std::size_t>(span.stream)];
      simulation.spans.push_back({stream, lowered[r].events[i], span.start_ns, span.end_ns,
                                  span.stream < 0 ? Nanoseconds{} : timeline.issued_ns[i],
                                  internal::ActivityOf(step, step.code[i])});
    }
    simulations.push_back(std::move(simulation));
  }
  return simulations;
}

namespace {

std::string InMilliseconds(Nanoseconds time) {
  return fmt::format("{:.2f} ms", static_cast<double>(time.value) / 1e6);
}

Nanoseconds IdleOf(const Report& report) {
  for (const ActivityReport& activity : report.activities) {
    if (activity.activity == Name(DeviceActivity::kIdle)) return activity.time_ns;
  }
  return {};
}

std::string RanksText(const std::vector<RecordingSimulation>& simulations) {
  std::string text = fmt::format("{:>6}  {:>14}  {:>14}  {:>14}  {:>14}\n", "rank", "compute busy", "exposed",
                                 "idle", "done at");
  for (const RecordingSimulation& one : simulations) {
    text += fmt::format("{:>6}  {:>14}  {:>14}  {:>14}  {:>14}\n", one.rank,
                        InMilliseconds(one.report.compute_ns),
                        InMilliseconds(one.report.exposed_communication_ns),
                        InMilliseconds(IdleOf(one.report)), InMilliseconds(one.end_ns));
  }
  return text;
}

}  // namespace

std::string RecordedTimeText(const std::vector<RecordingSimulation>& simulations) {
  const RecordingSimulation& simulation = simulations.front();
  const Report& report = simulation.report;
  const auto ms = InMilliseconds;
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
  for (const std::string& remark : simulation.remarks) text += remark + "\n";
  if (simulations.size() > 1) text += "\n" + RanksText(simulations);
  return text;
}

}  // namespace shardplan
