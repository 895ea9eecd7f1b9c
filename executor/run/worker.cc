#include "worker.h"

#include <fmt/format.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <memory>
#include <numeric>
#include <optional>
#include <sstream>
#include <thread>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "filler.h"
#include "meeting.h"
#include "peak_meter.h"
#include "results.h"
#include "shardplan/executor/agreement.h"
#include "shardplan/executor/bounded_store.h"
#include "shardplan/executor/cpu_backend.h"
#include "shardplan/executor/cuda_backend.h"
#include "shardplan/executor/peers.h"
#include "shardplan/executor/replayer.h"
#include "shardplan/schemas/io.h"
#include "shardplan/schemas/printable.h"

namespace shardplan::run {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::chrono::seconds kLastWords{5};  // for ranks that have all but finished

Nanoseconds Since(Clock::time_point begin) {
  return {std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now() - begin).count()};
}

// Where the host's time goes, and how much memory is allocated.
class Meter final : public executor::Observer {
 public:
  explicit Meter(PeakMeter& peak) : peak_(peak) {}
  void BeforeInstruction(const Instruction&) override { begin_ = Clock::now(); }
  void AfterInstruction(const Instruction& i) override {
    using enum InstructionKind;
    const bool waits = i.kind == kWait || i.kind == kHostWait || i.kind == kAllGather ||
                       i.kind == kReduceScatter || i.kind == kAllReduce;
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
  int ChooseGpu() const;
  Status RunStep();
  Status Report();
  Status Await(const std::string& key, std::int64_t rank);

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
  std::vector<Nanoseconds> steps_ns_;
};

// Ranks that were started here share GPUs where there are not enough. NCCL takes those for ranks of several
// hosts.
int Rank::ChooseGpu() const {
  const int gpus = executor::CudaDeviceCount();
  const bool shares = environment_.started_here && gpus > 0 && environment_.world_size > gpus;
  if (!shares) return static_cast<int>(environment_.local_rank);
  (void)setenv("NCCL_HOSTID", fmt::format("shardplan-{}", environment_.rank).c_str(), 0);
  return static_cast<int>(environment_.local_rank % gpus);
}

Status Rank::MakeBackend() {
  std::unique_ptr<Spinner> spinner;
  if (options_.device == DeviceKind::kCuda) {
    const auto memory = options_.arena ? executor::MemorySource::kArena : executor::MemorySource::kAllocator;
    Result<std::unique_ptr<executor::TorchDevice>> device = executor::MakeCudaDevice(ChooseGpu(), memory);
    if (!device) return std::unexpected(device.error());
    device_ = std::move(*device);
    auto collectives = executor::MakeNcclCollectives(*device_, {timeout(), store_, plan_.world_size, peers_});
    if (!collectives) return std::unexpected(collectives.error());
    collectives_ = std::move(*collectives);
    spinner = MakeMatmulSpinner(device_->torch_device());
  } else {
    device_ = executor::MakeCpuDevice(options_.arena ? executor::MemorySource::kArena
                                                     : executor::MemorySource::kAllocator);
    executor::GlooOptions gloo;
    gloo.store = store_;
    gloo.timeout = timeout();
    gloo.peers = peers_;
    if (!IsLoopback(environment_.master_address)) gloo.address.clear();
    auto groups = executor::MakeGlooGroups(plan_, environment_.rank, gloo);
    if (!groups) return std::unexpected(groups.error());
    collectives_ =
        executor::MakeProcessGroupCollectives(*device_, {std::move(*groups), timeout(), store_, peers_});
    spinner = MakeCpuSpinner();
  }
  device_->CountAllocations(allocated_);
  model_ = std::make_unique<FillerModel>(plan_, *device_, options_, peak_, std::move(spinner));
  auto replayer = executor::Replayer::Create(plan_, environment_.rank, *device_, *collectives_, model_.get());
  if (!replayer) return std::unexpected(replayer.error());
  replayer_ = std::move(*replayer);
  replayer_->SetObserver(&meter_);
  model_->AllocateBuffers();
  return {};
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
  if (options_.progress) {
    std::fputs(fmt::format("rank {}: step {} took {:.1f} ms\n", environment_.rank, step,
                           static_cast<double>(steps_ns_.back().value) / 1e6)
                   .c_str(),
               stderr);
  }
  return {};
}

// Every rank tells its step times; rank 0 prints the slowest.
Status Rank::Report() {
  const auto key = [](std::int64_t rank) { return fmt::format("shardplan/steps/{}", rank); };
  std::string times;
  for (const Nanoseconds ns : steps_ns_) times += fmt::format("{} ", ns.value);
  store_->set(key(environment_.rank), std::vector<std::uint8_t>(times.begin(), times.end()));
  if (environment_.rank != 0) {
    if (Status status = Await("shardplan/printed", 0); !status) return status;
    store_->add("shardplan/read", 1);
    return {};
  }
  Measurement measured;
  measured.steps_ns = steps_ns_;
  for (std::int64_t rank = 1; rank < plan_.world_size; ++rank) {
    if (Status status = Await(key(rank), rank); !status) return status;
    const std::vector<std::uint8_t> bytes = store_->get(key(rank));
    std::istringstream stream(std::string(bytes.begin(), bytes.end()));
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
  std::unique_ptr<shardplan::Report> report;
  if (!options_.report_path.empty()) {
    Result<shardplan::Report> read = ReadReport(options_.report_path);
    if (!read) return std::unexpected(read.error());
    report = std::make_unique<shardplan::Report>(std::move(*read));
  }
  const Status printed =
      WriteStandardOutput(PrintableLines(ResultTable(plan_, options_, measured, report.get())));
  store_->set("shardplan/printed", "1");
  // The store may end with this process: the others have to know first.
  const auto deadline = Clock::now() + kLastWords;
  while (ServesStore(environment_) && store_->add("shardplan/read", 0) < plan_.world_size - 1 &&
         Clock::now() < deadline) {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  return printed;
}

// Until `rank` has written the key.
Status Rank::Await(const std::string& key, std::int64_t rank) {
  const auto deadline = Clock::now() + timeout();
  while (!store_->check({key})) {
    std::string absent = peers_->Dead().value_or("");
    if (absent.empty() && Clock::now() >= deadline) {
      absent = executor::AwaitCulprit(peers_.get(), executor::kEndPatience);
      if (absent.empty()) absent = executor::DidNotArrive({rank});
    }
    if (!absent.empty()) return MakeError(ErrorCode::kEnvironment, absent + " at the end of the run");
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  return {};
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

// Ranks that our launcher started meet as they are; those that are started again at the same store have keys
// of their own.
c10::intrusive_ptr<c10d::Store> Meet(const RunOptions& options, const RankEnvironment& environment) {
  const c10::intrusive_ptr<c10d::Store> store = Connect(options, environment);
  const char* restart = std::getenv("TORCHELASTIC_RESTART_COUNT");
  if (restart == nullptr) return store;
  return c10::make_intrusive<c10d::PrefixStore>(fmt::format("shardplan/attempt/{}", restart), store);
}

// Our launcher says itself who dies.
std::shared_ptr<executor::Peers> WatchPeers(const c10::intrusive_ptr<c10d::Store>& store,
                                            const RankEnvironment& environment) {
  executor::PeersOptions options = {.store = store,
                                    .rank = environment.rank,
                                    .ranks = environment.world_size,
                                    .store_rank = {},
                                    .speak = nullptr};
  if (!environment.store_is_served) options.store_rank = 0;
  if (!environment.started_here) {
    options.speak = [rank = environment.rank](const std::string& text) {
      std::fputs(fmt::format("rank {}: {}\n", rank, text).c_str(), stderr);
    };
  }
  return std::make_shared<executor::Peers>(std::move(options));
}

// This rank's own failure, or what the ranks do not agree on.
Status AgreeOnPlan(const Result<Plan>& plan, const RunOptions& options, const RankEnvironment& environment,
                   const c10::intrusive_ptr<c10d::Store>& store,
                   const std::shared_ptr<executor::Peers>& peers) {
  const std::optional<Error> failure = WhyNot(plan, options, environment);
  executor::Statement statement;
  if (failure) {
    statement.failure = ToString(*failure);
  } else {
    statement.facts = {{"the plan", Digest(ToJson(*plan))}, {"shardplan's version", SHARDPLAN_VERSION}};
  }
  std::vector<std::int64_t> ranks(static_cast<std::size_t>(environment.world_size));
  std::iota(ranks.begin(), ranks.end(), 0);
  const auto own = c10::make_intrusive<c10d::PrefixStore>("shardplan/agreement", store);
  Status agreed = executor::Agree(own, environment.rank, ranks, statement,
                                  std::chrono::seconds(options.timeout_s), peers.get());
  if (failure) return std::unexpected(*failure);
  return agreed;
}

}  // namespace

Status RunRank(const Result<Plan>& plan, const RunOptions& options, const RankEnvironment& environment) {
  try {
    const c10::intrusive_ptr<c10d::Store> store = Meet(options, environment);
    const std::shared_ptr<executor::Peers> peers = WatchPeers(store, environment);
    Status status = AgreeOnPlan(plan, options, environment, store, peers);
    if (status) status = Rank(*plan, options, environment, store, peers).Run();
    if (!status && peers->Dead()) peers->Fail();
    return status;
  } catch (const std::exception& exception) {
    const std::string what = exception.what();
    return MakeError(ErrorCode::kEnvironment, what.substr(0, what.find('\n')));
  }
}

}  // namespace shardplan::run
