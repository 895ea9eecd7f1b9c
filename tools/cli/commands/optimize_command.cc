// SPDX-License-Identifier: Apache-2.0
// `optimize`: trace + cluster + job + budget -> the fastest plan; `certify`: whether a certificate holds.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <csignal>
#include <thread>

#include "commands/commands.h"
#include "flags/cluster_choice.h"
#include "flags/default_cluster.h"
#include "flags/file_flag.h"
#include "flags/flag_group.h"
#include "flags/memory_budget.h"
#include "flags/plan_flags.h"
#include "shardplan/planner/fsdp2_settings.h"
#include "shardplan/planner/optimize.h"
#include "shardplan/schemas/io.h"
#include "shardplan/schemas/pytorch_rules.h"
#include "shardplan/simulator/lower_bound.h"
#include "shardplan/simulator/memory_profile.h"
#include "support.h"
#include "terminal.h"
#include "trace_names.h"

namespace shardplan::cli {
namespace {

struct OptimizeArguments {
  std::vector<std::string> traces;
  std::optional<std::int64_t> seq;
  std::string strategy, output = "plan.json", certificate, report, strategy_output;
  std::string budget, time_limit, robust;
  std::int64_t plan_limit = OptimizeOptions().plan_limit;
  std::vector<std::string> allow, fix;
  std::optional<std::int64_t> global_batch;
  std::string expressible;
  std::int32_t threads = 0;
  ClusterFlags cluster;
  PlanFlags flags;
  bool whole_grid = false;
  bool quiet = false;
};

// A signal ends the search, and the best so far is written.
std::atomic<bool> interrupted = false;
void Interrupt(int) { interrupted = true; }

Result<OptimizeOptions> OptionsOf(const OptimizeArguments& arguments, const Cluster& cluster) {
  OptimizeOptions options;
  const Result<std::optional<Bytes>> budget = ParseMemoryBudget(arguments.budget);
  if (!budget) return std::unexpected(budget.error());
  options.budget = *budget;
  if (!options.budget && cluster.device.memory_bytes <= cluster.device.context_bytes)
    return BadFlag("--memory-budget", arguments.budget,
                   "a number of bytes: the cluster's device has no memory to speak of");
  options.plan_limit = arguments.plan_limit;
  if (!arguments.time_limit.empty()) {
    const auto limit =
        WithSuffix(arguments.time_limit,
                   {{"", 1'000'000'000}, {"s", 1'000'000'000}, {"ms", 1'000'000}, {"min", 60'000'000'000}});
    if (!limit) return BadFlag("--time-limit", arguments.time_limit, "a time, say 10s, 500ms or 2min");
    options.time_limit_ns = {*limit};
  }
  if (!arguments.robust.empty()) {
    const auto off = WithSuffix(arguments.robust, {{"%", 10'000}});
    if (!off || *off < 1 || *off > 900'000)
      return BadFlag("--robust", arguments.robust, "how far costs may be off: 20%, above 0 and at most 90%");
    options.robust_ppm = *off;
  }
  for (const std::string& allowed : arguments.allow) {
    options.may_change_policy = options.may_change_policy || allowed == "policy";
    options.may_checkpoint = options.may_checkpoint || allowed == "checkpoint";
    options.may_offload = options.may_offload || allowed == "offload";
    options.may_offload_activations = options.may_offload_activations || allowed == "activations";
    options.may_release_cache = options.may_release_cache || allowed == "cache-release";
  }
  options.of_pytorch = !arguments.expressible.empty();
  options.fixed.insert(arguments.fix.begin(), arguments.fix.end());
  options.threads = arguments.threads > 0
                        ? arguments.threads
                        : static_cast<std::int32_t>(std::clamp(std::thread::hardware_concurrency(), 1U, 16U));
  options.whole_grid = arguments.whole_grid;
  options.stop = &interrupted;
  const auto bar = std::make_shared<ProgressBar>(arguments.quiet, "optimize", "plans at most");
  options.on_variant = [bar, quiet = arguments.quiet](const std::string& variant) {
    bar->Clear();
    Progress(quiet, variant);
  };
  options.on_progress = [bar, quiet = arguments.quiet,
                         most = options.plan_limit](const OptimizeProgress& progress) {
    if (!progress.is_better) return bar->Update(std::min(progress.evaluations, most), most);
    const double gib = static_cast<double>(progress.pooled_bytes.value) / (1 << 30);
    const std::string time =
        progress.step_ns.value == 0
            ? "nothing in the budget yet"
            : fmt::format("{:.3f} ms", static_cast<double>(progress.step_ns.value) / 1e6);
    bar->Clear();
    Progress(quiet, fmt::format("best so far: {}, {:.2f} GiB ({} plans)", time, gib, progress.evaluations));
  };
  return options;
}

std::string RobustText(const RobustReport& robust, Nanoseconds step_ns) {
  const auto ms = [](Nanoseconds time) { return static_cast<double>(time.value) / 1e6; };
  const auto percent = [](std::int64_t factor_ppm) {
    return static_cast<double>(factor_ppm - 1'000'000) / 1e4;
  };
  const auto longer = [](Nanoseconds time, Nanoseconds than) {
    return 100 * static_cast<double>((time - than).value) /
           static_cast<double>(std::max<std::int64_t>(1, than.value));
  };
  std::string text = fmt::format("costs up to {:g} % off\n", percent(1'000'000 + robust.off_ppm));
  text += fmt::format("  {:<42}{:>12} {:>14}\n", "", "this plan", "the fastest");
  const auto line = [&](const std::string& at, Nanoseconds plan, Nanoseconds plain) {
    text += fmt::format("  {:<42}{:12.3f} {:14.3f} ms\n", at, ms(plan), ms(plain));
  };
  line("as they are", step_ns, robust.plain_step_ns);
  for (const CornerReport& corner : robust.corners) {
    line(fmt::format("compute {:+g} %, links {:+g} %, overlap {:+g} %", percent(corner.compute_ppm),
                     percent(corner.links_ppm), percent(corner.overlap_ppm)),
         corner.step_ns, corner.plain_step_ns);
  }
  line("at worst", robust.worst_ns, robust.plain_worst_ns);
  text += fmt::format(
      "  the fastest plan loses {:.2f} % at worst; this one costs {:.2f} % where costs are as they are\n",
      longer(robust.plain_worst_ns, robust.worst_ns), longer(step_ns, robust.plain_step_ns));
  return text;
}

std::string VariantsText(const Optimization& r) {
  std::string text = "meshes and micro-batches\n";
  for (const VariantReport& variant : r.variants) {
    const double step = static_cast<double>(variant.step_ns.value) / 1e6;
    const double bound = static_cast<double>(variant.lower_bound_ns.value) / 1e6;
    std::string figures = variant.step_ns.value > 0 ? fmt::format("{:.3f} ms", step) : "";
    if (variant.lower_bound_ns.value > 0)
      figures += fmt::format("{}bound {:.3f} ms", figures.empty() ? "" : ", ", bound);
    const std::string why = variant.outcome == VariantOutcome::kChosen ? "chosen" : variant.says;
    text += fmt::format("  {:<54}{}{}{}\n", VariantText(variant), why, figures.empty() ? "" : ": ", figures);
    if (variant.outcome == VariantOutcome::kChosen && variant.microbatches > 0)
      text += fmt::format("    of {}\n", variant.trace);
  }
  if (r.variants_lower_bound_ns.value > 0)
    text += fmt::format("  no plan of the class is faster than {:.3f} ms, whatever the variant\n",
                        static_cast<double>(r.variants_lower_bound_ns.value) / 1e6);
  else
    text += "  the lower bound is about the chosen variant: one of the others has none\n";
  return text;
}

// The plans that the bound is about, where the model has meshes or collectives of its own.
std::string MeshesText(const Certificate& certificate) {
  std::string text;
  if (certificate.meshes.size() > 1) {
    text += fmt::format(
        "             of all plans with parameters over {} ranks, each of them kept or gathered whatever the "
        "rest of its unit is\n",
        fmt::join(certificate.meshes, " and "));
  }
  if (certificate.model_wait_ns.value > 0) {
    text += fmt::format("             each of these plans waits {:.3f} ms for the model's own collectives\n",
                        static_cast<double>(certificate.model_wait_ns.value) / 1e6);
  }
  return text;
}

std::string Text(const OptimizeOutput& output) {
  const Optimization& r = output.report;
  const auto ms = [](Nanoseconds time) { return static_cast<double>(time.value) / 1e6; };
  const auto gib = [](Bytes bytes) { return static_cast<double>(bytes.value) / (1 << 30); };
  std::string text = fmt::format("step         {:12.3f} ms\n", ms(r.step_ns));
  if (output.certificate) {
    text += fmt::format("lower bound  {:12.3f} ms   gap {:.2f} %\n", ms(r.lower_bound_ns),
                        static_cast<double>(r.gap_ppm) / 1e4);
    text += MeshesText(*output.certificate);
  }
  text += fmt::format("memory       {:12.2f} GiB pooled, {:.2f} reserved, {:.2f} allocated; budget {:.2f}\n",
                      gib(r.peak_pooled_bytes), gib(r.peak_reserved_bytes), gib(r.peak_allocated_bytes),
                      gib(r.budget_bytes));
  if (r.cache_releases > 0)
    text +=
        fmt::format("             {} requests release the cache, and each synchronises\n", r.cache_releases);
  text += fmt::format("search       {:12.2f} s    {} plans, {} a second{}\n",
                      static_cast<double>(r.planning_ns.value) / 1e9, r.evaluations, r.evaluations_per_second,
                      r.complete ? "" : "; ended early");
  text += "\ndecisions, and how much longer the step is with FSDP2's default in the place of one\n";
  for (const DecisionReport& decision : r.decisions) {
    text += fmt::format("  {:<13}{:+10.3f} ms{}  {}\n", decision.decision, ms(decision.worth_ns),
                        decision.fits_without ? "" : " (not in the budget)", decision.chosen);
  }
  text += "\ncommon settings\n";
  std::size_t width = 42;
  for (const BaselineReport& baseline : r.baselines) width = std::max(width, baseline.name.size() + 1);
  for (const BaselineReport& baseline : r.baselines) {
    std::string note = baseline.fits ? "" : "  not in the budget";
    if (baseline.cache_releases > 0) note += fmt::format("  {} cache releases", baseline.cache_releases);
    text += fmt::format("  {:<{}}{:12.3f} ms {:8.2f} GiB{}\n", baseline.name, width, ms(baseline.step_ns),
                        gib(baseline.peak_reserved_bytes), note);
  }
  if (r.robust) text += "\n" + RobustText(*r.robust, r.step_ns);
  if (!r.variants.empty()) text += "\n" + VariantsText(r);
  for (const std::string& note : r.notes) text += note + "\n";
  return text;
}

Status WriteAll(const OptimizeArguments& arguments, const OptimizeOutput& output) {
  if (Status s = WriteAndSay(arguments.output, output.plan, arguments.quiet); !s) return s;
  if (!arguments.strategy_output.empty()) {
    if (Status s = WriteAndSay(arguments.strategy_output, ToJson(output.strategy), arguments.quiet); !s)
      return s;
  }
  if (!arguments.report.empty()) {
    if (Status s = WriteAndSay(arguments.report, ToJson(output.report), arguments.quiet); !s) return s;
  }
  if (arguments.certificate.empty()) return {};
  if (!output.certificate) {
    return MakeError(ErrorCode::kNegative, fmt::format("there is no certificate of this plan ({})",
                                                       fmt::join(output.report.notes, "; ")));
  }
  return WriteAndSay(arguments.certificate, ToJson(*output.certificate), arguments.quiet);
}

// --expressible: the job itself has to be.
Status CheckExpressible(const OptimizeArguments& arguments, const Strategy& strategy, const Trace& trace) {
  if (arguments.expressible.empty()) return {};
  if (strategy.policy != "fsdp2") return BadFlag("--expressible fsdp2", strategy.policy, "--policy fsdp2");
  if (std::ranges::find(arguments.allow, "policy") != arguments.allow.end())
    return BadFlag("--expressible fsdp2", "--allow policy", "one of them");
  Strategy planned = strategy;
  planned.pytorch = PlannedPyTorch(strategy, trace);
  const Fsdp2Settings settings = WithoutWhatFsdp2Lacks(planned);
  if (settings.left_out.empty()) return {};
  const LeftOut& left = settings.left_out.front();
  return BadFlag("--expressible fsdp2", left.pointer + ": " + left.what, "settings that FSDP2 has");
}

Result<std::vector<JobVariant>> VariantsOf(const OptimizeArguments& arguments,
                                           const std::vector<Trace>& traces, const Strategy& strategy,
                                           const Cluster& cluster) {
  std::vector<NamedTrace> named;
  for (std::size_t t = 0; t < traces.size(); ++t) named.push_back({arguments.traces[t], &traces[t]});
  const bool meshes = std::ranges::find(arguments.allow, "mesh") != arguments.allow.end();
  return MakeVariants(named, strategy, cluster, {.meshes = meshes, .global_batch = arguments.global_batch});
}

Status RunOptimize(const OptimizeArguments& arguments) {
  const std::vector<OutputFile> outputs = {{"-o", arguments.output},
                                           {"--certificate", arguments.certificate},
                                           {"--report", arguments.report},
                                           {"--write-strategy", arguments.strategy_output}};
  const bool prints = !HasStandardOutput(outputs);
  std::vector<std::string> inputs = {arguments.strategy, arguments.cluster.cluster};
  inputs.insert(inputs.end(), arguments.traces.begin(), arguments.traces.end());
  if (Status s = CheckOutputs(inputs, outputs, prints); !s) return s;
  std::vector<Trace> traces;
  for (const std::string& name : arguments.traces) {
    Result<Trace> trace = ReadNamedTrace(name, arguments.seq);
    if (!trace) return std::unexpected(trace.error());
    traces.push_back(std::move(*trace));
  }
  Result<GivenStrategy> given = StrategyOf(arguments.strategy, arguments.flags);
  if (!given) return std::unexpected(given.error());
  if (Status made =
          ApplyTraceFlags(arguments.flags, traces.front(), arguments.traces.front(), given->strategy);
      !made)
    return made;
  if (given->library)
    return BadFlag("--policy-library", arguments.flags.own_policy.library, "a policy that is built in");
  const Strategy* strategy = &given->strategy;
  if (Status s = CheckExpressible(arguments, *strategy, traces.front()); !s) return s;
  ClusterFlags cluster_flags = arguments.cluster;
  cluster_flags.traced_ranks = traces.front().world_size;
  Result<ChosenCluster> chosen = ChooseClusterOrDefault(cluster_flags, *strategy, arguments.strategy);
  if (!chosen) return std::unexpected(std::move(chosen.error()));
  if (!chosen->note.empty()) Progress(arguments.quiet, chosen->note);
  Result<OptimizeOptions> options = OptionsOf(arguments, chosen->cluster);
  if (!options) return std::unexpected(options.error());
  const Result<std::vector<JobVariant>> variants = VariantsOf(arguments, traces, *strategy, chosen->cluster);
  if (!variants) return std::unexpected(variants.error());
  for (const int signal : {SIGINT, SIGTERM}) (void)std::signal(signal, Interrupt);
  Result<OptimizeOutput> output = OptimizeVariants(*variants, chosen->cluster, *options);
  options->on_progress = nullptr;  // and their bar
  options->on_variant = nullptr;
  if (!output) {
    return std::unexpected(
        WithDocument(std::move(output.error()), arguments.traces.front(), arguments.strategy));
  }
  if (Status s = WriteAll(arguments, *output); !s) return s;
  return prints ? PrintText(Text(*output)) : Status{};
}

struct CertifyArguments {
  std::string plan, certificate, trace;
  std::optional<std::int64_t> seq;
};

Status RunCertify(const CertifyArguments& arguments) {
  const Result<Trace> trace = ReadNamedTrace(arguments.trace, arguments.seq);
  if (!trace) return std::unexpected(trace.error());
  const Result<Plan> plan = ReadPlan(arguments.plan);
  if (!plan) return std::unexpected(plan.error());
  const Result<Certificate> certificate = ReadCertificate(arguments.certificate);
  if (!certificate) return std::unexpected(certificate.error());
  Status checked = CheckCertificate(*trace, *plan, *certificate);
  if (!checked) {
    const bool of_documents = checked.error().code == ErrorCode::kBadInput;
    checked.error().file =
        of_documents && checked.error().pointer == "/digests/trace" ? arguments.plan : arguments.certificate;
    return checked;
  }
  return PrintText(fmt::format(
      "holds: a step of {:.3f} ms; no plan of the class {} within {} bytes has one below {:.3f} ms\n{}",
      static_cast<double>(certificate->step_ns.value) / 1e6, certificate->plan_class,
      certificate->budget_bytes.value, static_cast<double>(certificate->lower_bound_ns.value) / 1e6,
      MeshesText(*certificate)));
}

}  // namespace

void AddOptimizeCommand(CLI::App& app, Invocation& invocation) {
  CLI::App* command = app.add_subcommand(
      "optimize", "The fastest plan within a memory budget, and how near to the best it is");
  command->footer(
      "Examples: shardplan optimize trace.json --cluster h100_sxm_8 --memory-budget device -o plan.json\n"
      "          shardplan optimize trace.json --ranks 64 --memory-budget 60GiB --allow checkpoint "
      "--certificate cert.json --report r.json\n"
      "Exit code: 1 when no plan that was found is within the budget; the message has the least that is "
      "needed.");
  auto options = std::make_shared<OptimizeArguments>();
  command
      ->add_option("TRACE", options->traces,
                   "trace.json, as `shardplan trace` writes it, or a model whose traces are shipped; with "
                   "--global-batch one for each micro-batch that a rank may have")
      ->required();
  AddSeqFlag(*command, options->seq);
  AddClusterFlags(*command, options->cluster,
                  "A cluster file, the name of a shipped one, or a device (h100)");
  AddFile(*command, "--strategy", options->strategy,
          "A strategy file: dtypes, mesh, optimizer and training loop; flags go over it");
  command->add_option("--memory-budget", options->budget, kMemoryBudgetWords)->required();
  AddFile(*command, "-o,--output", options->output, "Where to write the plan (default: plan.json)");
  AddFile(*command, "--certificate", options->certificate, "Write the proof of the bound");
  AddFile(*command, "--report", options->report, "Write times, memory, decisions and baselines (JSON)");
  AddFile(*command, "--write-strategy", options->strategy_output, "Write the strategy that makes the plan");
  command
      ->add_option("--plan-limit", options->plan_limit,
                   "The search ends after so many plans, on every machine the same; 0: by itself")
      ->check(CLI::Range(std::int64_t{0}, std::int64_t{1} << 40))
      ->capture_default_str();
  command->add_option("--time-limit", options->time_limit,
                      "The search ends after so long, too: 10s, 500ms, 2min (default: no limit)");
  command->add_option("--robust", options->robust,
                      "Not the fastest plan, but the best at the worst of the costs, when compute, links and "
                      "overlap are off by at most so much: 20%");
  command
      ->add_option(
          "--allow", options->allow,
          "What the plan may do besides: policy (be of another policy than the strategy's), "
          "checkpoint (recompute activations), activations (of blocks in host memory between forward and "
          "backward), offload (shards in host memory), cache-release (requests release the allocator's "
          "cache, and synchronise), mesh (replicas of shards on "
          "fewer ranks)")
      ->delimiter(',')
      ->check(CLI::IsMember({"policy", "checkpoint", "activations", "offload", "cache-release", "mesh"}));
  command
      ->add_option("--global-batch", options->global_batch,
                   "Samples of a step over all ranks: which trace's micro-batch, and how many of them, is "
                   "decided")
      ->check(CLI::Range(std::int64_t{1}, std::int64_t{1} << 40));
  command
      ->add_option(
          "--expressible", options->expressible,
          "fsdp2: decide only what plain FSDP2 can be told, so that `shardplan export --fsdp2` leaves "
          "nothing out")
      ->check(CLI::IsMember({"fsdp2"}));
  command->add_option("--fix", options->fix, "What stays as the strategy has it")
      ->delimiter(',')
      ->check(CLI::IsMember(FixableDecisions()));
  command->add_option("--threads", options->threads, "Threads of the search (default: all)")
      ->check(CLI::Range(1, 256));
  command->add_flag("--whole-grid", options->whole_grid,
                    "Simulate every setting of the grid, and report the best as a baseline");
  command->add_flag("-q,--quiet", options->quiet, "No progress on standard error");
  AddPlanFlags(*command, options->flags);
  command->callback([options, &invocation] {
    const Status status = RunOptimize(*options);
    if (!status) invocation.exit_code = Fail(status.error());
  });
}

void AddCertifyCommand(CLI::App& app, Invocation& invocation) {
  CLI::App* command = app.add_subcommand("certify", "Check the certificate of an optimised plan");
  command->footer(
      "Example: shardplan certify plan.json cert.json --trace trace.json\n"
      "Exit code: 1 when a figure of the certificate, or its bound, does not hold.");
  auto options = std::make_shared<CertifyArguments>();
  command->add_option("PLAN", options->plan, "The plan")->required();
  command->add_option("CERTIFICATE", options->certificate, "As `shardplan optimize --certificate` writes it")
      ->required();
  AddFile(*command, "--trace", options->trace, "The trace that the plan was made from")->required();
  AddSeqFlag(*command, options->seq);
  command->callback([options, &invocation] {
    const Status status = RunCertify(*options);
    if (!status) invocation.exit_code = Fail(status.error());
  });
}

}  // namespace shardplan::cli
