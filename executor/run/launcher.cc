#include "launcher.h"

#include <fmt/format.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <exception>
#include <optional>
#include <thread>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

namespace shardplan::run {
namespace {

constexpr int kEnvironmentExit = 4;
constexpr std::int64_t kPatienceSeconds = 15;  // for ranks that have noticed, to say so and leave

struct Child {
  pid_t pid = -1;
  std::optional<int> exit_code;
};

std::vector<char*> Pointers(std::vector<std::string>& strings) {
  std::vector<char*> pointers;
  for (std::string& text : strings) pointers.push_back(text.data());
  pointers.push_back(nullptr);
  return pointers;
}

pid_t Spawn(const std::vector<std::string>& arguments, std::int64_t rank, std::int64_t ranks,
            std::uint16_t port) {
  std::vector<std::string> environment = {
      fmt::format("RANK={}", rank), fmt::format("LOCAL_RANK={}", rank),  fmt::format("WORLD_SIZE={}", ranks),
      "MASTER_ADDR=127.0.0.1",      fmt::format("MASTER_PORT={}", port), "SHARDPLAN_RUN_CHILD=1"};
  for (char** entry = environ; *entry != nullptr; ++entry) environment.emplace_back(*entry);
  std::vector<std::string> words = {"shardplan-run"};
  words.insert(words.end(), arguments.begin(), arguments.end());
  pid_t pid = -1;
  const int result = posix_spawn(&pid, "/proc/self/exe", nullptr, nullptr, Pointers(words).data(),
                                 Pointers(environment).data());
  if (result != 0)
    std::fprintf(stderr, "shardplan-run: rank %d does not start: %s\n", static_cast<int>(rank),
                 std::strerror(result));
  return result == 0 ? pid : -1;
}

int ExitCodeOf(int status, std::int64_t rank) {
  if (WIFEXITED(status)) return WEXITSTATUS(status);
  std::fprintf(stderr, "shardplan-run: rank %d was killed by signal %d\n", static_cast<int>(rank),
               WTERMSIG(status));
  return kEnvironmentExit;
}

void Kill(const std::vector<Child>& children) {
  for (const Child& child : children) {
    if (child.pid > 0 && !child.exit_code) (void)kill(child.pid, SIGKILL);
  }
}

// Until all have left, or time is up after the first failure.
int Watch(std::vector<Child>& children, std::int64_t timeout_s) {
  using Clock = std::chrono::steady_clock;
  int first_failure = 0;
  Clock::time_point deadline = Clock::time_point::max();
  while (true) {
    bool running = false;
    for (std::size_t rank = 0; rank < children.size(); ++rank) {
      Child& child = children[rank];
      if (child.exit_code) continue;
      int status = 0;
      if (waitpid(child.pid, &status, WNOHANG) != child.pid) {
        running = true;
        continue;
      }
      child.exit_code = ExitCodeOf(status, static_cast<std::int64_t>(rank));
      if (*child.exit_code == 0 || first_failure != 0) continue;
      first_failure = *child.exit_code;
      deadline = Clock::now() + std::chrono::seconds(timeout_s + kPatienceSeconds);
    }
    if (!running) return first_failure;
    if (Clock::now() >= deadline) {
      std::fprintf(stderr, "shardplan-run: ranks that did not stop by themselves are killed\n");
      Kill(children);
      deadline = Clock::time_point::max();
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
}

}  // namespace

int LaunchRanks(const std::vector<std::string>& arguments, std::int64_t ranks, std::int64_t timeout_s) {
  c10::intrusive_ptr<c10d::TCPStore> store;
  try {
    c10d::TCPStoreOptions options;
    options.port = 0;  // any free one
    options.isServer = true;
    options.waitWorkers = false;
    store = c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options);
  } catch (const std::exception& exception) {
    std::fprintf(stderr, "shardplan-run: no store can be served on 127.0.0.1: %s\n", exception.what());
    return kEnvironmentExit;
  }
  std::vector<Child> children;
  for (std::int64_t rank = 0; rank < ranks; ++rank) {
    const pid_t pid = Spawn(arguments, rank, ranks, store->getPort());
    if (pid < 0) {
      Kill(children);
      return kEnvironmentExit;
    }
    children.push_back({pid, std::nullopt});
  }
  return Watch(children, timeout_s);
}

}  // namespace shardplan::run
