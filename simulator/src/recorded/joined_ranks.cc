// SPDX-License-Identifier: Apache-2.0
// [Note: messages of one kernel] A kernel may have several messages. It begins when the first of them has
// both its ends, and is done when all are. A message goes at the rate of the end where it gets least.
#include "recorded/joined_ranks.h"

#include <fmt/format.h>

#include <algorithm>

#include "engine/rank_clock.h"

namespace shardplan::internal {
namespace {

class JoinedRun final : public Joins {
 public:
  JoinedRun(const std::vector<LoweredRecording>& lowered, const std::vector<Meeting>& meetings)
      : meetings_(meetings), under_way_(meetings.size()), ranks_(lowered.size()) {
    kernels_.reserve(lowered.size());
    for (const LoweredRecording& rank : lowered)
      kernels_.emplace_back(rank.program.steps.front().code.size());
    for (std::size_t m = 0; m < meetings.size(); ++m) {
      for (const Meeting::Member& member : meetings[m].members) {
        KernelOf(member).meetings.push_back(static_cast<std::int32_t>(m));
        ++KernelOf(member).open;
      }
    }
    clock_.Reserve(lowered.size());
    for (std::size_t r = 0; r < lowered.size(); ++r) {
      clock_.Emplace(lowered[r].program, lowered[r].program.steps.front(), &ranks_[r].timeline,
                     RunOptions{.activities = true}, this, RankTraits{.rank = static_cast<std::int32_t>(r)});
    }
  }

  Result<std::vector<JoinedRank>> Run(const std::vector<const Recording*>& recordings,
                                      const std::vector<LoweredRecording>& lowered) {
    clock_.Run([this](std::int32_t meeting, std::int64_t time_ns) {
      if (under_way_[Index(meeting)].finish_ns == time_ns) End(meeting, time_ns);
    });
    for (std::int32_t r = 0; r < clock_.size(); ++r) {
      if (const std::int32_t stuck = clock_.Runner(r).StuckAt(); stuck >= 0) {
        return MakeInputError(
            fmt::format("/events/{}", lowered[Index(r)].events[Index(stuck)]),
            fmt::format("the step of rank {} never ends: this waits for ever", recordings[Index(r)]->rank));
      }
      ranks_[Index(r)].result = clock_.Runner(r).TakeResult();
    }
    return std::move(ranks_);
  }

  bool IsJoined(std::int32_t rank, std::int32_t instruction) const override {
    return !kernels_[Index(rank)][Index(instruction)].meetings.empty();
  }

  void Come(std::int32_t rank, std::size_t stream, std::int32_t instruction) override {
    Kernel& kernel = kernels_[Index(rank)][Index(instruction)];
    kernel.stream = stream;
    for (const std::int32_t meeting : kernel.meetings) {
      if (++under_way_[Index(meeting)].came == std::ssize(meetings_[Index(meeting)].members)) {
        Begin(meeting, clock_.Runner(rank).now_ns(), rank);
      }
    }
  }

  void Offer(std::int32_t rank, std::int32_t instruction, std::int64_t /*old_rate*/,
             std::int64_t rate) override {
    Kernel& kernel = kernels_[Index(rank)][Index(instruction)];
    kernel.rate = rate;
    for (const std::int32_t meeting : kernel.meetings) SetRate(meeting, clock_.Runner(rank).now_ns());
  }

 private:
  struct Kernel {
    std::vector<std::int32_t> meetings;
    std::int32_t open = 0;  // that have not ended
    std::size_t stream = 0;
    bool active = false;
    std::int64_t rate = 0;  // that its rank offers
  };
  struct UnderWay {
    std::int32_t came = 0;
    bool begun = false;
    std::int64_t rate = 0;
    Int128 remaining = 0;  // rate x nanoseconds
    std::int64_t updated_ns = 0;
    std::int64_t finish_ns = kNever;
  };

  static std::size_t Index(std::int32_t i) { return static_cast<std::size_t>(i); }
  Kernel& KernelOf(const Meeting::Member& member) {
    return kernels_[Index(member.rank)][Index(member.instruction)];
  }

  // `last`: who came last, and is being settled.
  void Begin(std::int32_t meeting, std::int64_t now_ns, std::int32_t last) {
    UnderWay& state = under_way_[Index(meeting)];
    state.begun = true;
    state.remaining = Int128{meetings_[Index(meeting)].duration_ns.value} * kFullRate;
    state.updated_ns = now_ns;
    for (const Meeting::Member& member : meetings_[Index(meeting)].members) {
      Kernel& kernel = KernelOf(member);
      if (kernel.active) continue;
      kernel.active = true;
      if (member.rank != last) clock_.BringTo(member.rank, now_ns);
      clock_.Runner(member.rank).BeginJoined(kernel.stream);
    }
    SetRate(meeting, now_ns);
  }

  void SetRate(std::int32_t meeting, std::int64_t now_ns) {
    UnderWay& state = under_way_[Index(meeting)];
    if (!state.begun) return;
    std::int64_t rate = kFullRate;
    for (const Meeting::Member& member : meetings_[Index(meeting)].members) {
      rate = std::min(rate, KernelOf(member).rate);
    }
    state.remaining -= Int128{state.rate} * (now_ns - state.updated_ns);
    state.updated_ns = now_ns;
    state.rate = rate;
    const std::int64_t finish_ns =
        state.remaining <= 0 ? now_ns
        : rate == 0          ? kNever
                             : now_ns + static_cast<std::int64_t>((state.remaining + rate - 1) / rate);
    if (finish_ns == state.finish_ns) return;
    state.finish_ns = finish_ns;
    if (finish_ns != kNever) clock_.Schedule(finish_ns, meeting);
  }

  void End(std::int32_t meeting, std::int64_t now_ns) {
    under_way_[Index(meeting)] = {};
    for (const Meeting::Member& member : meetings_[Index(meeting)].members) {
      Kernel& kernel = KernelOf(member);
      if (--kernel.open > 0) continue;
      clock_.BringTo(member.rank, now_ns);
      clock_.Runner(member.rank).FinishJoined(kernel.stream);
    }
  }

  const std::vector<Meeting>& meetings_;
  std::vector<UnderWay> under_way_;           // by meeting
  std::vector<std::vector<Kernel>> kernels_;  // by rank and instruction
  std::vector<JoinedRank> ranks_;
  RankClock clock_;
};

}  // namespace

Result<std::vector<JoinedRank>> RunJoined(const std::vector<const Recording*>& recordings,
                                          const std::vector<LoweredRecording>& lowered,
                                          const std::vector<Meeting>& meetings) {
  return JoinedRun(lowered, meetings).Run(recordings, lowered);
}

}  // namespace shardplan::internal
