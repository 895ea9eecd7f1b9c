// SPDX-License-Identifier: Apache-2.0
// `plan`: trace + cluster + strategy -> plan.
#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <optional>
#include <utility>
#include <vector>

#include "commands/commands.h"
#include "flags/cluster_choice.h"
#include "flags/default_cluster.h"
#include "flags/file_flag.h"
#include "flags/plan_flags.h"
#include "shardplan/planner/planner.h"
#include "shardplan/schemas/io.h"
#include "shardplan/schemas/plan_text.h"
#include "shardplan/schemas/precision.h"
#include "shardplan/schemas/pytorch_rules.h"
#include "shardplan/simulator/simulate.h"
#include "support.h"
#include "texts/explain_plan.h"
#include "trace_names.h"

namespace shardplan::cli {
namespace {

struct PlanArguments {
  std::string trace;
  std::optional<std::int64_t> seq;
  std::string strategy, graph, strategy_output, stop_after;
  std::optional<std::string> output;
  std::vector<std::string> skip;
  ClusterFlags cluster;
  PlanFlags flags;
  bool dump = false;
  bool explain = false;
  bool explain_schedule = false;
  bool quiet = false;
};

std::string PassesText() {
  std::string text;
  for (const PlannerPass& pass : PlannerPasses()) {
    const std::string use =
        pass.needed_by.empty() ? "may be skipped" : fmt::format("needed by {}", pass.needed_by);
    text += fmt::format("{:<20} makes {:<7} {}\n", pass.name, pass.makes, use);
  }
  return text;
}

// The destination of the plan, or of the output of --dump.
std::string OutputOf(const PlanArguments& options) {
  return options.output.value_or(options.stop_after.empty() ? "plan.json" : "-");
}

Status CheckArguments(const PlanArguments& options) {
  const bool of_the_plan = options.explain || options.explain_schedule || !options.graph.empty();
  if (!options.stop_after.empty() && of_the_plan) {
    return MakeError(ErrorCode::kUsage,
                     "--stop-after makes no plan: --graph, --explain and --explain-schedule need all passes");
  }
  const bool unverified = std::ranges::find(options.skip, "verify") != options.skip.end();
  const bool of_the_graph = options.explain_schedule || !options.graph.empty();
  if (unverified && of_the_graph && !options.flags.own_policy.library.empty()) {
    return MakeError(ErrorCode::kUsage,
                     "--graph and --explain-schedule are of a plan that verifies: with --policy-library they "
                     "need the pass verify");
  }
  std::vector<OutputFile> outputs = {{"--graph", options.graph},
                                     {"--write-strategy", options.strategy_output}};
  if (options.stop_after.empty() || options.dump) outputs.push_back({"-o", OutputOf(options)});
  return CheckOutputs({options.trace, options.strategy, options.cluster.cluster}, outputs,
                      options.explain || options.explain_schedule);
}

// The first passes only. Writes what the last of them made, if asked to.
Status RunSomePasses(const PlanArguments& options, const Trace& trace, const GivenStrategy& given,
                     const Cluster& cluster, PlanOptions plan_options) {
  plan_options.policy = given.policy();
  Result<PassOutput> made = RunPassesUntil(options.stop_after, trace, given.strategy, cluster, plan_options);
  if (!made) {
    return std::unexpected(WithDocument(std::move(made.error()), options.trace, options.strategy));
  }
  if (!options.dump) return {};
  return WriteAndSay(OutputOf(options), made->text, options.quiet, made->makes);
}

// How long each instruction of the step that repeats takes by itself in the simulation.
Result<std::string> ExplainTimedSchedule(const Plan& plan) {
  const Result<Simulation> simulation = Simulate(plan);
  if (!simulation) return std::unexpected(simulation.error());
  std::map<std::pair<std::int32_t, std::int32_t>, Nanoseconds> durations;
  for (const Span& span : simulation->spans) {
    if (span.step != plan.steady_step || span.stream < 0 || span.instruction < 0) continue;
    const Instruction& instruction =
        plan.steps[span.step].triggers[span.trigger].instructions[span.instruction];
    if (instruction.kind == InstructionKind::kWait) continue;  // as long as what it waits for
    durations[{span.trigger, span.instruction}] = Nanoseconds{span.end_ns.value - span.start_ns.value};
  }
  return ExplainSchedule(plan, plan.steady_step, [&](std::int32_t trigger, std::int32_t instruction) {
    const auto found = durations.find({trigger, instruction});
    return found == durations.end() ? Nanoseconds{} : found->second;
  });
}

// "": the trace says what gradients autograd makes. A wider one of a norm's weight is known of a trace that
// was recorded in the dtype that is planned, and stays as it is in FSDP2 (gradients_stay_as_made).
std::string RecordedDTypeNote(const Trace& trace, const Plan& plan) {
  if (plan.strategy.policy != "fsdp2" || !RulesOf(plan.strategy).gradients_stay_as_made) return {};
  for (const Unit& unit : plan.units) {
    const auto may_be_wider = [&](const UnitParameter& parameter) {
      return parameter.requires_grad && KeepsWiderGrads(unit, parameter);
    };
    if (unit.param_dtype == trace.compute_dtype || !std::ranges::any_of(unit.parameters, may_be_wider))
      continue;
    const auto recorded = Name(trace.compute_dtype), planned = Name(unit.param_dtype);
    return fmt::format(
        "note: the trace was recorded in {}, and {} computes in {}: gradients that autograd makes wider than "
        "that "
        "(norms' weights), which FSDP2 reduces as they are, are not known; `shardplan trace --dtype {}` "
        "records them",
        recorded, DisplayName(unit.fqn), planned, planned);
  }
  return {};
}

Status RunPlan(PlanArguments options) {
  Result<std::string> path = ResolveTrace(options.trace, options.seq);
  if (!path) return std::unexpected(std::move(path.error()));
  options.trace = *std::move(path);
  if (Status checked = CheckArguments(options); !checked) return checked;
  Result<Trace> trace = ReadTrace(options.trace);
  if (!trace) return std::unexpected(trace.error());
  Result<GivenStrategy> given = StrategyOf(options.strategy, options.flags);
  if (!given) return std::unexpected(given.error());
  if (Status made = ApplyTraceFlags(options.flags, *trace, options.trace, given->strategy); !made)
    return made;
  const std::optional<Muon>& muon = given->strategy.optimizer.muon;
  if (muon && muon->compute.empty() && (options.flags.muon_in_backward || !options.flags.muon_bucket.empty()))
    return BadFlag(options.flags.muon_in_backward ? "--muon-in-backward" : "--muon-bucket",
                   "no owners, to whom matrices could go", "--muon-owners shards, replicas or all");
  options.cluster.traced_ranks = trace->world_size;
  Result<ChosenCluster> chosen = ChooseClusterOrDefault(options.cluster, given->strategy, options.strategy);
  if (!chosen) return std::unexpected(std::move(chosen.error()));
  if (!chosen->note.empty()) Progress(options.quiet, chosen->note);
  const Cluster* cluster = &chosen->cluster;

  PlanOptions plan_options;
  plan_options.skip = options.skip;
  plan_options.on_pass = [&](std::string_view pass, Nanoseconds wall_ns) {
    Progress(options.quiet, fmt::format("{:<24} {:8.1f} ms", pass, static_cast<double>(wall_ns.value) / 1e6));
  };
  if (!options.stop_after.empty()) return RunSomePasses(options, *trace, *given, *cluster, plan_options);
  const Result<PlannerOutput> planned =
      PlanTrace(*trace, options.trace, *given, options.strategy, *cluster, plan_options);
  if (!planned) return std::unexpected(planned.error());
  if (const std::string note = RecordedDTypeNote(*trace, planned->plan); !note.empty())
    Progress(options.quiet, note);
  for (const std::string& fault : planned->faults) {
    Warn(fmt::format("the plan has a fault because PyTorch has it: {}", fault));
  }
  const Plan& plan = planned->plan;
  if (Status written = WriteAndSay(OutputOf(options), plan, options.quiet); !written) return written;
  if (!options.graph.empty()) {
    const std::string graph = ScheduleGraphviz(plan, plan.steady_step);
    if (Status written = WriteAndSay(options.graph, graph, options.quiet, "GraphViz"); !written)
      return written;
  }
  if (!options.strategy_output.empty()) {
    const Status written = WriteAndSay(options.strategy_output, ToJson(given->strategy), options.quiet);
    if (!written) return written;
  }
  if (options.explain) {
    if (Status written = PrintText(ExplainPlan(plan, false)); !written) return written;
  }
  if (!options.explain_schedule) return {};
  const Result<std::string> schedule = ExplainTimedSchedule(plan);
  return schedule ? PrintText(*schedule) : std::unexpected(schedule.error());
}

void AddPassFlags(CLI::App& command, Invocation& invocation, PlanArguments& options) {
  CLI::Option* stop_after = command.add_option("--stop-after", options.stop_after,
                                               "Run the passes up to this one, and make no plan");
  command
      .add_flag("--dump", options.dump,
                "Write what that pass made: a trace or a plan (JSON), units and order (text), the graph "
                "(GraphViz)")
      ->needs(stop_after);
  command.add_option("--skip", options.skip, "A pass not to run; repeat it")->allow_extra_args(false);
  command.add_flag_callback(
      "--list-passes",
      [&invocation] {
        invocation.exit_code = PrintAnswer(PassesText());
        throw CLI::Success();
      },
      "Print the passes in order, and end");
}

}  // namespace

void AddPlanCommand(CLI::App& app, Invocation& invocation) {
  CLI::App* command =
      app.add_subcommand("plan", "Make a plan from a trace: trace + cluster + strategy -> plan.json");
  command->footer(
      "Examples: shardplan plan trace.json --cluster h100_sxm_8 --policy fsdp2 -o plan.json\n"
      "          shardplan plan trace.json --policy fsdp1 --sharding shard_grad_op --checkpoint "
      "'model.layers.*'\n"
      "          shardplan plan trace.json --mesh replicate=2 shard=4 --reshard-after-forward false "
      "--explain\n"
      "          shardplan plan trace.json --unit 'layers.*' --stop-after choose_units --dump");
  auto options = std::make_shared<PlanArguments>();
  command
      ->add_option(
          "TRACE", options->trace,
          "trace.json, as `shardplan trace` writes it, or a model whose traces are shipped (llama-3.1-8b)")
      ->required();
  AddSeqFlag(*command, options->seq);
  AddClusterFlags(
      *command, options->cluster,
      fmt::format(
          "A cluster file, the name of a shipped one, or a device (h100) of whose clusters the one for "
          "--ranks is taken (default: {}, with as many ranks as "
          "--ranks or the mesh says)",
          kDefaultNode));
  AddFile(*command, "--strategy", options->strategy, "A strategy file; flags go over it");
  AddFile(*command, "-o,--output", options->output,
          "Where to write the plan, or what --dump writes ('-': standard output; default: "
          "plan.json, with --dump standard output)");
  AddFile(*command, "--graph", options->graph, "Write the schedule graph of the steady step (GraphViz)");
  AddFile(*command, "--write-strategy", options->strategy_output,
          "Write the strategy that the flags amount to");
  command->add_flag("--explain", options->explain,
                    "Print the step that repeats, and why each instruction is there");
  command->add_flag(
      "--explain-schedule", options->explain_schedule,
      "Print where collectives may move in the step that repeats, what no work can move across, and its "
      "critical path");
  AddPassFlags(*command, invocation, *options);
  command->add_flag("-q,--quiet", options->quiet, "No progress on standard error");
  AddPlanFlags(*command, options->flags);
  command->callback([options, &invocation] {
    const Status status = RunPlan(*options);
    if (!status) invocation.exit_code = Fail(status.error());
  });
}

}  // namespace shardplan::cli
