// SPDX-License-Identifier: Apache-2.0
#include "worker.h"

#include <fmt/format.h>

#include <chrono>
#include <cstdio>
#include <memory>
#include <optional>
#include <sstream>

#include "backend.h"
#include "filler.h"
#include "peak_meter.h"
#include "profile.h"
#include "results.h"
#include "shardplan/executor/peers.h"
#include "shardplan/executor/replayer.h"
#include "shardplan/executor/step_recorder.h"
#include "shardplan/schemas/instruction_set.h"
#include "shardplan/schemas/io.h"
#include "shardplan/schemas/printable.h"
#include "torch/bounded_store.h"

namespace shardplan::run {
namespace {

using Clock = std::chrono::steady_clock;

Nanoseconds Since(Clock::time_point begin) {
  return {std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now() - begin).count()};
}

// Meters the host's time, and how much memory is allocated.
class Meter final : public executor::Observer {
 public:
  explicit Meter(PeakMeter& peak) : peak_(peak) {}
  void BeforeInstruction(const Instruction&) override { begin_ = Clock::now(); }
  void AfterInstruction(const Instruction& i) override {
    const OrderEffect order = DescriptionOf(i.kind).order;
    const bool waits =
        order == OrderEffect::kWaits || order == OrderEffect::kHostWaits || order == OrderEffect::kMeets;
    if (waits) waiting_ns_ += Since(begin_);
    peak_.Look();
  }
  Nanoseconds waiting_ns() const { return waiting_ns_; }

 private:
  PeakMeter& peak_;
  Clock::time_point begin_;
  Nanoseconds waiting_ns_;
};

class Rank {
 public:
  Rank(const Plan& plan, const RunOptions& options, const RankEnvironment& environment,
       c10::intrusive_ptr<c10d::Store> store, std::shared_ptr<executor::Peers> peers)
      : plan_(plan),
        options_(options),
        environment_(environment),
        peak_(allocated_),
        meter_(peak_),
        store_(executor::MakeBoundedStore(std::move(store), timeout())),
        peers_(std::move(peers)) {}

  Status Run() {
    if (Status status = MakeBackend(); !status) return status;
    for (std::int64_t step = 0; step < options_.steps; ++step) {
      if (Status status = RunStep(); !status) return status;
    }
    return Report();
  }

 private:
  Status MakeBackend();
  Status RunStep();
  Status Report();
  Result<std::string> Recorded();

  std::chrono::milliseconds timeout() const { return std::chrono::seconds(options_.timeout_s); }

