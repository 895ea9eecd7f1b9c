// SPDX-License-Identifier: Apache-2.0
// The subcommands of `shardplan`. Each Add function registers one with its options; its callback stores the
// process exit code in *exit_code (docs/internals/architecture.md, "Errors").
#pragma once

#include <CLI/CLI.hpp>
#include <string>
#include <vector>

#include "shardplan/schemas/error.h"

namespace shardplan::cli {

// argv[0] and the tail that a subcommand passes on to another program.
struct Invocation {
  std::string program;  // argv[0]
  int exit_code = 0;
  std::vector<std::string> words = {};  // behind a command that hands them to another program
};

void AddTraceCommand(CLI::App& app, Invocation& invocation);
void AddPlanCommand(CLI::App& app, Invocation& invocation);
void AddOptimizeCommand(CLI::App& app, Invocation& invocation);
void AddCertifyCommand(CLI::App& app, Invocation& invocation);
void AddExplainCommand(CLI::App& app, Invocation& invocation);
void AddValidateCommand(CLI::App& app, Invocation& invocation);
void AddSimulateCommand(CLI::App& app, Invocation& invocation);
void AddCompareCommand(CLI::App& app, Invocation& invocation);
void AddCostCommand(CLI::App& app, Invocation& invocation);
void AddMemoryCommand(CLI::App& app, Invocation& invocation);
void AddExplainMemoryCommand(CLI::App& app, Invocation& invocation);
void AddShowCommand(CLI::App& app, Invocation& invocation);
void AddDiffCommand(CLI::App& app, Invocation& invocation);
void AddExportCommand(CLI::App& app, Invocation& invocation);
void AddRunCommand(CLI::App& app, Invocation& invocation);
void AddConformanceCommand(CLI::App& app, Invocation& invocation);
void AddCalibrateCommand(CLI::App& app, Invocation& invocation);
void AddImportProfileCommand(CLI::App& app, Invocation& invocation);
void AddDoctorCommand(CLI::App& app, Invocation& invocation);
void AddEvaluateCommand(CLI::App& app, Invocation& invocation);
void AddSweepCommand(CLI::App& app, Invocation& invocation);
void AddTorchtitanCommand(CLI::App& app, Invocation& invocation);
void AddRehearseCommand(CLI::App& app, Invocation& invocation);
void AddLayoutCommand(CLI::App& app, Invocation& invocation);
void AddReshardCommand(CLI::App& app, Invocation& invocation);
void AddReshardCheckpointCommand(CLI::App& app, Invocation& invocation);
void AddAllocatorReplayCommand(CLI::App& app, Invocation& invocation);

// Becomes `python -m shardplan.MODULE ARGUMENTS...`, which finds the programs of this build. Returns only
// where that cannot be started.
Error ExecutePythonCommand(const std::string& module, std::vector<std::string> arguments);

}  // namespace shardplan::cli
