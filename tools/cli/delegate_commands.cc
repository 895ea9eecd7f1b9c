// `trace` (Python, needs torch) and `run` (C++, needs LibTorch) live in programs of their own, so that the
// command itself builds without either.
#include <fmt/format.h>

#include <cstdlib>
#include <filesystem>

#include "commands.h"
#include "support.h"

namespace shardplan::cli {
namespace {

namespace fs = std::filesystem;

// The interpreter that has torch: $SHARDPLAN_PYTHON, the project's virtual environment, else python3.
std::string Python() {
  if (const char* named = std::getenv("SHARDPLAN_PYTHON")) return named;
  const fs::path venv = fs::path(SHARDPLAN_SOURCE_DIR) / ".venv" / "bin" / "python";
  return fs::exists(venv) ? venv.string() : "python3";
}

// A subcommand that hands everything after its name, --help included, to another program.
CLI::App* AddDelegate(CLI::App& app, const std::string& name, const std::string& description) {
  CLI::App* command = app.add_subcommand(name, description);
  command->prefix_command();
  command->set_help_flag();
  return command;
}

}  // namespace

void AddTraceCommand(CLI::App& app, Invocation& invocation) {
  CLI::App* command = AddDelegate(
      app, "trace", "Record what one training step of a model does -> trace.json (no GPU, no weights)");
  command->callback([command, &invocation] {
    std::vector<std::string> arguments = {"-m", "shardplan.tracer"};
    for (const std::string& argument : command->remaining()) arguments.push_back(argument);
    invocation.exit_code = Fail(Execute(Python(), arguments, PythonFolder()));
  });
}

void AddRunCommand(CLI::App& app, Invocation& invocation) {
  CLI::App* command =
      AddDelegate(app, "run", "Replay a plan without the model on real ranks: real memory, real collectives");
  command->callback([command, &invocation] {
    const fs::path program = fs::path(ExecutableFolder()) / "shardplan-run";
    if (!fs::exists(program)) {
      invocation.exit_code = Fail({ErrorCode::kEnvironment,
                                   "this build has no executor: configure with -DSHARDPLAN_EXECUTOR=ON",
                                   program.string(),
                                   {},
                                   {},
                                   {}});
      return;
    }
    invocation.exit_code = Fail(Execute(program.string(), command->remaining()));
  });
}

}  // namespace shardplan::cli
