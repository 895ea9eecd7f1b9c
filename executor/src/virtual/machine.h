// SPDX-License-Identifier: Apache-2.0
// The virtual machine's insides: queues of work per (rank, stream), and who may run next.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <span>
#include <string>
#include <tuple>
#include <vector>

#include "shardplan/executor/virtual_backend.h"
#include "virtual/memory.h"

namespace shardplan::executor {

using RendezvousKey =
    std::tuple<CommunicatorId, std::int64_t, std::int64_t>;  // communicator, group, sequence

// One collective of a communicator group: the members' parts, joined as they arrive.
struct Rendezvous {
  RendezvousKey key;
  const CollectiveSpec* spec = nullptr;  // of the member that joined first
  std::int64_t members = 0;
  std::int64_t arrived = 0;                  // members whose stream has come to it
  std::vector<Place> inputs;                 // by position in the group
  std::vector<const CollectiveSpec*> specs;  // likewise; null: has not joined yet
  std::vector<std::byte> gathered;           // what was read: all members' inputs, one after the other
  PoisonMarks gathered_marks;                // ... kMarks: where it was poison
  bool read = false;
  std::int64_t finished = 0;
};

// The description of a piece of work, for messages. `a`, `b`: see each.
struct WorkLabel {
  enum class Kind : std::uint8_t {
    kModel,
    kCopy,        // a: from buffer, b: to buffer
    kAccumulate,  // likewise
    kScale,       // a: buffer
    kRecord,      // a: event
    kRelease,     // a: buffer
    kWait,        // a: event
    kSpan,        // a: span, of which it is the begin or the end
    kCollective,  // a: communicator, b: output buffer
  };
  Kind kind = Kind::kModel;
  std::int32_t a = -1;
  std::int32_t b = -1;
};

struct WorkItem {
  enum class Kind : std::uint8_t { kWork, kRecord, kWait, kCollective };
  Kind kind = Kind::kWork;
  WorkLabel label;
  Debts debts;                       // poisoned before anything else
  std::function<void()> work;        // kWork; may be empty
  std::int64_t record = -1;          // kRecord, kWait: which record
  Rendezvous* rendezvous = nullptr;  // kCollective
  std::int64_t position = 0;         // ... of this rank in the group
  std::int64_t sequence = 0;         // ... of the collective in its communicator, on this rank
  Place output;
  bool arrived = false;
};

class VirtualRank;

class VirtualMachineImpl final : public VirtualMachine {
 public:
  VirtualMachineImpl(const Plan& plan, std::uint64_t seed, VirtualContent content);
  ~VirtualMachineImpl() override;

  Device& device(std::int64_t rank) override;
  Collectives& collectives(std::int64_t rank) override;
  std::span<std::byte> Memory(std::int64_t rank, BufferId buffer, std::int32_t part) override;
  void Enqueue(std::int64_t rank, StreamId stream, std::span<const BufferId> uses,
               std::function<void()> work) override;
  Result<bool> RunOne() override;
  Status Drain() override;
  std::uint64_t Random(std::uint64_t n) override { return n == 0 ? 0 : random_() % n; }

  // For the ranks. Stream -1: the host does the work, now.
  void Push(std::int64_t rank, StreamId stream, WorkItem item);
  // All that the stream was given is done.
  bool IsIdle(std::int64_t rank, StreamId stream) const;
  std::int64_t NewRecord();
  bool IsReached(std::int64_t record) const { return reached_[record]; }
  // The group is named by its first rank. The spec outlives the collective.
  Result<Rendezvous*> Join(const CollectiveSpec& spec, std::int64_t rank, std::int64_t first_rank,
                           std::int64_t position, std::int64_t sequence);
  const Plan& plan() const { return plan_; }
  HandOut hand_out() const { return hand_out_; }
  VirtualContent content() const { return content_; }
  // The place of a buffer's part now; no block while it is not alive.
  Place PlaceOf(std::int64_t rank, BufferId buffer, std::int32_t part);

 private:
  bool CanRun(std::size_t queue) const;
  void Run(std::size_t queue);
  void Arrive(std::size_t queue);
  void EndCollective(std::size_t queue);
  void ReadInputs(Rendezvous& rendezvous);
  void WriteOutput(const WorkItem& item);
  void WriteMarks(const WorkItem& item);
  void Shuffle();
  std::int64_t& CollectivesDone(std::size_t rank, std::int32_t communicator) {
    return collectives_done_[rank * plan_.communicators.size() + static_cast<std::size_t>(communicator)];
  }
  std::string Text(const WorkItem& item) const;

