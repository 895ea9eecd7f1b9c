// SPDX-License-Identifier: Apache-2.0
#include "reshard_run.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdio>
#include <memory>
#include <sstream>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "backend.h"
#include "reshard_state.h"
#include "shardplan/checkpoints/reshard.h"
#include "shardplan/executor/checkpoints.h"
#include "shardplan/schemas/io.h"
#include "torch/bounded_store.h"

namespace shardplan::run {
namespace {

using ReshardClock = std::chrono::steady_clock;

std::int64_t RanksNeeded(const ReshardPlan& plan) {
  return std::max(RanksOf(plan.source), RanksOf(plan.target));
}

// Figures of a rank's runs, as numbers in a line.
struct RankFigures {
  executor::ReshardMoved moved;
  std::int64_t state_bytes = 0;
  std::vector<std::int64_t> runs_ns;

  std::string Text() const {
    std::string text = fmt::format("{} {} {} {} {} {}", moved.rounds, moved.sent_bytes, moved.received_bytes,
                                   moved.kept_bytes, moved.staging_bytes, state_bytes);
    for (const std::int64_t ns : runs_ns) text += fmt::format(" {}", ns);
    return text;
  }
  static RankFigures Of(const std::string& text) {
    RankFigures figures;
    std::istringstream stream(text);
    stream >> figures.moved.rounds >> figures.moved.sent_bytes >> figures.moved.received_bytes >>
        figures.moved.kept_bytes >> figures.moved.staging_bytes >> figures.state_bytes;
    for (std::int64_t ns = 0; stream >> ns;) figures.runs_ns.push_back(ns);
    return figures;
  }
};

class ReshardRank {
 public:
  ReshardRank(const ReshardPlan& plan, const RunOptions& options, const RankEnvironment& environment,
              const c10::intrusive_ptr<c10d::Store>& store, std::shared_ptr<executor::Peers> peers)
      : plan_(plan),
        options_(options),
        environment_(environment),
        world_(executor::ExchangePlan(environment.world_size)),
        store_(executor::MakeBoundedStore(store, std::chrono::seconds(options.timeout_s))),
        peers_(std::move(peers)) {}

  Status Run() {
    Result<Backend> backend = MakeBackend(world_, options_, environment_, store_, peers_);
    if (!backend) return std::unexpected(backend.error());
    backend_ = std::move(*backend);
    if (Status status = backend_.device->Prepare(world_); !status) return status;
    if (Status status = backend_.collectives->Prepare(world_, environment_.rank); !status) return status;
    const c10::Device device = backend_.device->torch_device();
    RankState source(plan_.source, environment_.rank, device);
    RankState target(plan_.target, environment_.rank, device);
    source.Fill();
    figures_.state_bytes = source.bytes() + target.bytes();
    for (std::int64_t run = 0; run < options_.steps; ++run) {
      if (Status status = RunOnce(run, source, target); !status) return status;
    }
    const auto report = [&](const std::vector<std::string>& of_ranks) -> Result<std::string> {
      return Table(of_ranks);
    };
    return PrintForAll({*store_, peers_.get(), environment_, std::chrono::seconds(options_.timeout_s)},
                       figures_.Text(), report);
  }

 private:
  Status RunOnce(std::int64_t run, const RankState& source, RankState& target) {
    target.Clear();
    executor::ReshardRun how;
    how.store = c10::make_intrusive<c10d::PrefixStore>(fmt::format("shardplan/run/{}", run), store_);
    how.peers = peers_;
    how.timeout = std::chrono::seconds(options_.timeout_s);
    how.verify = false;  // when it was read
    std::int64_t round = 0;
    if (options_.progress) {
      how.progress = [&](std::int64_t done, std::int64_t total) {
        std::fputs(fmt::format("rank {}: round {}: {} of {} bytes\n", environment_.rank, round++, done, total)
                       .c_str(),
                   stderr);
      };
    }
    const auto begin = ReshardClock::now();
    const Result<executor::ReshardMoved> moved = executor::ExecuteReshard(
        plan_, environment_.rank, *backend_.device, *backend_.collectives,
        [&](const StateTensor& tensor) { return source.StorageOf(tensor); },
        [&](const StateTensor& tensor) { return target.StorageOf(tensor); }, how);
    if (!moved) return std::unexpected(moved.error());
    figures_.moved = *moved;
    figures_.runs_ns.push_back(
        std::chrono::duration_cast<std::chrono::nanoseconds>(ReshardClock::now() - begin).count());
    if (const std::optional<std::string> wrong = target.FirstWrong())
      return MakeError(ErrorCode::kInternal, "the state is not what it has to be: " + *wrong);
    return {};
  }

