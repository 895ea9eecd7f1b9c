// SPDX-License-Identifier: Apache-2.0
// Helpers that the subcommands share: error printing, finding programs and shipped data, reading a plan in
// either form.
#pragma once

#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

#include "shardplan/schemas/error.h"
#include "shardplan/schemas/io.h"
#include "shardplan/schemas/plan.h"

namespace shardplan::cli {

// Lines for a person on stderr. Nobody can be told if stderr cannot be written.
void PrintError(std::string_view text);

// Prints "shardplan: error: ..." to stderr and returns the exit code of the error.
int Fail(const Error& error);

// A line of progress on stderr, "shardplan: <text>". Nothing when `quiet`.
void Progress(bool quiet, std::string_view text);

// Warns even with --quiet, "shardplan: <text>", in as many lines as the text has.
void Warn(std::string_view text);

// The checkout that the program was built in; empty: it is from a wheel.
std::filesystem::path SourceFolder();

// Writes a document to a file atomically, or to stdout for "-".
Status WriteOutput(const std::string& path, std::string_view bytes);
Status WriteOutput(const std::string& path, const TextInPieces& text);

// WriteOutput, and a line of progress that says so ("wrote r.html (<more>)").
Status WriteAndSay(const std::string& path, std::string_view bytes, bool quiet, std::string_view more = {});
// The plan's JSON text, which may be larger than the plan.
Status WriteAndSay(const std::string& path, const Plan& plan, bool quiet);

// Writes lines for a person to stdout, control characters of names as escapes (printable.h).
Status PrintText(std::string_view text);

// PrintText, and `exit_code` if that could be done, else that of the failure.
int PrintAnswer(std::string_view text, int exit_code = 0);

// A file that a flag names. An empty path: the flag is not given.
struct OutputFile {
  std::string flag, path;  // "-": standard output
};

// Before any work: kUsage where an output is one of the inputs (by inode, so through links, too) or two
// outputs are one file; kEnvironment where one cannot be written. `prints`: there is text on standard output
// besides.
Status CheckOutputs(const std::vector<std::string>& inputs, const std::vector<OutputFile>& outputs,
                    bool prints = false);

// Whether one of the outputs is standard output: it is in place of text there.
bool HasStandardOutput(const std::vector<OutputFile>& outputs);

// Folders with shipped data, first match wins: an installation's share folder, then the source tree.
std::vector<std::filesystem::path> DataFolders(const std::string& installed, const std::string& in_source);

// Replaces this process by `program arguments...`; PYTHONPATH is extended by `python_path` unless empty. The
// Python package compares SHARDPLAN_COMMAND_VERSION with its own version.
// Returns only on failure.
Error Execute(const std::string& program, const std::vector<std::string>& arguments,
              const std::string& python_path = {});

// Whether something is there, be it a link that leads nowhere: opening it says what is wrong.
bool IsThere(const std::string& path);

// The folder that holds the running executable.
std::string ExecutableFolder();

// The folder of the shipped Python package, beside the installed program or in the source tree.
std::string PythonFolder();

}  // namespace shardplan::cli
