// `show` and `diff`: what a plan says.
#include <fmt/format.h>

#include "commands.h"
#include "explain_plan.h"
#include "shardplan/schemas/io.h"
#include "shardplan/schemas/plan_text.h"
#include "shardplan/schemas/printable.h"
#include "support.h"

namespace shardplan::cli {

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
    if (const Status checked = CheckOutputs({options->plan}, {{"-o", options->output}}); !checked) {
      invocation.exit_code = Fail(checked.error());
      return;
    }
    const Result<Plan> plan = ReadPlan(options->plan);
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
    const Result<Plan> a = ReadPlan(files->first);
    const Result<Plan> b = ReadPlan(files->second);
    if (!a || !b) {
      invocation.exit_code = Fail(!a ? a.error() : b.error());
      return;
    }
    std::string text;
    for (const std::string& difference : DescribeDifferences(*a, *b)) text += Printable(difference) + "\n";
    invocation.exit_code = text.empty() ? PrintAnswer("the plans are equal\n")
                                        : PrintAnswer(text, ExitCode(ErrorCode::kNegative));
  });
}

}  // namespace shardplan::cli
