// SPDX-License-Identifier: Apache-2.0
// shardplan: a command for each thing that one does with a plan.
#include <fcntl.h>
#include <unistd.h>

#include <csignal>
#include <exception>
#include <sstream>
#include <string>
#include <string_view>
#include <vector>

#include "commands/commands.h"
#include "shardplan/schemas/error.h"
#include "shardplan/schemas/printable.h"
#include "support.h"

namespace {

// CLI11's error for a first word that is no command names neither the word nor the commands.
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

// Commands by what they are for, in the order of --help.
struct CommandGroup {
  const char* name;
  std::vector<void (*)(CLI::App&, shardplan::cli::Invocation&)> commands;
};

void AddCommands(CLI::App& app, shardplan::cli::Invocation& invocation) {
  using namespace shardplan::cli;
  const std::vector<CommandGroup> groups = {
      {"Size a job",
       {AddSweepCommand, AddTorchtitanCommand, AddEvaluateCommand, AddMemoryCommand, AddRehearseCommand}},
      {"Plan", {AddTraceCommand, AddPlanCommand, AddOptimizeCommand, AddCertifyCommand, AddValidateCommand}},
      {"Predict",
       {AddSimulateCommand, AddCostCommand, AddCalibrateCommand, AddImportProfileCommand,
        AddAllocatorReplayCommand}},
      {"Explain",
       {AddExplainCommand, AddExplainMemoryCommand, AddCompareCommand, AddDiffCommand, AddShowCommand}},
      {"Train", {AddRunCommand, AddExportCommand, AddConformanceCommand}},
      {"Convert", {AddLayoutCommand, AddReshardCommand, AddReshardCheckpointCommand}},
      {"Check the machine", {AddDoctorCommand}}};
  for (const CommandGroup& group : groups) {
    for (const auto add : group.commands) {
      add(app, invocation);
      app.get_subcommands([](const CLI::App*) { return true; }).back()->group(group.name);
    }
  }
}

// A script that completes commands, and flags by asking a command for its help: those of other programs, too.
std::string CompletionText(const CLI::App& app, std::string_view shell) {
  std::string commands;
  for (const CLI::App* command : app.get_subcommands([](const CLI::App*) { return true; }))
    commands += command->get_name() + " ";
  std::string text = shell == "zsh" ? "autoload -U +X bashcompinit && bashcompinit\n" : "";
  return text +
         "_shardplan() {\n"
         "  local word=${COMP_WORDS[COMP_CWORD]}\n"
         "  if [ \"$COMP_CWORD\" -eq 1 ]; then\n"
         "    COMPREPLY=($(compgen -W '" +
         commands +
         "--help --version' -- \"$word\"))\n"
         "  elif [ \"${word#-}\" != \"$word\" ]; then\n"
         "    local flags=$({ \"${COMP_WORDS[0]}\" \"${COMP_WORDS[1]}\" --help-all || \"${COMP_WORDS[0]}\" "
         "\"${COMP_WORDS[1]}\" "
         "--help; } 2>/dev/null | grep -oE -- "
         "'--[a-z][a-z0-9-]+' | sort -u)\n"
         "    COMPREPLY=($(compgen -W \"$flags\" -- \"$word\"))\n"
         "  else\n"
         "    COMPREPLY=($(compgen -f -- \"$word\"))\n"
         "  fi\n"
         "}\n"
         "complete -o filenames -F _shardplan shardplan\n";
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
  AddCommands(app, invocation);
  std::string shell;
  app.add_option_function<std::string>(
         "--completion",
         [&](const std::string& name) {
           shell = name;
           app.require_subcommand(0);
         },
         "Print a script that completes commands and flags: eval \"$(shardplan --completion bash)\"")
      ->type_name("SHELL")
      ->check(CLI::IsMember({"bash", "zsh"}))
      ->trigger_on_parse();
  try {
    const std::string_view name = argc > 1 ? argv[1] : "";
    const bool delegates = !app.get_subcommands([&](const CLI::App* command) {
                                 return command->get_name() == name && command->get_prefix_command();
                               })
                                .empty();
    if (delegates) invocation.words.assign(argv + 2, argv + argc);
    app.parse(delegates ? 2 : argc, argv);
  } catch (const CLI::ParseError& error) {
    const std::string_view word = argc > 1 ? argv[1] : "";
    const bool is_own_flag = app.get_option_no_throw(std::string(word.substr(0, word.find('=')))) != nullptr;
    if (error.get_exit_code() != 0 && app.get_subcommands().empty() && !is_own_flag) {
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
  return shell.empty() ? invocation.exit_code : cli::PrintAnswer(CompletionText(app, shell));
}
