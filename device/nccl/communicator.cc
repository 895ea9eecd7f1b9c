// SPDX-License-Identifier: Apache-2.0
#include "device/nccl/communicator.h"

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <thread>
#include <utility>

#include "device/nccl/played.h"

namespace shardplan::softdevice {
namespace {

constexpr std::chrono::microseconds kPoll{50};
constexpr std::chrono::milliseconds kPeerCheck{50};

// In null mode there are no peers (played.h): a communicator of any size is ready at once.
bool IsAlone() { return TheSettings().null; }

}  // namespace

Communicator::Communicator(std::unique_ptr<SharedFile> file, int rank, int ranks, int device, bool blocking)
    : file_(std::move(file)),
      rank_(rank),
      ranks_(ranks),
      device_(device),
      blocking_(blocking),
      stage_(Stage::kJoining) {
  Join();
}

Communicator::Communicator(std::shared_ptr<Communicator> parent, std::size_t split, int color, int device,
                           bool blocking)
    : parent_(std::move(parent)),
      split_(split),
      color_(color),
      device_(device),
      blocking_(blocking),
      stage_(Stage::kSplitting) {}

Communicator::~Communicator() { Leave(); }

void Communicator::Join() {
  if (!IsAlone()) {
    file_->head().ranks[rank_].pid = getpid();
    ++file_->head().joined;
  }
  next_sent_.resize(static_cast<std::size_t>(ranks_));
  next_received_.resize(static_cast<std::size_t>(ranks_));
  Engine::Get().MixSeed(static_cast<std::uint64_t>(rank_));
}

// With the lock held. The ranks of this one's colour, by key and then by rank in the parent.
bool Communicator::FindGroup() {
  if (IsAlone()) {
    // Nobody says who else has this color.
    ranks_ = parent_->ranks();
    rank_ = parent_->rank();
    return true;
  }
  SharedHead& head = parent_->file_->head();
  struct Member {
    int key;
    int rank;
  };
  std::vector<Member> members;
  for (int r = 0; r < parent_->ranks(); ++r) {
    const SplitSaid& said = head.ranks[r].splits[split_];
    if (!said.said.load(std::memory_order_acquire)) return false;
    if (said.color == color_) members.push_back({said.key, r});
  }
  std::ranges::stable_sort(members, {}, &Member::key);
  const auto self = std::ranges::find(members, parent_->rank(), &Member::rank);
  SplitSaid& first = head.ranks[members.front().rank].splits[split_];
  const int rank = static_cast<int>(self - members.begin());
  if (rank == 0) {
    file_ = SharedFile::Make();
    if (file_ != nullptr) {
      first.pid = getpid();
      first.descriptor = file_->descriptor();
      first.made.store(true, std::memory_order_release);
    }
  } else {
    if (!first.made.load(std::memory_order_acquire)) return false;
    file_ = SharedFile::Open(first.pid, first.descriptor);
  }
  rank_ = rank;
  ranks_ = static_cast<int>(members.size());
  if (file_ == nullptr) error_ = ncclSystemError;
  return true;
}

// With the lock held. False: some have not come yet.
bool Communicator::MeetPeers() {
  if (file_->head().joined < ranks_) return false;
  file_->CloseDescriptor();
  demand_ = Engine::Get().AddDemand([weak = weak_from_this()]() -> std::optional<Point> {
    const std::shared_ptr<Communicator> self = weak.lock();
    return self ? self->Wanted() : std::nullopt;
  });
  return true;
}

ncclResult_t Communicator::State() {
  const std::lock_guard lock(mutex_);
  if (error_ != ncclSuccess) return error_;
  if (stage_ == Stage::kSplitting) {
    if (!FindGroup()) return ncclInProgress;
    if (error_ != ncclSuccess) return error_;
    Join();
    stage_ = Stage::kJoining;
    parent_.reset();
  }
  if (stage_ == Stage::kJoining) {
    if (!IsAlone() && !MeetPeers()) return ncclInProgress;
    stage_ = Stage::kReady;
  }
  if (asked_in_progress_.exchange(false)) return ncclInProgress;
  return ncclSuccess;
}

ncclResult_t Communicator::WaitUntilKnown() {
  ncclResult_t state = State();
  for (; state == ncclInProgress; state = State()) std::this_thread::sleep_for(kPoll);
  return state;
}

bool Communicator::IsReady() {
  const std::lock_guard lock(mutex_);
  return stage_ == Stage::kReady;
}

std::string Communicator::LastError() {
  const std::lock_guard lock(error_mutex_);
  return what_;
}

std::size_t Communicator::SaySplit(int color, int key) {
  const std::lock_guard lock(mutex_);
  if (IsAlone()) return 0;
  const std::size_t split = splits_said_++;
  if (split >= kMaxSplits) return split;
  SplitSaid& said = file_->head().ranks[rank_].splits[split];
  said.color = color;
  said.key = key;
  said.said.store(true, std::memory_order_release);
  return split;
}

ncclRedOp_t Communicator::AddFactor(double factor) {
  const std::lock_guard lock(mutex_);
  factors_[next_op_] = factor;
  return static_cast<ncclRedOp_t>(next_op_++);
}
void Communicator::ForgetFactor(ncclRedOp_t op) {
  const std::lock_guard lock(mutex_);
  factors_.erase(op);
}
bool Communicator::Find(ncclRedOp_t op, Reduction& reduction) {
  reduction = {.op = op};
  if (op < ncclNumOps) return true;
  const std::lock_guard lock(mutex_);
  const auto found = factors_.find(op);
  if (found == factors_.end()) return false;
  reduction = {.op = ncclSum, .has_factor = true, .factor = found->second};
  return true;
}

void Communicator::Launch(std::vector<Operation> operations, const std::shared_ptr<Stream>& stream) {
  const std::lock_guard lock(mutex_);
  for (Operation& op : operations) {
    const auto peer = static_cast<std::size_t>(op.peer);
    op.number = op.kind == OpKind::kSend      ? next_sent_[peer]++
                : op.kind == OpKind::kReceive ? next_received_[peer]++
                                              : next_number_++;
  }
  if (IsAlone()) PlayPeers(operations, rank_, ranks_);
  // NCCL launches the work of one communicator in the order of the calls, whatever the streams. In null mode
  // only streams order it, so that a host knows only what the program alone makes certain.
  Task task = {NameOf(operations.front().kind), IsAlone() ? std::vector<Point>() : std::vector{last_}, {}};
  task.run = [self = shared_from_this(), operations = std::move(operations)]() mutable {
    if (IsAlone()) return true;
    bool done = true, collectives_done = true;
    for (Operation& op : operations) {
      const bool message = op.kind == OpKind::kSend || op.kind == OpKind::kReceive;
      // Collectives of a group are done in their order: `taken` and `given` count them.
      const bool did = (message || collectives_done) && self->Advance(op);
      done = did && done;
      if (!message) collectives_done = did && collectives_done;
    }
    return done;
  };
  std::erase_if(launched_, [](const auto& one) { return Engine::Get().IsDone(one.second); });
  last_ = Engine::Get().Enqueue(stream, std::move(task));
  launched_.emplace_back(next_number_, last_);
}

Point Communicator::last() const { return last_; }

bool Communicator::TakeFirst() {
  if (!std::exchange(is_first_, false)) return false;
  MarkInProgress();
  return true;
}

void Communicator::Abort() { aborted_ = true; }

void Communicator::Leave() {
  if (demand_ >= 0) Engine::Get().ForgetDemand(std::exchange(demand_, -1));
  if (file_ != nullptr) file_->head().ranks[rank_].left = true;
}

// The latest work here that a peer waits for.
std::optional<Point> Communicator::Wanted() {
  const SharedHead& head = file_->head();
  const std::uint64_t wanted = head.wanted;
  const bool messages = head.any_message_wanted;
  const std::lock_guard lock(mutex_);
  std::optional<Point> point;
  for (const auto& [after, of] : launched_) {
    if (messages || after <= wanted) point = of;
  }
  return point;
}

void Communicator::Fail(ncclResult_t error, const std::string& what) {
  const std::lock_guard lock(error_mutex_);
  if (error_ != ncclSuccess) return;
  error_ = error;
  what_ = what;
  std::fprintf(stderr, "device in software: rank %d: %s\n", rank_, what.c_str());
}

// Somebody who is gone, or has left the communicator, gives nothing any more.
void Communicator::CheckPeers(const Operation& op) {
  const auto now = Clock::now();
  if (now - peers_checked_ < kPeerCheck) return;
  peers_checked_ = now;
  const bool message = op.kind == OpKind::kSend || op.kind == OpKind::kReceive;
  for (int r = 0; r < ranks_; ++r) {
    if (r == rank_ || (message && r != op.peer)) continue;
    const RankArea& area = file_->head().ranks[r];
    const bool left = area.left;
    if (!left && IsAlive(area.pid)) continue;
    // It may have given its part first.
    const bool gave = message ? op.kind == OpKind::kReceive && file_->head().pairs[r][rank_].sent > op.number
                              : area.given > op.number;
    if (gave) continue;
    Fail(ncclRemoteError, left ? "rank " + std::to_string(r) + " has left the communicator"
                               : "the process of rank " + std::to_string(r) + " is gone");
  }
}

}  // namespace shardplan::softdevice
