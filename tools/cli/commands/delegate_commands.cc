// SPDX-License-Identifier: Apache-2.0
// `trace`, `calibrate`, `sweep`, `torchtitan`, `rehearse`, `doctor` and `conformance` (Python, most need
// torch) and `run` (C++, needs LibTorch) live in programs of their own, so that the command itself builds
// without either.
#include <fmt/format.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <optional>

#include "commands/commands.h"
#include "run/options.h"
#include "shardplan/schemas/io.h"
#include "shardplan/simulator/simulate.h"
#include "support.h"

namespace shardplan::cli {
namespace {

namespace fs = std::filesystem;

// The interpreter that has torch: $SHARDPLAN_PYTHON, that of the environment the command is installed in, the
// project's virtual environment, else python3.
std::string Python() {
  if (const char* named = std::getenv("SHARDPLAN_PYTHON")) return named;
  const fs::path beside = fs::path(ExecutableFolder()) / "python3";
  if (IsThere(beside)) return beside.string();
  const fs::path source = SourceFolder(), venv = source / ".venv" / "bin" / "python";
  return !source.empty() && IsThere(venv) ? venv.string() : "python3";
}

// A subcommand that hands everything after its name, --help included, to another program: Invocation::words.
// CLI11 sees the name alone, since a first -- would be its own.
CLI::App* AddDelegate(CLI::App& app, const std::string& name, const std::string& description) {
  CLI::App* command = app.add_subcommand(name, description);
  command->prefix_command();
  command->set_help_flag();
  return command;
}

bool Has(const std::vector<std::string>& arguments, std::string_view flag) {
  return std::ranges::any_of(
      arguments, [&](const std::string& a) { return a == flag || a.starts_with(std::string(flag) + "="); });
}

// The simulated report of the plan among the arguments, so that measured stands beside simulated. None where
// the user names a report, under torchrun (every rank would make one), or where the plan is not a good one:
// `run` says why.
std::optional<std::string> SimulatedReport(const std::vector<std::string>& arguments) {
  if (Has(arguments, "--report") || Has(arguments, "--help") || Has(arguments, "-h") || std::getenv("RANK")) {
    return std::nullopt;
  }
  const auto path = std::ranges::find_if(arguments, [](const std::string& a) {
    std::error_code ignored;
    return fs::is_regular_file(a, ignored);
  });
  if (path == arguments.end()) return std::nullopt;
  const Result<Plan> plan = ReadPlan(*path);
  if (!plan) return std::nullopt;
  SimulationOptions options;
  options.record_timeline = false;
  const Result<Simulation> simulation = Simulate(*plan, options);
  if (!simulation) return std::nullopt;
  return ToJson(simulation->report);
}

// Whether a folder of it has a layout.json: a recording of optimizer states.
bool HoldsOptimizerStates(const fs::path& folder) {
  std::error_code error;
  for (fs::directory_iterator entry(folder, error), end; !error && entry != end; entry.increment(error)) {
    std::error_code ignored;
    if (fs::exists(entry->path() / "layout.json", ignored)) return true;
  }
  return false;
}

// A file of these bytes that lives in memory, for this process and those that it becomes or starts: nothing
// is left behind however they end. Its path.
Result<std::string> MakeMemoryFile(std::string_view bytes) {
  const int file = memfd_create("shardplan-report", 0);
  std::string_view rest = bytes;
  while (file >= 0 && !rest.empty()) {
    const ssize_t written = write(file, rest.data(), rest.size());
    if (written <= 0) break;
    rest.remove_prefix(static_cast<std::size_t>(written));
  }
  if (file >= 0 && rest.empty()) return fmt::format("/proc/self/fd/{}", file);
  return MakeError(ErrorCode::kEnvironment,
                   fmt::format("no memory for the simulated report: {}", std::strerror(errno)));
}

// A command of the Python package that runs other commands of this build. Its module has underscores.
void RunInPython(CLI::App* command, Invocation& invocation) {
  command->callback([command, &invocation] {
    std::string module = command->get_name();
    std::ranges::replace(module, '-', '_');
    invocation.exit_code = Fail(ExecutePythonCommand(module, invocation.words));
  });
}

}  // namespace

Error ExecutePythonCommand(const std::string& module, std::vector<std::string> arguments) {
  arguments.insert(arguments.begin(), {"-m", "shardplan." + module});
  setenv("SHARDPLAN_PROGRAMS", ExecutableFolder().c_str(), 0);
  return Execute(Python(), arguments, PythonFolder());
}

void AddTraceCommand(CLI::App& app, Invocation& invocation) {
  CLI::App* command = AddDelegate(
      app, "trace", "Record what one training step of a model does -> trace.json (no GPU, no weights)");
  command->callback([&invocation] {
    std::vector<std::string> arguments = {"-m", "shardplan.tracer"};
    arguments.insert(arguments.end(), invocation.words.begin(), invocation.words.end());
    invocation.exit_code = Fail(Execute(Python(), arguments, PythonFolder()));
  });
}

void AddCalibrateCommand(CLI::App& app, Invocation& invocation) {
  RunInPython(
      AddDelegate(app, "calibrate", "Measure the machine at hand, and write a cluster document of it"),
      invocation);
}

void AddImportProfileCommand(CLI::App& app, Invocation& invocation) {
  RunInPython(AddDelegate(app, "import-profile", "Profiles of a training -> a report of what was measured"),
              invocation);
}

void AddDoctorCommand(CLI::App& app, Invocation& invocation) {
  RunInPython(AddDelegate(app, "doctor", "What is installed, which backends work here, and what to do"),
              invocation);
}

void AddSweepCommand(CLI::App& app, Invocation& invocation) {
  RunInPython(
      AddDelegate(app, "sweep", "Plan and simulate many configurations; the largest or smallest that fits"),
      invocation);
}

void AddTorchtitanCommand(CLI::App& app, Invocation& invocation) {
  CLI::App* command =
      AddDelegate(app, "torchtitan",
                  "Trace, plan and simulate a torchtitan job by its own configuration, and variants of it");
  command->callback(
      [&invocation] { invocation.exit_code = Fail(ExecutePythonCommand("titan", invocation.words)); });
}

void AddRehearseCommand(CLI::App& app, Invocation& invocation) {
  RunInPython(
      AddDelegate(app, "rehearse",
                  "Run any training script as one rank of N without a GPU, and say what memory it takes"),
      invocation);
}

void AddConformanceCommand(CLI::App& app, Invocation& invocation) {
  CLI::App* command = AddDelegate(
      app, "conformance", "Compare plans with what PyTorch does: recordings, or the installed one (--live)");
  command->callback([&invocation] {
    const std::vector<std::string>& given = invocation.words;
    if (SourceFolder().empty()) {
      invocation.exit_code =
          Fail({ErrorCode::kUsage,
                "conformance is a command of the source repository, which has the recordings "
                "and the program that compares them",
                {},
                {},
                {},
                {}});
      return;
    }
    // A folder without a model or optimizer states holds recordings of events, which need no Python. A
    // missing one is reported there too.
    std::error_code ignored;
    const bool events = !given.empty() && !given.front().starts_with('-') &&
                        !fs::exists(fs::path(given.front()) / "model.py", ignored) &&
                        !HoldsOptimizerStates(given.front());
    if (events) {
      const fs::path program = fs::path(ExecutableFolder()) / "shardplan-conformance";
      if (!IsThere(program)) {
        invocation.exit_code = Fail({ErrorCode::kEnvironment,
                                     "not built: build the target shardplan-conformance",
                                     program.string(),
                                     {},
                                     {},
                                     {}});
        return;
      }
      invocation.exit_code = Fail(Execute(program.string(), given));
      return;
    }
    std::vector<std::string> arguments = {"-m", "shardplan.conformance", "--programs", ExecutableFolder()};
    arguments.insert(arguments.end(), given.begin(), given.end());
    invocation.exit_code = Fail(Execute(Python(), arguments, PythonFolder()));
  });
}

namespace {

// The output that `run` is asked for is no file that it reads, and can be written. `run` prints besides.
Status CheckProfile(const std::vector<std::string>& arguments) {
  const std::string flag = "--profile";
  std::vector<std::string> others;
  std::string profile;
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    if (arguments[i] == flag && i + 1 < arguments.size()) {
      profile = arguments[++i];
    } else if (arguments[i].starts_with(flag + "=")) {
      profile = arguments[i].substr(flag.size() + 1);
    } else {
      others.push_back(arguments[i]);
    }
  }
  return profile.empty() ? Status() : CheckOutputs(others, {{flag, profile}}, /*prints=*/true);
}

// Ends of `run` before anything is started: its help, or arguments that it does not have.
std::optional<int> EndOfParsing(const std::vector<std::string>& arguments) {
  std::vector<const char*> words = {"shardplan run"};
  for (const std::string& argument : arguments) words.push_back(argument.c_str());
  run::RunOptions ignored;
  return run::ParseRun(static_cast<int>(words.size()), words.data(), ignored);
}

// shardplan-run beside the command; in a wheel, that of the environment's torch, which is compiled where it
// is not yet.
Error ExecuteRun(std::vector<std::string> arguments) {
  const fs::path program = fs::path(ExecutableFolder()) / "shardplan-run";
  if (IsThere(program)) return Execute(program.string(), arguments);
  if (SourceFolder().empty()) return ExecutePythonCommand("building", std::move(arguments));
  return {ErrorCode::kEnvironment,
          "this build has no executor: configure with -DSHARDPLAN_EXECUTOR=ON",
          program.string(),
          {},
          {},
          {}};
}

}  // namespace

void AddRunCommand(CLI::App& app, Invocation& invocation) {
  CLI::App* command =
      AddDelegate(app, "run", "Replay a plan without the model on real ranks: real memory, real collectives");
  command->callback([&invocation] {
    std::vector<std::string> arguments = invocation.words;
    if (const std::optional<int> code = EndOfParsing(arguments)) {
      invocation.exit_code = *code;
      return;
    }
    if (const Status status = CheckProfile(arguments); !status) {
      invocation.exit_code = Fail(status.error());
      return;
    }
    if (const std::optional<std::string> report = SimulatedReport(arguments)) {
      const Result<std::string> path = MakeMemoryFile(*report);
      if (!path) {
        invocation.exit_code = Fail(path.error());
        return;
      }
      arguments.insert(arguments.end(), {"--report", *path});
    }
    invocation.exit_code = Fail(ExecuteRun(std::move(arguments)));
  });
}

}  // namespace shardplan::cli
