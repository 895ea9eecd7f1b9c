// SPDX-License-Identifier: Apache-2.0
// `simulate`: time, overlap and memory of one or several plans.
#include <fmt/format.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <optional>
#include <variant>

#include "commands/commands.h"
#include "commands/recorded_time.h"
#include "flags/file_flag.h"
#include "flags/memory_budget.h"
#include "shardplan/schemas/io.h"
#include "shardplan/schemas/printable.h"
#include "shardplan/simulator/caching_allocator.h"
#include "shardplan/simulator/cost_model.h"
#include "shardplan/simulator/engine.h"
#include "shardplan/simulator/simulate.h"
#include "support.h"
#include "verified_plan.h"

namespace shardplan::cli {
namespace {

struct SimulateArguments {
  std::vector<std::string> plans;
  std::string cluster, report, timeline, kineto, html, budget;
  std::optional<std::string> alloc_conf;
  bool no_verify = false;
  bool sensitivity = false;
  bool ranks_apart = false;
  std::vector<std::string> stragglers;  // "3=1.2"
  double jitter_percent = 0;
  std::uint64_t seed = 1;
  bool quiet = false;
  std::int64_t tokens = 0;  // of a recording's step
};

// Everything that is written for a single plan: its report and its timeline.
Status WriteSingle(const SimulateArguments& options, const Plan& plan, const Simulation& simulation) {
  if (!options.report.empty()) {
    if (Status written = WriteAndSay(options.report, ToJson(simulation.report), options.quiet); !written)
      return written;
  }
  if (!options.timeline.empty()) {
    if (Status written = WriteAndSay(options.timeline, TimelineJson(plan, simulation), options.quiet,
                                     "open it at ui.perfetto.dev");
        !written)
      return written;
  }
  if (!options.kineto.empty()) {
    const std::string trace = KinetoTrace(plan, simulation, plan.cluster);
    return WriteAndSay(options.kineto, options.kineto.ends_with(".gz") ? Gzip(trace) : trace, options.quiet,
                       "a profile of torch.profiler's kind");
  }
  return {};
}

std::vector<OutputFile> OutputsOf(const SimulateArguments& options) {
  return {{"--report", options.report},
          {"--timeline", options.timeline},
          {"--kineto", options.kineto},
          {"--html", options.html}};
}

Status CheckFiles(const SimulateArguments& options) {
  std::vector<std::string> inputs = options.plans;
  inputs.push_back(options.cluster);
  return CheckOutputs(inputs, OutputsOf(options), !HasStandardOutput(OutputsOf(options)));
}

// How far the step may be off. None where the cluster does not say how far its figures may be.
Result<std::optional<Sensitivity>> UncertaintyOf(const SimulateArguments& options, const Plan& plan) {
  if (plan.cluster.sources.empty()) {
    if (!options.sensitivity) return std::nullopt;
    return MakeInputError("/cluster/sources", "the cluster does not say how far its figures may be off",
                          "none", "a source for each figure, as shipped clusters have");
  }
  Result<Sensitivity> sensitivity = AnalyseSensitivity(plan, plan.cluster);
  if (!sensitivity) return std::unexpected(std::move(sensitivity.error()));
  return std::move(*sensitivity);
}

// The step's interval, and with --sensitivity what each figure of the cluster contributes to it.
std::string UncertaintyText(const SimulateArguments& options, const Sensitivity& sensitivity,
                            const std::string& path) {
  std::string text = "\n" + (options.plans.size() > 1 ? path + ": " : "") + IntervalText(sensitivity) + "\n";
  if (options.sensitivity) text += SensitivityText(sensitivity);
  return text;
}

Result<RanksApartOptions> ApartOptions(const SimulateArguments& options) {
  if (!options.ranks_apart && (!options.stragglers.empty() || options.jitter_percent > 0))
    return MakeError(ErrorCode::kUsage,
                     "--straggler and --jitter are of ranks by themselves: give --ranks-apart");
  RanksApartOptions apart{.jitter_ppm = std::llround(options.jitter_percent * 1e4), .seed = options.seed};
  for (const std::string& text : options.stragglers) {
    Straggler straggler;
    double factor = 0;
    int end = 0;
    const bool read = std::sscanf(text.c_str(), "%d=%lf%n", &straggler.rank, &factor, &end) == 2 &&
                      static_cast<std::size_t>(end) == text.size();
    if (!read || !(factor >= 1 && factor <= 1000)) {
      return std::unexpected(Error{.code = ErrorCode::kUsage,
                                   .message = "--straggler says a rank and how many times its kernels take",
                                   .found = text,
                                   .expected = "RANK=FACTOR, as 3=1.2, from 1 to 1000"});
    }
    straggler.kernels_ppm = std::llround(factor * 1e6);
    apart.stragglers.push_back(straggler);
  }
  return apart;
}

Result<std::string> ApartText(const RanksApartOptions& options, const Plan& plan, Nanoseconds alike_ns) {
  for (const Straggler& straggler : options.stragglers) {
    if (straggler.rank < plan.world_size) continue;
    return std::unexpected(Error{.code = ErrorCode::kUsage,
                                 .message = "--straggler: the plan has no such rank",
                                 .found = fmt::format("{}", straggler.rank),
                                 .expected = fmt::format("0 to {}", plan.world_size - 1)});
  }
  const std::unique_ptr<CostModel> costs = MakeCostModel(plan.cluster);
  const Result<EngineProgram> program = LowerPlan(plan, plan.cluster, *costs);
  if (!program) return std::unexpected(program.error());
  const Result<RanksApart> apart = RunRanksApart(plan, *program, options);
  if (!apart) return std::unexpected(apart.error());
  return "\n" + RanksApartText(*apart, alike_ns);
}

// Recordings of several ranks are of one job.
Status RunRecordings(const SimulateArguments& options, const std::vector<Recording>& recordings,
                     bool prints) {
  const bool of_plans =
      options.sensitivity || options.ranks_apart || !options.budget.empty() || options.alloc_conf;
  if (of_plans) {
    return MakeError(
        ErrorCode::kUsage,
        "a recording is simulated with --cluster, --tokens, --report, --timeline, --kineto and --html alone");
  }
  std::vector<std::string> traces;
  for (const std::string& path : {options.timeline, options.kineto}) {
    if (!path.empty()) traces.push_back(path);
  }
  std::vector<const Recording*> ranks;
  for (const Recording& recording : recordings) ranks.push_back(&recording);
  return SimulateRecorded(ranks, {options.plans, options.cluster, options.tokens, options.report,
                                  options.html, traces, options.quiet, prints});
}

Status RunSimulate(const SimulateArguments& options, bool& fits) {
  if (Status checked = CheckFiles(options); !checked) return checked;
  const Result<std::optional<Bytes>> budget = ParseMemoryBudget(options.budget);
  if (!budget) return std::unexpected(budget.error());
  if (options.alloc_conf) {
    if (Status checked = CheckAllocatorSettings(*options.alloc_conf); !checked) return checked;
  }
  const Result<RanksApartOptions> apart = ApartOptions(options);
  if (!apart) return std::unexpected(apart.error());
  const bool prints = !HasStandardOutput(OutputsOf(options));
  std::vector<Plan> plans;
  std::vector<Simulation> simulations;
  std::vector<Recording> recordings;
  std::string uncertainty;
  for (const std::string& path : options.plans) {
    Result<std::variant<Plan, Recording>> read = ReadVerifiedPlanOrRecording(path, options.no_verify);
    if (!read) return std::unexpected(read.error());
    auto* recording = std::get_if<Recording>(&*read);
    if (recording != nullptr ? !plans.empty() : !recordings.empty()) {
      return MakeError(ErrorCode::kUsage,
                       fmt::format("{}: recordings and plans are not simulated together", Printable(path)));
    }
    if (recording != nullptr) {
      recordings.push_back(std::move(*recording));
      continue;
    }
    if (options.plans.size() > 1 &&
        !(options.report.empty() && options.timeline.empty() && options.kineto.empty())) {
      return MakeError(ErrorCode::kUsage,
                       "--report, --timeline and --kineto take one plan; give --html for several");
    }
    Plan* plan = std::get_if<Plan>(&*read);
    SimulationOptions simulation_options;
    simulation_options.plan_digest = DigestOfJson(*plan);
    if (!options.cluster.empty()) {
      Result<Cluster> cluster = ClusterForPlan(options.cluster, path, *plan, options.quiet);
      if (!cluster) return std::unexpected(std::move(cluster.error()));
      plan->cluster = std::move(*cluster);
    }
    simulation_options.fit.budget_bytes = *budget;
    if (options.alloc_conf) plan->strategy.alloc_conf = *options.alloc_conf;
    simulation_options.record_timeline =
        !options.timeline.empty() || !options.html.empty() || !options.kineto.empty();
    Result<Simulation> simulation = Simulate(*plan, simulation_options);
    if (!simulation) {
      if (simulation.error().file.empty()) simulation.error().file = path;
      return std::unexpected(simulation.error());
    }
    if (!simulation->report.memory.fits) {
      fits = false;
      if (const std::string why = WhyNoRanksFit(*plan, simulation_options.fit); !why.empty())
        uncertainty += fmt::format("{} fits on no number of ranks: {}\n", path, why);
    }
    const Result<std::optional<Sensitivity>> sensitivity = UncertaintyOf(options, *plan);
    if (!sensitivity) return std::unexpected(sensitivity.error());
    if (*sensitivity) FillInterval(**sensitivity, simulation->report);
    if (prints) {
      if (*sensitivity) uncertainty += UncertaintyText(options, **sensitivity, path);
      if (options.ranks_apart) {
        Result<std::string> text = ApartText(*apart, *plan, simulation->report.step_ns);
        if (!text) {
          if (text.error().file.empty()) text.error().file = path;
          return std::unexpected(std::move(text.error()));
        }
        uncertainty += *text;
      }
    }
    plans.push_back(std::move(*plan));
    simulations.push_back(std::move(*simulation));
  }
  if (!recordings.empty()) return RunRecordings(options, recordings, prints);
  if (plans.size() == 1) {
    if (Status written = WriteSingle(options, plans[0], simulations[0]); !written) return written;
  }
  if (!options.html.empty()) {
    std::vector<const Plan*> plan_pointers;
    std::vector<const Simulation*> simulation_pointers;
    for (std::size_t i = 0; i < plans.size(); ++i) {
      plan_pointers.push_back(&plans[i]);
      simulation_pointers.push_back(&simulations[i]);
    }
    const std::string page = ReportHtml(plan_pointers, simulation_pointers);
    if (Status written = WriteAndSay(options.html, page, options.quiet); !written) return written;
  }
  if (!prints) return {};
  std::vector<Report> reports;
  for (const Simulation& simulation : simulations) reports.push_back(simulation.report);
  return PrintText(ComparisonTable(reports) + uncertainty);
}

}  // namespace

void AddSimulateCommand(CLI::App& app, Invocation& invocation) {
  CLI::App* command = app.add_subcommand(
      "simulate",
      "Simulate plans: step time, overlap, tokens/s, peak memory by category; several are compared");
  command->footer(
      "Examples: shardplan simulate plan.json --timeline t.json --html r.html\n"
      "          shardplan simulate fsdp1.json fsdp2.json\n"
      "          shardplan simulate recording.json.gz --cluster h100_sxm --kineto step.json.gz\n"
      "          shardplan simulate stage0.json.gz stage1.json.gz --cluster h100_sxm\n"
      "Exit code: 1 when a plan does not verify, or does not fit into the budget or the device's memory.");
  auto options = std::make_shared<SimulateArguments>();
  command
      ->add_option(
          "PLAN", options->plans,
          "One or several plans; or recordings of ranks of one job, which are joined (with --cluster)")
      ->required();
  AddFile(*command, "--cluster", options->cluster,
          "Costs from this cluster (a file, a shipped one, or a device) instead of the plan's own");
  AddFile(*command, "--report", options->report, "Write the report (JSON; '-': standard output, no table)");
  command
      ->add_option(
          "--tokens", options->tokens,
          "Of a recording: tokens of one step of the whole job (default: what its embedding looks up)")
      ->check(CLI::Range(std::int64_t{0}, std::int64_t{1} << 53));
  AddFile(*command, "--timeline", options->timeline, "Write a timeline that Perfetto opens");
  AddFile(*command, "--kineto", options->kineto,
          "Write the step as torch.profiler would (gzip where it ends in .gz): for Perfetto, HTA, TraceLens");
  AddFile(*command, "--html", options->html, "Write a self-contained HTML report");
  command->add_option("--memory-budget", options->budget, std::string(kMemoryBudgetWords) + " (default)");
  command->add_option("--alloc-conf", options->alloc_conf, kAllocConfWords);
  AddNoVerifyFlag(*command, options->no_verify);
  command->add_flag("--sensitivity", options->sensitivity,
                    "What each uncertain figure of the cluster changes, the widest first");
  command->add_flag("--ranks-apart", options->ranks_apart,
                    "Simulate each rank by itself, and say what they wait for each other");
  command
      ->add_option("--straggler", options->stragglers,
                   "RANK=FACTOR: the kernels of a rank take so many times as long; repeat it")
      ->allow_extra_args(false);
  command
      ->add_option("--jitter", options->jitter_percent,
                   "Percent: each kernel of each rank takes up to so much longer, by chance")
      ->check(CLI::Range(0.0, 1000.0));
  command->add_option("--seed", options->seed, "Of that chance (default: 1)");
  command->add_flag("-q,--quiet", options->quiet, "No progress on standard error");
  command->callback([options, &invocation] {
    bool fits = true;
    const Status status = RunSimulate(*options, fits);
    if (!status) {
      invocation.exit_code = Fail(status.error());
    } else if (!fits) {
      invocation.exit_code = ExitCode(ErrorCode::kNegative);
    }
  });
}

}  // namespace shardplan::cli
