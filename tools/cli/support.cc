// SPDX-License-Identifier: Apache-2.0
#include "support.h"

#include <fmt/format.h>
#include <sys/auxv.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>

#include "shardplan/schemas/io.h"
#include "shardplan/schemas/printable.h"
#include "terminal.h"

namespace shardplan::cli {
namespace {

namespace fs = std::filesystem;

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

void PrintError(std::string_view text) { std::fputs(PrintableLines(text).c_str(), stderr); }

int Fail(const Error& error) {
  std::fputs(fmt::format("{} {}\n", Alarming("shardplan: error:"), PrintableLines(ToString(error))).c_str(),
             stderr);
  return ExitCode(error.code);
}

void Progress(bool quiet, std::string_view text) {
  if (!quiet) PrintError(fmt::format("shardplan: {}\n", Printable(text)));
}

void Warn(std::string_view text) { PrintError(fmt::format("shardplan: {}\n", PrintableLines(text))); }

Status WriteOutput(const std::string& path, std::string_view bytes) {
  return path == "-" ? WriteStandardOutput(bytes) : WriteFileAtomically(path, bytes);
}

Status WriteOutput(const std::string& path, const TextInPieces& text) {
  return path == "-" ? WriteStandardOutput(text) : WriteFileAtomically(path, text);
}

Status WriteAndSay(const std::string& path, std::string_view bytes, bool quiet, std::string_view more) {
  if (Status written = WriteOutput(path, bytes); !written) return written;
  if (path != "-") Progress(quiet, more.empty() ? "wrote " + path : fmt::format("wrote {} ({})", path, more));
  return {};
}

Status WriteAndSay(const std::string& path, const Plan& plan, bool quiet) {
  const auto text = [&](const JsonSink& sink) { WriteJson(plan, sink); };
  if (Status written = WriteOutput(path, text); !written) return written;
  if (path != "-") Progress(quiet, "wrote " + path);
  return {};
}

Status PrintText(std::string_view text) { return WriteStandardOutput(PrintableLines(text)); }

int PrintAnswer(std::string_view text, int exit_code) {
  const Status printed = PrintText(text);
  return printed ? exit_code : Fail(printed.error());
}

bool IsThere(const std::string& path) {
  std::error_code error;
  return fs::exists(path, error) || error;
}

Error Execute(const std::string& program, const std::vector<std::string>& arguments,
              const std::string& python_path) {
  if (!python_path.empty()) {
    const char* old = std::getenv("PYTHONPATH");
    const std::string joined = old && *old ? python_path + ":" + old : python_path;
    setenv("PYTHONPATH", joined.c_str(), 1);
  }
  setenv("SHARDPLAN_COMMAND_VERSION", SHARDPLAN_VERSION, 1);
  execvp(program.c_str(), Argv(program, arguments).data());
  return CannotStart(program, errno);
}

std::vector<fs::path> DataFolders(const std::string& installed, const std::string& in_source) {
  std::vector<fs::path> folders = {fs::path(ExecutableFolder()) / ".." / "share" / "shardplan" / installed};
  if (const fs::path source = SourceFolder(); !source.empty()) folders.push_back(source / in_source);
  return folders;
}

std::filesystem::path SourceFolder() { return SHARDPLAN_SOURCE_DIR; }

std::string ExecutableFolder() {
  std::error_code error;
  fs::path self = fs::read_symlink("/proc/self/exe", error);
  if (error) {  // a root without /proc: what was given to execve
    const auto given = ::getauxval(AT_EXECFN);
    self = given == 0 ? fs::path() : fs::canonical(reinterpret_cast<const char*>(given), error);
  }
  return error || self.empty() ? "." : self.parent_path().string();
}

std::string PythonFolder() {
  for (const fs::path& folder : DataFolders("python", "tools/python")) {
    if (IsThere(folder / "shardplan" / "__init__.py")) return folder.lexically_normal().string();
  }
  return {};
}

}  // namespace shardplan::cli
