// SPDX-License-Identifier: Apache-2.0
#include "verifier/clocks.h"

#include <algorithm>

namespace shardplan::verifier {

Clocks::Clocks(std::int32_t streams, std::int32_t events)
    : host_(streams),
      clocks_((streams + 1) * (streams + 1), 0),
      event_clocks_(events * (streams + 1), 0),
      recorded_(events, false),
      stuck_(streams + 1, false),
      event_stuck_(events, false),
      stuck_at_(streams + 1),
      event_stuck_at_(events) {}

void Clocks::Join(std::int32_t* into, const std::int32_t* from) const {
  for (std::int32_t i = 0; i < width(); ++i) into[i] = std::max(into[i], from[i]);
}

Work Clocks::Issue(std::int32_t stream, Position at) {
  SHARDPLAN_ASSERT(stream >= 0 && stream <= host_, "work runs on a stream of the plan or on the host");
  std::int32_t* row = Row(stream);
  if (stream != host_) Join(row, Row(host_));
  return {stream, ++row[stream], at};
}

void Clocks::Record(EventId event, StreamId stream) {
  Join(Row(stream), Row(host_));
  std::copy_n(Row(stream), width(), &event_clocks_[event * width()]);
  recorded_[event] = true;
  event_stuck_[event] = stuck_[stream];
  event_stuck_at_[event] = stuck_at_[stream];
}

void Clocks::Wait(std::int32_t stream, EventId event) {
  SHARDPLAN_ASSERT(recorded_[event], "a wait for what was never recorded is reported, not followed");
  Join(Row(stream), &event_clocks_[event * width()]);
  if (event_stuck_[event]) MarkStuck(stream, event_stuck_at_[event]);
}

void Clocks::MarkStuck(std::int32_t stream, Position at) {
  if (stuck_[stream]) return;
  stuck_[stream] = true;
  stuck_at_[stream] = at;
}

}  // namespace shardplan::verifier
