// shardplan: trace, plan, optimize, certify, explain, validate, simulate, compare, cost, memory,
// explain-memory, show, diff, run, conformance, calibrate, sweep, evaluate, layout, reshard,
// reshard-checkpoint, allocator-replay.
#include <fcntl.h>
#include <unistd.h>

#include <csignal>
#include <exception>
#include <sstream>
#include <string>
#include <string_view>

#include "commands.h"
#include "shardplan/schemas/error.h"
#include "shardplan/schemas/printable.h"
#include "support.h"

namespace {

// What CLI11 says of a first word that is no command names neither the word nor the commands.
std::string CommandsText(const CLI::App& app, std::string_view word) {
  std::string text = "shardplan: a command is missing";
  if (!word.empty()) {
    text = word.starts_with('-') ? "shardplan: no such option: " : "shardplan: no such command: ";
    text += word;
  }
  text += "\nThe commands are";
  for (const CLI::App* command : app.get_subcommands([](const CLI::App*) { return true; }))
    text += " " + command->get_name();
  return text + "\nRun with --help for more information.\n";
}

// A write that fails is an error that is told, and no file of ours gets the number of a standard descriptor
// that was closed.
void PrepareWriting() {
  (void)std::signal(SIGPIPE, SIG_IGN);
  (void)std::signal(SIGXFSZ, SIG_IGN);
  for (const int standard : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO}) {
    if (::fcntl(standard, F_GETFD) < 0)
      (void)::open("/dev/null", standard == STDERR_FILENO ? O_WRONLY : O_RDONLY);
  }
}

// An empty value of a flag that names a file would count as no flag.
void RefuseEmptyNames(CLI::App& app) {
  const CLI::Validator not_empty([](std::string& name) { return name.empty() ? "names no file" : ""; }, "");
  for (CLI::App* command : app.get_subcommands([](const CLI::App*) { return true; })) {
    for (const char* flag : {"--strategy", "--cluster", "--trace", "--output", "--graph", "--write-strategy",
                             "--report", "--certificate", "--timeline", "--html", "--rows", "--plot", "--map",
                             "--json", "--fit", "--target-layout"}) {
      CLI::Option* option = command->get_option_no_throw(flag);
      if (option != nullptr && option->get_items_expected_max() > 0) option->check(not_empty);
    }
  }
}

// Help, the version, or what is wrong with the command line.
int Explain(const CLI::App& app, const CLI::ParseError& error) {
  std::ostringstream text, wrong;
  const bool asked = app.exit(error, text, wrong) == 0;
  if (!asked) {
    // The words may hold anything: the message is one line, the hint that CLI11 adds another.
    std::string said = wrong.str();
    const std::size_t hint = said.rfind("\nRun with --help");
    if (hint == std::string::npos) {
      shardplan::cli::PrintError(said);
    } else {
      shardplan::cli::PrintError(shardplan::Printable(said.substr(0, hint)) + said.substr(hint));
    }
    return ExitCode(shardplan::ErrorCode::kUsage);
  }
  return shardplan::cli::PrintAnswer(text.str());
}

}  // namespace

int main(int argc, char** argv) {
  using namespace shardplan;
  PrepareWriting();
  CLI::App app{
      "shardplan makes the schedule of fully sharded data-parallel training a document:\n"
      "plan it from a traced model, verify it, simulate it, replay it on real ranks.\n",
      "shardplan"};
  app.require_subcommand(1);
  app.set_version_flag("--version", SHARDPLAN_VERSION);
  app.footer(
      "Exit codes: 0 done; 1 the answer is negative (does not verify, does not fit, differs); 2 usage;\n"
      "3 bad input; 4 environment (no GPU, no NCCL, no space); 70 a bug of shardplan.");
  cli::Invocation invocation{argv[0], 0};
  cli::AddTraceCommand(app, invocation);
  cli::AddPlanCommand(app, invocation);
  cli::AddOptimizeCommand(app, invocation);
  cli::AddCertifyCommand(app, invocation);
  cli::AddExplainCommand(app, invocation);
  cli::AddValidateCommand(app, invocation);
  cli::AddSimulateCommand(app, invocation);
  cli::AddCompareCommand(app, invocation);
  cli::AddCostCommand(app, invocation);
  cli::AddMemoryCommand(app, invocation);
  cli::AddExplainMemoryCommand(app, invocation);
  cli::AddShowCommand(app, invocation);
  cli::AddDiffCommand(app, invocation);
  cli::AddRunCommand(app, invocation);
  cli::AddConformanceCommand(app, invocation);
  cli::AddCalibrateCommand(app, invocation);
  cli::AddSweepCommand(app, invocation);
  cli::AddEvaluateCommand(app, invocation);
  cli::AddLayoutCommand(app, invocation);
  cli::AddReshardCommand(app, invocation);
  cli::AddReshardCheckpointCommand(app, invocation);
  cli::AddAllocatorReplayCommand(app, invocation);
  RefuseEmptyNames(app);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    const std::string_view word = argc > 1 ? argv[1] : "";
    if (error.get_exit_code() != 0 && app.get_subcommands().empty()) {
      cli::PrintError(CommandsText(app, word));
      return ExitCode(ErrorCode::kUsage);
    }
    const int code = Explain(app, error);
    return code == 0 ? invocation.exit_code : code;
  } catch (const std::bad_alloc&) {
    cli::PrintError("shardplan: error: there is not enough memory for this document\n");
    return ExitCode(ErrorCode::kEnvironment);
  } catch (const std::exception& error) {
    cli::PrintError(std::string("shardplan: internal error: ") + error.what() + "\n");
    return ExitCode(ErrorCode::kInternal);
  }
  return invocation.exit_code;
}
