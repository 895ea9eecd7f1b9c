// SPDX-License-Identifier: Apache-2.0
// `explain-memory`: what is alive at the peak, since when, until when, and which knob would remove it.
#include <fmt/format.h>

#include "commands/commands.h"
#include "flags/file_flag.h"
#include "memory_input.h"
#include "shardplan/schemas/io.h"
#include "shardplan/simulator/memory_explanation.h"
#include "support.h"
#include "texts/memory_text.h"
#include "texts/memory_trials.h"
#include "trace_names.h"
#include "verified_plan.h"

namespace shardplan::cli {
namespace {

constexpr std::size_t kShown = 20;

struct ExplainMemoryArguments {
  std::string plan, trace, json;
  std::optional<std::int64_t> seq;
  bool all = false;
  bool no_verify = false;
  bool no_kernel_temporaries = false;
};

Status RunExplainMemory(const ExplainMemoryArguments& options) {
  const std::vector<OutputFile> outputs = {{"--json", options.json}};
  if (Status checked = CheckOutputs({options.plan, options.trace}, outputs, !HasStandardOutput(outputs));
      !checked)
    return checked;
  const Result<Plan> plan = ReadVerifiedPlan(options.plan, options.no_verify);
  if (!plan) return std::unexpected(plan.error());
  if (plan->steps.empty()) return MakeError(ErrorCode::kBadInput, "the plan has no step");
  const bool kernels = !options.no_kernel_temporaries;
  const MemoryExplanation explanation =
      ExplainMemory(*plan, MemoryHistoryOf(*plan, {.kernel_temporaries = kernels}));
  if (!options.json.empty()) {
    if (Status written = WriteOutput(options.json, ExplanationJson(*plan, explanation)); !written) {
      return written;
    }
    if (options.json == "-") return {};
  }
  std::string text = ExplanationTable(*plan, explanation, options.all ? explanation.alive.size() : kShown);
  if (!options.trace.empty()) {
    const Result<Trace> trace = ReadNamedTrace(options.trace, options.seq);
    if (!trace) return std::unexpected(trace.error());
    Result<std::vector<KnobTrial>> trials = TryKnobs(*plan, *trace, kernels);
    if (!trials) {
      trials.error().file = options.trace;
      return std::unexpected(trials.error());
    }
    text += TrialsTable(*trials, explanation.peak_bytes);
  }
  return PrintText(text);
}

}  // namespace

void AddExplainMemoryCommand(CLI::App& app, Invocation& invocation) {
  CLI::App* command = app.add_subcommand("explain-memory",
                                         "What is alive at a plan's peak: since when, until when, of which "
                                         "unit, and which knob would remove it");
  command->footer(
      "Examples: shardplan explain-memory plan.json\n"
      "          shardplan explain-memory plan.json --trace trace.json   (tries the knobs)\n"
      "          shardplan explain-memory plan.json --json alive.json --all");
  auto options = std::make_shared<ExplainMemoryArguments>();
  command->add_option("PLAN", options->plan, "A plan")->required();
  AddFile(*command, "--trace", options->trace,
          "The trace that the plan was made from: knobs are tried by planning again");
  AddSeqFlag(*command, options->seq);
  AddFile(*command, "--json", options->json, "Write all of it as JSON ('-': standard output, no table)");
  command->add_flag("--all", options->all, "All that is alive, not the largest 20");
  AddNoVerifyFlag(*command, options->no_verify);
  command->add_flag("--no-kernel-temporaries", options->no_kernel_temporaries,
                    "Leave out what kernels allocate inside themselves (estimated by formulas)");
  command->callback([options, &invocation] {
    const Status status = RunExplainMemory(*options);
    if (!status) invocation.exit_code = Fail(status.error());
  });
}

}  // namespace shardplan::cli
