// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <string_view>
#include <unordered_set>
#include <variant>

#include "documents/document_json.h"
#include "documents/recording_fields.h"
#include "json/tables.h"
#include "shardplan/schemas/io.h"

namespace shardplan {

template const JsonObjectType& JsonObjectTypeOf<Recording>();

namespace {

// Each once, of the job, and this one in its place.
Status CheckRanks(const Recording& recording, const RecordedCommunicator& communicator, std::size_t number) {
  std::unordered_set<std::int64_t> seen;
  for (std::size_t r = 0; r < communicator.ranks.size(); ++r) {
    const std::int64_t rank = communicator.ranks[r];
    const std::string at = fmt::format("/communicators/{}/ranks/{}", number, r);
    if (rank < 0 || rank >= recording.world_size) {
      return MakeInputError(at, "no rank of the job", fmt::format("{}", rank),
                            fmt::format("0 to {}", recording.world_size - 1));
    }
    if (!seen.insert(rank).second) {
      return MakeInputError(at, "a rank that the communicator has twice", fmt::format("{}", rank),
                            "each once");
    }
    if (static_cast<std::int64_t>(r) == communicator.rank && rank != recording.rank) {
      return MakeInputError(at, "it is not the recording's rank, which has this place",
                            fmt::format("{}", rank), fmt::format("{}", recording.rank));
    }
  }
  return {};
}

Status CheckPlaces(const Recording& recording) {
  for (std::size_t i = 0; i < recording.places.size(); ++i) {
    const RecordedId forward = recording.places[i].forward;
    if (forward >= static_cast<RecordedId>(i)) {
      return MakeInputError(fmt::format("/places/{}/forward", i), "a forward that comes later",
                            fmt::format("{}", forward), "a place before this one");
    }
  }
  for (std::size_t i = 0; i < recording.threads.size(); ++i) {
    const RecordedId of = recording.threads[i].works_for;
    if (of == static_cast<RecordedId>(i) || of >= static_cast<RecordedId>(recording.threads.size())) {
      return MakeInputError(fmt::format("/threads/{}/works_for", i), "no such thread", fmt::format("{}", of),
                            "another thread");
    }
  }
  for (std::size_t i = 0; i < recording.communicators.size(); ++i) {
    const RecordedCommunicator& communicator = recording.communicators[i];
    if (communicator.rank >= communicator.size) {
      return MakeInputError(fmt::format("/communicators/{}/rank", i), "a rank that it does not have",
                            fmt::format("{}", communicator.rank), fmt::format("below {}", communicator.size));
    }
    if (!communicator.ranks.empty() && std::ssize(communicator.ranks) != communicator.size) {
      return MakeInputError(fmt::format("/communicators/{}/ranks", i), "not as many ranks as it has",
                            fmt::format("{}", communicator.ranks.size()),
                            fmt::format("{}", communicator.size));
    }
    if (Status bad = CheckRanks(recording, communicator, i); !bad) return bad;
  }
  if (recording.rank >= recording.world_size) {
    return MakeInputError("/rank", "a rank that the job does not have", fmt::format("{}", recording.rank),
                          fmt::format("below {}", recording.world_size));
  }
  return {};
}

Status CheckRegions(const std::vector<MemoryRegion>& regions, std::size_t event) {
  for (const MemoryRegion& region : regions) {
    if (!region.strides.empty() && region.strides.size() != region.shape.size()) {
      return MakeInputError(fmt::format("/events/{}", event), "a region with other strides than dimensions",
                            fmt::format("{} strides", region.strides.size()),
                            fmt::format("{}", region.shape.size()));
    }
    // In double first: a product of strides may be beyond any integer.
    double last = 0.0;
    for (std::size_t d = 0; d < region.strides.size(); ++d) {
      last += static_cast<double>(region.shape[d]) * static_cast<double>(region.strides[d]);
    }
    constexpr double kMost = 0x1p53 / 16;
    if (last > kMost || region.address > kMaxExact - (last > 0 ? SpanBytes(region) : 0)) {
      return MakeInputError(fmt::format("/events/{}", event), "a region beyond any memory", {},
                            "addresses below 2^53");
    }
  }
  return {};
}

Status CheckPeer(const Recording& recording, const IssuedCollective& issued, std::size_t event) {
  const std::int64_t size = recording.communicators[static_cast<std::size_t>(issued.communicator)].size;
  const bool is_message = issued.kind == CollectiveKind::kSend || issued.kind == CollectiveKind::kReceive;
  if (is_message ? issued.peer >= 0 && issued.peer < size : issued.peer < 0) return {};
  return MakeInputError(
      fmt::format("/events/{}", event), "a send and a receive say with whom, and nothing else does",
      fmt::format("{}", issued.peer), is_message ? fmt::format("0 to {}", size - 1) : "no peer (-1)");
}

Status CheckEvents(const Recording& recording) {
  std::unordered_set<std::int64_t> recorded;
  for (std::size_t i = 0; i < recording.events.size(); ++i) {
    const Status status = std::visit(
        [&]<typename Event>(const Event& event) -> Status {
          if constexpr (std::is_same_v<Event, IssuedRecord>) {
            if (!recorded.insert(event.event).second) {
              return MakeInputError(fmt::format("/events/{}", i), "a record that was there before",
                                    fmt::format("{}", event.event), "another number for each record");
            }
          } else if constexpr (requires { event.event; }) {
            if (!recorded.contains(event.event)) {
              return MakeInputError(fmt::format("/events/{}", i),
                                    "it waits for an event that nobody recorded",
                                    fmt::format("{}", event.event), "the number of a \"record\" before it");
            }
          }
          if constexpr (std::is_same_v<Event, PhaseEnded>) {
            constexpr std::array<std::string_view, 4> kPhases = {"setup", "forward", "backward", "optimizer"};
            if (std::ranges::find(kPhases, event.phase) == kPhases.end()) {
              return MakeInputError(fmt::format("/events/{}", i), "unknown phase", event.phase,
                                    "setup, forward, backward or optimizer");
            }
          }
          if constexpr (std::is_same_v<Event, IssuedCollective>) {
            if (Status bad = CheckPeer(recording, event, i); !bad) return bad;
          }
          if constexpr (requires { event.reads; }) {
            if (Status bad = CheckRegions(event.reads, i); !bad) return bad;
          }
          if constexpr (requires { event.writes; }) return CheckRegions(event.writes, i);
          return {};
        },
        recording.events[i]);
    if (!status) return status;
  }
  return {};
}

}  // namespace

Result<Recording> RecordingFromTape(const JsonTape& tape) {
  Result<Recording> recording = ReadDocumentAs<Recording>(tape, kRecordingSchema);
  if (!recording.has_value()) return recording;
  for (const auto check : {CheckPlaces, CheckEvents}) {
    if (Status status = check(*recording); !status) return std::unexpected(std::move(status.error()));
  }
  return recording;
}

std::string ToJson(const Recording& recording) {
  JsonWriter writer;
  writer.WriteDocument(kRecordingSchema, recording);
  return writer.Take();
}

}  // namespace shardplan
