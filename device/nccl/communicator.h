// SPDX-License-Identifier: Apache-2.0
// A NCCL communicator: its ranks meet in a shared file; its collectives are tasks of streams.
#pragma once

#include <nccl.h>

#include <atomic>
#include <chrono>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "device/nccl/arithmetic.h"
#include "device/nccl/shared_file.h"
#include "device/runtime/engine.h"

namespace shardplan::softdevice {

enum class OpKind {
  kAllGather,
  kReduceScatter,
  kAllReduce,
  kBroadcast,
  kReduce,
  kAllToAll,
  kGather,
  kSend,
  kReceive
};
const char* NameOf(OpKind kind);

// One call, and how far it has come.
struct Operation {
  OpKind kind = OpKind::kAllGather;
  const std::byte* from = nullptr;
  std::byte* to = nullptr;
  std::size_t count = 0;
  ncclDataType_t dtype = ncclFloat32;
  Reduction reduction;
  int peer = 0;              // root, or the other rank of a message
  std::uint64_t number = 0;  // of the communicator's collectives, or of the pair's messages
  bool given = false;
  bool done = false;
};

class Communicator : public std::enable_shared_from_this<Communicator> {
 public:
  Communicator(std::unique_ptr<SharedFile> file, int rank, int ranks, int device, bool blocking);
  // A child whose ranks are not known yet: the `split`-th split of the parent.
  Communicator(std::shared_ptr<Communicator> parent, std::size_t split, int color, int device, bool blocking);
  ~Communicator();

  // Its process group's name for it (ncclConfig_t::commName); "": not said.
  std::string name;

  int rank() const { return rank_; }
  int ranks() const { return ranks_; }
  int device() const { return device_; }
  bool blocking() const { return blocking_; }

  // ncclInProgress until all ranks have come; then success, or the first error.
  ncclResult_t State();
  // Polls State until it is known.
  ncclResult_t WaitUntilKnown();
  bool IsReady();
  std::string LastError();

  // Says how this rank takes part in its next split; returns which one that is.
  std::size_t SaySplit(int color, int key);

  // Reductions of ncclRedOpCreatePreMulSum.
  ncclRedOp_t AddFactor(double factor);
  void ForgetFactor(ncclRedOp_t op);
  // Nothing: no such operation.
  bool Find(ncclRedOp_t op, Reduction& reduction);

  // Queues the operations as one task: they end together.
  void Launch(std::vector<Operation> operations, const std::shared_ptr<Stream>& stream);
  // Work ends at once, without its data.
  void Abort();
  // No collective comes any more.
  void Leave();
  Point last() const;
  // The next State is ncclInProgress.
  void MarkInProgress() { asked_in_progress_ = true; }
  // True once: NCCL sets up what the first collective of a communicator needs in the background.
  bool TakeFirst();

 private:
  enum class Stage { kSplitting, kJoining, kReady };
  using Clock = std::chrono::steady_clock;
  void Join();
  bool FindGroup();
  bool MeetPeers();
  bool Advance(Operation& op);
  bool AdvanceCollective(Operation& op);
  bool AdvanceSend(Operation& op);
  bool AdvanceReceive(Operation& op);
  bool AllSaidTheSame(const Operation& op);
  void TakeFrom(const Operation& op, const std::vector<const std::byte*>& given);
  void Fail(ncclResult_t error, const std::string& what);
  void CheckPeers(const Operation& op);
  std::optional<Point> Wanted();

  std::mutex mutex_;
  std::mutex error_mutex_;  // taken by tasks, which run under mutex_, too
  std::unique_ptr<SharedFile> file_;
  std::shared_ptr<Communicator> parent_;
  std::size_t split_ = 0;
  int color_ = 0;
  int rank_ = 0;
  int ranks_ = 0;
  const int device_;
  const bool blocking_;
  Stage stage_;
  bool is_first_ = true;
  std::atomic<bool> asked_in_progress_ = false;
  std::atomic<ncclResult_t> error_ = ncclSuccess;
  std::string what_;
  std::atomic<bool> aborted_ = false;
  std::size_t splits_said_ = 0;
  std::map<int, double> factors_;
  int next_op_ = ncclNumOps;
  std::uint64_t next_number_ = 0;
  std::vector<std::uint64_t> next_sent_;
  std::vector<std::uint64_t> next_received_;
  // Launched, by the number of the last collective in it.
  std::vector<std::pair<std::uint64_t, Point>> launched_;
  Point last_;
  int demand_ = -1;
  Clock::time_point peers_checked_;
};

}  // namespace shardplan::softdevice
