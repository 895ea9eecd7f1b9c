// SPDX-License-Identifier: Apache-2.0
// The options of `shardplan run`: read by the command before it starts shardplan-run, and by shardplan-run.
// Needs no LibTorch.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace shardplan::run {

enum class DeviceKind : std::uint8_t { kCpu, kCuda, kVirtual };

struct RunOptions {
  std::string plan_path;
  std::string profile_path;  // where the measured report goes; empty: nothing is recorded
  std::string report_path;   // of `shardplan simulate --report`; empty: no comparison
  DeviceKind device = DeviceKind::kCpu;
  std::int64_t ranks = 0;  // 0: as many as the plan has
  std::int64_t steps = 3;
  double compute_scale = 1.0;
  std::int64_t timeout_s = 60;
  std::uint64_t seed = 1;
  bool activations = true;
  bool arena = false;
  bool progress = false;
  bool verify = true;
};

// Fills `options` from a command line that begins with the program's name. Returns the exit code if that ends
// the program, with the help on standard output or with what is wrong on standard error.
std::optional<int> ParseRun(int argc, const char* const* argv, RunOptions& options);

}  // namespace shardplan::run
