// SPDX-License-Identifier: Apache-2.0
// `export`: a plan as plain calls of PyTorch's FSDP2, for a job without shardplan.
#include <fmt/format.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "commands/commands.h"
#include "flags/file_flag.h"
#include "shardplan/planner/fsdp2_settings.h"
#include "shardplan/planner/planner.h"
#include "shardplan/schemas/io.h"
#include "shardplan/schemas/printable.h"
#include "shardplan/schemas/pytorch_rules.h"
#include "shardplan/simulator/simulate.h"
#include "support.h"
#include "texts/figures.h"
#include "texts/fsdp2_script.h"
#include "trace_names.h"
#include "verified_plan.h"

namespace shardplan::cli {
namespace {

struct ExportArguments {
  std::string plan, trace, output = "apply_plan.py";
  std::optional<std::int64_t> seq;
  bool fsdp2 = false;
  bool no_verify = false;
  bool quiet = false;
};

Result<Report> ReportOf(const Plan& plan) {
  Result<Simulation> simulation = Simulate(plan, {.record_timeline = false});
  if (!simulation) return std::unexpected(std::move(simulation.error()));
  return std::move(simulation->report);
}

// The plan of policy fsdp2 that the exported settings make.
Result<Plan> PlanOfSettings(const ExportArguments& arguments, const Plan& plan,
                            const Fsdp2Settings& settings) {
  const Result<Trace> trace = ReadNamedTrace(arguments.trace, arguments.seq);
  if (!trace) return std::unexpected(trace.error());
  if (const std::string digest = Digest(ToJson(*trace)); digest != plan.digests.trace) {
    Error error{.code = ErrorCode::kBadInput, .message = "the plan was made from another trace"};
    error.file = arguments.plan;
    error.pointer = "/digests/trace";
    error.found = plan.digests.trace;
    error.expected = fmt::format("{}, of {}", digest, arguments.trace);
    return std::unexpected(std::move(error));
  }
  Result<PlannerOutput> planned = MakePlan(*trace, settings.strategy, plan.cluster, {.verify = false});
  if (!planned) {
    planned.error().message = "FSDP2 cannot be set up like this plan: " + planned.error().message;
    planned.error().file = arguments.plan;
    return std::unexpected(std::move(planned.error()));
  }
  return std::move(planned->plan);
}

// Differences between the exported calls and the plan, and their cost.
Result<std::vector<std::string>> DifferenceLines(const ExportArguments& arguments, const Plan& plan,
                                                 const Fsdp2Settings& settings, const Report& report) {
  std::vector<std::string> lines;
  if (!settings.left_out.empty()) {
    lines.emplace_back("Plain FSDP2 cannot say:");
    for (const LeftOut& left : settings.left_out)
      lines.push_back(fmt::format("  {}: {}", left.pointer, left.what));
  }
  if (arguments.trace.empty()) {
    lines.emplace_back(settings.left_out.empty() ? "Plain FSDP2 has a call for each setting of the plan."
                                                 : "What that costs: export with --trace.");
    return lines;
  }
  const Result<Plan> other = PlanOfSettings(arguments, plan, settings);
  if (!other) return std::unexpected(other.error());
  if (other->steps == plan.steps && other->buffers == plan.buffers) {
    lines.emplace_back("These calls issue the plan's schedule, instruction for instruction.");
    return lines;
  }
  if (settings.left_out.empty())
    lines.emplace_back("The plan was edited: its instructions are not those that its strategy makes.");
  const Result<Report> with = ReportOf(*other);
  if (!with) return std::unexpected(with.error());
  lines.push_back(fmt::format(
      "These calls cost {:+.3f} ms and {:+.3f} GiB beside the plan (simulated: {:.3f} ms, {:.3f} GiB of the "
      "device).",
      InMilliseconds(with->step_ns - report.step_ns),
      InGibibytes(NeededBytes(with->memory) - NeededBytes(report.memory)), InMilliseconds(with->step_ns),
      InGibibytes(NeededBytes(with->memory))));
  return lines;
}

// The part that is left to the job.
std::vector<std::string> RestLines(const Strategy& settings) {
  std::vector<std::string> lines;
  if (settings.compile) lines.emplace_back("The plan is of compiled blocks: compile them before apply_plan.");
  if (!settings.fsdp2.extensions.empty())
    lines.emplace_back("Parameters with all-gather extensions are the model's own: they have to be there.");
  if (settings.program.size() > 1)
    lines.emplace_back(
        "The plan's first steps call other setters than the step that repeats; these are the latter's.");
  return lines;
}

Status RunExport(const ExportArguments& arguments) {
  if (!arguments.fsdp2)
    return MakeError(ErrorCode::kUsage, "--fsdp2 is missing: plain FSDP2 is what a plan is exported as");
  const bool prints = arguments.output != "-";
  if (Status s = CheckOutputs({arguments.plan, arguments.trace}, {{"-o", arguments.output}}, prints); !s)
    return s;
  const Result<Plan> plan = ReadVerifiedPlan(arguments.plan, arguments.no_verify);
  if (!plan) return std::unexpected(plan.error());
  const auto of_plan = [&](Error error) {
    if (error.file.empty()) error.file = arguments.plan;
    return std::unexpected(std::move(error));
  };
  const Result<Fsdp2Settings> settings = Fsdp2SettingsOf(*plan);
  if (!settings) return of_plan(settings.error());
  const Result<Report> report = ReportOf(*plan);
  if (!report) return of_plan(report.error());
  std::vector<std::string> about = {
      fmt::format("Plan of {} for {} ranks, policy {} of PyTorch {}, on {}.", plan->model, plan->world_size,
                  plan->policy, Name(PyTorchOfPlan(plan->strategy)), plan->cluster.name),
      fmt::format("Simulated: a step of {:.3f} ms, {:.3f} GiB of the device.",
                  InMilliseconds(report->step_ns), InGibibytes(NeededBytes(report->memory)))};
  const Result<std::vector<std::string>> differences = DifferenceLines(arguments, *plan, *settings, *report);
  if (!differences) return of_plan(differences.error());
  about.insert(about.end(), differences->begin(), differences->end());
  const std::vector<std::string> rest = RestLines(settings->strategy);
  about.insert(about.end(), rest.begin(), rest.end());
  const Result<std::string> script = Fsdp2Script(*plan, settings->strategy, about);
  if (!script) return of_plan(script.error());
  if (Status s = WriteAndSay(arguments.output, *script, arguments.quiet); !s) return s;
  if (!prints) return {};
  std::string text;
  for (const std::string& line : about) text += Printable(line) + "\n";
  return PrintText(text);
}

}  // namespace

void AddExportCommand(CLI::App& app, Invocation& invocation) {
  CLI::App* command = app.add_subcommand(
      "export", "Write a plan as plain FSDP2 calls, for a job that does without shardplan");
  command->footer(
      "Example: shardplan export plan.json --fsdp2 --trace trace.json -o apply_plan.py\n"
      "Exit codes: 0 written, what FSDP2 cannot say is told; 1 the plan does not verify, or FSDP2 has "
      "nothing "
      "like it.");
  auto options = std::make_shared<ExportArguments>();
  command->add_option("PLAN", options->plan, "The plan")->required();
  command->add_flag("--fsdp2", options->fsdp2, "As calls of fully_shard and its setters");
  AddFile(*command, "--trace", options->trace,
          "The trace that the plan was made from: whether the calls issue the plan's schedule, and what it "
          "costs where they do not");
  AddSeqFlag(*command, options->seq);
  AddFile(*command, "-o,--output", options->output,
          "Where to write the Python file ('-': standard output; default: apply_plan.py)");
  AddNoVerifyFlag(*command, options->no_verify);
  command->add_flag("-q,--quiet", options->quiet, "No progress on standard error");
  command->callback([options, &invocation] {
    const Status status = RunExport(*options);
    if (!status) invocation.exit_code = Fail(status.error());
  });
}

}  // namespace shardplan::cli
