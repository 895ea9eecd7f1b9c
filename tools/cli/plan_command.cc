// `plan`: trace + cluster + strategy -> plan.
#include <fmt/format.h>

#include "commands.h"
#include "explain_plan.h"
#include "plan_flags.h"
#include "shardplan/planner/planner.h"
#include "shardplan/schemas/io.h"
#include "shardplan/schemas/plan_text.h"
#include "support.h"

namespace shardplan::cli {
namespace {

struct PlanArguments {
  std::string trace, cluster = "h100_sxm_8", strategy, output = "plan.json", graph, strategy_output;
  PlanFlags flags;
  bool explain = false;
  bool quiet = false;
};

Status RunPlan(const PlanArguments& options) {
  Result<Trace> trace = ReadTrace(options.trace);
  if (!trace) return std::unexpected(trace.error());
  Result<Cluster> cluster = FindCluster(options.cluster);
  if (!cluster) return std::unexpected(cluster.error());
  const Result<Strategy> strategy = StrategyOf(options.strategy, options.flags);
  if (!strategy) return std::unexpected(strategy.error());

  PlanOptions plan_options;
  plan_options.on_pass = [&](std::string_view pass, Nanoseconds wall_ns) {
    Progress(options.quiet, fmt::format("{:<24} {:8.1f} ms", pass, static_cast<double>(wall_ns.value) / 1e6));
  };
  const Result<PlannerOutput> planned =
      PlanTrace(*trace, options.trace, *strategy, options.strategy, *cluster, plan_options);
  if (!planned) return std::unexpected(planned.error());
  for (const std::string& fault : planned->faults) {
    Progress(false, fmt::format("the plan has a fault because PyTorch has it: {}", fault));
  }
  if (Status written = WriteOutput(options.output, ToJson(planned->plan)); !written) return written;
  if (options.output != "-") Progress(options.quiet, fmt::format("wrote {}", options.output));
  if (!options.graph.empty()) {
    if (Status written = WriteOutput(options.graph, planned->graph_dot); !written) return written;
    Progress(options.quiet, fmt::format("wrote {} (GraphViz)", options.graph));
  }
  if (!options.strategy_output.empty()) {
    if (Status written = WriteOutput(options.strategy_output, ToJson(*strategy)); !written) return written;
    Progress(options.quiet, fmt::format("wrote {}", options.strategy_output));
  }
  return options.explain ? WriteOutput("-", ExplainPlan(planned->plan, false)) : Status{};
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
      "--explain");
  auto options = std::make_shared<PlanArguments>();
  command->add_option("TRACE", options->trace, "trace.json, as `shardplan trace` writes it")->required();
  command->add_option("--cluster", options->cluster, "A cluster file or the name of a shipped one")
      ->capture_default_str();
  command->add_option("--strategy", options->strategy, "A strategy file; flags go over it");
  command->add_option("-o,--output", options->output, "Where to write the plan ('-': standard output)")
      ->capture_default_str();
  command->add_option("--graph", options->graph, "Write the schedule graph of the steady step (GraphViz)");
  command->add_option("--write-strategy", options->strategy_output,
                      "Write the strategy that the flags amount to");
  command->add_flag("--explain", options->explain,
                    "Print the step that repeats, and why each instruction is there");
  command->add_flag("-q,--quiet", options->quiet, "No progress on standard error");
  AddPlanFlags(*command, options->flags);
  command->callback([options, &invocation] {
    const Status status = RunPlan(*options);
    if (!status) invocation.exit_code = Fail(status.error());
  });
}

}  // namespace shardplan::cli
