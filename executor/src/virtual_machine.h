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
#include "virtual_memory.h"

namespace shardplan::executor {

// One collective of a communicator group: the members' parts, joined as they arrive.
struct Rendezvous {
  CollectiveSpec spec;
  std::int64_t members = 0;
  std::int64_t arrived = 0;              // members whose stream has come to it
  std::vector<const std::byte*> inputs;  // by position in the group
  std::vector<std::byte> gathered;       // what was read: all members' inputs, one after the other
  bool read = false;
  std::int64_t finished = 0;
};

struct WorkItem {
  enum class Kind : std::uint8_t { kWork, kRecord, kWait, kCollective };
  Kind kind = Kind::kWork;
  std::function<void()> work;        // kWork
  std::int64_t record = -1;          // kRecord, kWait: which record
  Rendezvous* rendezvous = nullptr;  // kCollective
  std::int64_t position = 0;         // ... of this rank in the group
  std::int64_t sequence = 0;         // ... of the collective in its communicator, on this rank
  CommunicatorId communicator = -1;
  std::byte* output = nullptr;
  bool arrived = false;
  std::string what;  // for messages
};

class VirtualRank;

class VirtualMachineImpl final : public VirtualMachine {
 public:
  VirtualMachineImpl(const Plan& plan, std::uint64_t seed);
  ~VirtualMachineImpl() override;

  Device& device(std::int64_t rank) override;
  Collectives& collectives(std::int64_t rank) override;
  std::span<std::byte> Memory(std::int64_t rank, BufferId buffer, std::int32_t part) override;
  void Enqueue(std::int64_t rank, StreamId stream, std::span<const BufferId> uses,
               std::function<void()> work) override;
  Result<bool> RunOne() override;
  Status Drain() override;
  std::uint64_t Random(std::uint64_t n) override { return n == 0 ? 0 : random_() % n; }

  // For the ranks.
  void Push(std::int64_t rank, StreamId stream, WorkItem item);
  std::int64_t NewRecord();
  bool IsReached(std::int64_t record) const { return reached_[record]; }
  Result<Rendezvous*> Join(const CollectiveSpec& spec, std::int64_t rank, std::int64_t sequence);
  const Plan& plan() const { return plan_; }

 private:
  std::deque<WorkItem>& Queue(std::size_t index) { return queues_[index]; }
  bool CanRun(std::size_t queue);
  void Run(std::size_t queue);
  void Arrive(WorkItem& item);
  void ReadInputs(Rendezvous& rendezvous);
  void WriteOutput(const WorkItem& item);
  void Shuffle();

  const Plan& plan_;
  std::mt19937_64 random_;
  std::vector<std::unique_ptr<VirtualRank>> ranks_;
  std::vector<std::deque<WorkItem>> queues_;  // rank * streams + stream
  std::vector<std::size_t> order_;            // of preference
  std::int64_t until_shuffle_ = 0;
  std::vector<bool> reached_;  // by record
  std::map<std::tuple<CommunicatorId, std::int64_t, std::int64_t>, Rendezvous> rendezvous_;
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
  Status MakeAlias(CopyId copy) override;
  Status Copy(CopyId copy, StreamId stream) override;
  Status Accumulate(CopyId copy, StreamId stream) override;
  Status Scale(BufferId buffer, double divisor, StreamId stream) override;
  Status Record(EventId event, StreamId stream) override;
  Status Wait(EventId event, StreamId stream) override;
  Result<bool> HostWait(EventId event) override;
  Result<bool> Synchronize() override;

  Status Prepare(const Plan& plan, std::int64_t rank) override;
  Result<CollectiveId> PrepareCollective(const CollectiveSpec& spec) override;
  Status Issue(CollectiveId collective, StreamId stream) override;
  Status Check() override;
  void Abort(const std::string& reason) override { aborted_ = reason; }

  std::span<std::byte> Memory(BufferId buffer, std::int32_t part);
  // First byte of each part; the debts of a first use are added to `debts`.
  Result<std::vector<std::byte*>> Use(BufferId buffer, std::vector<Debt>& debts);
  // Of the model's own work on the stream: the pool's, and those of the buffers that it uses first.
  std::vector<Debt> TakeDebts(StreamId stream, std::span<const BufferId> buffers);

 private:
  // A buffer's memory: where its parts begin in an instance.
  struct Name {
    std::shared_ptr<Instance> instance;
    std::vector<std::byte*> parts;
  };
  // Memory that a stream in `safe_after` may still use.
  struct PendingRelease {
    std::shared_ptr<Instance> instance;
    std::vector<std::int64_t> records;
  };

  // Queues kernel(copy, src, dst) as the work `what`. kBadInput when a buffer is not there.
  using RunsKernel = void (*)(const CopySpec&, std::span<std::byte* const> src,
                              std::span<std::byte* const> dst);
  Status PushRuns(const CopySpec& copy, StreamId stream, RunsKernel kernel, std::string what);
  void PushWork(StreamId stream, std::vector<Debt> debts, std::function<void()> work, std::string what);
  void ReleaseFinished();
  std::string NameOf(BufferId buffer) const { return plan_.buffers[buffer].name; }

  VirtualMachineImpl& machine_;
  const Plan& plan_;
  const std::int64_t rank_;
  VirtualMemory memory_;
  std::vector<Name> names_;  // by buffer
  std::vector<PendingRelease> pending_;
  std::vector<std::int64_t> latest_record_;  // by event, -1
  std::vector<std::unique_ptr<CopySpec>> copies_;
  std::vector<CollectiveSpec> collectives_;
  std::vector<std::int64_t> issued_;  // by communicator
  std::optional<std::string> aborted_;
};

}  // namespace shardplan::executor
