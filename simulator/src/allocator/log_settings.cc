// SPDX-License-Identifier: Apache-2.0
// The settings of a log, under the names of torch.cuda.memory._snapshot() and of PYTORCH_ALLOC_CONF.
#include <limits>

#include "allocator/log_json.h"
#include "shardplan/simulator/allocator_replay.h"

namespace shardplan {

using allocator_log::Brief;
using allocator_log::Fail;
using allocator_log::Json;
using allocator_log::Node;

namespace {

// "1" .. "32768" MiB -> divisions, or 16 numbers, or one.
void ParseDivisions(const Node& node, std::array<std::int64_t, 16>& table) {
  auto checked = [](const Node& value) {
    const std::int64_t divisions = value.Integer(0);
    if ((divisions & (divisions - 1)) != 0)
      Fail(value.pointer, "wrong value", Brief(value.value), "0 or a power of 2");
    return divisions;
  };
  if (node.value.is_object()) {
    for (std::size_t i = 0; i < table.size(); ++i) {
      const std::string key = std::to_string(std::int64_t{1} << i);
      if (node.value.contains(key)) table[i] = checked({node.value[key], node.pointer + "/" + key});
    }
  } else if (node.value.is_array()) {
    if (node.value.size() != table.size())
      Fail(node.pointer, "wrong length", Brief(node.value), "16 numbers");
    for (std::size_t i = 0; i < table.size(); ++i) table[i] = checked(node.At(i));
  } else {
    table.fill(checked(node));
  }
}

std::string KnobText(const Json& value) {
  if (value.is_boolean()) return value.get<bool>() ? "True" : "False";
  return value.is_string() ? value.get<std::string>() : value.dump();
}

}  // namespace

void ParseLogSettings(const Json& settings, AllocatorLog& log, bool& says_expandable) {
  if (!settings.is_object()) Fail("/allocator_settings", "wrong type", Brief(settings), "an object");
  AllocatorSettings& out = log.settings;
  auto apply = [&](const std::string& pointer, const std::string& text) {
    if (Status applied = ParseAllocatorSettings(text, log.device_bytes, out); !applied) {
      Fail(pointer, applied.error().message, applied.error().found, applied.error().expected);
    }
  };
  auto unlimited = [](const Json& value) {
    return value.is_null() || value == -1 || value == std::numeric_limits<std::uint64_t>::max();
  };
  for (const auto& [key, value] : settings.items()) {
    const Node node{value, "/allocator_settings/" + key};
    if (key == "expandable_segments") {
      if (!value.is_boolean()) Fail(node.pointer, "wrong type", Brief(value), "true or false");
      out.expandable_segments = value.get<bool>();
      says_expandable = true;
    } else if (key == "max_split_size") {
      if (!unlimited(value)) out.max_split_size_bytes = Bytes{node.Integer(1)};
    } else if (key == "max_non_split_rounding_size") {
      out.max_non_split_rounding_bytes = Bytes{node.Integer(0)};
    } else if (key == "large_segment_size") {
      out.large_segment_bytes = out.max_non_split_rounding_bytes = Bytes{node.Integer((10 << 20) + 1)};
    } else if (key == "garbage_collection_threshold") {
      if (!value.is_number() || value.get<double>() < 0 || value.get<double>() >= 1) {
        Fail(node.pointer, "wrong value", Brief(value), "a number from 0 to 1");
      }
      out.garbage_collection_threshold = value.get<double>();
    } else if (key == "roundup_power2_divisions") {
      if (value.is_string()) {
        apply(node.pointer, key + ":" + value.get<std::string>());
      } else if (!value.is_null()) {
        ParseDivisions(node, out.roundup_power2_divisions);
      }
    } else if (key == "per_process_memory_fraction" || key.ends_with("_mb")) {
      apply(node.pointer, key + ":" + KnobText(value));
    } else if (key == "PYTORCH_CUDA_ALLOC_CONF" || key == "PYTORCH_ALLOC_CONF" ||
               key == "last_allocator_settings") {
      if (!value.is_null()) apply(node.pointer, node.String());
      if (!value.is_null() && node.String().find("expandable_segments") != std::string::npos)
        says_expandable = true;
    } else {
      log.notes.push_back("setting \"" + key + "\" has no effect");
    }
  }
}

}  // namespace shardplan
