// SPDX-License-Identifier: Apache-2.0
// Sizes as the settings round them, and the settings as text (c10/core/AllocatorConfig, CUDAAllocatorConfig).
#include <fmt/ranges.h>

#include <algorithm>
#include <bit>
#include <charconv>

#include "allocator/sizes.h"
#include "shardplan/schemas/pytorch_rules.h"
#include "shardplan/simulator/caching_allocator.h"

namespace shardplan {
namespace {

constexpr std::int64_t kMebibyte = 1 << 20;

// Which of the 16 intervals a size lies in: they begin at 1 MiB and double.
std::size_t Interval(std::int64_t bytes) {
  const int log = static_cast<int>(std::bit_width(static_cast<std::uint64_t>(bytes))) - 1;
  return static_cast<std::size_t>(std::clamp(log - 20, 0, 15));
}

std::unexpected<Error> BadSetting(std::string_view key, std::string_view found, std::string expected) {
  return std::unexpected(Error{ErrorCode::kUsage,
                               "allocator setting " + std::string(key) + " is wrong",
                               {},
                               {},
                               "\"" + std::string(found) + "\"",
                               std::move(expected)});
}

std::optional<std::int64_t> ToInteger(std::string_view text) {
  std::int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return value;
}

std::optional<double> ToDouble(std::string_view text) {
  double value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return value;
}

bool IsPowerOfTwo(std::int64_t value) { return value > 0 && (value & (value - 1)) == 0; }

std::vector<std::string_view> Split(std::string_view text, char separator) {
  std::vector<std::string_view> parts;
  int depth = 0;
  std::size_t begin = 0;
  for (std::size_t i = 0; i <= text.size(); ++i) {
    if (i == text.size() || (text[i] == separator && depth == 0)) {
      parts.push_back(text.substr(begin, i - begin));
      begin = i + 1;
    } else if (text[i] == '[') {
      ++depth;
    } else if (text[i] == ']') {
      --depth;
    }
  }
  return parts;
}

// One "mebibytes:divisions" or ">:divisions" of a list. The first fills the intervals before its own too.
bool ApplyInterval(std::string_view entry, bool& first, std::size_t& last,
                   std::array<std::int64_t, 16>& table) {
  const std::size_t colon = entry.find(':');
  if (colon == std::string_view::npos) return false;
  const std::optional<std::int64_t> divisions = ToInteger(entry.substr(colon + 1));
  if (!divisions || (*divisions != 0 && !IsPowerOfTwo(*divisions))) return false;
  if (entry.substr(0, colon) == ">") {
    std::fill(table.begin() + static_cast<std::ptrdiff_t>(last) + 1, table.end(), *divisions);
    return true;
  }
  const std::optional<std::int64_t> mebibytes = ToInteger(entry.substr(0, colon));
  if (!mebibytes || !IsPowerOfTwo(*mebibytes) || *mebibytes > (std::int64_t{1} << 40)) return false;
  last = Interval(*mebibytes * kMebibyte);
  if (first) std::fill_n(table.begin(), last, *divisions);
  first = false;
  table[last] = *divisions;
  return true;
}

Status ApplyDivisions(std::string_view value, std::array<std::int64_t, 16>& table) {
  static constexpr std::string_view kKey = "roundup_power2_divisions";
  if (value.empty() || value.front() != '[') {
    const std::optional<std::int64_t> divisions = ToInteger(value);
    if (!divisions || !IsPowerOfTwo(*divisions)) return BadSetting(kKey, value, "a power of 2, or a list");
    table.fill(*divisions);
    return {};
  }
  if (value.back() != ']') return BadSetting(kKey, value, "a list that ends with ]");
  bool first = true;
  std::size_t last = 0;
  for (const std::string_view entry : Split(value.substr(1, value.size() - 2), ',')) {
    if (!ApplyInterval(entry, first, last, table)) {
      return BadSetting(kKey, entry, "MEBIBYTES:DIVISIONS or >:DIVISIONS, powers of 2 (divisions may be 0)");
    }
  }
  return {};
}

Status ApplySetting(std::string_view key, std::string_view value, std::optional<Bytes> device_bytes,
                    AllocatorSettings& settings) {
  auto mebibytes = [&](std::int64_t least, auto& field) -> Status {
    const std::optional<std::int64_t> number = ToInteger(value);
    if (!number || *number < least || *number > (std::int64_t{1} << 40)) {
      return BadSetting(key, value, "a number of MiB, at least " + std::to_string(least));
    }
    field = Bytes{*number * kMebibyte};
    return {};
  };
  const std::int64_t large_segment = settings.large_segment_bytes.value / kMebibyte;
  if (key == "large_segment_size_mb") {
    if (Status applied = mebibytes(11, settings.large_segment_bytes); !applied) return applied;
    settings.max_non_split_rounding_bytes = settings.large_segment_bytes;
    return {};
  }
  if (key == "max_split_size_mb") return mebibytes(large_segment, settings.max_split_size_bytes);
  if (key == "max_non_split_rounding_mb")
    return mebibytes(large_segment, settings.max_non_split_rounding_bytes);
  if (key == "roundup_power2_divisions") return ApplyDivisions(value, settings.roundup_power2_divisions);
  if (key == "expandable_segments") {
    if (value != "True" && value != "False") return BadSetting(key, value, "True or False");
    settings.expandable_segments = value == "True";
    return {};
  }
  if (key == "garbage_collection_threshold") {
    const std::optional<double> number = ToDouble(value);
    if (!number || !(*number > 0 && *number < 1)) return BadSetting(key, value, "a number between 0 and 1");
    settings.garbage_collection_threshold = *number;
    return {};
  }
  if (key == "per_process_memory_fraction") {
    const std::optional<double> number = ToDouble(value);
    if (!number || !(*number >= 0 && *number <= 1)) return BadSetting(key, value, "a number from 0 to 1");
    if (!device_bytes) return BadSetting(key, value, "the size of the device's memory to be known");
    settings.allowed_bytes.reset();
    if (*number < 1) {
      settings.allowed_bytes =
          Bytes{static_cast<std::int64_t>(*number * static_cast<double>(device_bytes->value))};
    }
    return {};
  }
  static constexpr std::string_view kNoEffect[] = {"backend",
                                                   "graph_capture_record_stream_reuse",
                                                   "pinned_num_register_threads",
                                                   "pinned_reserve_segment_size_mb",
                                                   "pinned_use_background_threads",
                                                   "pinned_use_cuda_host_register",
                                                   "release_lock_on_cudamalloc"};
  if (std::find(std::begin(kNoEffect), std::end(kNoEffect), key) == std::end(kNoEffect)) {
    return BadSetting(key, key, "a key of PYTORCH_ALLOC_CONF");
  }
  if (key == "backend" && value != "native")
    return BadSetting(key, value, "native: no other backend is modelled");
  return {};
}

}  // namespace

Bytes RoundedSize(const AllocatorSettings& settings, Bytes requested) {
  const std::int64_t size = requested.value;
  if (size < kMinBlockBytes) return {kMinBlockBytes};
  const std::int64_t divisions = settings.roundup_power2_divisions[Interval(size)];
  if (divisions <= 1 || size <= kMinBlockBytes * divisions) return {RoundUp(size, kMinBlockBytes)};
  const auto floor = static_cast<std::int64_t>(std::bit_floor(static_cast<std::uint64_t>(size)));
  return {floor == size ? size : RoundUp(size, floor / divisions)};
}

Bytes SegmentSize(const AllocatorSettings& settings, Bytes rounded) {
  if (IsSmall(rounded.value)) return {kSmallSegmentBytes};
  if (rounded.value < kMinLargeAllocBytes) return settings.large_segment_bytes;
  return {RoundUp(rounded.value, kRoundLargeBytes)};
}

Status ParseAllocatorSettings(std::string_view text, std::optional<Bytes> device_bytes,
                              AllocatorSettings& settings) {
  std::string compact;
  for (const char c : text) {
    if (c != ' ' && c != '\t' && c != '\n') compact += c;
  }
  // The large segment first, whatever its position: other limits and defaults depend on it.
  for (const bool large_segment : {true, false}) {
    for (const std::string_view entry : Split(compact, ',')) {
      if (entry.empty()) continue;
      const std::size_t colon = entry.find(':');
      if (colon == std::string_view::npos) return BadSetting(entry, entry, "KEY:VALUE");
      const std::string_view key = entry.substr(0, colon);
      if ((key == "large_segment_size_mb") != large_segment) continue;
      if (Status applied = ApplySetting(key, entry.substr(colon + 1), device_bytes, settings); !applied)
        return applied;
    }
  }
  return {};
}

Status SetRelease(std::string_view release, AllocatorSettings& settings) {
  const std::optional<PyTorchVersion> version = PyTorchFromName(release);
  if (!version) {
    return std::unexpected(Error{ErrorCode::kUsage,
                                 "the release of PyTorch is not planned",
                                 {},
                                 {},
                                 "\"" + std::string(release) + "\"",
                                 fmt::format("{}", fmt::join(PyTorchVersions(), " or "))});
  }
  settings.older_segments_first = RulesOf({.pytorch = version}).older_segments_first;
  return {};
}

Status CheckAllocatorSettings(std::string_view text) {
  AllocatorSettings settings;
  return ParseAllocatorSettings(text, Bytes{std::int64_t{1} << 40}, settings);
}

std::string ToString(const AllocatorSettings& settings) {
  std::string text;
  auto add = [&](std::string_view key, const std::string& value) {
    if (!text.empty()) text += ',';
    text += key;
    text += ':';
    text += value;
  };
  const AllocatorSettings defaults;
  auto mebibytes = [](Bytes bytes) { return std::to_string(bytes.value / kMebibyte); };
  if (settings.expandable_segments) add("expandable_segments", "True");
  if (settings.large_segment_bytes != defaults.large_segment_bytes) {
    add("large_segment_size_mb", mebibytes(settings.large_segment_bytes));
  }
  if (settings.max_split_size_bytes) add("max_split_size_mb", mebibytes(*settings.max_split_size_bytes));
  if (settings.max_non_split_rounding_bytes != settings.large_segment_bytes) {
    add("max_non_split_rounding_mb", mebibytes(settings.max_non_split_rounding_bytes));
  }
  if (settings.garbage_collection_threshold > 0) {
    char buffer[32];
    const auto [end, error] =
        std::to_chars(buffer, buffer + sizeof(buffer), settings.garbage_collection_threshold);
    add("garbage_collection_threshold", std::string(buffer, end));
  }
  if (settings.roundup_power2_divisions != defaults.roundup_power2_divisions) {
    std::string list = "[";
    for (std::size_t i = 0; i < settings.roundup_power2_divisions.size(); ++i) {
      if (i > 0) list += ',';
      list +=
          std::to_string(std::int64_t{1} << i) + ":" + std::to_string(settings.roundup_power2_divisions[i]);
    }
    add("roundup_power2_divisions", list + "]");
  }
  return text;
}

std::string_view Name(SegmentActionKind kind) {
  switch (kind) {
    case SegmentActionKind::kSegmentAlloc:
      return "segment_alloc";
    case SegmentActionKind::kSegmentFree:
      return "segment_free";
    case SegmentActionKind::kSegmentMap:
      return "segment_map";
    case SegmentActionKind::kSegmentUnmap:
      return "segment_unmap";
  }
  return "";
}

}  // namespace shardplan
