// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <vector>

#include "shardplan/executor/virtual_backend.h"

namespace shardplan::executor {
namespace {

// The hosts of all ranks as one loop.
class Replay {
 public:
  Replay(VirtualMachine& machine, std::span<Replayer* const> replayers, std::int64_t steps)
      : machine_(machine), replayers_(replayers), in_trigger_(replayers.size(), false) {
    for (const Replayer* replayer : replayers) last_step_.push_back(replayer->steps_completed() + steps);
    // How eager the hosts are: from lock step with the device to everything issued before anything runs.
    const std::uint64_t eagerness[] = {50, 90, 99, 100};
    host_percent_ = eagerness[machine.Random(4)];
  }

  Status Run() {
    while (true) {
      const bool prefer_host = machine_.Random(100) < host_percent_;
      Result<bool> moved = prefer_host ? AdvanceSomeHost() : machine_.RunOne();
      if (moved && !*moved) moved = prefer_host ? machine_.RunOne() : AdvanceSomeHost();
      if (!moved) return std::unexpected(std::move(moved.error()));
      if (*moved) continue;
      if (Status status = machine_.Drain(); !status) return status;
      return CheckDone();
    }
  }

 private:
  bool IsDone(std::size_t rank) const {
    return !in_trigger_[rank] && replayers_[rank]->steps_completed() >= last_step_[rank];
  }

  // One instruction of one host. False: all are done, or wait.
  Result<bool> AdvanceSomeHost() {
    const std::size_t first = machine_.Random(replayers_.size());
    for (std::size_t i = 0; i < replayers_.size(); ++i) {
      const std::size_t rank = (first + i) % replayers_.size();
      if (IsDone(rank)) continue;
      Result<bool> moved = AdvanceHost(rank);
      if (!moved || *moved) return moved;
    }
    return false;
  }

  Result<bool> AdvanceHost(std::size_t rank) {
    Replayer& replayer = *replayers_[rank];
    if (!in_trigger_[rank]) {
      if (Status status = replayer.Begin(replayer.Expected()); !status)
        return std::unexpected(status.error());
      in_trigger_[rank] = true;
      return true;
    }
    const std::int64_t before = replayer.instructions_issued();
    Result<bool> done = replayer.Advance();
    if (!done) return done;
    if (*done) in_trigger_[rank] = false;
    return *done || replayer.instructions_issued() != before;
  }

  Status CheckDone() const {
    for (std::size_t rank = 0; rank < replayers_.size(); ++rank) {
      if (IsDone(rank)) continue;
      return MakeError(ErrorCode::kNegative, fmt::format("deadlock: the host of rank {} waits for ever at {}",
                                                         rank, replayers_[rank]->Where()));
    }
    return {};
  }

  VirtualMachine& machine_;
  std::span<Replayer* const> replayers_;
  std::vector<bool> in_trigger_;
  std::vector<std::int64_t> last_step_;
  std::uint64_t host_percent_ = 50;
};

}  // namespace

Status ReplayOnVirtual(VirtualMachine& machine, std::span<Replayer* const> replayers, std::int64_t steps) {
  return Replay(machine, replayers, steps).Run();
}

}  // namespace shardplan::executor
