// SPDX-License-Identifier: Apache-2.0
#include "recorded/meetings.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <set>
#include <string>
#include <tuple>
#include <utility>

namespace shardplan::internal {
namespace {

// A communicator for all its ranks: these, and how many of the same it comes after.
using GroupKey = std::pair<std::vector<std::int64_t>, std::int32_t>;

std::unexpected<Error> BadInput(std::string message, std::string found, std::string expected) {
  return std::unexpected(
      Error{ErrorCode::kBadInput, std::move(message), "", "", std::move(found), std::move(expected)});
}

const IssuedCollective& EventOf(const Recording& recording, const CollectivePart& part) {
  return std::get<IssuedCollective>(recording.events[static_cast<std::size_t>(part.event)]);
}

// Bytes that an instruction sends less those that it receives.
std::map<std::int32_t, std::int64_t> SurplusOf(const Recording& recording, const LoweredRecording& lowered) {
  std::map<std::int32_t, std::int64_t> surplus;
  for (const CollectivePart& part : lowered.parts) {
    const IssuedCollective& issued = EventOf(recording, part);
    if (issued.kind == CollectiveKind::kSend) surplus[part.instruction] += issued.size_bytes.value;
    if (issued.kind == CollectiveKind::kReceive) surplus[part.instruction] -= issued.size_bytes.value;
  }
  return surplus;
}

bool MovesTheSame(const IssuedCollective& a, const IssuedCollective& b) {
  return a.size_bytes == b.size_bytes && a.dtype == b.dtype;
}

std::string Described(const IssuedCollective& issued) {
  return fmt::format("{} of {} bytes of {}", Name(issued.kind), issued.size_bytes.value, Name(issued.dtype));
}

class Matching {
 public:
  Matching(const std::vector<const Recording*>& recordings, const std::vector<LoweredRecording>& lowered)
      : recordings_(recordings), lowered_(lowered) {}

  Result<std::vector<Meeting>> Run() {
    for (std::size_t r = 0; r < recordings_.size(); ++r) {
      index_of_[recordings_[r]->rank] = static_cast<std::int32_t>(r);
    }
    for (std::size_t r = 0; r < recordings_.size(); ++r) {
      if (Status added = AddRank(static_cast<std::int32_t>(r)); !added) return std::unexpected(added.error());
    }
    std::vector<Meeting> meetings;
    if (Status added = AddMessages(meetings); !added) return std::unexpected(added.error());
    if (Status added = AddCollectives(meetings); !added) return std::unexpected(added.error());
    return meetings;
  }

 private:
  struct Part {
    Meeting::Member member;
    Nanoseconds duration_ns;
    const IssuedCollective* issued = nullptr;
  };
  struct Direction {
    std::vector<Part> sends, receives;
  };

  std::int64_t RankOf(std::int32_t index) const { return recordings_[static_cast<std::size_t>(index)]->rank; }

  static std::vector<GroupKey> KeysOf(const Recording& recording) {
    std::map<std::vector<std::int64_t>, std::int32_t> seen;
    std::vector<GroupKey> keys;
    for (const RecordedCommunicator& communicator : recording.communicators) {
      std::vector<std::int64_t> ranks = communicator.ranks;
      std::ranges::sort(ranks);
      keys.emplace_back(ranks, seen[ranks]++);
    }
    return keys;
  }

  Status AddRank(std::int32_t r) {
    const Recording& recording = *recordings_[static_cast<std::size_t>(r)];
    const std::vector<GroupKey> keys = KeysOf(recording);
    const std::map<std::int32_t, std::int64_t> surplus =
        SurplusOf(recording, lowered_[static_cast<std::size_t>(r)]);
    for (const CollectivePart& part : lowered_[static_cast<std::size_t>(r)].parts) {
      const IssuedCollective& issued = EventOf(recording, part);
      const auto c = static_cast<std::size_t>(issued.communicator);
      const RecordedCommunicator& communicator = recording.communicators[c];
      const Part mine = {{r, part.instruction}, part.duration_ns, &issued};
      if (communicator.ranks.empty()) {
        if (recordings_.size() == 1 || issued.peer < 0) continue;
        return BadInput(fmt::format("rank {} has messages in communicator {}, whose ranks are not known",
                                    recording.rank, issued.communicator),
                        "", fmt::format("/communicators/{}/ranks", issued.communicator));
      }
      if (issued.peer < 0) {
        collectives_[keys[c]][r].push_back(mine);
        continue;
      }
      const std::int64_t peer = communicator.ranks[static_cast<std::size_t>(issued.peer)];
      if (!index_of_.contains(peer)) {
        if (recordings_.size() == 1 || surplus.at(part.instruction) == 0) continue;
        return BadInput(
            fmt::format("rank {} {} rank {}, whose recording is not there", recording.rank,
                        issued.kind == CollectiveKind::kSend ? "sends to" : "receives from", peer),
            "", fmt::format("one of `shardplan rehearse --rank {} --record`", peer));
      }
      const bool sends = issued.kind == CollectiveKind::kSend;
      Direction& direction =
          messages_[{keys[c], sends ? recording.rank : peer, sends ? peer : recording.rank}];
      (sends ? direction.sends : direction.receives).push_back(mine);
    }
    return {};
  }

