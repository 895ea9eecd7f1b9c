// SPDX-License-Identifier: Apache-2.0
#include "tests/executor/forked_ranks.h"

#include <fmt/format.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdio>
#include <optional>
#include <stdexcept>
#include <thread>

namespace shardplan::test {
namespace {

using Clock = std::chrono::steady_clock;

std::vector<std::string> Lines(std::FILE* file) {
  std::vector<std::string> lines(1);
  std::rewind(file);
  for (int c = std::fgetc(file); c != EOF; c = std::fgetc(file)) {
    c == '\n' ? void(lines.emplace_back()) : lines.back().push_back(static_cast<char>(c));
  }
  lines.pop_back();
  return lines;
}

// Waits for all; kills those that are still there when time is up after the first failure.
std::vector<std::string> Watch(std::vector<pid_t> ranks, int patience_s) {
  std::vector<std::string> faults;
  std::optional<Clock::time_point> deadline;
  std::size_t running = ranks.size();
  while (running > 0) {
    for (std::size_t rank = 0; rank < ranks.size(); ++rank) {
      int status = 0;
      if (ranks[rank] == 0 || waitpid(ranks[rank], &status, WNOHANG) != ranks[rank]) continue;
      ranks[rank] = 0;
      --running;
      if (WIFSIGNALED(status))
        faults.push_back(fmt::format("rank {} was killed by signal {}", rank, WTERMSIG(status)));
      if (WIFEXITED(status) && WEXITSTATUS(status) != 0)
        faults.push_back(fmt::format("rank {} gave up", rank));
      if (!faults.empty() && !deadline) deadline = Clock::now() + std::chrono::seconds(patience_s);
    }
    if (deadline && Clock::now() > *deadline) {
      for (const pid_t rank : ranks) {
        if (rank != 0) (void)kill(rank, SIGKILL);
      }
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  return faults;
}

}  // namespace

ForkedRun RunForked(std::int64_t ranks, int patience_s,
                    const std::function<bool(std::int64_t rank, const Log& log)>& work) {
  std::FILE* file = std::tmpfile();
  if (file == nullptr) throw std::runtime_error("no temporary file can be made");
  const int descriptor = fileno(file);
  std::vector<pid_t> children;
  for (std::int64_t rank = 0; rank < ranks; ++rank) {
    const pid_t pid = fork();
    if (pid < 0) throw std::runtime_error("fork fails");
    if (pid == 0) {
      const bool good = work(rank, [descriptor](const std::string& line) {
        (void)!write(descriptor, (line + "\n").c_str(), line.size() + 1);
      });
      std::_Exit(good ? 0 : 1);
    }
    children.push_back(pid);
  }
  ForkedRun run;
  run.faults = Watch(std::move(children), patience_s);
  run.lines = Lines(file);
  std::fclose(file);
  return run;
}

}  // namespace shardplan::test
