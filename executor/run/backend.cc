// SPDX-License-Identifier: Apache-2.0
#include "backend.h"

#include <fmt/format.h>

#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <thread>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <utility>

#include "shardplan/executor/backends.h"
#include "shardplan/schemas/io.h"
#include "shardplan/schemas/printable.h"

namespace shardplan::run {
namespace {

using EndingClock = std::chrono::steady_clock;

constexpr std::chrono::seconds kLastWords{5};  // for ranks that have all but finished
constexpr std::chrono::milliseconds kLookAgain{5};

// Ranks that were started here share GPUs where there are not enough. NCCL takes those for ranks of several
// hosts.
int ChooseGpu(const RankEnvironment& environment) {
  const int gpus = executor::CudaDeviceCount();
  const bool shares = environment.started_here && gpus > 0 && environment.world_size > gpus;
  if (!shares) return static_cast<int>(environment.local_rank);
  (void)setenv("NCCL_HOSTID", fmt::format("shardplan-{}", environment.rank).c_str(), 0);
  return static_cast<int>(environment.local_rank % gpus);
}

// Until `rank` has written the key.
Status Await(const Ending& ending, const std::string& key, std::int64_t rank) {
  const auto deadline = EndingClock::now() + ending.timeout;
  while (!ending.store.check({key})) {
    std::string absent = ending.peers->Dead().value_or("");
    if (absent.empty() && EndingClock::now() >= deadline) {
      absent = executor::AwaitCulprit(ending.peers, executor::kEndPatience);
      if (absent.empty()) absent = executor::DidNotArrive({rank});
    }
    if (!absent.empty()) return MakeError(ErrorCode::kEnvironment, absent + " at the end of the run");
    std::this_thread::sleep_for(kLookAgain);
  }
  return {};
}

std::string SaidKey(std::int64_t rank) { return fmt::format("shardplan/said/{}", rank); }

}  // namespace

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

Status AgreeOnDocument(const executor::Fact& document, const std::optional<Error>& failure,
                       const RunOptions& options, const RankEnvironment& environment,
                       const c10::intrusive_ptr<c10d::Store>& store,
                       const std::shared_ptr<executor::Peers>& peers) {
  executor::Statement statement;
  if (failure) {
    statement.failure = ToString(*failure);
  } else {
    statement.facts = {document, {"shardplan's version", SHARDPLAN_VERSION}};
  }
  std::vector<std::int64_t> ranks(static_cast<std::size_t>(environment.world_size));
  std::iota(ranks.begin(), ranks.end(), 0);
  const auto own = c10::make_intrusive<c10d::PrefixStore>("shardplan/agreement", store);
  Status agreed = executor::Agree(own, environment.rank, ranks, statement,
                                  std::chrono::seconds(options.timeout_s), peers.get());
  if (failure) return std::unexpected(*failure);
  return agreed;
}

Status TakePart(const RunOptions& options, const RankEnvironment& environment,
                const std::optional<Error>& failure, const std::function<executor::Fact()>& document,
                const std::function<Status(const c10::intrusive_ptr<c10d::Store>& store,
                                           const std::shared_ptr<executor::Peers>& peers)>& run) {
  try {
    const auto met = executor::MeetAtStore(environment, std::chrono::seconds(options.timeout_s));
    if (!met) return std::unexpected(met.error());
    const c10::intrusive_ptr<c10d::Store>& store = *met;
    const std::shared_ptr<executor::Peers> peers = WatchPeers(store, environment);
    Status status = AgreeOnDocument(document(), failure, options, environment, store, peers);
    if (status) status = run(store, peers);
    if (!status && peers->Dead()) peers->Fail();
    return status;
  } catch (const std::exception& exception) {
    const std::string what = exception.what();
    return MakeError(ErrorCode::kEnvironment, what.substr(0, what.find('\n')));
  }
}

Result<Backend> MakeBackend(const Plan& plan, const RunOptions& options, const RankEnvironment& environment,
                            const c10::intrusive_ptr<c10d::Store>& store,
                            const std::shared_ptr<executor::Peers>& peers) {
  const auto memory = options.arena ? executor::MemorySource::kArena : executor::MemorySource::kAllocator;
  const std::chrono::milliseconds timeout = std::chrono::seconds(options.timeout_s);
  Backend backend;
  if (options.device == DeviceKind::kCuda) {
    Result<std::unique_ptr<executor::TorchDevice>> device =
        executor::MakeCudaDevice(ChooseGpu(environment), memory);
    if (!device) return std::unexpected(device.error());
    backend.device = std::move(*device);
    auto collectives =
        executor::MakeNcclCollectives(*backend.device, {timeout, store, plan.world_size, peers});
    if (!collectives) return std::unexpected(collectives.error());
    backend.collectives = std::move(*collectives);
    return backend;
  }
  backend.device = executor::MakeCpuDevice(memory);
  executor::GlooOptions gloo;
  gloo.store = store;
  gloo.timeout = timeout;
  gloo.peers = peers;
  if (!executor::IsLoopback(environment.master_address)) gloo.address.clear();
  auto groups = executor::MakeGlooGroups(plan, environment.rank, gloo);
  if (!groups) return std::unexpected(groups.error());
  backend.collectives =
      executor::MakeProcessGroupCollectives(*backend.device, {std::move(*groups), timeout, store, peers});
  return backend;
}

Status PrintForAll(const Ending& ending, const std::string& said,
                   const std::function<Result<std::string>(const std::vector<std::string>&)>& report) {
  const std::string printed = "shardplan/printed";
  const std::string read = "shardplan/read";
  ending.store.set(SaidKey(ending.environment.rank), std::vector<std::uint8_t>(said.begin(), said.end()));
  if (ending.environment.rank != 0) {
    if (Status status = Await(ending, printed, 0); !status) return status;
    ending.store.add(read, 1);
    return {};
  }
  std::vector<std::string> of_ranks = {said};
  for (std::int64_t rank = 1; rank < ending.environment.world_size; ++rank) {
    if (Status status = Await(ending, SaidKey(rank), rank); !status) return status;
    of_ranks.push_back(ending.store.get_to_str(SaidKey(rank)));
  }
  const Result<std::string> text = report(of_ranks);
  if (!text) return std::unexpected(text.error());
  Status status = WriteStandardOutput(PrintableLines(*text));
  ending.store.set(printed, std::vector<std::uint8_t>{'1'});
  // The store may end with this process: the others have to know first.
  const auto deadline = EndingClock::now() + kLastWords;
  while (executor::ServesStore(ending.environment) &&
         ending.store.add(read, 0) < ending.environment.world_size - 1 && EndingClock::now() < deadline)
    std::this_thread::sleep_for(kLookAgain);
  return status;
}

}  // namespace shardplan::run
