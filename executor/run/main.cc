// SPDX-License-Identifier: Apache-2.0
// shardplan-run: replays a plan without the model (docs/internals/executor.md).
#include <fmt/format.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <map>
#include <optional>
#include <sstream>
#include <string>

#include "launcher.h"
#include "options.h"
#include "profile.h"
#include "reshard_run.h"
#include "shardplan/schemas/io.h"
#include "shardplan/schemas/known_faults.h"
#include "shardplan/schemas/printable.h"
#include "worker.h"

namespace shardplan::run {
namespace {

constexpr int kUsageExit = 2;
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

void AddFlags(CLI::App& app, RunOptions& options) {
  const CLI::Range count(std::int64_t{1}, std::int64_t{1} << 30);
  app.add_option("plan", options.plan_path, "The plan to replay, of training or of resharding")->required();
  app.add_option("--ranks", options.ranks, "Local processes to start (default: the plan's world size)")
      ->check(count);
  static const std::map<std::string, DeviceKind> kDevices = {
      {"cpu", DeviceKind::kCpu}, {"cuda", DeviceKind::kCuda}, {"virtual", DeviceKind::kVirtual}};
  app.add_option_function<std::string>(
         "--device", [&options](const std::string& name) { options.device = kDevices.at(name); },
         "cpu (Gloo), cuda (NCCL, a GPU per rank), or virtual (one thread, streams in the worst order)")
      ->transform(CLI::IsMember({"cpu", "cuda", "virtual"}, CLI::ignore_case))
      ->default_str("cpu")
      ->type_name("DEVICE");
  app.add_option("--steps", options.steps, "Steps to run; of resharding: how many times")
      ->check(count)
      ->capture_default_str();
  app.add_option("--compute-scale", options.compute_scale, "Filler compute takes the traced cost times this")
      ->check(CLI::Range(0.0, 1e9))
      ->capture_default_str();
  app.add_option("--timeout-s", options.timeout_s, "A collective that takes longer has failed")
      ->check(count)
      ->capture_default_str();
  app.add_option("--seed", options.seed, "virtual: which order the streams run in")->capture_default_str();
  app.add_option("--report", options.report_path, "Report of `shardplan simulate --report`, to compare with");
  app.add_option("--profile", options.profile_path,
                 "Write what was measured as a report, as `shardplan import-profile` does")
      ->type_name("FILE");
  app.add_flag("--arena", options.arena, "Buffers at addresses of their own in one block of memory");
  app.add_flag("!--no-activations", options.activations, "Do not allocate the model's own memory");
  app.add_flag("--progress", options.progress, "Each rank says when a step is done");
  app.add_flag("!--no-verify", options.verify, "Replay the plan as it is, even one that does not verify");
  app.footer(
      "Examples:\n"
      "  shardplan run plan.json --ranks 2 --device cpu --compute-scale 0.001\n"
      "  shardplan run plan.json --device virtual --seed 7\n"
      "  shardplan run reshard.json --device cpu                # bytes that are made up, each compared "
      "afterwards\n"
      "  torchrun --nproc-per-node 8 --no-python shardplan run plan.json --device cuda --report report.json\n"
      "Exit codes: 0 done, 1 the plan does not verify or the ranks have different ones, 2 usage (another "
      "number of\n"
      "ranks), 3 a bad document,\n"
      "4 environment (no GPU, a rank failed or did not arrive)");
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

// What every rank reads, before any starts. Ranks that our launcher started read what it has read.
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

// As many ranks as the plan needs, here.
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
  CLI::App app("Replay a plan without the model: real memory, real collectives, filler compute",
               "shardplan run");
  shardplan::run::RunOptions options;
  shardplan::run::AddFlags(app, options);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    std::ostringstream text, wrong;
    const bool asked = app.exit(error, text, wrong) == 0;
    std::fputs(shardplan::PrintableLines(wrong.str()).c_str(), stderr);
    if (!asked) return shardplan::run::kUsageExit;
    const shardplan::Status written = shardplan::WriteStandardOutput(text.str());
    return written ? 0 : shardplan::run::Fail(written.error(), "shardplan-run");
  }
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
