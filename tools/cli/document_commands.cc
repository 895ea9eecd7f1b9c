// `validate`, `show` and `diff`: what a document says and whether it holds.
#include <fmt/format.h>

#include <type_traits>

#include "commands.h"
#include "explain_plan.h"
#include "shardplan/schemas/io.h"
#include "shardplan/schemas/plan_text.h"
#include "shardplan/schemas/verifier.h"
#include "support.h"

namespace shardplan::cli {
namespace {

std::string Summary(const Trace& trace) {
  std::size_t events = 0;
  for (const Pass& pass : trace.forwards) events += pass.events.size();
  for (const Pass& pass : trace.backwards) events += pass.events.size();
  return fmt::format("trace of {}: {} modules, {} parameters, {} events", trace.model, trace.modules.size(),
                     trace.parameters.size(), events);
}
std::string Summary(const Cluster& cluster) {
  return fmt::format("cluster {}: {} ranks, {} per node, {} measured collective tables", cluster.name,
                     cluster.ranks, cluster.ranks_per_node, cluster.collectives.size());
}
std::string Summary(const Strategy& strategy) {
  return fmt::format("strategy: policy {}, {} unit rules", strategy.policy, strategy.units.size());
}
std::string Summary(const Report& report) {
  return fmt::format("report of {} under {}: step {:.3f} ms", report.model, report.policy,
                     static_cast<double>(report.step_ns.value) / 1e6);
}
std::string Summary(const Plan& plan) {
  std::size_t triggers = 0, instructions = 0;
  for (const PlanStep& step : plan.steps) {
    triggers += step.triggers.size();
    for (const Trigger& trigger : step.triggers) instructions += trigger.instructions.size();
  }
  return fmt::format("plan of {} by {} for {} ranks: {} units, {} steps, {} triggers, {} instructions",
                     plan.model, plan.policy, plan.world_size, plan.units.size(), plan.steps.size(), triggers,
                     instructions);
}

// Prints every violation; 0 or the exit code of a negative answer.
int VerifyAndExplain(const std::string& path, const Plan& plan) {
  const std::vector<Violation> violations = Verify(plan);
  if (violations.empty()) {
    fmt::print("{}: verifies\n", path);
    for (const Remark& remark : Remarks(plan)) {
      fmt::print("{}: remark: {}: {}\n", path, Name(remark.kind), remark.message);
    }
    return 0;
  }
  for (const Violation& violation : violations) fmt::print("{}: {}\n", path, Explain(plan, violation));
  fmt::print("{}: {} violation{}\n", path, violations.size(), violations.size() == 1 ? "" : "s");
  return ExitCode(ErrorCode::kNegative);
}

Result<Document> ReadAnyDocument(const std::string& path) {
  Result<std::string> text = ReadFile(path);
  if (!text) return std::unexpected(text.error());
  const std::size_t first = text->find_first_not_of(" \t\r\n");
  if (first == std::string::npos || (*text)[first] == '{') return ReadDocument(path);
  Result<Plan> plan = ReadPlanFile(path);
  if (!plan) return std::unexpected(plan.error());
  return Document(std::move(*plan));
}

int ValidateFile(const std::string& path) {
  const Result<Document> document = ReadAnyDocument(path);
  if (!document) return Fail(document.error());
  fmt::print("{}: {}\n", path, std::visit([](const auto& value) { return Summary(value); }, *document));
  const Plan* plan = std::get_if<Plan>(&*document);
  return plan ? VerifyAndExplain(path, *plan) : 0;
}

}  // namespace

void AddValidateCommand(CLI::App& app, Invocation& invocation) {
  CLI::App* command = app.add_subcommand(
      "validate", "Check documents of any kind; for a plan, run the verifier and explain each violation");
  command->footer(
      "Example: shardplan validate trace.json plan.json\n"
      "Exit code: the worst of all files (0 fine, 1 a plan does not verify, 3 not a document).");
  auto files = std::make_shared<std::vector<std::string>>();
  command->add_option("FILE", *files, "Documents (JSON, or a plan as `shardplan show` prints it)")
      ->required();
  command->callback([files, &invocation] {
    for (const std::string& file : *files) {
      invocation.exit_code = std::max(invocation.exit_code, ValidateFile(file));
    }
  });
}

void AddShowCommand(CLI::App& app, Invocation& invocation) {
  CLI::App* command =
      app.add_subcommand("show", "Print a plan as text, trigger by trigger; the text parses back");
  command->footer(
      "Examples: shardplan show plan.json > plan.txt\n"
      "          shardplan show plan.txt --json -o plan.json\n"
      "          shardplan show plan.json --explain | less");
  struct Options {
    std::string plan, output = "-";
    bool json = false;
    bool explain = false;
  };
  auto options = std::make_shared<Options>();
  command->add_option("PLAN", options->plan, "plan.json, or the text form")->required();
  CLI::Option* json = command->add_flag("--json", options->json, "Print JSON instead of text");
  command->add_flag("--explain", options->explain, "Print every step, and why each instruction is there")
      ->excludes(json);
  command->add_option("-o,--output", options->output, "Where to write (default: standard output)");
  command->callback([options, &invocation] {
    const Result<Plan> plan = ReadPlanFile(options->plan);
    if (!plan) {
      invocation.exit_code = Fail(plan.error());
      return;
    }
    const std::string text = options->json      ? ToJson(*plan)
                             : options->explain ? ExplainPlan(*plan, true)
                                                : PlanText(*plan);
    const Status written = WriteOutput(options->output, text);
    if (!written) invocation.exit_code = Fail(written.error());
  });
}

void AddDiffCommand(CLI::App& app, Invocation& invocation) {
  CLI::App* command = app.add_subcommand("diff", "Say in words how plan B differs from plan A");
  command->footer("Example: shardplan diff fsdp1.json fsdp2.json\nExit code: 0 equal, 1 they differ.");
  auto files = std::make_shared<std::pair<std::string, std::string>>();
  command->add_option("A", files->first, "A plan")->required();
  command->add_option("B", files->second, "Another plan")->required();
  command->callback([files, &invocation] {
    const Result<Plan> a = ReadPlanFile(files->first);
    const Result<Plan> b = ReadPlanFile(files->second);
    if (!a || !b) {
      invocation.exit_code = Fail(!a ? a.error() : b.error());
      return;
    }
    const std::vector<std::string> differences = DescribeDifferences(*a, *b);
    for (const std::string& difference : differences) fmt::print("{}\n", difference);
    if (differences.empty()) {
      fmt::print("the plans are equal\n");
    } else {
      invocation.exit_code = ExitCode(ErrorCode::kNegative);
    }
  });
}

}  // namespace shardplan::cli
