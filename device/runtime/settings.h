// SPDX-License-Identifier: Apache-2.0
// Settings of the device in software from the environment. Read once.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace shardplan::softdevice {

struct Settings {
  int devices = 8;                                     // SHARDPLAN_DEVICE_COUNT
  std::size_t capacity_bytes = std::size_t{80} << 30;  // SHARDPLAN_DEVICE_BYTES, of each device
  int major = 9, minor = 0;                            // SHARDPLAN_DEVICE_CAPABILITY=9.0
  int multiprocessors = 132;                           // SHARDPLAN_DEVICE_MULTIPROCESSORS
  std::string name = "shardplan device in software";   // SHARDPLAN_DEVICE_NAME
  // SHARDPLAN_DEVICE_MODE=inline, serial, lazy:SEED, late:NUMBER, null or null:slow.
  bool serial = false;
  int late = -1;  // number of the streams that are late (engine.h, [Note: modes]); -1: none
  bool lazy = false;
  std::uint64_t seed = 0;
  // Nothing computes: kernels, copies and collectives are work without content (docs/internals/device.md).
  // With `lazy`: nothing is done before the host waits for it, and then only what that needs.
  bool null = false;
  bool poison = true;  // SHARDPLAN_DEVICE_POISON=0: memory that is handed out keeps what it holds
};

const Settings& TheSettings();

}  // namespace shardplan::softdevice