  Status AddMessages(std::vector<Meeting>& meetings) const {
    for (const auto& [key, direction] : messages_) {
      if (direction.sends.size() != direction.receives.size()) {
        return BadInput(
            fmt::format("rank {} sends rank {} other messages than that receives", std::get<1>(key),
                        std::get<2>(key)),
            fmt::format("{} sent, {} received", direction.sends.size(), direction.receives.size()),
            "as many of both in the last step");
      }
      for (std::size_t i = 0; i < direction.sends.size(); ++i) {
        const Part &sent = direction.sends[i], &received = direction.receives[i];
        if (!MovesTheSame(*sent.issued, *received.issued)) {
          return BadInput(fmt::format("message {} from rank {} to rank {} is not what is received", i,
                                      std::get<1>(key), std::get<2>(key)),
                          Described(*received.issued), Described(*sent.issued));
        }
        meetings.push_back({{sent.member, received.member},
                            std::max(sent.duration_ns, received.duration_ns),
                            /*is_message=*/true});
      }
    }
    return {};
  }

  Status AddCollectives(std::vector<Meeting>& meetings) const {
    for (const auto& [key, by_rank] : collectives_) {
      std::set<std::int32_t> members;
      for (const auto& [rank, index] : index_of_) {
        if (std::ranges::binary_search(key.first, rank)) members.insert(index);
      }
      if (members.size() < 2) continue;
      const std::size_t count = by_rank.begin()->second.size();
      for (const std::int32_t member : members) {
        const auto found = by_rank.find(member);
        const std::size_t issued = found == by_rank.end() ? 0 : found->second.size();
        if (issued == count) continue;
        return BadInput(fmt::format("ranks {} and {} are in one communicator, and differ in its collectives",
                                    RankOf(by_rank.begin()->first), RankOf(member)),
                        fmt::format("{} and {} in the last step", count, issued), "as many");
      }
      for (std::size_t i = 0; i < count; ++i) {
        Meeting meeting;
        const IssuedCollective& first = *by_rank.begin()->second[i].issued;
        for (const auto& [rank, parts] : by_rank) {
          if (parts[i].issued->kind != first.kind || !MovesTheSame(*parts[i].issued, first)) {
            return BadInput(fmt::format("collective {} of ranks {} and {} is not the same", i,
                                        RankOf(by_rank.begin()->first), RankOf(rank)),
                            Described(*parts[i].issued), Described(first));
          }
          meeting.members.push_back(parts[i].member);
          meeting.duration_ns = std::max(meeting.duration_ns, parts[i].duration_ns);
        }
        meetings.push_back(std::move(meeting));
      }
    }
    return {};
  }

  const std::vector<const Recording*>& recordings_;
  const std::vector<LoweredRecording>& lowered_;
  std::map<std::int64_t, std::int32_t> index_of_;                                   // by rank of the job
  std::map<std::tuple<GroupKey, std::int64_t, std::int64_t>, Direction> messages_;  // from, to
  std::map<GroupKey, std::map<std::int32_t, std::vector<Part>>> collectives_;
};

}  // namespace

Status CheckOneJob(const std::vector<const Recording*>& recordings) {
  std::set<std::int64_t> ranks;
  for (const Recording* recording : recordings) {
    if (recording->world_size != recordings.front()->world_size) {
      return BadInput(fmt::format("the recording of rank {} is of another job", recording->rank),
                      fmt::format("{} ranks", recording->world_size),
                      fmt::format("{}", recordings.front()->world_size));
    }
    if (!ranks.insert(recording->rank).second) {
      return BadInput("two recordings are of one rank", fmt::format("rank {}", recording->rank),
                      "one of each rank");
    }
  }
  return {};
}

std::vector<std::int64_t> AbsentPartners(const Recording& recording, const LoweredRecording& lowered) {
  const std::map<std::int32_t, std::int64_t> surplus = SurplusOf(recording, lowered);
  std::set<std::int64_t> partners;
  for (const CollectivePart& part : lowered.parts) {
    const IssuedCollective& issued = EventOf(recording, part);
    const RecordedCommunicator& communicator =
        recording.communicators[static_cast<std::size_t>(issued.communicator)];
    if (issued.peer >= 0 && !communicator.ranks.empty() && surplus.at(part.instruction) != 0)
      partners.insert(communicator.ranks[static_cast<std::size_t>(issued.peer)]);
  }
  return {partners.begin(), partners.end()};
}

Result<std::vector<Meeting>> MeetingsOf(const std::vector<const Recording*>& recordings,
                                        const std::vector<LoweredRecording>& lowered) {
  return Matching(recordings, lowered).Run();
}

}  // namespace shardplan::internal
