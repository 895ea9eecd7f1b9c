// SPDX-License-Identifier: Apache-2.0
// [Note: ranks that meet] Several ranks of one job are simulated together where they do different things: the
// stages of a pipeline. They meet in messages, the first that one sends another in the first that the other
// receives of it, and in collectives of a communicator that two of them are in. All other collectives a rank
// does with ranks that do as it does.
#pragma once

#include <cstdint>
#include <vector>

#include "recorded/lower_recording.h"
#include "shardplan/schemas/error.h"
#include "shardplan/schemas/recording.h"

namespace shardplan::internal {

struct Meeting {
  struct Member {
    std::int32_t rank = -1;  // index into the recordings
    std::int32_t instruction = -1;
  };
  std::vector<Member> members;  // two or more
  Nanoseconds duration_ns;      // alone
  bool is_message = false;      // of two ranks, the sender first
};

// kBadInput: the recordings are of several jobs, or two of one rank.
Status CheckOneJob(const std::vector<const Recording*>& recordings);

// The meetings of lowered steps of one job. kBadInput: a rank has a message with one whose recording is not
// there, and its kernel does not move as many bytes in the other direction. Or two ranks do not issue the
// same.
Result<std::vector<Meeting>> MeetingsOf(const std::vector<const Recording*>& recordings,
                                        const std::vector<LoweredRecording>& lowered);

// Ranks that the rank has such messages with.
std::vector<std::int64_t> AbsentPartners(const Recording& recording, const LoweredRecording& lowered);

}  // namespace shardplan::internal
