// SPDX-License-Identifier: Apache-2.0
// Writes the plans that the tests know, and what the simulator says of each, for the naive simulator to be
// compared with (tests/python/commands/test_naive_simulator.py).
//
//   simulator_suite_plans FOLDER FIRST_SEED COUNT CLUSTER...
//
// Every recording (random cases included), every golden and every knob, and COUNT random strategies from seed
// FIRST_SEED on. FOLDER gets N.plan.json and for cluster K (from 0) N.K.report.json and N.K.spans.json: a
// line for each span, [stream or -1, step, trigger, instruction, start, end]. N counts the plans; the
// standard output names them, one a line.
#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "shardplan/planner/planner.h"
#include "shardplan/schemas/collective_kinds.h"
#include "shardplan/schemas/io.h"
#include "shardplan/simulator/simulate.h"
#include "tests/executor/virtual/plan_cases.h"

namespace shardplan::test {
namespace {

std::string SpansJson(const Simulation& simulation) {
  std::string text = "[";
  for (const Span& span : simulation.spans) {
    if (span.instruction < 0) continue;
    text += fmt::format("{}[{},{},{},{},{},{}]", text.size() > 1 ? ",\n" : "", span.stream, span.step,
                        span.trigger, span.instruction, span.start_ns.value, span.end_ns.value);
  }
  return text + "]\n";
}

std::set<SegmentId> OrthogonalizedBy(const Plan& plan) {
  std::set<SegmentId> segments;
  for (const PlanStep& step : plan.steps) {
    for (const Trigger& trigger : step.triggers) {
      for (const Instruction& i : trigger.instructions) {
        if (i.kind == InstructionKind::kOrthogonalize) segments.insert(i.segment);
      }
    }
  }
  return segments;
}

// Puts collectives of the model between the operators of every third plan, on a communicator of two ranks.
// The iterations on a whole matrix have none.
void AddModelCollectives(std::uint64_t seed, Plan& plan) {
  std::mt19937_64 random(seed);
  const auto below = [&](std::uint64_t n) { return random() % n; };
  if (plan.world_size % 2 != 0) return;
  plan.communicators.push_back({"own", 2, 1});
  const auto own = static_cast<CommunicatorId>(plan.communicators.size() - 1);
  const std::set<SegmentId> alone = OrthogonalizedBy(plan);
  std::int32_t work = 0;
  for (std::size_t s = 0; s < plan.segments.size(); ++s) {
    if (alone.contains(static_cast<SegmentId>(s))) continue;
    Segment& segment = plan.segments[s];
    std::vector<SegmentEntry> entries;
    std::vector<std::int32_t> issued;
    for (SegmentEntry& entry : segment.entries) {
      entries.push_back(std::move(entry));
      if (!issued.empty() && below(3) == 0) {
        entries.emplace_back(CollectiveWaitEvent{issued.back()});
        issued.pop_back();
      }
      if (below(4) > 0) continue;
      OperatorEvent op{.name = "c10d.own"};
      if (below(4) == 0) op.duration_ns = Nanoseconds{static_cast<std::int64_t>(below(9'000))};
      op.collective = ModelCollective{.kind = static_cast<CollectiveKind>(below(kCollectiveKindCount)),
                                      .communicator = below(5) == 0 ? 0 : own,
                                      .size_bytes = Bytes{static_cast<std::int64_t>(below(90'000))}};
      if (below(2) == 0) issued.push_back(op.collective->work = work++);
      entries.emplace_back(std::move(op));
    }
    segment.entries = std::move(entries);
  }
}

class Writer {
 public:
  Writer(std::string folder, std::vector<Cluster> clusters)
      : folder_(std::move(folder)), clusters_(std::move(clusters)) {}

  Status Write(const PlanCase& c) {
    Result<PlannerOutput> planned = MakePlan(c.trace, c.strategy, c.cluster, PlanOptions{.verify = false});
    if (!planned) {
      // The planner refuses what PyTorch refuses.
      if (planned.error().code == ErrorCode::kBadInput) return {};
      return std::unexpected(planned.error());
    }
    if (count_ % 3 == 0) AddModelCollectives(static_cast<std::uint64_t>(count_), planned->plan);
    const std::string base = fmt::format("{}/{}", folder_, count_++);
    if (Status status = WriteFileAtomically(base + ".plan.json", ToJson(planned->plan)); !status)
      return status;
    for (std::size_t k = 0; k < clusters_.size(); ++k) {
      planned->plan.cluster = clusters_[k];
      const Result<Simulation> simulation = Simulate(planned->plan, {});
      if (!simulation) return std::unexpected(simulation.error());
      const std::string name = fmt::format("{}.{}.", base, k);
      if (Status status = WriteFileAtomically(name + "report.json", ToJson(simulation->report)); !status)
        return status;
      if (Status status = WriteFileAtomically(name + "spans.json", SpansJson(*simulation)); !status)
        return status;
    }
    std::printf("%s\n", c.name.c_str());
    return {};
  }

 private:
  std::string folder_;
  std::vector<Cluster> clusters_;
  int count_ = 0;
};

// Random cases that PyTorch was recorded with, "live/one_rank".
std::vector<std::string> LiveNames() {
  std::vector<std::string> names;
  for (const auto& entry :
       std::filesystem::directory_iterator(SHARDPLAN_SOURCE_DIR "/tests/conformance/live")) {
    if (entry.path().extension() == ".log") names.push_back("live/" + entry.path().stem().string());
  }
  std::ranges::sort(names);
  return names;
}

int Fail(const std::string& name, const Error& error) {
  std::fprintf(stderr, "%s: %s\n", name.c_str(), ToString(error).c_str());
  return 1;
}

int Run(int argc, char** argv) {
  if (argc < 5) {
    std::fprintf(stderr, "simulator_suite_plans FOLDER FIRST_SEED COUNT CLUSTER...\n");
    return 2;
  }
  std::vector<Cluster> clusters;
  for (int k = 4; k < argc; ++k) {
    Result<Cluster> cluster = ReadCluster(argv[k]);
    if (!cluster) return Fail(argv[k], cluster.error());
    clusters.push_back(std::move(*cluster));
  }
  std::vector<PlanCase> cases;
  for (const std::string& name : RecordedNames()) cases.push_back(RecordedCase(name));
  for (const std::string& name : LiveNames()) cases.push_back(RecordedCase(name));
  for (const std::string& name : GoldenNames()) cases.push_back(GoldenCase(name));
  for (PlanCase& knob : KnobCases()) cases.push_back(std::move(knob));
  const auto first = static_cast<std::uint32_t>(std::strtoul(argv[2], nullptr, 10));
  const auto count = static_cast<std::uint32_t>(std::strtoul(argv[3], nullptr, 10));
  for (std::uint32_t i = 0; i < count; ++i) cases.push_back(RandomCase(first + i));
  Writer writer(argv[1], std::move(clusters));
  for (const PlanCase& c : cases) {
    if (Status status = writer.Write(c); !status) return Fail(c.name, status.error());
  }
  return 0;
}

}  // namespace
}  // namespace shardplan::test

int main(int argc, char** argv) { return shardplan::test::Run(argc, argv); }
