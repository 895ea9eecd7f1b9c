// SPDX-License-Identifier: Apache-2.0
// Races in words.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <map>
#include <string_view>
#include <tuple>
#include <variant>

#include "shardplan/races/races.h"
#include "shardplan/schemas/cluster.h"
#include "shardplan/schemas/printable.h"

namespace shardplan {
namespace {

struct Issued {
  std::string name;
  RecordedId place = -1, stream = -1;
};

Issued IssuedBy(const Recording& recording, std::int64_t number) {
  return std::visit(
      []<typename Event>(const Event& event) -> Issued {
        Issued issued;
        if constexpr (requires { event.place; }) issued.place = event.place;
        if constexpr (requires { event.stream; }) issued.stream = event.stream;
        if constexpr (requires { event.name; }) issued.name = event.name;
        if constexpr (std::is_same_v<Event, IssuedCopy>) {
          constexpr std::array<std::string_view, 4> kWords = {"copy to the device", "copy to the host",
                                                              "copy", "copy on the host"};
          issued.name = kWords[static_cast<std::size_t>(event.direction)];
        } else if constexpr (std::is_same_v<Event, IssuedMemset>) {
          issued.name = "memset";
        } else if constexpr (std::is_same_v<Event, IssuedCollective>) {
          issued.name = Name(event.kind);
        }
        return issued;
      },
      recording.events[static_cast<std::size_t>(number)]);
}

// Files of libraries: the script's own lines tell more.
bool IsOfLibrary(std::string_view file) {
  return file.starts_with('<') || file.find("/site-packages/") != std::string_view::npos ||
         file.find("/dist-packages/") != std::string_view::npos ||
         file.find("/lib/python") != std::string_view::npos;
}
// The rehearsal itself calls what the program calls.
bool IsOfRehearsal(std::string_view file) {
  return file.starts_with('<') || file.find("/shardplan_rehearsal/") != std::string_view::npos;
}
bool IsOfTorch(std::string_view file) { return file.find("/torch/") != std::string_view::npos; }

std::string ShortFile(std::string_view file) {
  for (const std::string_view root : {"/site-packages/", "/dist-packages/"}) {
    const std::size_t at = file.find(root);
    if (at != std::string_view::npos) return std::string(file.substr(at + root.size()));
  }
  return std::string(file);
}

std::string FrameText(const RecordedFrame& frame) {
  return fmt::format("{}:{} ({})", Printable(ShortFile(frame.file)), frame.line, Printable(frame.function));
}

// The innermost line, that of the library that called torch, and that of the script: those that there are.
std::string LinesOf(const std::vector<RecordedFrame>& frames) {
  std::vector<const RecordedFrame*> chosen;
  const auto add = [&](auto found) {
    if (found != frames.end() && std::ranges::find(chosen, &*found) == chosen.end())
      chosen.push_back(&*found);
  };
  const auto first_not_of = [&](auto is) {
    return std::ranges::find_if(frames, [&](const RecordedFrame& frame) { return !is(frame.file); });
  };
  add(first_not_of(IsOfRehearsal));
  add(first_not_of([](std::string_view file) { return IsOfTorch(file) || IsOfRehearsal(file); }));
  add(first_not_of([](std::string_view file) { return IsOfLibrary(file) || IsOfRehearsal(file); }));
  std::string text;
  for (const RecordedFrame* frame : chosen) text += (text.empty() ? "" : " < ") + FrameText(*frame);
  return text;
}

std::string PlaceText(const Recording& recording, RecordedId id) {
  if (id < 0) return "an unknown place";
  const RecordedPlace& place = recording.places[static_cast<std::size_t>(id)];
  std::string text = LinesOf(place.frames);
  if (!place.node.empty()) {
    text += fmt::format("{}{}", text.empty() ? "" : ", in ", Printable(place.node));
    if (place.forward >= 0) {
      const RecordedPlace& forward = recording.places[static_cast<std::size_t>(place.forward)];
      if (const std::string lines = LinesOf(forward.frames); !lines.empty()) text += " of " + lines;
      if (place.module.empty() && !forward.module.empty()) text += ", module " + Printable(forward.module);
    }
  }
  if (!place.module.empty()) text += ", module " + Printable(place.module);
  return text.empty() ? "no Python" : text;
}

std::string EventPlace(const Recording& recording, std::int64_t number) {
  return number < 0 ? "an unknown place" : PlaceText(recording, IssuedBy(recording, number).place);
}

std::string AccessLine(const Recording& recording, const RacingAccess& access, std::string_view which) {
  const Issued issued = IssuedBy(recording, access.event);
  const std::string where = issued.stream < 0 ? "the host" : fmt::format("stream {}", issued.stream);
  const std::int64_t begin = access.region.address;
  return fmt::format("  {:<8}{} {} 0x{:x} to 0x{:x}, on {}\n          at {}\n", which, Printable(issued.name),
                     access.writes ? "writes" : "reads", begin, begin + SpanBytes(access.region), where,
                     PlaceText(recording, issued.place));
}

std::string Head(const Recording& recording, const Race& race) {
  const std::string first = Printable(IssuedBy(recording, race.first.event).name);
  const std::string second = Printable(IssuedBy(recording, race.second.event).name);
  const char* verb = race.second.writes ? "writes" : "reads";
  const char* other = race.first.writes ? "writes" : "reads";
  if (race.kind == RaceKind::kFreedEarly) {
    return fmt::format(
        "{} {} a block, which in another run may be one that was freed while {} may still {} it", second,
        verb, first, race.first.writes ? "write" : "read");
  }
  if (race.kind == RaceKind::kReused) {
    return fmt::format("{} {} memory that was freed while {} may still {} it", second, verb, first,
                       race.first.writes ? "write" : "read");
  }
  if (race.kind == RaceKind::kHost) {
    return fmt::format("the host ({}) {} what {} {}, without waiting for it", second, verb, first, other);
  }
  return fmt::format("{} {} what {} {}, and nothing orders them", second, verb, first, other);
}

std::string Missing(const Recording& recording, const Race& race) {
  const Issued first = IssuedBy(recording, race.first.event);
  const std::string what = fmt::format("{} at {}", Printable(first.name), PlaceText(recording, first.place));
  switch (race.kind) {
    case RaceKind::kUnordered:
      return fmt::format("stream {} has to wait for stream {} behind the {}",
                         IssuedBy(recording, race.second.event).stream, first.stream, what);
    case RaceKind::kHost:
      return fmt::format("the host has to wait for stream {} behind the {}", first.stream, what);
    case RaceKind::kReused:
    case RaceKind::kFreedEarly:
      return fmt::format(
          "before the block is freed, its own stream has to wait for stream {} behind the {}; or "
          "record_stream with "
          "stream {}",
          first.stream, what, first.stream);
  }
  return {};
}

using Key = std::tuple<RaceKind, std::string, std::string>;

// Races of one cause, the first of each; in the order of the recording.
struct Group {
  const Race* first = nullptr;
  std::int64_t count = 0;
};

// Blocks of a model repeat: "layers.3" and "layers.4" are one.
std::string WithoutNumbers(const std::string& text) {
  std::string result;
  for (std::size_t i = 0; i < text.size(); ++i) {
    const bool digit = text[i] >= '0' && text[i] <= '9';
    const bool after_dot = !result.empty() && (result.back() == '.' || result.back() == '#');
    if (digit && after_dot) {
      if (result.back() != '#') result += '#';
    } else {
      result += text[i];
    }
  }
  return result;
}

std::vector<Group> Grouped(const Recording& recording, const RaceReport& report) {
  std::map<Key, std::size_t> by_key;
  std::vector<Group> groups;
  for (const Race& race : report.races) {
    const auto side = [&](const RacingAccess& access) {
      if (access.event < 0) return std::string();
      const Issued issued = IssuedBy(recording, access.event);
      return WithoutNumbers(fmt::format("{} {} {} {}", issued.name, issued.stream, access.writes,
                                        PlaceText(recording, issued.place)));
    };
    // Whoever is the next owner of a block that is freed too early: the free is the fault.
    const bool is_free = race.kind == RaceKind::kReused || race.kind == RaceKind::kFreedEarly;
    const std::string other = is_free ? WithoutNumbers(EventPlace(recording, race.freed)) : side(race.second);
    const Key key = {is_free ? RaceKind::kReused : race.kind, side(race.first), other};
    const auto [entry, is_new] = by_key.try_emplace(key, groups.size());
    if (is_new) groups.push_back({&race, 0});
    Group& group = groups[entry->second];
    ++group.count;
    if (group.first->kind == RaceKind::kFreedEarly && race.kind == RaceKind::kReused) group.first = &race;
  }
  return groups;
}

}  // namespace

std::vector<std::string> RaceSchedules(const Recording& recording, const RaceReport& report) {
  std::vector<std::string> schedules;
  for (const Group& group : Grouped(recording, report)) {
    const RecordedId stream = IssuedBy(recording, group.first->first.event).stream;
    const std::int32_t number = stream < 0 ? -1 : recording.streams[static_cast<std::size_t>(stream)].number;
    schedules.push_back(number < 0 ? std::string() : fmt::format("late:{}", number));
  }
  return schedules;
}

std::size_t RaceGroups(const Recording& recording, const RaceReport& report) {
  return Grouped(recording, report).size();
}

std::string RaceText(const Recording& recording, const RaceReport& report, std::size_t shown) {
  const std::vector<Group> groups = Grouped(recording, report);
  std::string text;
  std::size_t number = 0;
  for (const Group& group : groups) {
    const Race& race = *group.first;
    if (shown > 0 && number == shown) {
      text += fmt::format("and {} more\n", groups.size() - shown);
      break;
    }
    ++number;
    text +=
        fmt::format("race {}{}: {}\n", number, group.count > 1 ? fmt::format(" ({} times)", group.count) : "",
                    Head(recording, race));
    text += AccessLine(recording, race.first, "first");
    if (race.freed >= 0) {
      const auto* freed = std::get_if<BlockFreed>(&recording.events[static_cast<std::size_t>(race.freed)]);
      text += fmt::format("  freed   {} {}\n", freed != nullptr && freed->is_behind ? "after" : "at",
                          EventPlace(recording, race.freed));
    }
    if (race.allocated >= 0) {
      text += fmt::format("  handed out at {}\n", EventPlace(recording, race.allocated));
    }
    if (race.second.event >= 0) text += AccessLine(recording, race.second, "second");
    text += fmt::format("  missing {}\n", Missing(recording, race));
  }
  return text;
}

}  // namespace shardplan
