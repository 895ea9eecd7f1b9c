// SPDX-License-Identifier: Apache-2.0
// A model of LibTorch's CUDA caching allocator (c10/cuda/CUDACachingAllocator): which address a
// request gets, when segments are taken from the driver and given back, how many bytes are reserved.
// docs/internals/allocator.md has the rules and where each comes from.
//
// [Note: what is exact]
// Given the driver's answers (addresses, out of memory) and the times at which events complete, the model
// makes the decisions of the real allocator one by one: same block, same split, same segments, in the same
// order. Private pools (CUDA graphs, torch.cuda.MemPool) are not modelled.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "shardplan/schemas/error.h"
#include "shardplan/schemas/quantity.h"

namespace shardplan {

// The knobs of PYTORCH_ALLOC_CONF that decide where memory comes from. Defaults are LibTorch's.
struct AllocatorSettings {
  bool expandable_segments = false;
  // Blocks of this size and larger are never split; nullopt: no limit.
  std::optional<Bytes> max_split_size_bytes;
  // How much larger than an oversize request (>= max_split_size) a cached block may be and still serve it.
  // Setting large_segment_size_mb sets it too.
  Bytes max_non_split_rounding_bytes{20 << 20};
  // Segment of requests between 1 and 10 MiB, and page size of expandable segments of the large pool.
  Bytes large_segment_bytes{20 << 20};
  // Fraction of allowed_bytes above which cached segments are collected; 0: never. Without allowed_bytes it
  // has no effect, as in LibTorch.
  double garbage_collection_threshold = 0;
  // Divisions of each power of two that sizes are rounded up to, by floor(log2(bytes)) from 1 MiB (and below)
  // to 32 GiB (and above); 0 and 1: rounded to 512 B only.
  std::array<std::int64_t, 16> roundup_power2_divisions{};
  // The limit that torch.cuda.set_per_process_memory_fraction(f) with f < 1 sets: f times the device's
  // memory.
  std::optional<Bytes> allowed_bytes;
  // No knob: of free blocks of one size torch 2.15 takes one of the oldest segment, 2.11 the one at the
  // lowest address (PyTorchRules::older_segments_first).
  bool older_segments_first = false;