  const Plan& plan_;
  const VirtualContent content_;
  std::mt19937_64 random_;
  std::vector<std::unique_ptr<VirtualRank>> ranks_;
  std::vector<std::deque<WorkItem>> queues_;  // rank * streams + stream
  std::vector<std::size_t> order_;            // of preference
  std::int64_t until_shuffle_ = 0;
  const bool in_order_;  // a communicator runs one collective at a time
  const HandOut hand_out_;
  const std::int64_t longest_shuffle_;  // items of work until there are new preferences
  const bool has_outsider_;             // preferences have one stream first or last, on all ranks
  std::vector<bool> reached_;           // by record
  std::map<RendezvousKey, Rendezvous> rendezvous_;
  std::vector<std::int64_t> collectives_done_;  // rank * communicators + communicator
};

// Device and Collectives of one rank.
class VirtualRank final : public Device, public Collectives {
 public:
  VirtualRank(VirtualMachineImpl& machine, const Plan& plan, std::int64_t rank);

  Status Prepare(const Plan& plan) override;
  Result<CopyId> PrepareCopy(CopySpec spec) override;
  Status Allocate(BufferId buffer, StreamId stream) override;
  Status Free(BufferId buffer, std::span<const StreamId> safe_after) override;
  Status FreeParts(BufferId buffer, std::span<const std::int32_t> parts,
                   std::span<const StreamId> safe_after) override;
  Status MakeAlias(CopyId copy) override;
  Status Copy(CopyId copy, StreamId stream) override;
  Status Accumulate(CopyId copy, StreamId stream) override;
  Status Scale(BufferId buffer, double divisor, StreamId stream) override;
  Status Record(EventId event, StreamId stream) override;
  Status Wait(EventId event, StreamId stream) override;
  Result<bool> HostWait(EventId event) override;
  Result<bool> Synchronize() override;
  Status PrepareSpans(std::int64_t spans) override;
  Status BeginSpan(SpanId span, StreamId stream) override;
  Status EndSpan(SpanId span, StreamId stream) override;
  Result<SpanTimes> TimesOf(SpanId span) override;

  Status Prepare(const Plan& plan, std::int64_t rank) override;
  Result<CollectiveId> PrepareCollective(const CollectiveSpec& spec) override;
  Status Issue(CollectiveId collective, StreamId stream) override;
  Status Check() override;
  void Abort(const std::string& reason) override { aborted_ = reason; }

  std::span<std::byte> Memory(BufferId buffer, std::int32_t part);
  Place PlaceOf(BufferId buffer, std::int32_t part) const;
  // For the model's own work on the stream: the pool's debts, and those of the buffers that it uses first.
  Block* Borrow(StreamId stream) { return stream < 0 ? nullptr : memory_.Borrow(stream); }
  Debts TakeDebts(StreamId stream, std::span<const BufferId> buffers);

 private:
  // First byte of each part, as the work that was issued with it sees it whatever happens to the name.
  struct PartMemory {
    std::vector<Place> places;
    std::vector<std::byte*> bytes;  // kNumbers
  };
  using Parts = std::shared_ptr<const PartMemory>;
  // A buffer's memory: where its parts begin in an instance.
  struct Name {
    std::shared_ptr<Instance> instance;
    Parts parts;
  };
  // Memory that a stream in `safe_after` may still use.
  struct PendingRelease {
    std::shared_ptr<Instance> instance;
    std::vector<std::int64_t> records;
  };
  struct Group {
    std::int64_t first_rank = 0;
    std::int64_t position = 0;  // of this rank
  };

  // kBadInput when the buffer is not there. The debts of a first use are added to `debts`.
  Result<Parts> Use(BufferId buffer, Debts& debts);
  void SetMemory(BufferId buffer, std::shared_ptr<Instance> instance);
  bool HasNumbers() const { return machine_.content() == VirtualContent::kNumbers; }
  Parts PartsAt(std::vector<Place> places) const;
  // Queues kernel(copy, src, dst), or what it does to marks.
  using RunsKernel = void (*)(const CopySpec&, std::span<std::byte* const> src,
                              std::span<std::byte* const> dst);
  using MarksKernel = void (*)(const CopySpec&, std::span<const Place> src, std::span<const Place> dst);
  Status PushRuns(WorkLabel::Kind kind, CopyId copy, StreamId stream, RunsKernel kernel,
                  MarksKernel on_marks);
  void PushWork(StreamId stream, WorkLabel label, Debts debts, std::function<void()> work);
  // Gives memory back, once the streams have done what they were given so far.
  void Release(BufferId buffer, std::shared_ptr<Instance> memory, std::span<const StreamId> safe_after);
  void ReleaseFinished();
  std::string NameOf(BufferId buffer) const { return plan_.buffers[buffer].name; }
  Status NotRecorded(EventId event) const;

  VirtualMachineImpl& machine_;
  const Plan& plan_;
  const std::int64_t rank_;
  VirtualMemory memory_;
  std::vector<Name> names_;  // by buffer
  std::vector<PendingRelease> pending_;
  std::vector<std::int64_t> latest_record_;  // by event, -1
  std::vector<std::unique_ptr<CopySpec>> copies_;
  std::deque<CollectiveSpec> collectives_;  // a rendezvous points to them
  std::vector<std::int64_t> issued_;        // by communicator
  std::vector<Group> groups_;               // by communicator
  std::vector<SpanTimes> spans_;
  std::optional<std::string> aborted_;
};

}  // namespace shardplan::executor
