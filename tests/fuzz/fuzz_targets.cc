#include "tests/fuzz/fuzz_targets.h"

#include <cstdio>
#include <cstdlib>
#include <memory>
#include <vector>

#include "shardplan/executor/replayer.h"
#include "shardplan/executor/virtual_backend.h"
#include "shardplan/schemas/io.h"
#include "shardplan/schemas/plan_text.h"
#include "shardplan/schemas/verifier.h"
#include "shardplan/simulator/allocator_replay.h"
#include "shardplan/simulator/simulate.h"

namespace shardplan::test {
namespace {

void Require(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "does not hold: %s\n", what);
  std::abort();
}

void CheckError(const Error& error) {
  Require(error.code == ErrorCode::kBadInput, "bad bytes are bad input");
  Require(!error.message.empty() && !ToString(error).empty(), "an error has a message");
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
void FuzzReport(std::string_view bytes) { Check(bytes, ParseReport); }
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

}  // namespace shardplan::test