  const Plan& plan_;
  const RunOptions& options_;
  const RankEnvironment& environment_;
  std::shared_ptr<executor::AllocationCount> allocated_ = std::make_shared<executor::AllocationCount>();
  PeakMeter peak_;
  Meter meter_;
  c10::intrusive_ptr<c10d::Store> store_;
  std::shared_ptr<executor::Peers> peers_;
  std::unique_ptr<executor::TorchDevice> device_;
  std::unique_ptr<executor::Collectives> collectives_;
  std::unique_ptr<FillerModel> model_;
  std::unique_ptr<executor::Replayer> replayer_;
  std::unique_ptr<executor::StepRecorder> recorder_;  // null: nobody asks
  executor::DeviceFacts facts_;                       // before the first step
  std::vector<Nanoseconds> steps_ns_;
};

Status Rank::MakeBackend() {
  Result<Backend> backend = run::MakeBackend(plan_, options_, environment_, store_, peers_);
  if (!backend) return std::unexpected(backend.error());
  device_ = std::move(backend->device);
  collectives_ = std::move(backend->collectives);
  std::unique_ptr<Spinner> spinner =
      options_.device == DeviceKind::kCuda ? MakeMatmulSpinner(device_->torch_device()) : MakeCpuSpinner();
  device_->CountAllocations(allocated_);
  model_ =
      std::make_unique<FillerModel>(plan_, environment_.rank, *device_, options_, peak_, std::move(spinner));
  auto replayer = executor::Replayer::Create(plan_, environment_.rank, *device_, *collectives_, model_.get());
  if (!replayer) return std::unexpected(replayer.error());
  replayer_ = std::move(*replayer);
  replayer_->SetObserver(&meter_);
  model_->AllocateBuffers();
  if (options_.profile_path.empty()) return {};
  executor::RecorderOptions record = RecorderOptionsOf(options_);
  record.allocations = allocated_;
  recorder_ = std::make_unique<executor::StepRecorder>(plan_, std::move(record));
  facts_ = device_->Facts();
  return replayer_->SetRecorder(recorder_.get());
}

Status Rank::RunStep() {
  const std::int64_t step = replayer_->steps_completed();
  const auto begin = Clock::now();
  model_->BeginStep(replayer_->step_index());
  while (replayer_->steps_completed() == step) {
    const executor::TriggerKey trigger = replayer_->Expected();
    if (Status status = replayer_->Fire(trigger); !status) return status;
  }
  model_->EndStep();
  Result<bool> done = device_->Synchronize();
  if (!done) return std::unexpected(done.error());
  if (Status status = collectives_->Check(); !status) return status;
  steps_ns_.push_back(Since(begin));
  if (recorder_) recorder_->EndStep();
  if (options_.progress) {
    std::fputs(fmt::format("rank {}: step {} took {:.1f} ms\n", environment_.rank, step,
                           static_cast<double>(steps_ns_.back().value) / 1e6)
                   .c_str(),
               stderr);
  }
  return {};
}

Result<std::string> Rank::Recorded() {
  Result<executor::Recording> recording = recorder_->Finish();
  if (!recording) return std::unexpected(std::move(recording.error()));
  executor::DeviceFacts facts = device_->Facts();
  facts.cache_releases -= facts_.cache_releases;
  return ToJson(*recording, plan_, environment_.rank, facts);
}

// Every rank tells its step times, in a line, and what it recorded; rank 0 prints the slowest.
Status Rank::Report() {
  std::vector<std::string> recordings;
  const auto report = [&](const std::vector<std::string>& of_ranks) -> Result<std::string> {
    Measurement measured;
    measured.steps_ns = steps_ns_;
    for (const std::string& said : of_ranks) {
      const std::size_t line = said.find('\n');
      if (recorder_) recordings.push_back(said.substr(line + 1));
      std::istringstream stream(said.substr(0, line));
      for (Nanoseconds& slowest : measured.steps_ns) {
        std::int64_t ns = 0;
        stream >> ns;
        slowest = std::max(slowest, Nanoseconds{ns});
      }
    }
    const std::int64_t steps = std::max<std::int64_t>(1, options_.steps);
    measured.compute_ns = {model_->compute_ns().value / steps};
    measured.waiting_ns = {meter_.waiting_ns().value / steps};
    if (options_.device == DeviceKind::kCuda) {
      measured.waiting_ns = {
          std::max<std::int64_t>(0, measured.steps_ns.back().value - measured.compute_ns.value)};
    }
    measured.peak_bytes = peak_.peak_bytes();
    std::unique_ptr<shardplan::Report> simulated;
    if (!options_.report_path.empty()) {
      Result<shardplan::Report> read = ReadReport(options_.report_path);
      if (!read) return std::unexpected(read.error());
      simulated = std::make_unique<shardplan::Report>(std::move(*read));
    }
    return ResultTable(plan_, options_, measured, simulated.get());
  };
  std::string times;
  for (const Nanoseconds ns : steps_ns_) times += fmt::format("{} ", ns.value);
  times += '\n';
  if (recorder_) {
    const Result<std::string> recorded = Recorded();
    if (!recorded) return std::unexpected(recorded.error());
    times += *recorded;
  }
  Status printed = PrintForAll({*store_, peers_.get(), environment_, timeout()}, times, report);
  return printed && !recordings.empty() ? WriteProfile(options_, recordings) : printed;
}

std::optional<Error> WhyNot(const Result<Plan>& plan, const RunOptions& options,
                            const RankEnvironment& environment) {
  if (!plan) return plan.error();
  if (environment.world_size == plan->world_size) return std::nullopt;
  return Error{.code = ErrorCode::kUsage,
               .message = "the plan is for another number of ranks",
               .file = options.plan_path,
               .pointer = "/world_size",
               .found = fmt::format("{} ranks", environment.world_size),
               .expected = fmt::format("{} ranks", plan->world_size)};
}

}  // namespace

Status RunRank(const Result<Plan>& plan, const RunOptions& options, const RankEnvironment& environment) {
  // A fault of one rank is told to all, in place of a digest.
  const std::optional<Error> failure = WhyNot(plan, options, environment);
  const auto document = [&] { return executor::Fact{"the plan", failure ? "" : Digest(ToJson(*plan))}; };
  return TakePart(options, environment, failure, document, [&](const auto& store, const auto& peers) {
    return Rank(*plan, options, environment, store, peers).Run();
  });
}

}  // namespace shardplan::run