  bool operator==(const AllocatorSettings&) const = default;
};

// Reads the syntax of PYTORCH_ALLOC_CONF ("expandable_segments:True,max_split_size_mb:128,
// roundup_power2_divisions:[256:1,512:2,>:8]") over `settings`. Knobs that do not decide about device memory
// (pinned_*, backend:native, release_lock_on_cudamalloc, ...) are accepted and have no effect.
// per_process_memory_fraction needs `device_bytes`. kUsage says what was found and expected; the limits are
// LibTorch's.
Status ParseAllocatorSettings(std::string_view text, std::optional<Bytes> device_bytes,
                              AllocatorSettings& settings);

// Sets the decisions that differ between releases of PyTorch ("2.15"). kUsage: it is not planned.
Status SetRelease(std::string_view release, AllocatorSettings& settings);

// Whether it takes the settings, on some device. kUsage as above.
Status CheckAllocatorSettings(std::string_view text);

// The same syntax back; "" for the defaults. allowed_bytes has no counterpart and is left out.
std::string ToString(const AllocatorSettings& settings);

// Requested bytes rounded up as the allocator does before it searches: the size of the block that a request
// occupies when its remainder is split off.
Bytes RoundedSize(const AllocatorSettings& settings, Bytes requested);
// Size of the segment that a request of that rounded size makes without expandable segments.
Bytes SegmentSize(const AllocatorSettings& settings, Bytes rounded);

using DeviceAddress = std::int64_t;

// The CUDA driver as the allocator sees it.
class DeviceDriver {
 public:
  virtual ~DeviceDriver() = default;
  // cudaMalloc; nullopt: out of memory.
  virtual std::optional<DeviceAddress> AllocateSegment(Bytes size_bytes, std::int32_t stream) = 0;
  virtual void FreeSegment(DeviceAddress address, Bytes size_bytes) = 0;
  // cuMemAddressReserve and cuMemAddressFree: address space without memory.
  virtual DeviceAddress ReserveAddresses(Bytes size_bytes, std::int32_t stream) = 0;
  virtual void FreeAddresses(DeviceAddress address, Bytes size_bytes) = 0;
  // cuMemCreate and cuMemMap of consecutive pages, all or none; false: out of memory.
  virtual bool MapPages(DeviceAddress address, Bytes size_bytes) = 0;
  virtual void UnmapPages(DeviceAddress address, Bytes size_bytes) = 0;
  // Size of the device's memory: an expandable segment reserves 9/8 of it in addresses.
  virtual Bytes TotalMemory() const = 0;
  // All streams are synchronized, before cached memory is released. Blocks whose free was deferred by
  // DeferFree and that are complete by then are named here.
  virtual std::vector<std::int32_t> Synchronize() { return {}; }
};

// The direction in which a device places its next segment. It matters because the allocator takes the lowest
// block of a size. CUDA's driver goes upwards, Linux's mmap (a device in software) downwards.
enum class AddressOrder : std::uint8_t { kUpwards, kDownwards };

// A device that hands out addresses in one direction and never reuses one: deterministic, and enough for
// everything but the addresses themselves. `other_bytes` is memory that the process cannot get (context, NCCL
// buffers, other processes).
class SimpleDevice final : public DeviceDriver {
 public:
  explicit SimpleDevice(Bytes total_bytes = {std::int64_t{80} << 30}, Bytes other_bytes = {0},
                        AddressOrder order = AddressOrder::kUpwards)
      : total_bytes_(total_bytes), used_bytes_(other_bytes), order_(order) {}
  std::optional<DeviceAddress> AllocateSegment(Bytes size_bytes, std::int32_t stream) override;
  void FreeSegment(DeviceAddress address, Bytes size_bytes) override;
  DeviceAddress ReserveAddresses(Bytes size_bytes, std::int32_t stream) override;
  void FreeAddresses(DeviceAddress, Bytes) override {}
  bool MapPages(DeviceAddress address, Bytes size_bytes) override;
  void UnmapPages(DeviceAddress address, Bytes size_bytes) override;
  Bytes TotalMemory() const override { return total_bytes_; }
  Bytes FreeMemory() const { return total_bytes_ - used_bytes_; }

 private:
  DeviceAddress NextAddress(Bytes size_bytes);

  Bytes total_bytes_;
  Bytes used_bytes_;
  AddressOrder order_;
  Bytes handed_out_bytes_;
};

using BlockId = std::int32_t;
inline constexpr BlockId kNoBlock = -1;     // out of memory
inline constexpr BlockId kEmptyBlock = -2;  // a request of 0 bytes: it occupies nothing

enum class SegmentActionKind : std::uint8_t { kSegmentAlloc, kSegmentFree, kSegmentMap, kSegmentUnmap };
// "segment_alloc", ... as torch.cuda.memory._snapshot() names them.
std::string_view Name(SegmentActionKind kind);

struct SegmentAction {
  SegmentActionKind kind = SegmentActionKind::kSegmentAlloc;
  DeviceAddress address = 0;
  Bytes size_bytes;
  bool operator==(const SegmentAction&) const = default;
};

// torch.cuda.memory_stats(), the aggregate of both pools.
struct AllocatorStats {
  Bytes requested_bytes;       // as asked for, of active blocks
  Bytes allocated_bytes;       // blocks handed out
  Bytes active_bytes;          // and those whose free waits for another stream
  Bytes reserved_bytes;        // segments (expandable: mapped pages)
  Bytes inactive_split_bytes;  // free parts of segments that are in use: what cannot be released
  Bytes peak_allocated_bytes;
  Bytes peak_active_bytes;
  Bytes peak_reserved_bytes;
  std::int64_t allocations = 0;    // blocks handed out
  std::int64_t segments = 0;       // of cudaMalloc
  std::int64_t device_allocs = 0;  // calls that took memory from the driver, ever
  std::int64_t device_frees = 0;
  std::int64_t retries = 0;  // requests that first had to release the cache
  std::int64_t ooms = 0;
  bool operator==(const AllocatorStats&) const = default;
};

enum class BlockState : std::uint8_t { kFree, kAllocated, kAwaitingEvents, kUnmapped };

struct BlockView {
  BlockId id = kNoBlock;
  DeviceAddress address = 0;
  Bytes size_bytes;
  Bytes requested_bytes;  // of allocated and awaiting blocks
  BlockState state = BlockState::kFree;
  bool operator==(const BlockView&) const = default;
};

struct SegmentView {
  DeviceAddress address = 0;
  Bytes size_bytes;  // expandable: of the address space
  std::int32_t stream = 0;
  bool small_pool = false;
  bool expandable = false;
  std::vector<BlockView> blocks;  // by address; they tile the segment
  bool operator==(const SegmentView&) const = default;
};

class CachingAllocator {
 public:
  explicit CachingAllocator(AllocatorSettings settings = {});
  CachingAllocator(const CachingAllocator& other);
  CachingAllocator(CachingAllocator&& other) noexcept;
  CachingAllocator& operator=(const CachingAllocator& other);
  CachingAllocator& operator=(CachingAllocator&& other) noexcept;
  ~CachingAllocator();

