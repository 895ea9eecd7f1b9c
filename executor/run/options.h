// SPDX-License-Identifier: Apache-2.0
// What `shardplan run` was asked for.
#pragma once

#include <cstdint>
#include <string>

#include "shardplan/executor/launch.h"

namespace shardplan::run {

using executor::RankEnvironment;

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

}  // namespace shardplan::run
