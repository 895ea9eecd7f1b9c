// SPDX-License-Identifier: Apache-2.0
// A replay as text and as JSON.
#include <algorithm>
#include <nlohmann/json.hpp>

#include "shardplan/schemas/printable.h"
#include "shardplan/simulator/allocator_replay.h"

namespace shardplan {
namespace {

constexpr std::int64_t kRowsAround = 5;

std::string WithSeparators(std::int64_t number) {
  std::string text = std::to_string(number < 0 ? -number : number);
  for (std::ptrdiff_t at = static_cast<std::ptrdiff_t>(text.size()) - 3; at > 0; at -= 3) {
    text.insert(static_cast<std::size_t>(at), ",");
  }
  return number < 0 ? "-" + text : text;
}

Bytes PeakReserved(const AllocatorReplay& replay) {
  Bytes peak = replay.initial_reserved_bytes;
  for (const Bytes reserved : replay.reserved_bytes) peak = std::max(peak, reserved);
  return peak;
}

Bytes FinalReserved(const AllocatorReplay& replay) {
  return replay.reserved_bytes.empty() ? replay.initial_reserved_bytes : replay.reserved_bytes.back();
}

std::vector<LogActionKind> AllKinds() {
  std::vector<LogActionKind> kinds;
  for (int kind = 0; kind <= static_cast<int>(LogActionKind::kSnapshot); ++kind) {
    kinds.push_back(static_cast<LogActionKind>(kind));
  }
  return kinds;
}

std::int64_t CountOf(const AllocatorLog& log, LogActionKind kind) {
  return std::count_if(log.actions.begin(), log.actions.end(),
                       [&](const LogAction& action) { return action.kind == kind; });
}

std::string RowText(const AllocatorLog& log, const AllocatorReplay& replay, std::int64_t row) {
  const LogAction& action = log.actions[static_cast<std::size_t>(row)];
  std::string text = replay.departure->action == row ? "  > " : "    ";
  text += std::to_string(row) + "  " + std::string(Name(action.kind)) + "  address " +
          std::to_string(action.address) + "  " + WithSeparators(action.size_bytes.value) + " B";
  if (static_cast<std::size_t>(row) < replay.reserved_bytes.size()) {
    text += "  reserved " + WithSeparators(replay.reserved_bytes[static_cast<std::size_t>(row)].value) + " B";
  }
  return text + "\n";
}

std::string DepartureText(const AllocatorLog& log, const AllocatorReplay& replay) {
  const AllocatorDeparture& departure = *replay.departure;
  std::string text = "first departure at action " + std::to_string(departure.action) + " (/events/" +
                     std::to_string(departure.action) + ")\n  model: " + Printable(departure.model) +
                     "\n  log:   " + Printable(departure.log) + "\n";
  const std::int64_t last = std::min(departure.action + kRowsAround, replay.actions - 1);
  for (std::int64_t row = std::max<std::int64_t>(0, departure.action - kRowsAround); row <= last; ++row) {
    text += RowText(log, replay, row);
  }
  if (!departure.segments.empty()) {
    text += "the model's memory there ('#' allocated, 'w' waiting, '.' free):\n" +
            AsciiMemoryMap(departure.segments);
  }
  return text;
}

}  // namespace

std::string ReplayText(const AllocatorLog& log, const AllocatorReplay& replay) {
  std::string text;
  if (!log.about.empty()) text += Printable(log.about) + "\n";
  const std::string settings = ToString(log.settings);
  text += "settings: " + (settings.empty() ? "defaults" : Printable(settings)) + "\n";
  if (log.settings.allowed_bytes) {
    text += "allowed: " + WithSeparators(log.settings.allowed_bytes->value) + " B\n";
  }
  if (replay.inferred_device_bytes) {
    text += "size of the device, from the log's address spaces: about " +
            WithSeparators(replay.inferred_device_bytes->value) + " B\n";
  }
  if (replay.streams_searched) {
    text += "streams: the log does not say them; some new segments fit only another stream than the first\n";
  }
  for (const std::string& note : log.notes) text += "note: " + Printable(note) + "\n";
  text += "state before: " + std::to_string(log.initial_segments.size()) + " segments, " +
          WithSeparators(replay.initial_reserved_bytes.value) + " B reserved\n";
  std::string kinds;
  for (const LogActionKind kind : AllKinds()) {
    const std::int64_t count = CountOf(log, kind);
    if (count > 0)
      kinds += (kinds.empty() ? "" : ", ") + WithSeparators(count) + " " + std::string(Name(kind));
  }
  text += "actions: " + (kinds.empty() ? "none" : kinds) + "\n";
  text += "reproduced: " + WithSeparators(replay.reproduced) + " of " + WithSeparators(replay.actions) +
          " actions, with address, size, order and reserved bytes after each\n";
  text += "reserved: peak " + WithSeparators(PeakReserved(replay).value) + " B, last " +
          WithSeparators(FinalReserved(replay).value) + " B; allocated " +
          WithSeparators(replay.stats.allocated_bytes.value) + " B, free in segments that are in use " +
          WithSeparators(replay.stats.inactive_split_bytes.value) + " B\n";
  return text + (replay.departure ? DepartureText(log, replay) : "no departure\n");
}

std::string ReplayJson(const AllocatorLog& log, const AllocatorReplay& replay) {
  nlohmann::ordered_json json;
  json["settings"] = ToString(log.settings);
  json["actions"] = replay.actions;
  json["reproduced"] = replay.reproduced;
  nlohmann::ordered_json& kinds = json["actions_by_kind"] = nlohmann::ordered_json::object();
  for (const LogActionKind kind : AllKinds()) {
    if (const std::int64_t count = CountOf(log, kind); count > 0) kinds[std::string(Name(kind))] = count;
  }
  json["initial_reserved_bytes"] = replay.initial_reserved_bytes.value;
  json["peak_reserved_bytes"] = PeakReserved(replay).value;
  json["final_reserved_bytes"] = FinalReserved(replay).value;
  json["allocated_bytes"] = replay.stats.allocated_bytes.value;
  json["active_bytes"] = replay.stats.active_bytes.value;
  json["requested_bytes"] = replay.stats.requested_bytes.value;
  json["inactive_split_bytes"] = replay.stats.inactive_split_bytes.value;
  json["inferred_device_bytes"] = nullptr;
  if (replay.inferred_device_bytes) json["inferred_device_bytes"] = replay.inferred_device_bytes->value;
  json["streams_searched"] = replay.streams_searched;
  json["departure"] = nullptr;
  if (replay.departure) {
    json["departure"] = {{"action", replay.departure->action},
                         {"pointer", "/events/" + std::to_string(replay.departure->action)},
                         {"model", replay.departure->model},
                         {"log", replay.departure->log}};
  }
  json["notes"] = log.notes;
  return json.dump(2, ' ', true, nlohmann::ordered_json::error_handler_t::replace) + "\n";
}

}  // namespace shardplan
