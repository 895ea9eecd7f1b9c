// SPDX-License-Identifier: Apache-2.0
#include "launcher.h"

#include <fmt/format.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <exception>
#include <optional>

#include "shardplan/executor/peers.h"
#include "signals.h"
#include "torch/launch.h"

namespace shardplan::run {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kEnvironmentExit = 4;
constexpr int kSignalExit = 128;                 // of shells: and the signal's number
constexpr std::chrono::seconds kPatience{15};    // for ranks that have noticed, to say so and leave
constexpr std::chrono::seconds kAfterSignal{5};  // after a signal that was passed on
constexpr std::chrono::milliseconds kLook{50};   // a child's signal usually comes first

std::vector<char*> Pointers(std::vector<std::string>& strings) {
  std::vector<char*> pointers;
  for (std::string& text : strings) pointers.push_back(text.data());
  pointers.push_back(nullptr);
  return pointers;
}

struct Child {
  pid_t pid = -1;
  bool ended = false;
  bool stopped = false;
};

// The ranks that run on this machine.
class LocalRanks {
 public:
  LocalRanks(const Signals& signals, c10::intrusive_ptr<c10d::TCPStore> store, std::int64_t timeout_s)
      : signals_(signals), store_(std::move(store)), timeout_(std::chrono::seconds(timeout_s)) {}

  bool Start(const std::vector<std::string>& arguments, std::int64_t ranks);
  // Until all have left, or time is up after the first failure or a signal: the launcher's exit code.
  int Watch();

 private:
  pid_t Spawn(const std::vector<std::string>& arguments, std::int64_t rank, std::int64_t ranks) const;
  void Reap();
  void Reap(std::int64_t rank, int status);
  void PassOn(int signal);
  void Kill(int signal) const;
  bool NobodyCanEnd() const;

  const Signals& signals_;
  const c10::intrusive_ptr<c10d::TCPStore> store_;
  const Clock::duration timeout_;
  std::vector<Child> children_;
  int first_failure_ = 0;
  int passed_on_ = 0;    // the signal
  bool killed_ = false;  // what did not end by itself
  Clock::time_point deadline_ = Clock::time_point::max();
};

pid_t LocalRanks::Spawn(const std::vector<std::string>& arguments, std::int64_t rank,
                        std::int64_t ranks) const {
  std::vector<std::string> environment = {fmt::format("RANK={}", rank),
                                          fmt::format("LOCAL_RANK={}", rank),
                                          fmt::format("WORLD_SIZE={}", ranks),
                                          "MASTER_ADDR=127.0.0.1",
                                          fmt::format("MASTER_PORT={}", store_->getPort()),
                                          fmt::format("SHARDPLAN_RUN_CHILD={}", getpid())};
  for (char** entry = environ; *entry != nullptr; ++entry) environment.emplace_back(*entry);
  std::vector<std::string> words = {"shardplan-run"};
  words.insert(words.end(), arguments.begin(), arguments.end());
  posix_spawnattr_t attributes;
  posix_spawnattr_init(&attributes);
  posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETSIGMASK);
  posix_spawnattr_setsigmask(&attributes, &signals_.before());
  pid_t pid = -1;
  const int result = posix_spawn(&pid, "/proc/self/exe", nullptr, &attributes, Pointers(words).data(),
                                 Pointers(environment).data());
  posix_spawnattr_destroy(&attributes);
  if (result == 0) return pid;
  std::fprintf(stderr, "shardplan-run: rank %d does not start: %s\n", static_cast<int>(rank),
               std::strerror(result));
  return -1;
}

bool LocalRanks::Start(const std::vector<std::string>& arguments, std::int64_t ranks) {
  for (std::int64_t rank = 0; rank < ranks; ++rank) {
    const pid_t pid = Spawn(arguments, rank, ranks);
    if (pid < 0) {
      Kill(SIGKILL);
      return false;
    }
    children_.push_back({.pid = pid});
  }
  return true;
}

void LocalRanks::Kill(int signal) const {
  for (const Child& child : children_) {
    if (!child.ended) (void)kill(child.pid, signal);
  }
}

void LocalRanks::PassOn(int signal) {
  std::fprintf(stderr, "shardplan-run: signal %d (%s) is passed on to the ranks\n", signal,
               strsignal(signal));
  Kill(signal);
  Kill(SIGCONT);  // a stopped one would not take it
  passed_on_ = signal;
  deadline_ = std::min(deadline_, Clock::now() + kAfterSignal);
}

void LocalRanks::Reap(std::int64_t rank, int status) {
  Child& child = children_[rank];
  child.stopped = WIFSTOPPED(status);
  if (child.stopped)
    std::fprintf(stderr, "shardplan-run: rank %d was stopped by signal %d\n", static_cast<int>(rank),
                 WSTOPSIG(status));
  child.ended = WIFEXITED(status) || WIFSIGNALED(status);
  if (!child.ended || passed_on_ != 0 || killed_) return;
  if (WIFEXITED(status) && WEXITSTATUS(status) == 0) return;
  if (WIFSIGNALED(status)) {
    const std::string how = fmt::format("was killed by signal {}", WTERMSIG(status));
    std::fprintf(stderr, "shardplan-run: rank %d %s\n", static_cast<int>(rank), how.c_str());
    executor::PublishDeath(*store_, rank, how);
  }
  if (first_failure_ != 0) return;
  first_failure_ = WIFEXITED(status) ? WEXITSTATUS(status) : kEnvironmentExit;
  deadline_ = Clock::now() + timeout_ + kPatience;
}

void LocalRanks::Reap() {
  for (std::size_t rank = 0; rank < children_.size(); ++rank) {
    int status = 0;
    Child& child = children_[rank];
    while (!child.ended && waitpid(child.pid, &status, WNOHANG | WUNTRACED | WCONTINUED) == child.pid)
      Reap(static_cast<std::int64_t>(rank), status);
  }
}

// Something has failed, and those that are left are stopped.
bool LocalRanks::NobodyCanEnd() const {
  return first_failure_ != 0 &&
         std::ranges::all_of(children_, [](const Child& child) { return child.ended || child.stopped; });
}

int LocalRanks::Watch() {
  while (true) {
    Reap();
    const bool running = std::ranges::any_of(children_, [](const Child& child) { return !child.ended; });
    if (!running) return passed_on_ != 0 ? kSignalExit + passed_on_ : first_failure_;
    if (!killed_ && (Clock::now() >= deadline_ || NobodyCanEnd())) {
      std::fprintf(stderr, "shardplan-run: ranks that did not stop by themselves are killed\n");
      Kill(SIGKILL);
      killed_ = true;
    }
    const std::optional<int> signal = signals_.Next(kLook);
    if (signal && *signal != SIGCHLD) PassOn(*signal);
  }
}

}  // namespace

int LaunchRanks(const std::vector<std::string>& arguments, std::int64_t ranks, std::int64_t timeout_s) {
  const Signals signals;  // before the store has threads
  Result<c10::intrusive_ptr<c10d::TCPStore>> store = executor::ServeStore();
  if (!store) {
    std::fprintf(stderr, "shardplan-run: %s\n", ToString(store.error()).c_str());
    return kEnvironmentExit;
  }
  LocalRanks local(signals, std::move(*store), timeout_s);
  return local.Start(arguments, ranks) ? local.Watch() : kEnvironmentExit;
}

}  // namespace shardplan::run
