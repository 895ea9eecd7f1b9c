// SPDX-License-Identifier: Apache-2.0
// shardplan-run: replays a plan without the model (docs/internals/executor.md).
#include <fmt/format.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <optional>
#include <string>

#include "launcher.h"
#include "options.h"
#include "profile.h"
#include "reshard_run.h"
#include "shardplan/checkpoints/reshard.h"
#include "shardplan/schemas/io.h"
#include "shardplan/verifier/verifier.h"
#include "worker.h"

namespace shardplan::run {
namespace {

constexpr int kOrphanExit = 4;

int Fail(const Error& error, const std::string& who) {
  std::fprintf(stderr, "%s: %s\n", who.c_str(), ToString(error).c_str());
  return ExitCode(error.code);
}

// A rank that our launcher started does not outlive it, nor one that died before we could say so.
void EndWithLauncher() {
  const char* launcher = std::getenv("SHARDPLAN_RUN_CHILD");
  if (launcher == nullptr) return;
  (void)prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (getppid() != std::strtoll(launcher, nullptr, 10)) std::_Exit(kOrphanExit);
}

// The plan, verified. Our launcher has done so for the ranks that it starts.
Result<Plan> ReadPlanForRun(const RunOptions& options, const std::optional<RankEnvironment>& environment,
                            const std::string& who) {
  Result<Plan> plan = ReadPlan(options.plan_path);
  if (!plan || (environment && environment->started_here)) return plan;
  const bool speaks = !environment || environment->rank == 0;
  const auto warn = [&](const std::string& text) {
    if (speaks)
      std::fprintf(stderr, "%s: warning: %s: %s\n", who.c_str(), options.plan_path.c_str(), text.c_str());
  };
  if (!options.verify) {
    warn("not verified (--no-verify)");
    return plan;
  }
  Result<std::vector<std::string>> warnings = CheckForUse(*plan, "--no-verify replays it as it is");
  if (!warnings) {
    warnings.error().file = options.plan_path;
    return std::unexpected(std::move(warnings.error()));
  }
  for (const std::string& warning : *warnings)
    warn("the plan has a fault because PyTorch has it: " + warning);
  return plan;
}

// Reads the documents of every rank, before any starts. Ranks that our launcher started read what it has
// read.
Result<Plan> ReadDocumentsForRun(const RunOptions& options, const std::optional<RankEnvironment>& environment,
                                 const std::string& who) {
  const bool is_alone = !environment && options.device == DeviceKind::kVirtual;
  for (const std::string& path : {options.plan_path, options.report_path}) {
    std::error_code ignored;
    const std::filesystem::file_type type = std::filesystem::status(path, ignored).type();
    if (type == std::filesystem::file_type::fifo && !is_alone) {
      return std::unexpected(Error{.code = ErrorCode::kBadInput,
                                   .message = "every rank reads it, and of a pipe only the first could",
                                   .file = path,
                                   .found = "a pipe",
                                   .expected = "a file"});
    }
  }
  Result<Plan> plan = ReadPlanForRun(options, environment, who);
  if (!plan || options.report_path.empty() || (environment && environment->started_here)) return plan;
  Result<Report> report = ReadReport(options.report_path);
  if (!report) return std::unexpected(std::move(report.error()));
  return plan;
}

// Launches as many ranks as the plan needs, here.
int Launch(const RunOptions& options, const std::vector<std::string>& arguments, std::int64_t needed,
           const char* pointer, const std::string& who) {
  const std::int64_t ranks = options.ranks > 0 ? options.ranks : needed;
  if (ranks == needed) return LaunchRanks(arguments, ranks, options.timeout_s);
  return Fail({.code = ErrorCode::kUsage,
               .message = "the plan is for another number of ranks; make one for this many, or start as many",
               .file = options.plan_path,
               .pointer = pointer,
               .found = fmt::format("--ranks {}", ranks),
               .expected = std::to_string(needed)},
              who);
}

int RunReshard(const RunOptions& options, const std::vector<std::string>& arguments,
               const std::optional<RankEnvironment>& environment, const std::string& who) {
  const Result<ReshardPlan> plan = ReadReshardForRun(options, environment && environment->started_here);
  if (environment) {
    const Status status = RunReshardRank(plan, options, *environment);
    return status ? 0 : Fail(status.error(), who);
  }
  if (!plan) return Fail(plan.error(), who);
  return Launch(options, arguments, std::max(RanksOf(plan->source), RanksOf(plan->target)), "", who);
}

// `shardplan run` says its version: the packages of the two programs may be of two.
Status IsOfThisVersion() {
  const char* command = std::getenv("SHARDPLAN_COMMAND_VERSION");
  if (command == nullptr || std::string_view(command) == SHARDPLAN_VERSION) return {};
  return MakeError(ErrorCode::kEnvironment,
                   fmt::format("the command shardplan is of version {}, and shardplan-run is of version {}: "
                               "install shardplan and shardplan-torch of one version",
                               command, SHARDPLAN_VERSION));
}

int Run(const RunOptions& options, const std::vector<std::string>& arguments) {
  if (const Status status = IsOfThisVersion(); !status) return Fail(status.error(), "shardplan-run");
  const Result<std::optional<RankEnvironment>> read = executor::ReadRankEnvironment();
  if (!read) return Fail(read.error(), "shardplan-run");
  const std::optional<RankEnvironment>& environment = *read;
  const std::string who = environment ? fmt::format("rank {}", environment->rank) : "shardplan-run";
  const Result<Plan> plan = ReadDocumentsForRun(options, environment, who);
  const bool reshards = !plan && IsReshardInstead(plan.error());
  if (plan || reshards) {
    if (Status status = CheckProfile(options, plan ? &*plan : nullptr); !status)
      return Fail(status.error(), who);
  }
  if (reshards) return RunReshard(options, arguments, environment, who);
  if (environment && options.device != DeviceKind::kVirtual) {
    const Status status = RunRank(plan, options, *environment);
    return status ? 0 : Fail(status.error(), who);
  }
  if (!plan) return Fail(plan.error(), who);
  if (options.device == DeviceKind::kVirtual) {
    const Status status = RunVirtual(*plan, options);
    return status ? 0 : Fail(status.error(), who);
  }
  return Launch(options, arguments, plan->world_size, "/world_size", who);
}

}  // namespace
}  // namespace shardplan::run

int main(int argc, char** argv) {
  (void)std::signal(SIGPIPE, SIG_IGN);  // a pipe that nobody reads is an error that is told
  shardplan::run::EndWithLauncher();
  shardplan::run::RunOptions options;
  if (const std::optional<int> ended = shardplan::run::ParseRun(argc, argv, options)) return *ended;
  int code = 0;
  try {
    code = shardplan::run::Run(options, {argv + 1, argv + argc});
  } catch (const std::bad_alloc&) {
    std::fprintf(stderr, "shardplan-run: there is not enough memory for this plan\n");
    code = ExitCode(shardplan::ErrorCode::kEnvironment);
  } catch (const std::exception& exception) {
    std::fprintf(stderr, "shardplan-run: %s\n", exception.what());
    code = 70;
  }
  std::fflush(nullptr);
  std::_Exit(code);  // threads of collectives that will never finish are left behind
}
