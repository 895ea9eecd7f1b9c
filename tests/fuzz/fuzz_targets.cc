// SPDX-License-Identifier: Apache-2.0
#include "tests/fuzz/fuzz_targets.h"

#include <cstdio>
#include <cstdlib>
#include <memory>
#include <vector>

#include "events.h"
#include "recording.h"
#include "shardplan/checkpoints/reshard.h"
#include "shardplan/executor/replayer.h"
#include "shardplan/executor/virtual_backend.h"
#include "shardplan/planner/planner.h"
#include "shardplan/races/races.h"
#include "shardplan/schemas/io.h"
#include "shardplan/schemas/plan_text.h"
#include "shardplan/simulator/allocator_replay.h"
#include "shardplan/simulator/memory_explanation.h"
#include "shardplan/simulator/memory_profile.h"
#include "shardplan/simulator/reserved_memory.h"
#include "shardplan/simulator/simulate.h"
#include "shardplan/verifier/verifier.h"
#include "tests/fuzz/mutator.h"

namespace shardplan::test {
namespace {

void Require(bool holds, const std::string& what) {
  if (holds) return;
  std::fprintf(stderr, "does not hold: %s\n", what.c_str());
  std::abort();
}

void CheckError(const Error& error) {
  Require(error.code == ErrorCode::kBadInput, "bad bytes are bad input: " + ToString(error));
  Require(!error.message.empty() && !ToString(error).empty(), "an error has a message");
}

// An error of a document that reads well says the place, too.
void CheckPlacedError(const Error& error) {
  CheckError(error);
  Require(!error.pointer.empty(), "an error has a place: " + ToString(error));
}

template <typename T>
Result<T> Check(std::string_view bytes, Result<T> (*parse)(std::string_view)) {
  Result<T> value = parse(bytes);
  if (!value.has_value()) {
    CheckError(value.error());
    return value;
  }
  const std::string text = ToJson(*value);
  const Result<T> again = parse(text);
  Require(again.has_value(), "what was written is read");
  Require(*again == *value, "what was written is read as the same value");
  Require(ToJson(*again) == text, "the canonical text stays as it is");
  return value;
}

void CheckPlan(const Plan& plan) {
  const Result<Plan> again = ParsePlanText(PlanText(plan));
  Require(again.has_value(), "the text form is read");
  Require(*again == plan, "the text form is read as the same plan");
  Require(DescribeDifferences(plan, *again).empty(), "equal plans have no differences");
  const std::vector<Violation> violations = Verify(plan);
  for (const Violation& violation : violations)
    Require(!Explain(plan, violation).empty(), "violations are explained");
  for (const Remark& remark : violations.empty() ? Remarks(plan) : std::vector<Remark>{})
    Require(!remark.message.empty(), "a remark says something");
  if (plan.world_size < 2 || plan.world_size > 8) return;
  // One rank apart, so that all ranks are run together.
  std::vector<Plan> plans(static_cast<std::size_t>(plan.world_size), plan);
  plans.back().model += '+';
  Require(VerifyRanks(plans).empty() == violations.empty(), "equal programs meet in every collective");
}

// Everything that `memory` and `explain-memory` say, of a plan that need not verify.
void CheckMemory(const Plan& plan) {
  for (const bool kernels : {false, true}) {
    const MemoryHistory history = MemoryHistoryOf(plan, {.kernel_temporaries = kernels});
    const MemoryProfile profile = ProfileMemory(plan, history, {.record_samples = true});
    Require(profile.peak_bytes.value >= 0, "memory is not negative");
    Require(!RowsOf(plan, profile, plan.steady_step).rows.empty(), "a step has rows of memory");
    const MemoryExplanation explanation = ExplainMemory(plan, history);
    Require(explanation.peak_bytes.value >= 0, "memory is not negative");
    const ReservedMemory reserved = ReserveMemory(plan, history, {.record_addresses = true});
    Require(
        reserved.out_of_memory || reserved.peak_reserved_bytes.value >= reserved.peak_allocated_bytes.value,
        "what is allocated is reserved");
    Require(!MemoryHtml(plan, history, &reserved).empty(), "memory is drawn");
  }
  MemoryHistoryOf(plan, {.space = MemorySpace::kHost});
}

void CheckSimulation(const Plan& plan) {
  const Result<Simulation> simulation = Simulate(plan);
  if (!simulation) return CheckPlacedError(simulation.error());
  Require(simulation->report.step_ns.value >= 0, "time is not negative");
  const Result<Report> report = ParseReport(ToJson(simulation->report));
  Require(report.has_value() && *report == simulation->report, "a report is read as it was written");
  Require(!TimelineJson(plan, *simulation).empty() && !ReportHtml({&plan}, {&*simulation}).empty(),
          "a simulation is drawn");
}

// Real memory on every rank of the virtual machine.
bool IsSmall(const Plan& plan) {
  constexpr std::int64_t kMost = 1 << 20;
  if (plan.world_size > 8) return false;
  std::int64_t bytes = 0;
  for (const Buffer& buffer : plan.buffers) {
    for (const Bytes part : buffer.parts_bytes) {
      if (part.value > kMost) return false;
      bytes += part.value;
    }
  }
  return bytes <= kMost;
}

}  // namespace

void FuzzTrace(std::string_view bytes) { Check(bytes, ParseTrace); }
void FuzzCluster(std::string_view bytes) { Check(bytes, ParseCluster); }
void FuzzStrategy(std::string_view bytes) { Check(bytes, ParseStrategy); }
void FuzzRehearsal(std::string_view bytes) {
  const Result<Recording> recording = Check(bytes, ParseRecording);
  if (!recording) return;
  const RaceReport report = FindRaces(*recording);
  Require(RaceText(*recording, report, 0).empty() == report.races.empty(), "races are told");
}
void FuzzReport(std::string_view bytes) { Check(bytes, ParseReport); }
void FuzzStateLayout(std::string_view bytes) {
  const Result<StateLayout> layout = Check(bytes, ParseStateLayout);
  if (!layout) return;
  if (const Status checked = CheckStateLayout(*layout); !checked) return CheckPlacedError(checked.error());
  const std::int64_t ranks = RanksOf(*layout);
  for (const std::int64_t rank : {std::int64_t{0}, ranks - 1})
    Require(StorageBytes(*layout, rank).value >= 0, "a rank's storage has a size");
}
void FuzzReshard(std::string_view bytes) {
  const Result<ReshardPlan> plan = Check(bytes, ParseReshard);
  if (!plan) return;
  const bool sound = CheckReshardLayouts(*plan).has_value();
  if (sound) {
    Require(!ReshardText(*plan).empty(), "a plan is told");
    const Result<ReshardPlan> made = PlanReshard(plan->source, plan->target);
    Require(!made || VerifyReshard(*made).empty(), "a plan of any layouts verifies");
    if (!made) CheckPlacedError(made.error());
  }
  const std::vector<ReshardViolation> violations = VerifyReshard(*plan);
  Require(sound || !violations.empty(), "a plan of layouts that are none does not verify");
  if (!violations.empty()) return;
  Cluster cluster;
  cluster.links = {{.name = "link", .latency_ns = {1}, .bytes_per_second = 1'000'000}};
  const Result<ReshardSimulation> simulation = SimulateReshard(*plan, cluster);
  Require(simulation.has_value() && simulation->duration_ns >= simulation->bound_ns,
          "nothing is faster than its bound");
  Require(simulation->staging_peak_bytes <= plan->budget_bytes, "a plan stays within its budget");
}
void FuzzPlan(std::string_view bytes) {
  const Result<Plan> plan = Check(bytes, ParsePlan);
  if (plan.has_value()) CheckPlan(*plan);
}
void FuzzPlanText(std::string_view bytes) {
  const Result<Plan> plan = ParsePlanText(bytes);
  if (plan.has_value()) {
    CheckPlan(*plan);
  } else {
    CheckError(plan.error());
    Require(plan.error().pointer.starts_with("line "), "an error names the line");
  }
}

void FuzzSimulate(std::string_view bytes) {
  const Result<Plan> plan = ParsePlan(bytes);
  if (!plan) return;
  const Result<Simulation> simulation = Simulate(*plan);
  if (!simulation) Require(!simulation.error().message.empty(), "an error has a message");
}

void FuzzReplay(std::string_view bytes) {
  const Result<Plan> plan = ParsePlan(bytes);
  if (!plan || !IsSmall(*plan)) return;
  const auto machine = executor::VirtualMachine::Create(*plan, /*seed=*/1);
  std::vector<std::unique_ptr<executor::Replayer>> replayers;
  std::vector<executor::Replayer*> pointers;
  for (std::int64_t rank = 0; rank < plan->world_size; ++rank) {
    auto replayer =
        executor::Replayer::Create(*plan, rank, machine->device(rank), machine->collectives(rank));
    if (!replayer) return Require(!replayer.error().message.empty(), "an error has a message");
    pointers.push_back(replayers.emplace_back(std::move(*replayer)).get());
  }
  const Status status = executor::ReplayOnVirtual(*machine, pointers, /*steps=*/2);
  if (!status) Require(!status.error().message.empty(), "an error has a message");
}

void FuzzAllocatorLog(std::string_view bytes) {
  const Result<AllocatorLog> log = ParseAllocatorLog(bytes);
  if (!log) return CheckError(log.error());
  const Result<AllocatorReplay> replay = ReplayAllocatorLog(*log);
  if (!replay) return CheckError(replay.error());
  Require(!ReplayText(*log, *replay).empty() && !ReplayJson(*log, *replay).empty(), "a replay is told");
}

// `plan`, `memory` of the trace, and what takes the plan.
void FuzzPipeline(std::string_view bytes) {
  const std::vector<std::string_view> parts = PartsOf(bytes);
  if (parts.size() != 3) return;
  const Result<Trace> trace = ParseTrace(parts[0]);
  if (!trace) return CheckError(trace.error());
  const Result<Strategy> strategy = ParseStrategy(parts[1]);
  if (!strategy) return CheckError(strategy.error());
  const Result<Cluster> cluster = ParseCluster(parts[2]);
  if (!cluster) return CheckError(cluster.error());
  const Result<PlannerOutput> unverified = MakePlan(*trace, *strategy, *cluster, {.verify = false});
  if (!unverified) return CheckPlacedError(unverified.error());
  CheckMemory(unverified->plan);
  const Result<PlannerOutput> planned = MakePlan(*trace, *strategy, *cluster);
  if (!planned) return CheckPlacedError(planned.error());
  const Result<Plan> read = ParsePlan(ToJson(planned->plan));
  Require(read.has_value(), read ? "" : "a plan is read as it was written: " + ToString(read.error()));
  Require(*read == planned->plan, "a plan is read as it was written");
  Require(Judge(*read).good(), "a plan verifies");
  CheckSimulation(*read);
}

// A recording of PyTorch, as `conformance` reads and compares it: the case's document or trace and strategy,
// and the log.
void FuzzRecording(std::string_view bytes) {
  const std::vector<std::string_view> parts = PartsOf(bytes);
  conformance::Recording recording;
  Status parsed;
  if (parts.size() == 2) {
    Result<conformance::Recording> converted = conformance::ConvertCase(std::string(parts[0]));
    if (!converted) return CheckError(converted.error());
    recording = std::move(*converted);
    parsed = conformance::ParseLog(std::string(parts[1]), recording);
  } else if (parts.size() == 3) {
    const Result<Trace> trace = ParseTrace(parts[0]);
    if (!trace) return CheckError(trace.error());
    const Result<Strategy> strategy = ParseStrategy(parts[1]);
    if (!strategy) return CheckError(strategy.error());
    recording.trace = *trace;
    recording.strategy = *strategy;
    parsed = conformance::ParseLiveLog(std::string(parts[2]), recording);
  }
  if (!parsed) return CheckPlacedError(parsed.error());
  const conformance::Comparison comparison = conformance::Compare(recording);
  Require(comparison.matches || !comparison.difference.empty(), "a difference is told");
}

}  // namespace shardplan::test