  // The block for a request on a stream (streams are small numbers; searches and releases go through them in
  // ascending order). Frees whose events are complete are finished first. kNoBlock: out of memory even after
  // all cached memory was released. Amortised time: logarithmic in the free blocks of the stream's pool.
  BlockId Allocate(Bytes requested, std::int32_t stream, DeviceDriver& driver);
  // Frees a live block; one with recorded streams only when their events are complete.
  void Free(BlockId block);
  // The block is used on another stream: its free waits for what that stream has been given by the time of
  // Free.
  void RecordStream(BlockId block, std::int32_t stream);

  // [Note: events] A free that waits has one event on each stream recorded for the block. Events of a stream
  // are numbered from 0 in the order of the frees, and complete in that order. Completion shows at the next
  // Allocate or ReleaseCached (which waits for all).
  std::int64_t RecordedEvents(std::int32_t stream) const;
  // The first `count` events of the stream are complete.
  void CompleteEvents(std::int32_t stream, std::int64_t count);

  // A free whose completion the caller decides: the block stays active until CompleteFree.
  void DeferFree(BlockId block);
  void CompleteFree(BlockId block);

  // torch.cuda.empty_cache(): waits for all events, then gives back every segment (expandable: every page)
  // without a live block.
  void ReleaseCached(DeviceDriver& driver);

  // True when Allocate would take a cached block: it would not call the driver.
  bool HasCachedBlock(Bytes requested, std::int32_t stream) const;

  // Takes over a segment and its active blocks {address, requested, size}, in ascending order: to start from
  // a recorded state. A segment of expandable address space [address, address + size) has memory at `mapped`
  // only. kBadInput: blocks overlap, or leave the segment.
  struct InitialBlock {
    DeviceAddress address = 0;
    Bytes requested_bytes;
    Bytes size_bytes;
  };
  struct MappedRange {
    DeviceAddress address = 0;
    Bytes size_bytes;
  };
  struct InitialSegment {
    DeviceAddress address = 0;
    Bytes size_bytes;
    std::int32_t stream = 0;
    bool small_pool = false;
    bool expandable = false;
    std::vector<MappedRange> mapped;  // expandable only
    std::vector<InitialBlock> blocks;
  };
  // Returns the ids of the blocks, in order.
  Result<std::vector<BlockId>> AddSegment(const InitialSegment& segment);

  const AllocatorSettings& settings() const { return settings_; }
  const AllocatorStats& stats() const { return stats_; }
  // The driver's calls of the last Allocate or ReleaseCached, in order.
  const std::vector<SegmentAction>& last_actions() const { return actions_; }
  // Properties of a live block.
  DeviceAddress Address(BlockId block) const { return blocks_[block].address; }
  Bytes Size(BlockId block) const { return {blocks_[block].size}; }
  Bytes Requested(BlockId block) const { return {blocks_[block].requested}; }
  bool IsAllocated(BlockId block) const;

  // All segments and their blocks, by address.
  std::vector<SegmentView> MemoryMap() const;

