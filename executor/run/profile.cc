// SPDX-License-Identifier: Apache-2.0
#include "profile.h"

#include <fmt/format.h>
#include <spawn.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <string_view>

namespace shardplan::run {
namespace {

// A file in memory, for the programs that this one starts.
Result<std::string> InMemory(std::string_view bytes) {
  const int file = memfd_create("shardplan-recording", 0);
  while (file >= 0 && !bytes.empty()) {
    const ssize_t written = write(file, bytes.data(), bytes.size());
    if (written <= 0) break;
    bytes.remove_prefix(static_cast<std::size_t>(written));
  }
  if (file >= 0 && bytes.empty()) return fmt::format("/proc/self/fd/{}", file);
  return MakeError(ErrorCode::kEnvironment,
                   fmt::format("no memory for a recording: {}", std::strerror(errno)));
}

Error NotStarted(const std::string& program, const std::string& why) {
  return {.code = ErrorCode::kEnvironment,
          .message = "the profile cannot be made a report: " + why,
          .file = program};
}

// Exit codes of the commands are those of errors (ExitCode).
Status Run(const std::string& program, std::vector<std::string> words) {
  words.insert(words.begin(), program);
  std::vector<char*> arguments;
  for (std::string& word : words) arguments.push_back(word.data());
  arguments.push_back(nullptr);
  pid_t pid = -1;
  const int started = posix_spawn(&pid, program.c_str(), nullptr, nullptr, arguments.data(), environ);
  if (started != 0) return std::unexpected(NotStarted(program, std::strerror(started)));
  int status = 0;
  while (waitpid(pid, &status, 0) < 0 && errno == EINTR) {
  }
  if (WIFEXITED(status) && WEXITSTATUS(status) == 0) return {};
  Error error = NotStarted(
      program, WIFEXITED(status) ? fmt::format("import-profile ended with {}", WEXITSTATUS(status))
                                 : fmt::format("import-profile was ended by signal {}", WTERMSIG(status)));
  for (const ErrorCode code : {ErrorCode::kUsage, ErrorCode::kBadInput}) {
    if (WIFEXITED(status) && WEXITSTATUS(status) == ExitCode(code)) error.code = code;
  }
  return std::unexpected(std::move(error));
}

}  // namespace

Status CheckProfile(const RunOptions& options, const Plan* plan) {
  if (options.profile_path.empty()) return {};
  Error error = {.code = ErrorCode::kUsage, .message = {}, .file = options.plan_path};
  if (plan == nullptr) {
    error.message = "--profile means nothing for a plan of resharding";
  } else if (options.device == DeviceKind::kVirtual) {
    error.message = "--profile needs a device whose times mean something";
    error.found = "--device virtual, whose streams run in the worst order";
    error.expected = "cpu or cuda";
  } else if (options.steps <= plan->steady_step) {
    error.message = "--profile records steps that repeat, and none of these does";
    error.found = fmt::format("--steps {}", options.steps);
    error.expected = fmt::format("at least {}", plan->steady_step + 1);
  } else {
    return {};
  }
  return std::unexpected(std::move(error));
}

executor::RecorderOptions RecorderOptionsOf(const RunOptions& options) {
  const std::int64_t warmup = std::min<std::int64_t>(1, options.steps - 1);
  const std::int64_t left = options.steps - warmup;
  return {.warmup = warmup, .steps = (left + 1) / 2, .compares = left > 1, .allocations = nullptr};
}

Status WriteProfile(const RunOptions& options, const std::vector<std::string>& recordings) {
  std::error_code ignored;
  const std::filesystem::path self = std::filesystem::read_symlink("/proc/self/exe", ignored);
  std::vector<std::string> words = {"import-profile"};
  for (const std::string& recording : recordings) {
    Result<std::string> file = InMemory(recording);
    if (!file) return std::unexpected(std::move(file.error()));
    words.push_back(std::move(*file));
  }
  words.insert(words.end(), {"--plan", options.plan_path, "--rank", "0", "-q", "-o", options.profile_path});
  return Run((self.parent_path() / "shardplan").string(), std::move(words));
}

}  // namespace shardplan::run
