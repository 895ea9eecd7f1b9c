// What the subcommands share: error printing, finding clusters and programs, reading a plan in either form.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "shardplan/schemas/cluster.h"
#include "shardplan/schemas/error.h"
#include "shardplan/schemas/plan.h"

namespace shardplan::cli {

// Prints "shardplan: error: ..." to stderr and returns the exit code of the error.
int Fail(const Error& error);

// A line of progress on stderr, "shardplan: <text>". Nothing when `quiet`.
void Progress(bool quiet, std::string_view text);

// Writes bytes to a file atomically, or to stdout for "-".
Status WriteOutput(const std::string& path, std::string_view bytes);

// A plan from JSON or from the text that `shardplan show` prints (the first character decides).
Result<Plan> ReadPlanFile(const std::string& path);

// A cluster document: a path, or the name of one that is shipped ("h100_sxm_8"). kBadInput lists the shipped
// names.
Result<Cluster> FindCluster(const std::string& path_or_name);

// Replaces this process by `program arguments...`; PYTHONPATH is extended by `python_path` unless empty.
// Returns only on failure.
Error Execute(const std::string& program, const std::vector<std::string>& arguments,
              const std::string& python_path = {});

// The folder that holds the running executable.
std::string ExecutableFolder();

// The folder of the shipped Python package, beside the installed program or in the source tree.
std::string PythonFolder();

}  // namespace shardplan::cli
