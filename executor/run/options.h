// SPDX-License-Identifier: Apache-2.0
// What `shardplan run` was asked for.
#pragma once

#include <cstdint>
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

// A rank's place, from the environment that torchrun (or our launcher) sets.
struct RankEnvironment {
  std::int64_t rank = 0;
  std::int64_t world_size = 1;
  std::int64_t local_rank = 0;
  std::string master_address = "127.0.0.1";
  std::uint16_t master_port = 0;
  bool started_here = false;     // by our launcher, as all ranks
  bool store_is_served = false;  // by the launcher; otherwise rank 0 serves it
};

}  // namespace shardplan::run
