// SPDX-License-Identifier: Apache-2.0
#include "races/order.h"

#include <algorithm>

namespace shardplan {

void Join(Clock& into, const Clock& from) {
  for (std::size_t s = 0; s < from.size(); ++s) into[s] = std::max(into[s], from[s]);
}

Order::Order(const Recording& recording)
    : recording_(recording),
      streams_(recording.streams.size(), Clock(recording.streams.size(), 0)),
      threads_(recording.threads.size(), Clock(recording.streams.size(), 0)),
      known_(threads_),
      pinned_(threads_),
      has_learned_(threads_.size()),
      copied_pinned_(threads_.size()) {}

void Order::Wait(RecordedId thread, const Clock& clock) {
  Join(threads_[Own(thread)], clock);
  Join(known_[Own(thread)], clock);
  Join(pinned_[Own(thread)], clock);
}

void Order::ForgetLearned(RecordedId thread) {
  copied_pinned_[static_cast<std::size_t>(thread)] = false;
  const std::size_t own = Own(thread);
  if (!has_learned_[own]) return;
  known_[own] = threads_[own];
  has_learned_[own] = false;
}

std::size_t Order::Own(RecordedId thread) const {
  const RecordedId of = recording_.threads[static_cast<std::size_t>(thread)].works_for;
  return static_cast<std::size_t>(of >= 0 ? of : thread);
}

std::int32_t Order::Issue(RecordedId thread, RecordedId stream) {
  Clock& clock = streams_[static_cast<std::size_t>(stream)];
  Join(clock, threads_[Own(thread)]);
  return ++clock[static_cast<std::size_t>(stream)];
}

void Order::On(const IssuedRecord& event) {
  Clock& clock = streams_[static_cast<std::size_t>(event.stream)];
  Join(clock, threads_[Own(event.thread)]);
  records_[event.event] = clock;
  if (copied_pinned_[static_cast<std::size_t>(event.thread)]) of_pinned_.insert(event.event);
}
void Order::On(const IssuedWait& event) {
  Join(streams_[static_cast<std::size_t>(event.stream)], records_.at(event.event));
}
void Order::On(const HostWaitForEvent& event) { Wait(event.thread, records_.at(event.event)); }
void Order::On(const HostLearned& event) {
  const std::size_t own = Own(event.thread);
  Join(known_[own], records_.at(event.event));
  has_learned_[own] = true;
  if (of_pinned_.contains(event.event)) KnowOfPinned(records_.at(event.event));
}
void Order::On(const HostWaitForStream& event) {
  Wait(event.thread, OfStream(event.stream));
  // The copy was not asynchronous: its block has no event, and is free as soon as it is dropped.
  if (copied_pinned_[static_cast<std::size_t>(event.thread)]) KnowOfPinned(OfStream(event.stream));
}
void Order::KnowOfPinned(const Clock& clock) {
  for (Clock& known : pinned_) Join(known, clock);
}
void Order::On(const HostWaitForDevice& event) { WaitForDevice(event.thread, event.device); }
void Order::On(const MemoryReleased& event, std::int32_t device) { WaitForDevice(event.thread, device); }
void Order::On(const HandOver& event) {
  const Clock none(streams_.size(), 0);
  Object& object = objects_.try_emplace(event.object, Object{none, none}).first->second;
  Join(object.waited, threads_[Own(event.thread)]);
  Join(object.pinned, pinned_[Own(event.thread)]);
}
void Order::On(const TakeOver& event) {
  const auto found = objects_.find(event.object);
  if (found == objects_.end()) return;
  Wait(event.thread, found->second.waited);
  Join(pinned_[Own(event.thread)], found->second.pinned);
}

void Order::WaitForDevice(RecordedId thread, std::int32_t device) {
  for (std::size_t s = 0; s < streams_.size(); ++s) {
    if (recording_.streams[s].device == device) Wait(thread, streams_[s]);
  }
}

}  // namespace shardplan