 private:
  struct Block {
    DeviceAddress address = 0;
    std::int64_t size = 0;
    std::int64_t requested = 0;
    std::int64_t segment = 0;  // number of its segment; 0 without older_segments_first
    std::int64_t gc_base = 0;  // value of searches_ when it was put into the free list
    BlockId previous = kNoBlock;
    BlockId next = kNoBlock;
    std::int32_t stream = 0;
    std::int32_t reservation = -1;  // index into reservations_; -1: a segment of cudaMalloc
    std::int32_t pending_events = 0;
    BlockState state = BlockState::kFree;
    bool small = false;
    bool live = false;              // false: the slot is unused
    bool recorded_streams = false;  // has an entry in stream_uses_
  };
  struct Reservation {
    DeviceAddress address = 0;
    std::int64_t size = 0;
    std::int64_t page = 0;
    bool live = false;
  };
  struct Pool;  // allocator/pool.h
  struct StreamEvents {
    std::int64_t recorded = 0;
    std::int64_t completed = 0;
    std::int64_t processed = 0;
    std::deque<BlockId> waiting;  // of the events processed .. recorded - 1
  };
  struct Search {
    std::int64_t size = 0;
    std::int32_t stream = 0;
    bool small = false;
  };

  Pool& PoolOf(std::int32_t stream, bool small);
  BlockId NewBlock(const Block& block);
  std::int64_t NextSegment() { return settings_.older_segments_first ? ++segments_made_ : 0; }
  void DeleteBlock(BlockId block);
  void InsertFree(BlockId block);
  void EraseFree(BlockId block);
  void InsertUnmapped(BlockId block);
  void EraseUnmapped(BlockId block);
  void LinkAfter(BlockId block, BlockId before);

  BlockId FindFree(const Search& search) const;
  BlockId HandOut(BlockId block, const Search& search, std::int64_t requested);
  bool ShouldSplit(const Block& block, std::int64_t size) const;
  void FinishFree(BlockId block);
  std::int64_t Merge(BlockId into, BlockId other);
  void ProcessEvents();
  StreamEvents& EventsOf(std::int32_t stream);

  BlockId AllocateFromDriver(const Search& search, DeviceDriver& driver);
  BlockId NewSegment(const Search& search, DeviceDriver& driver);
  BlockId ExpandSegment(const Search& search, DeviceDriver& driver);
  BlockId FindExpandable(const Search& search, DeviceDriver& driver);
  bool MapBlock(BlockId block, std::int64_t size, DeviceDriver& driver);
  void UnmapBlock(BlockId block, DeviceDriver& driver);
  void CollectGarbage(DeviceDriver& driver);
  bool ReleaseOversize(const Search& search, DeviceDriver& driver);
  void ReleaseAll(DeviceDriver& driver);
  void ReleasePools(bool small, DeviceDriver& driver);
  void ReleaseSegment(BlockId block, DeviceDriver& driver);
  bool CollectsGarbage() const {
    return settings_.allowed_bytes && settings_.garbage_collection_threshold > 0;
  }
  void AddReserved(std::int64_t bytes);

  AllocatorSettings settings_;
  std::int64_t max_split_;  // settings_.max_split_size_bytes, or the largest number
  std::vector<Block> blocks_;
  std::vector<BlockId> unused_;
  std::vector<Pool> pools_;                 // 2 * stream + (small ? 0 : 1)
  std::array<std::int64_t, 2> searches_{};  // by pool, counted while garbage collection is on
  std::vector<Reservation> reservations_;
  std::int64_t segments_made_ = 0;
  std::vector<StreamEvents> events_;  // by stream
  std::int64_t waiting_events_ = 0;
  std::map<BlockId, std::vector<std::int32_t>> stream_uses_;
  std::vector<SegmentAction> actions_;
  AllocatorStats stats_;
};

// The map as text: a line of `width` characters per segment (or row of it), '#' allocated, 'w' waiting for
// events,
// '.' free, ' ' not mapped; a character stands for the state of most of its bytes, but any allocated byte
// shows.
std::string AsciiMemoryMap(const std::vector<SegmentView>& segments, int width = 64);

}  // namespace shardplan
