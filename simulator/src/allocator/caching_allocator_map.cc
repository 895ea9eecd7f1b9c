// SPDX-License-Identifier: Apache-2.0
// The allocator's memory as a value and as text, and taking over a recorded state.
#include <algorithm>

#include "allocator/pool.h"
#include "allocator/sizes.h"
#include "shardplan/simulator/caching_allocator.h"

namespace shardplan {
namespace {

std::string Hex(DeviceAddress address) {
  static constexpr char kDigits[] = "0123456789abcdef";
  std::string text;
  auto rest = static_cast<std::uint64_t>(address < 0 ? -address : address);
  do {
    text.insert(text.begin(), kDigits[rest & 15]);
    rest >>= 4;
  } while (rest > 0);
  return (address < 0 ? "-0x" : "0x") + text;
}

// The symbol of [begin, end) of the segment.
char Symbol(const SegmentView& segment, std::size_t& first, DeviceAddress begin, DeviceAddress end) {
  while (segment.blocks[first].address + segment.blocks[first].size_bytes.value <= begin) ++first;
  std::array<std::int64_t, 4> bytes{};
  for (std::size_t i = first; i < segment.blocks.size() && segment.blocks[i].address < end; ++i) {
    const BlockView& block = segment.blocks[i];
    const DeviceAddress from = std::max(begin, block.address);
    const DeviceAddress to = std::min(end, block.address + block.size_bytes.value);
    bytes[static_cast<std::size_t>(block.state)] += to - from;
  }
  auto of = [&](BlockState state) { return bytes[static_cast<std::size_t>(state)]; };
  if (of(BlockState::kAllocated) > 0) return '#';
  if (of(BlockState::kAwaitingEvents) > 0) return 'w';
  return of(BlockState::kFree) >= of(BlockState::kUnmapped) ? '.' : ' ';
}

}  // namespace

std::vector<SegmentView> CachingAllocator::MemoryMap() const {
  std::vector<SegmentView> segments;
  for (BlockId head = 0; head < static_cast<BlockId>(blocks_.size()); ++head) {
    if (!blocks_[head].live || blocks_[head].previous != kNoBlock) continue;
    SegmentView segment;
    segment.address = blocks_[head].address;
    segment.stream = blocks_[head].stream;
    segment.small_pool = blocks_[head].small;
    segment.expandable = blocks_[head].reservation >= 0;
    for (BlockId id = head; id != kNoBlock; id = blocks_[id].next) {
      const Block& block = blocks_[id];
      const bool active = block.state == BlockState::kAllocated || block.state == BlockState::kAwaitingEvents;
      segment.blocks.push_back(
          {id, block.address, {block.size}, {active ? block.requested : 0}, block.state});
      segment.size_bytes.value += block.size;
    }
    segments.push_back(std::move(segment));
  }
  std::sort(segments.begin(), segments.end(),
            [](const SegmentView& a, const SegmentView& b) { return a.address < b.address; });
  return segments;
}

std::string AsciiMemoryMap(const std::vector<SegmentView>& segments, int width) {
  std::string text;
  for (const SegmentView& segment : segments) {
    std::int64_t used = 0, mapped = 0;
    DeviceAddress end = segment.address;
    for (const BlockView& block : segment.blocks) {
      if (block.state == BlockState::kUnmapped) continue;
      mapped += block.size_bytes.value;
      if (block.state != BlockState::kFree) used += block.size_bytes.value;
      end = block.address + block.size_bytes.value;
    }
    // Address space behind the last mapped page says nothing.
    const std::int64_t shown = std::max<std::int64_t>(end - segment.address, 1);
    text += Hex(segment.address) + " stream " + std::to_string(segment.stream) +
            (segment.small_pool ? " small " : " large ") + (segment.expandable ? "expandable " : "") +
            std::to_string(used) + " of " + std::to_string(mapped) + " B |";
    std::size_t first = 0;
    for (int column = 0; column < width && end > segment.address; ++column) {
      const DeviceAddress from = segment.address + shown / width * column + shown % width * column / width;
      const DeviceAddress to =
          segment.address + shown / width * (column + 1) + shown % width * (column + 1) / width;
      if (to > from) text += Symbol(segment, first, from, to);
    }
    text += "|\n";
  }
  return text;
}

namespace {

Error SegmentError(const CachingAllocator::InitialSegment& segment, std::string message, std::string found,
                   std::string expected) {
  return {ErrorCode::kBadInput,
          "segment at " + std::to_string(segment.address) + ": " + std::move(message),
          {},
          {},
          std::move(found),
          std::move(expected)};
}

// The segment as consecutive pieces: blocks, and between them free or unmapped memory.
struct Piece {
  DeviceAddress address;
  std::int64_t size;
  BlockState state;
  std::int64_t requested;
};

Result<std::vector<Piece>> PiecesOf(const CachingAllocator::InitialSegment& segment) {
  std::vector<CachingAllocator::MappedRange> mapped = segment.mapped;
  if (!segment.expandable) mapped = {{segment.address, segment.size_bytes}};
  std::vector<Piece> pieces;
  DeviceAddress at = segment.address;
  const DeviceAddress end = segment.address + segment.size_bytes.value;
  auto fill = [&](DeviceAddress to, BlockState state) {
    if (to > at) pieces.push_back({at, to - at, state, 0});
    at = to;
  };
  std::size_t block = 0;
  for (const CachingAllocator::MappedRange& range : mapped) {
    const DeviceAddress range_end = range.address + range.size_bytes.value;
    if (range.address < at || range.size_bytes.value <= 0 || range_end > end) {
      return std::unexpected(SegmentError(segment,
                                          "a mapped range overlaps another or leaves the address space",
                                          std::to_string(range.address), "ascending ranges inside"));
    }
    fill(range.address, BlockState::kUnmapped);
    for (; block < segment.blocks.size() && segment.blocks[block].address < range_end; ++block) {
      const CachingAllocator::InitialBlock& next = segment.blocks[block];
      if (next.address < at || next.size_bytes.value <= 0 ||
          next.address + next.size_bytes.value > range_end) {
        return std::unexpected(SegmentError(segment, "a block overlaps another or leaves the segment",
                                            std::to_string(next.address), "ascending blocks inside"));
      }
      fill(next.address, BlockState::kFree);
      pieces.push_back(
          {next.address, next.size_bytes.value, BlockState::kAllocated, next.requested_bytes.value});
      at = next.address + next.size_bytes.value;
    }
    fill(range_end, BlockState::kFree);
  }
  fill(end, BlockState::kUnmapped);
  if (block < segment.blocks.size()) {
    return std::unexpected(SegmentError(segment, "a block overlaps another or leaves the segment",
                                        std::to_string(segment.blocks[block].address),
                                        "ascending blocks inside"));
  }
  return pieces;
}

}  // namespace

Result<std::vector<BlockId>> CachingAllocator::AddSegment(const InitialSegment& segment) {
  Result<std::vector<Piece>> pieces = PiecesOf(segment);
  if (!pieces) return std::unexpected(pieces.error());
  std::int32_t reservation = -1;
  if (segment.expandable) {
    reservation = static_cast<std::int32_t>(reservations_.size());
    reservations_.push_back({segment.address, segment.size_bytes.value,
                             segment.small_pool ? kSmallSegmentBytes : settings_.large_segment_bytes.value,
                             true});
  }
  const std::int64_t number = NextSegment();
  std::vector<BlockId> ids;
  BlockId previous = kNoBlock;
  for (const Piece& piece : *pieces) {
    Block block;
    block.address = piece.address;
    block.size = piece.size;
    block.requested = piece.requested;
    block.stream = segment.stream;
    block.small = segment.small_pool;
    block.reservation = reservation;
    block.segment = number;
    block.state = piece.state;
    const BlockId id = NewBlock(block);
    if (previous != kNoBlock) LinkAfter(id, previous);
    previous = id;
    if (piece.state != BlockState::kUnmapped) stats_.reserved_bytes.value += piece.size;
    if (piece.state == BlockState::kUnmapped) {
      InsertUnmapped(id);
    } else if (piece.state == BlockState::kFree) {
      InsertFree(id);
      if (pieces->size() > 1 && reservation < 0) stats_.inactive_split_bytes.value += piece.size;
    } else {
      ids.push_back(id);
      ++stats_.allocations;
      stats_.requested_bytes.value += piece.requested;
      stats_.allocated_bytes.value += piece.size;
      stats_.active_bytes.value += piece.size;
    }
  }
  if (!segment.expandable) ++stats_.segments;
  stats_.peak_allocated_bytes = std::max(stats_.peak_allocated_bytes, stats_.allocated_bytes);
  stats_.peak_active_bytes = std::max(stats_.peak_active_bytes, stats_.active_bytes);
  stats_.peak_reserved_bytes = std::max(stats_.peak_reserved_bytes, stats_.reserved_bytes);
  return ids;
}

}  // namespace shardplan
