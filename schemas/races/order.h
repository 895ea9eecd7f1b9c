// SPDX-License-Identifier: Apache-2.0
// Happens-before in a recording: a vector clock for each stream, each thread of the host, each record of an
// event and each object that threads hand over.
//
// Work of a stream has the next tick of it. A clock says for each stream up to which tick its work is over.
// Work is behind what its stream had before, and behind what the thread that issues it has waited for.
#pragma once

#include <cstdint>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "shardplan/schemas/recording.h"

namespace shardplan {

using Clock = std::vector<std::int32_t>;  // a tick for each stream
void Join(Clock& into, const Clock& from);

class Order {
 public:
  explicit Order(const Recording& recording);

  // The tick of work that the thread issues to the stream now.
  std::int32_t Issue(RecordedId thread, RecordedId stream);
  // Work that is over before work issued to the stream now begins.
  const Clock& OfStream(RecordedId stream) const { return streams_[static_cast<std::size_t>(stream)]; }
  // Work that the thread has waited for, or of which torch's code in it has just been told to be over. [Note:
  // learned] That code gives up at once what it held until then: so what is freed next is behind it. Whatever
  // the program does next is not, since on another day the answer is "not yet" and it does the same.
  const Clock& KnownBy(RecordedId thread) const { return known_[Own(thread)]; }
  // The thread does something else.
  void ForgetLearned(RecordedId thread);
  // The same for pinned memory, for good and in all threads. Its allocator asks for the event behind the copy
  // before it hands a block out again, to whichever thread. That is not recorded.
  const Clock& KnownOfPinned(RecordedId thread) const { return pinned_[Own(thread)]; }
  // The thread has issued a copy of pinned memory: the record that follows is the allocator's.
  void CopiedPinned(RecordedId thread) { copied_pinned_[static_cast<std::size_t>(thread)] = true; }

  void On(const IssuedRecord& event);
  void On(const IssuedWait& event);
  void On(const HostWaitForEvent& event);
  void On(const HostLearned& event);
  void On(const HostWaitForStream& event);
  void On(const HostWaitForDevice& event);
  void On(const MemoryReleased& event, std::int32_t device);
  void On(const HandOver& event);
  void On(const TakeOver& event);

 private:
  // A thread that works for another one shares its clock.
  std::size_t Own(RecordedId thread) const;
  void Wait(RecordedId thread, const Clock& clock);
  void WaitForDevice(RecordedId thread, std::int32_t device);
  void KnowOfPinned(const Clock& clock);

  const Recording& recording_;
  std::vector<Clock> streams_, threads_, known_, pinned_;
  std::vector<bool> has_learned_;               // of `known_`
  std::vector<bool> copied_pinned_;             // by thread: its last event was such a copy
  std::unordered_set<std::int64_t> of_pinned_;  // records
  struct Object {
    Clock waited, pinned;
  };
  std::unordered_map<std::int64_t, Clock> records_;
  std::unordered_map<std::int64_t, Object> objects_;
};

}  // namespace shardplan
