// What a step has cost so far: busy and exposed time, ends of phases, and, where somebody wants it, the
// timeline.
#pragma once

#include <cstdint>
#include <vector>

#include "engine/rates.h"
#include "engine/stream_state.h"

namespace shardplan::internal {

class StepAccount {
 public:
  // timeline: null where nobody wants one.
  StepAccount(const EngineProgram& program, const EngineStep& step, EngineTimeline* timeline);

  // ---- the host ----
  void HostBegins(std::int32_t i, std::int64_t from_ns, std::int64_t to_ns, std::int64_t issued_ns);
  // recorded: the span whose record it waited for; -1: none.
  void HostEnds(std::int32_t i, std::int64_t from_ns, std::int64_t to_ns, std::int32_t recorded);

  // ---- streams ----
  // From now to then nothing changes.
  void Pass(const std::vector<StreamState>& streams, const Rates& rates, std::int64_t now_ns,
            std::int64_t then_ns);
  void Begin(std::size_t s, StreamState& stream, std::int64_t start_ns);
  void EndWork(std::size_t s, const StreamState& stream, std::int64_t now_ns);
  // The wait at the head of the stream is over; stream.stalled_ns: since when it has waited. recorded as in
  // HostEnds.
  void EndWait(std::size_t s, StreamState& stream, std::int32_t recorded, std::int64_t now_ns);
  // The host is not far enough ahead for this operator of the head, a segment.
  void PacedBy(const StreamState& stream);
  // The stream goes on behind its head.
  void Leave(const StreamState& stream, std::int64_t now_ns);

  EngineResult Take(std::int64_t end_ns);

 private:
  const EngineInstruction& HeadOf(const StreamState& stream) const {
    return step_.code[static_cast<std::size_t>(stream.head)];
  }
  void BeginSpan(std::size_t s, StreamState& stream, std::int64_t start_ns);

  const EngineProgram& program_;
  const EngineStep& step_;
  EngineTimeline* timeline_;
  EngineResult result_;
};

}  // namespace shardplan::internal
