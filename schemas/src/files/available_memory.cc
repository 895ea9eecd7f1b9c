// SPDX-License-Identifier: Apache-2.0
#include "files/available_memory.h"

#include <fmt/format.h>
#include <sys/resource.h>

#include <algorithm>
#include <charconv>
#include <filesystem>
#include <fstream>
#include <limits>
#include <optional>
#include <string>

namespace shardplan {
namespace {

namespace fs = std::filesystem;

constexpr std::int64_t kUnlimited = std::numeric_limits<std::int64_t>::max();

std::optional<std::int64_t> NumberIn(const fs::path& file) {
  std::ifstream stream(file);
  std::int64_t number = 0;
  return stream >> number ? std::optional(number) : std::nullopt;  // "max" is no number
}

// The value of a line "KEY:   123 kB".
std::optional<std::int64_t> KilobytesIn(const fs::path& file, std::string_view key) {
  std::ifstream stream(file);
  for (std::string word; stream >> word;) {
    std::int64_t kilobytes = 0;
    if (word == key && stream >> kilobytes) return kilobytes * 1024;
  }
  return std::nullopt;
}

// Control groups, version 2: a group has no more than those it is in.
std::int64_t LeftInControlGroups() {
  std::ifstream groups("/proc/self/cgroup");
  std::int64_t left = kUnlimited;
  for (std::string line; std::getline(groups, line);) {
    if (!line.starts_with("0::/")) continue;
    const fs::path root = "/sys/fs/cgroup";
    for (fs::path group = line.substr(4);; group = group.parent_path()) {
      const auto most = NumberIn(root / group / "memory.max");
      const auto taken = NumberIn(root / group / "memory.current");
      const auto cached = KilobytesIn(root / group / "memory.stat", "inactive_file");  // bytes there
      if (most && taken) left = std::min(left, *most - *taken + cached.value_or(0) / 1024);
      if (group.empty()) break;
    }
  }
  return left;
}

std::int64_t LeftOfLimit(int resource, std::string_view taken_key) {
  struct rlimit limit = {};
  if (::getrlimit(resource, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return kUnlimited;
  const std::int64_t taken = KilobytesIn("/proc/self/status", taken_key).value_or(0);
  return static_cast<std::int64_t>(limit.rlim_cur) - taken;
}

std::string Text(std::int64_t bytes) {
  constexpr double kMiB = 1 << 20;
  return fmt::format("{:.0f} MiB", static_cast<double>(bytes) / kMiB);
}

}  // namespace

std::int64_t AvailableMemoryBytes() {
  const std::int64_t machine = KilobytesIn("/proc/meminfo", "MemAvailable:").value_or(kUnlimited);
  const std::int64_t limits =
      std::min(LeftOfLimit(RLIMIT_AS, "VmSize:"), LeftOfLimit(RLIMIT_DATA, "VmData:"));
  return std::max<std::int64_t>(0, std::min({machine, LeftInControlGroups(), limits}));
}

Status CheckMemory(std::string_view what, std::int64_t needed_bytes) {
  const std::int64_t available = AvailableMemoryBytes();
  if (needed_bytes <= available) return {};
  return MakeError(ErrorCode::kEnvironment,
                   fmt::format("there is not enough memory: {} needs about {}, and {} are available", what,
                               Text(needed_bytes), Text(available)));
}

}  // namespace shardplan
