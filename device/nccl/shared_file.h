// SPDX-License-Identifier: Apache-2.0
// Memory that the ranks of a communicator share: one sparse file, whose pages come when they are touched.
//
// [Note: two slots]
// A rank puts what it gives to a collective into one of two slots, by the collective's number, when everybody
// has taken what the slot held before. So no rank can be two collectives ahead of another, which NCCL allows
// nobody to rely on either. Messages between two ranks have two slots for each pair.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

namespace shardplan::softdevice {

constexpr int kMaxRanks = 64;
constexpr int kSlots = 2;
constexpr int kMaxSplits = 256;

// A rank's account of its operation; the others compare it with theirs.
struct Said {
  int kind = 0;
  int dtype = 0;
  int op = 0;
  int root = 0;
  std::uint64_t count = 0;
  std::uint64_t scalar = 0;  // its bits, of a sum with a factor
  bool operator==(const Said&) const = default;
};

struct SplitSaid {
  std::atomic<bool> said;
  int color;
  int key;
  std::atomic<bool> made;  // by the first of the new group: its file
  pid_t pid;
  int descriptor;
};

struct RankArea {
  std::atomic<pid_t> pid;
  std::atomic<bool> left;
  std::atomic<std::uint64_t> given;  // collectives
  std::atomic<std::uint64_t> taken;
  Said said[kSlots];
  SplitSaid splits[kMaxSplits];
};

struct PairArea {
  std::atomic<std::uint64_t> sent;
  std::atomic<std::uint64_t> received;
  Said said[kSlots];
};

struct SharedHead {
  std::atomic<int> joined;
  std::atomic<std::uint64_t> wanted;  // somebody waits for collectives below this number
  std::atomic<bool> any_message_wanted;
  RankArea ranks[kMaxRanks];
  PairArea pairs[kMaxRanks][kMaxRanks];  // [from][to]
};

class SharedFile {
 public:
  // A file without a name, which others open through this process. Null: no memory.
  static std::unique_ptr<SharedFile> Make();
  static std::unique_ptr<SharedFile> Open(pid_t pid, int descriptor);
  ~SharedFile();
  SharedFile(const SharedFile&) = delete;
  SharedFile& operator=(const SharedFile&) = delete;

  SharedHead& head() const { return *static_cast<SharedHead*>(memory_); }
  // Room of kSlotBytes and kMessageBytes.
  std::byte* Slot(int rank, std::uint64_t number) const;
  std::byte* MessageSlot(int from, int to, std::uint64_t number) const;
  int descriptor() const { return descriptor_; }
  // Everybody has opened it.
  void CloseDescriptor();

  static constexpr std::size_t kSlotBytes = std::size_t{4} << 30;
  static constexpr std::size_t kMessageBytes = std::size_t{64} << 20;

 private:
  SharedFile(int descriptor, void* memory) : descriptor_(descriptor), memory_(memory) {}
  static std::unique_ptr<SharedFile> Map(int descriptor);
  int descriptor_;
  void* memory_;
};

// False: it has ended (also when nobody has waited for it yet).
bool IsAlive(pid_t pid);

}  // namespace shardplan::softdevice
