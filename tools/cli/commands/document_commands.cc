// SPDX-License-Identifier: Apache-2.0
// `show` and `diff`: what a plan says.
#include <fmt/format.h>

#include "commands/commands.h"
#include "flags/file_flag.h"
#include "shardplan/checkpoints/reshard.h"
#include "shardplan/schemas/io.h"
#include "shardplan/schemas/plan_text.h"
#include "shardplan/schemas/printable.h"
#include "support.h"
#include "texts/explain_plan.h"

namespace shardplan::cli {
namespace {

// The text of a plan, or of a plan of resharding.
Result<std::string> ShownText(const std::string& path, bool json, bool explain) {
  Result<Document> document = ReadDocument(path);
  if (!document) return std::unexpected(document.error());
  if (const auto* reshard = std::get_if<ReshardPlan>(&*document)) {
    if (explain)
      return MakeError(ErrorCode::kUsage,
                       "--explain takes a plan of training; leave it out for one of resharding");
    if (json) return ToJson(*reshard);
    if (Status checked = CheckReshardLayouts(*reshard); !checked) {
      checked.error().file = path;
      return std::unexpected(std::move(checked.error()));
    }
    return ReshardText(*reshard);
  }
  if (const auto* plan = std::get_if<Plan>(&*document))
    return json ? ToJson(*plan) : explain ? ExplainPlan(*plan, true) : PlanText(*plan);
  return std::unexpected(Error{.code = ErrorCode::kBadInput,
                               .message = "another kind of document",
                               .file = path,
                               .pointer = "/schema",
                               .expected = "\"shardplan.plan/1\" or \"shardplan.reshard/1\""});
}

}  // namespace

void AddShowCommand(CLI::App& app, Invocation& invocation) {
  CLI::App* command = app.add_subcommand(
      "show", "Print a plan as text, trigger by trigger (it parses back), or one of resharding");
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
  AddFile(*command, "-o,--output", options->output, "Where to write (default: standard output)");
  command->callback([options, &invocation] {
    if (const Status checked = CheckOutputs({options->plan}, {{"-o", options->output}}); !checked) {
      invocation.exit_code = Fail(checked.error());
      return;
    }
    const Result<std::string> text = ShownText(options->plan, options->json, options->explain);
    const Status written = text ? WriteOutput(options->output, *text) : std::unexpected(text.error());
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