  // The ranks' sums and maxima.
  std::string Table(const std::vector<std::string>& of_ranks) const {
    RankFigures all;
    for (const std::string& text : of_ranks) {
      const RankFigures figures = RankFigures::Of(text);
      all.moved.rounds = figures.moved.rounds;
      all.moved.sent_bytes += figures.moved.sent_bytes;
      all.moved.kept_bytes += figures.moved.kept_bytes;
      all.moved.staging_bytes = std::max(all.moved.staging_bytes, figures.moved.staging_bytes);
      all.state_bytes = std::max(all.state_bytes, figures.state_bytes);
      all.runs_ns.resize(figures.runs_ns.size(), 0);
      for (std::size_t r = 0; r < figures.runs_ns.size(); ++r)
        all.runs_ns[r] = std::max(all.runs_ns[r], figures.runs_ns[r]);
    }
    std::string text =
        fmt::format("{} ranks -> {} ranks on {}, {} run{}: every byte arrived\n", RanksOf(plan_.source),
                    RanksOf(plan_.target), options_.device == DeviceKind::kCuda ? "cuda" : "cpu",
                    options_.steps, options_.steps == 1 ? "" : "s");
    text += fmt::format("  between ranks        {:>15} bytes, in {} rounds\n", all.moved.sent_bytes,
                        all.moved.rounds);
    text += fmt::format("  stayed on its rank   {:>15} bytes\n", all.moved.kept_bytes);
    text += fmt::format("  staging of a rank    {:>15} bytes of a budget of {}\n", all.moved.staging_bytes,
                        plan_.budget_bytes.value);
    text += fmt::format("  state of a rank      {:>15} bytes, old and new\n", all.state_bytes);
    for (std::size_t r = 0; r < all.runs_ns.size(); ++r)
      text += fmt::format("  run {:<3} {:>29.1f} ms\n", r, static_cast<double>(all.runs_ns[r]) / 1e6);
    return text;
  }

  const ReshardPlan& plan_;
  const RunOptions& options_;
  const RankEnvironment& environment_;
  const Plan world_;
  c10::intrusive_ptr<c10d::Store> store_;
  std::shared_ptr<executor::Peers> peers_;
  Backend backend_;
  RankFigures figures_;
};

std::optional<Error> WhyNoReshard(const Result<ReshardPlan>& plan, const RunOptions& options,
                                  const RankEnvironment& environment) {
  if (!plan) return plan.error();
  const std::int64_t needed = RanksNeeded(*plan);
  if (environment.world_size == needed) return std::nullopt;
  return Error{.code = ErrorCode::kUsage,
               .message = "the plan is for another number of ranks",
               .file = options.plan_path,
               .found = fmt::format("{} ranks", environment.world_size),
               .expected = fmt::format("{} ranks, as many as the larger layout has", needed)};
}

}  // namespace

bool IsReshardInstead(const Error& error) {
  return error.pointer == "/schema" && error.found.starts_with("\"shardplan.reshard/");
}

Result<ReshardPlan> ReadReshardForRun(const RunOptions& options, bool is_verified) {
  const auto means_nothing = [&](const char* flag) {
    return Error{.code = ErrorCode::kUsage,
                 .message = fmt::format("{} means nothing for a plan of resharding", flag),
                 .file = options.plan_path};
  };
  if (!options.report_path.empty()) return std::unexpected(means_nothing("--report"));
  if (options.device == DeviceKind::kVirtual) return std::unexpected(means_nothing("--device virtual"));
  if (options.arena) return std::unexpected(means_nothing("--arena"));
  Result<Document> document = ReadDocument(options.plan_path);
  if (!document) return std::unexpected(document.error());
  ReshardPlan* plan = std::get_if<ReshardPlan>(&*document);
  if (plan == nullptr)  // it was another one a moment ago
    return std::unexpected(Error{.code = ErrorCode::kBadInput,
                                 .message = "the file was changed while it was read",
                                 .file = options.plan_path});
  if (is_verified || !options.verify) return std::move(*plan);
  const std::vector<ReshardViolation> wrong = VerifyReshard(*plan);
  if (wrong.empty()) return std::move(*plan);
  return std::unexpected(Error{.code = ErrorCode::kNegative,
                               .message = "the plan of resharding does not verify: " + wrong.front().message,
                               .file = options.plan_path,
                               .pointer = wrong.front().pointer});
}

Status RunReshardRank(const Result<ReshardPlan>& plan, const RunOptions& options,
                      const RankEnvironment& environment) {
  // A fault of one rank is told to all, in place of a digest.
  const std::optional<Error> failure = WhyNoReshard(plan, options, environment);
  const auto document = [&] {
    return executor::Fact{"the plan of resharding", failure ? "" : Digest(ToJson(*plan))};
  };
  return TakePart(options, environment, failure, document, [&](const auto& store, const auto& peers) {
    return ReshardRank(*plan, options, environment, store, peers).Run();
  });
}

}  // namespace shardplan::run
