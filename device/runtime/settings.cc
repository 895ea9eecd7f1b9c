// SPDX-License-Identifier: Apache-2.0
#include "device/runtime/settings.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string_view>

namespace shardplan::softdevice {
namespace {

[[noreturn]] void Refuse(const char* name, const char* value, const char* expected) {
  std::fprintf(stderr, "device in software: %s=%s, expected %s\n", name, value, expected);
  std::_Exit(2);
}

std::uint64_t NumberOf(const char* name, const char* text) {
  char* end = nullptr;
  const std::uint64_t number = std::strtoull(text, &end, 10);
  if (end == text || *end != '\0') Refuse(name, text, "a number");
  return number;
}

Settings Read() {
  Settings settings;
  if (const char* count = std::getenv("SHARDPLAN_DEVICE_COUNT")) {
    settings.devices = static_cast<int>(NumberOf("SHARDPLAN_DEVICE_COUNT", count));
  }
  if (const char* bytes = std::getenv("SHARDPLAN_DEVICE_BYTES")) {
    settings.capacity_bytes = NumberOf("SHARDPLAN_DEVICE_BYTES", bytes);
  }
  if (const char* name = std::getenv("SHARDPLAN_DEVICE_NAME")) settings.name = name;
  if (const char* capability = std::getenv("SHARDPLAN_DEVICE_CAPABILITY")) {
    int end = 0;
    const int read = std::sscanf(capability, "%d.%d%n", &settings.major, &settings.minor, &end);
    if (read != 2 || capability[end] != '\0') {
      Refuse("SHARDPLAN_DEVICE_CAPABILITY", capability, "two numbers, as 9.0");
    }
  }
  if (const char* count = std::getenv("SHARDPLAN_DEVICE_MULTIPROCESSORS")) {
    settings.multiprocessors = static_cast<int>(NumberOf("SHARDPLAN_DEVICE_MULTIPROCESSORS", count));
  }
  if (const char* poison = std::getenv("SHARDPLAN_DEVICE_POISON")) {
    settings.poison = NumberOf("SHARDPLAN_DEVICE_POISON", poison) != 0;
  }
  const char* mode = std::getenv("SHARDPLAN_DEVICE_MODE");
  if (mode == nullptr || std::string_view(mode) == "inline") return settings;
  if (std::string_view(mode) == "serial") {
    settings.serial = true;
    return settings;
  }
  if (std::string_view(mode) == "null" || std::string_view(mode) == "null:slow") {
    settings.null = true;
    settings.lazy = std::string_view(mode) == "null:slow";
    settings.poison = false;
    return settings;
  }
  if (std::string_view(mode).starts_with("late:")) {
    settings.late = static_cast<int>(NumberOf("SHARDPLAN_DEVICE_MODE", mode + std::strlen("late:")));
    return settings;
  }
  if (!std::string_view(mode).starts_with("lazy:")) {
    Refuse("SHARDPLAN_DEVICE_MODE", mode, "inline, serial, lazy:SEED, late:NUMBER, null or null:slow");
  }
  settings.lazy = true;
  settings.seed = NumberOf("SHARDPLAN_DEVICE_MODE", mode + std::strlen("lazy:"));
  return settings;
}

}  // namespace

const Settings& TheSettings() {
  static const Settings settings = Read();
  return settings;
}

namespace {

// torch's allocator reads it when it is first used: then each block is memory of its own, and none is handed
// out again. Other settings are read at their first use: until then a program may set them.
const bool without_cache = [] {
  const char* mode = std::getenv("SHARDPLAN_DEVICE_MODE");
  return mode != nullptr && std::string_view(mode) == "serial" &&
         setenv("PYTORCH_NO_CUDA_MEMORY_CACHING", "1", /*overwrite=*/1) == 0;
}();

}  // namespace

}  // namespace shardplan::softdevice
