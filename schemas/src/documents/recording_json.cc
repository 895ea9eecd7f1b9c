// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <array>
#include <unordered_set>
#include <variant>

#include "documents/document_json.h"
#include "documents/recording_fields.h"
#include "json/tables.h"
#include "shardplan/schemas/io.h"

namespace shardplan {

template const JsonObjectType& JsonObjectTypeOf<Recording>();

namespace {

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
