// SPDX-License-Identifier: Apache-2.0
// Reading a log. The positions of what is needed come from its "columns", so that further columns do no harm.
#include <algorithm>
#include <limits>
#include <map>
#include <set>

#include "allocator/log_json.h"
#include "allocator/sizes.h"
#include "shardplan/schemas/io.h"
#include "shardplan/simulator/allocator_replay.h"

namespace shardplan {
namespace {

using allocator_log::BadLog;
using allocator_log::Brief;
using allocator_log::Fail;
using allocator_log::Json;
using allocator_log::Node;

constexpr std::pair<std::string_view, LogActionKind> kActionNames[] = {
    {"alloc", LogActionKind::kAlloc},
    {"free", LogActionKind::kFree},
    {"free_requested", LogActionKind::kFreeRequested},
    {"free_completed", LogActionKind::kFreeCompleted},
    {"segment_alloc", LogActionKind::kSegmentAlloc},
    {"segment_free", LogActionKind::kSegmentFree},
    {"segment_map", LogActionKind::kSegmentMap},
    {"segment_unmap", LogActionKind::kSegmentUnmap},
    {"oom", LogActionKind::kOom},
    {"snapshot", LogActionKind::kSnapshot},
    {"workspace_snapshot", LogActionKind::kSnapshot}};

constexpr std::size_t kAbsent = std::numeric_limits<std::size_t>::max();

struct Columns {
  std::size_t segment_address = 0, segment_bytes = 1, segment_stream = 2, segment_pool = 3,
              segment_blocks = 4;
  std::size_t segment_expandable = kAbsent;
  std::size_t action = 0, address = 1, bytes = 2, stream = kAbsent;
};

// Positions of `names` in a list of column names; a nested list is "blocks".
std::map<std::string, std::size_t> PositionsOf(const Node& list) {
  std::map<std::string, std::size_t> positions;
  for (std::size_t i = 0; i < list.Array().size(); ++i) {
    const Json& name = list.value[i];
    if (name.is_string()) {
      positions[name.get<std::string>()] = i;
    } else if (name.is_array()) {
      positions["blocks"] = i;
    } else {
      Fail(list.pointer + "/" + std::to_string(i), "wrong type", Brief(name), "the name of a column");
    }
  }
  return positions;
}

Columns ParseColumns(const Json& root) {
  Columns columns;
  if (!root.contains("columns")) return columns;
  const Json& described = root["columns"];
  if (!described.is_object()) Fail("/columns", "wrong type", Brief(described), "an object");
  auto place = [](const Node& list, std::initializer_list<std::pair<const char*, std::size_t*>> needed,
                  std::initializer_list<std::pair<const char*, std::size_t*>> optional) {
    const std::map<std::string, std::size_t> positions = PositionsOf(list);
    for (const auto& [name, field] : needed) {
      const auto found = positions.find(name);
      if (found == positions.end()) Fail(list.pointer, "a column is missing", Brief(list.value), name);
      *field = found->second;
    }
    for (const auto& [name, field] : optional) {
      if (const auto found = positions.find(name); found != positions.end()) *field = found->second;
    }
  };
  if (described.contains("initial_segments")) {
    place({described["initial_segments"], "/columns/initial_segments"},
          {{"address", &columns.segment_address},
           {"bytes", &columns.segment_bytes},
           {"stream", &columns.segment_stream},
           {"pool", &columns.segment_pool},
           {"blocks", &columns.segment_blocks}},
          {{"expandable", &columns.segment_expandable}, {"is_expandable", &columns.segment_expandable}});
  }
  if (described.contains("events")) {
    place({described["events"], "/columns/events"},
          {{"action", &columns.action}, {"address", &columns.address}, {"bytes", &columns.bytes}},
          {{"stream", &columns.stream}});
  }
  return columns;
}

using InitialSegment = CachingAllocator::InitialSegment;

InitialSegment ParseSegment(const Node& row, const Columns& columns, bool expandable,
                            std::vector<std::int64_t>& streams) {
  InitialSegment segment;
  segment.address = row.At(columns.segment_address).Address();
  segment.size_bytes = {row.At(columns.segment_bytes).Integer(1)};
  streams.push_back(row.At(columns.segment_stream).Integer(0));
  const Node pool = row.At(columns.segment_pool);
  segment.small_pool = pool.String() == "small";
  if (!segment.small_pool && pool.String() != "large")
    Fail(pool.pointer, "wrong value", Brief(pool.value), "small or large");
  segment.expandable = expandable;
  if (columns.segment_expandable != kAbsent) {
    const Node flag = row.At(columns.segment_expandable);
    if (!flag.value.is_boolean()) Fail(flag.pointer, "wrong type", Brief(flag.value), "true or false");
    segment.expandable = flag.value.get<bool>();
  }
  if (segment.expandable) segment.mapped = {{segment.address, segment.size_bytes}};
  const Node blocks = row.At(columns.segment_blocks);
  DeviceAddress end = segment.address;
  for (std::size_t i = 0; i < blocks.Array().size(); ++i) {
    const Node block = blocks.At(i);
    const DeviceAddress address = block.At(0).Address();
    const std::int64_t requested = block.At(1).Integer(0);
    const std::int64_t size = block.At(2).Integer(1);
    if (address < end || address + size > segment.address + segment.size_bytes.value) {
      Fail(block.pointer, "the block overlaps another or leaves its segment", Brief(block.value),
           "blocks in ascending order from " + std::to_string(end) + " to " +
               std::to_string(segment.address + segment.size_bytes.value));
    }
    if (requested > size) {
      Fail(block.pointer, "requested more than the block has", std::to_string(requested),
           "at most " + std::to_string(size));
    }
    end = address + size;
    segment.blocks.push_back({address, {requested}, {size}});
  }
  return segment;
}

LogAction ParseAction(const Node& row, const Columns& columns) {
  const Node name = row.At(columns.action);
  const std::string text = name.String();
  const auto known = std::find_if(std::begin(kActionNames), std::end(kActionNames),
                                  [&](const auto& entry) { return entry.first == text; });
  if (known == std::end(kActionNames)) {
    std::string expected;
    for (const auto& [action, kind] : kActionNames)
      expected += (expected.empty() ? "" : ", ") + std::string(action);
    Fail(name.pointer, "unknown action", Brief(name.value), expected);
  }
  LogAction action;
  action.kind = known->second;
  action.address = row.At(columns.address).Address();
  action.size_bytes = {row.At(columns.bytes).Integer(0)};
  return action;
}

void ParseSegments(const Json& root, const Columns& columns, AllocatorLog& log,
                   std::vector<std::int64_t>& streams) {
  const Node rows{root["initial_segments"], "/initial_segments"};
  for (std::size_t i = 0; i < rows.Array().size(); ++i) {
    log.initial_segments.push_back(
        ParseSegment(rows.At(i), columns, log.settings.expandable_segments, streams));
  }
}

// Streams by their rank in ascending order: that is the order in which LibTorch visits them.
void NumberStreams(const Json& root, const Columns& columns, AllocatorLog& log,
                   const std::vector<std::int64_t>& of_segments) {
  std::vector<std::int64_t> of_actions;
  if (columns.stream != kAbsent) {
    const Node rows{root["events"], "/events"};
    for (std::size_t i = 0; i < log.actions.size(); ++i) {
      const LogActionKind kind = log.actions[i].kind;
      const Node stream = rows.At(i).At(columns.stream);
      const bool needed = kind != LogActionKind::kSnapshot && !stream.value.is_null();
      of_actions.push_back(needed ? stream.Integer(0) : -1);
    }
  }
  std::set<std::int64_t> all(of_segments.begin(), of_segments.end());
  all.insert(of_actions.begin(), of_actions.end());
  all.erase(-1);
  if (all.empty()) all.insert(0);
  if (all.size() > 1000) Fail("/events", "too many streams", std::to_string(all.size()), "at most 1000");
  log.streams.assign(all.begin(), all.end());
  auto number = [&](std::int64_t stream) {
    return static_cast<std::int32_t>(std::lower_bound(log.streams.begin(), log.streams.end(), stream) -
                                     log.streams.begin());
  };
  for (std::size_t i = 0; i < of_segments.size(); ++i)
    log.initial_segments[i].stream = number(of_segments[i]);
  for (std::size_t i = 0; i < of_actions.size(); ++i) {
    if (of_actions[i] >= 0) log.actions[i].stream = number(of_actions[i]);
  }
  log.streams_told = columns.stream != kAbsent;
}

AllocatorLog ParseRoot(const Json& root) {
  if (!root.is_object()) Fail("", "not an allocator log", Brief(root), "an object");
  for (const char* field : {"initial_segments", "events"}) {
    if (!root.contains(field)) Fail("", "not an allocator log: a field is missing", "", field);
  }
  AllocatorLog log;
  if (root.contains("about")) log.about = Node{root["about"], "/about"}.String();
  for (const char* field : {"device_total_bytes", "device_bytes", "total_memory"}) {
    if (root.contains(field))
      log.device_bytes = Bytes{Node{root[field], std::string("/") + field}.Integer(1)};
  }
  bool says_expandable = false;
  if (root.contains("allocator_settings")) ParseLogSettings(root["allocator_settings"], log, says_expandable);
  const Columns columns = ParseColumns(root);
  const Node rows{root["events"], "/events"};
  log.actions.reserve(rows.Array().size());
  for (std::size_t i = 0; i < rows.value.size(); ++i) log.actions.push_back(ParseAction(rows.At(i), columns));
  if (!says_expandable) {
    log.settings.expandable_segments =
        std::any_of(log.actions.begin(), log.actions.end(),
                    [](const LogAction& action) { return action.kind == LogActionKind::kSegmentMap; });
  }
  std::vector<std::int64_t> streams;
  ParseSegments(root, columns, log, streams);
  NumberStreams(root, columns, log, streams);
  std::sort(log.initial_segments.begin(), log.initial_segments.end(),
            [](const InitialSegment& a, const InitialSegment& b) { return a.address < b.address; });
  for (std::size_t i = 1; i < log.initial_segments.size(); ++i) {
    const InitialSegment& before = log.initial_segments[i - 1];
    if (before.address + before.size_bytes.value > log.initial_segments[i].address) {
      Fail("/initial_segments", "two segments overlap", std::to_string(log.initial_segments[i].address),
           "at least " + std::to_string(before.address + before.size_bytes.value));
    }
  }
  if (root.contains("pytorch")) {
    const Node said{root["pytorch"], "/pytorch"};
    if (Status set = SetRelease(said.String(), log.settings); !set) {
      Fail(said.pointer, set.error().message, set.error().found, set.error().expected);
    }
  }
  if (root.contains("final_reserved_bytes")) {
    log.final_reserved_bytes = Bytes{Node{root["final_reserved_bytes"], "/final_reserved_bytes"}.Integer(0)};
  }
  for (const auto& [key, value] : root.items()) {
    static const std::set<std::string> kKnown = {"about",
                                                 "pytorch",
                                                 "allocator_settings",
                                                 "columns",
                                                 "initial_segments",
                                                 "events",
                                                 "final_reserved_bytes",
                                                 "device_total_bytes",
                                                 "device_bytes",
                                                 "total_memory"};
    if (!kKnown.contains(key)) log.notes.push_back("field \"" + key + "\" has no effect");
  }
  return log;
}

}  // namespace

std::string_view Name(LogActionKind kind) {
  for (const auto& [name, named] : kActionNames) {
    if (named == kind) return name;
  }
  return "";
}

Result<AllocatorLog> ParseAllocatorLog(std::string_view json_text) {
  try {
    return ParseRoot(Json::parse(json_text));
  } catch (const BadLog& bad) {
    return std::unexpected(bad.error);
  } catch (const Json::parse_error& error) {
    return MakeInputError("byte " + std::to_string(error.byte),
                          "not JSON: the file is cut off or damaged there", error.what(), "JSON");
  } catch (const Json::exception& error) {
    return MakeInputError("", "not an allocator log", error.what(),
                          "the format of docs/internals/allocator.md");
  }
}

Result<AllocatorLog> ReadAllocatorLog(const std::string& path) {
  Result<std::string> text = ReadFile(path);
  if (!text) return std::unexpected(text.error());
  Result<AllocatorLog> log = ParseAllocatorLog(*text);
  if (!log) log.error().file = path;
  return log;
}

}  // namespace shardplan
