#include "support.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>

#include "shardplan/schemas/io.h"
#include "shardplan/schemas/plan_text.h"

namespace shardplan::cli {
namespace {

namespace fs = std::filesystem;

// Folders with shipped data, first match wins: an installation's share folder, then the source tree.
std::vector<fs::path> DataFolders(const std::string& installed, const std::string& in_source) {
  return {fs::path(ExecutableFolder()) / ".." / "share" / "shardplan" / installed,
          fs::path(SHARDPLAN_SOURCE_DIR) / in_source};
}

std::vector<std::string> ShippedClusters() {
  std::vector<std::string> names;
  for (const fs::path& folder : DataFolders("clusters", "tools/clusters")) {
    std::error_code ignored;
    for (const auto& entry : fs::directory_iterator(folder, ignored)) {
      if (entry.path().extension() == ".json") names.push_back(entry.path().stem().string());
    }
  }
  std::sort(names.begin(), names.end());
  names.erase(std::unique(names.begin(), names.end()), names.end());
  return names;
}

std::vector<char*> Argv(const std::string& program, const std::vector<std::string>& arguments) {
  std::vector<char*> argv;
  argv.push_back(const_cast<char*>(program.c_str()));
  for (const std::string& argument : arguments) argv.push_back(const_cast<char*>(argument.c_str()));
  argv.push_back(nullptr);
  return argv;
}

Error CannotStart(const std::string& program, int error) {
  return {ErrorCode::kEnvironment,
          fmt::format("cannot start {}: {}", program, std::strerror(error)),
          {},
          {},
          {},
          {}};
}

}  // namespace

int Fail(const Error& error) {
  std::fflush(stdout);
  fmt::print(stderr, "shardplan: error: {}\n", ToString(error));
  return ExitCode(error.code);
}

void Progress(bool quiet, std::string_view text) {
  if (!quiet) fmt::print(stderr, "shardplan: {}\n", text);
}

Status WriteOutput(const std::string& path, std::string_view bytes) {
  if (path != "-") return WriteFileAtomically(path, bytes);
  if (std::fwrite(bytes.data(), 1, bytes.size(), stdout) != bytes.size() || std::fflush(stdout) != 0) {
    return MakeError(ErrorCode::kEnvironment,
                     fmt::format("cannot write to standard output: {}", std::strerror(errno)));
  }
  return {};
}

Result<Plan> ReadPlanFile(const std::string& path) {
  Result<std::string> text = ReadFile(path);
  if (!text) return std::unexpected(text.error());
  const std::size_t first = text->find_first_not_of(" \t\r\n");
  const bool json = first == std::string::npos || (*text)[first] == '{';
  Result<Plan> plan = json ? ParsePlan(*text) : ParsePlanText(*text);
  if (!plan && plan.error().file.empty()) plan.error().file = path;
  return plan;
}

Result<Cluster> FindCluster(const std::string& path_or_name) {
  if (fs::exists(path_or_name)) return ReadCluster(path_or_name);
  for (const fs::path& folder : DataFolders("clusters", "tools/clusters")) {
    const fs::path candidate = folder / (path_or_name + ".json");
    if (fs::exists(candidate)) return ReadCluster(candidate.string());
  }
  Error error;
  error.code = ErrorCode::kBadInput;
  error.file = path_or_name;
  error.message = "no such cluster file, nor a shipped cluster of that name";
  error.expected = fmt::format("a path or one of: {}", fmt::join(ShippedClusters(), ", "));
  return std::unexpected(error);
}

Error Execute(const std::string& program, const std::vector<std::string>& arguments,
              const std::string& python_path) {
  if (!python_path.empty()) {
    const char* old = std::getenv("PYTHONPATH");
    const std::string joined = old && *old ? python_path + ":" + old : python_path;
    setenv("PYTHONPATH", joined.c_str(), 1);
  }
  execvp(program.c_str(), Argv(program, arguments).data());
  return CannotStart(program, errno);
}

std::string ExecutableFolder() {
  std::error_code error;
  const fs::path self = fs::read_symlink("/proc/self/exe", error);
  return error ? "." : self.parent_path().string();
}

std::string PythonFolder() {
  for (const fs::path& folder : DataFolders("python", "tools/python")) {
    if (fs::exists(folder / "shardplan" / "__init__.py")) return folder.lexically_normal().string();
  }
  return {};
}

}  // namespace shardplan::cli
