// SPDX-License-Identifier: Apache-2.0
#include "recorded/timeline.h"

#include <fmt/format.h>

#include <string_view>
#include <variant>

namespace shardplan::internal {
namespace {

std::string_view ModuleOf(const Recording& recording, RecordedId place) {
  if (place < 0) return {};
  const RecordedPlace& at = recording.places[static_cast<std::size_t>(place)];
  if (!at.module.empty() || at.forward < 0) return at.module;
  return recording.places[static_cast<std::size_t>(at.forward)].module;
}

std::string CollectiveName(const Recording& recording, const IssuedCollective& event) {
  const RecordedCommunicator& group = recording.communicators[static_cast<std::size_t>(event.communicator)];
  std::string name = fmt::format("{} {}", Name(event.kind), group.name);
  if (event.peer >= 0 && !group.ranks.empty()) {
    name += fmt::format(" {} rank {}", event.kind == CollectiveKind::kSend ? "to" : "from",
                        group.ranks[static_cast<std::size_t>(event.peer)]);
  }
  return fmt::format("{}, {:.1f} MB", name, static_cast<double>(event.size_bytes.value) / 1e6);
}

}  // namespace

std::string RecordedName(const Recording& recording, std::int64_t event) {
  return std::visit(
      [&]<typename Issued>(const Issued& issued) -> std::string {
        std::string name;
        if constexpr (std::is_same_v<Issued, IssuedCollective>) {
          return CollectiveName(recording, issued);
        } else if constexpr (requires { issued.name; }) {
          name = issued.name;
        } else if constexpr (std::is_same_v<Issued, IssuedCopy>) {
          name = fmt::format("copy, {:.1f} MB", static_cast<double>(issued.size_bytes.value) / 1e6);
        } else if constexpr (std::is_same_v<Issued, IssuedMemset>) {
          name = "memset";
        }
        if constexpr (requires { issued.place; }) {
          if (const std::string_view module = ModuleOf(recording, issued.place); !module.empty())
            name += fmt::format(" {}", module);
        }
        return name;
      },
      recording.events[static_cast<std::size_t>(event)]);
}

std::vector<TimelineSpan> RecordedTimeline(const Recording& recording, const RecordingSimulation& simulation,
                                           const std::string& prefix) {
  std::vector<TimelineSpan> timeline;
  for (const RecordedSpan& span : simulation.spans) {
    if (span.stream < 0 || span.end_ns == span.start_ns) continue;
    timeline.push_back({fmt::format("{}stream {}", prefix, span.stream), std::string(Name(span.activity)),
                        RecordedName(recording, span.event), span.start_ns, span.end_ns - span.start_ns});
  }
  return timeline;
}

}  // namespace shardplan::internal
