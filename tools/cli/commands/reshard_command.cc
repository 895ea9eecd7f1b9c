// SPDX-License-Identifier: Apache-2.0
// `layout` and `reshard`: where a training state lies, and how it gets to another layout.
#include <fmt/format.h>

#include <algorithm>
#include <optional>

#include "cluster_names.h"
#include "commands/commands.h"
#include "flags/file_flag.h"
#include "shardplan/checkpoints/reshard.h"
#include "shardplan/schemas/io.h"
#include "shardplan/simulator/simulate.h"
#include "state_layouts.h"
#include "support.h"

namespace shardplan::cli {

Result<StateLayout> ReadLayout(const std::string& path) {
  Result<Document> document = ReadDocument(path);
  if (!document) return std::unexpected(document.error());
  Result<StateLayout> layout =
      MakeInputError("/schema", "another kind of document", {}, "a state_layout or a plan");
  if (auto* read = std::get_if<StateLayout>(&*document)) {
    layout = std::move(*read);
    if (Status status = CheckStateLayout(*layout); !status) layout = std::unexpected(status.error());
  } else if (const auto* plan = std::get_if<Plan>(&*document)) {
    layout = StateLayoutOf(*plan);
  }
  if (!layout) layout.error().file = path;
  return layout;
}

namespace {

Status RunLayout(const std::string& plan, const std::string& output) {
  if (Status checked = CheckOutputs({plan}, {{"-o", output}}); !checked) return checked;
  const Result<StateLayout> layout = ReadLayout(plan);
  if (!layout) return std::unexpected(layout.error());
  return WriteOutput(output, ToJson(*layout));
}

struct ReshardArguments {
  std::string source, target, output, cluster;
  std::uint64_t budget = kUsualReshardBudget;
  std::optional<std::int64_t> ranks_per_node;
  bool lenient = false;
  bool quiet = false;
};

std::string PlanSummary(const ReshardPlan& plan) {
  std::size_t copies = 0;
  std::int64_t moved = 0;
  std::int64_t kept = 0;
  for (const ReshardGroup& group : plan.groups) {
    copies += group.copies.size() * group.tensors.size();
    for (const ReshardCopy& copy : group.copies)
      (copy.source_rank == copy.target_rank ? kept : moved) +=
          MovedBytes(copy).value * std::ssize(group.tensors);
  }
  return fmt::format("{} tensors, {} -> {} ranks: {} copies, {} bytes move, {} bytes stay on their rank\n",
                     plan.target.tensors.size(), RanksOf(plan.source), RanksOf(plan.target), copies, moved,
                     kept);
}

Result<ReshardPlan> MakePlanOf(const ReshardArguments& options, const std::optional<Cluster>& cluster) {
  const Result<StateLayout> source = ReadLayout(options.source);
  if (!source) return std::unexpected(source.error());
  const Result<StateLayout> target = ReadLayout(options.target);
  if (!target) return std::unexpected(target.error());
  ReshardOptions how;
  how.budget_bytes = Bytes{static_cast<std::int64_t>(options.budget)};
  how.lenient = options.lenient;
  if (cluster) how.ranks_per_node = cluster->ranks_per_node;
  how.ranks_per_node = options.ranks_per_node.value_or(how.ranks_per_node);
  Result<ReshardPlan> plan = PlanReshard(*source, *target, how);
  if (!plan && plan.error().code == ErrorCode::kBadInput) {
    const bool of_source = plan.error().pointer.starts_with("/source");
    plan.error().file = of_source ? options.source : options.target;
    plan.error().pointer.erase(0, std::string_view(of_source ? "/source" : "/target").size());
  }
  return plan;
}

// The largest of a device's clusters is chosen by it: that one has a link between nodes.
constexpr std::int64_t kMostRanks = std::int64_t{1} << 30;

Status RunReshard(const ReshardArguments& options) {
  const std::vector<OutputFile> outputs = {{"-o", options.output}};
  if (Status checked =
          CheckOutputs({options.source, options.target, options.cluster}, outputs, options.output != "-");
      !checked)
    return checked;
  std::optional<Cluster> cluster;
  if (!options.cluster.empty()) {
    Result<Cluster> found = FindCluster(options.cluster, kMostRanks);
    if (!found) return std::unexpected(found.error());
    cluster = std::move(*found);
  }
  const Result<ReshardPlan> plan = MakePlanOf(options, cluster);
  if (!plan) return std::unexpected(plan.error());
  if (const std::vector<ReshardViolation> violations = VerifyReshard(*plan); !violations.empty())
    return MakeError(ErrorCode::kInternal,
                     fmt::format("the plan does not verify: {}: {}", violations.front().pointer,
                                 violations.front().message));
  std::string text = PlanSummary(*plan);
  if (cluster) {
    const Result<ReshardSimulation> simulation = SimulateReshard(*plan, *cluster);
    if (!simulation) {
      Error error = simulation.error();
      error.file = options.cluster;
      return std::unexpected(std::move(error));
    }
    text += ReshardSimulationText(*simulation);
  }
  if (!options.output.empty()) {
    if (Status written = WriteAndSay(options.output, ToJson(*plan), options.quiet); !written) return written;
  }
  return HasStandardOutput(outputs) ? Status{} : PrintText(text);
}

}  // namespace

void AddLayoutCommand(CLI::App& app, Invocation& invocation) {
  CLI::App* command = app.add_subcommand(
      "layout", "Say which rank holds which elements of a plan's parameters and optimizer state");
  command->footer("Example: shardplan layout plan.json -o layout.json");
  auto files = std::make_shared<std::pair<std::string, std::string>>("", "-");
  command->add_option("PLAN", files->first, "A plan")->required();
  AddFile(*command, "-o,--output", files->second, "Where to write (default: standard output)");
  command->callback([files, &invocation] {
    const Status status = RunLayout(files->first, files->second);
    if (!status) invocation.exit_code = Fail(status.error());
  });
}

void AddReshardCommand(CLI::App& app, Invocation& invocation) {
  CLI::App* command = app.add_subcommand(
      "reshard", "Plan how a training state gets from one layout to another: who sends which bytes to whom");
  command->footer(
      "Examples: shardplan reshard fsdp1_8.json fsdp2_6.json -o reshard.json\n"
      "          shardplan reshard old.json new.json --cluster h100_sxm_1024\n"
      "A layout is a document of its own (`shardplan layout`), or that of a plan of training.");
  auto options = std::make_shared<ReshardArguments>();
  command->add_option("SOURCE", options->source, "Where the state is: a layout or a plan")->required();
  command->add_option("TARGET", options->target, "Where it goes: a layout or a plan")->required();
  AddFile(*command, "-o,--output", options->output, "Write the plan (JSON; '-': standard output, no text)");
  AddFile(*command, "--cluster", options->cluster, "Simulate the plan on this cluster");
  command->add_option("--budget", options->budget, "Staging memory of a rank (\"256MiB\", the default)")
      ->transform(CLI::AsSizeValue(false));
  command
      ->add_option("--ranks-per-node", options->ranks_per_node,
                   "Ranks that share the faster links (default: the cluster's, else 8)")
      ->check(CLI::Range(std::int64_t{1}, kMostLayoutRanks));
  command->add_flag("--lenient", options->lenient, "Leave out tensors of the target that the source lacks");
  command->add_flag("-q,--quiet", options->quiet, "No progress on standard error");
  command->callback([options, &invocation] {
    const Status status = RunReshard(*options);
    if (!status) invocation.exit_code = Fail(status.error());
  });
}

}  // namespace shardplan::cli
