// SPDX-License-Identifier: Apache-2.0
#include "naive_allocator.h"

#include <algorithm>
#include <tuple>

namespace shardplan {
namespace {

constexpr std::int64_t kMega = 1048576;

std::int64_t SegmentSizeFor(std::int64_t size) {
  if (size <= kMega) return 2 * kMega;
  if (size < 10 * kMega) return 20 * kMega;
  std::int64_t segment = 0;
  while (segment < size) segment += 2 * kMega;
  return segment;
}

}  // namespace

std::int64_t NaiveAllocator::Segment::Size() const {
  std::int64_t size = 0;
  for (const Block& block : blocks) size += block.size;
  return size;
}

std::int64_t NaiveAllocator::Reserved() const {
  std::int64_t reserved = 0;
  for (const Segment& segment : segments_) reserved += segment.Size();
  return reserved;
}

std::optional<NaiveAllocator::Place> NaiveAllocator::Find(std::int64_t size, int stream, bool small) const {
  std::optional<Place> best;
  for (std::size_t s = 0; s < segments_.size(); ++s) {
    if (segments_[s].stream != stream || segments_[s].small != small) continue;
    std::int64_t address = segments_[s].address;
    for (std::size_t b = 0; b < segments_[s].blocks.size(); ++b) {
      const Block& block = segments_[s].blocks[b];
      const bool better = !best || std::tie(block.size, address) < std::tie(best->size, best->address);
      if (!block.used && block.size >= size && better) best = Place{s, b, block.size, address};
      address += block.size;
    }
  }
  if (!best) return std::nullopt;
  if (size < settings_.max_split && best->size >= settings_.max_split) return std::nullopt;
  if (size >= settings_.max_split && best->size >= size + settings_.max_non_split_rounding)
    return std::nullopt;
  return best;
}

std::int64_t NaiveAllocator::Occupy(const Place& place, std::int64_t size) {
  std::vector<Block>& blocks = segments_[place.segment].blocks;
  const std::int64_t rest = place.size - size;
  const bool split =
      segments_[place.segment].small ? rest >= 512 : size < settings_.max_split && rest > kMega;
  blocks[place.block].used = true;
  if (split) {
    blocks[place.block].size = size;
    blocks.insert(blocks.begin() + static_cast<std::ptrdiff_t>(place.block) + 1, Block{rest, false});
  }
  return place.address;
}

bool NaiveAllocator::NewSegment(std::int64_t size, int stream, bool small) {
  const std::int64_t segment = SegmentSizeFor(size);
  if (Reserved() + segment > settings_.capacity) return false;
  segments_.push_back({next_address_, stream, small, {{segment, false}}});
  next_address_ += segment;
  return true;
}

bool NaiveAllocator::ReleaseOversize(std::int64_t size, int stream, bool small) {
  if (settings_.max_split == std::int64_t{1} << 62) return false;
  const std::int64_t wanted = std::max(size, settings_.max_split);
  std::vector<std::pair<std::int64_t, std::int64_t>> oversize;  // size and address of whole free segments
  for (const Segment& segment : segments_) {
    const bool whole = segment.blocks.size() == 1 && !segment.blocks[0].used;
    if (segment.stream == stream && segment.small == small && whole &&
        segment.Size() >= settings_.max_split) {
      oversize.emplace_back(segment.Size(), segment.address);
    }
  }
  std::sort(oversize.begin(), oversize.end());
  std::vector<std::int64_t> chosen;
  std::int64_t released = 0;
  for (const auto& [bytes, address] : oversize) {
    if (bytes < wanted) continue;
    chosen = {address};
    released = bytes;
    break;
  }
  if (chosen.empty()) {
    for (auto it = oversize.rbegin(); it != oversize.rend() && released < wanted; ++it) {
      chosen.push_back(it->second);
      released += it->first;
    }
  }
  std::erase_if(segments_, [&](const Segment& segment) {
    return std::find(chosen.begin(), chosen.end(), segment.address) != chosen.end();
  });
  return released >= wanted;
}

std::optional<std::int64_t> NaiveAllocator::Allocate(std::int64_t bytes, int stream) {
  std::int64_t size = 512;
  while (size < bytes) size += 512;
  const bool small = size <= kMega;
  std::optional<Place> place = Find(size, stream, small);
  if (!place) {
    bool fresh = NewSegment(size, stream, small);
    if (!fresh && ReleaseOversize(size, stream, small)) fresh = NewSegment(size, stream, small);
    if (!fresh) {
      EmptyCache();
      fresh = NewSegment(size, stream, small);
    }
    if (!fresh) return std::nullopt;
    place = Place{segments_.size() - 1, 0, segments_.back().Size(), segments_.back().address};
  }
  return Occupy(*place, size);
}

void NaiveAllocator::Free(std::int64_t freed) {
  for (Segment& segment : segments_) {
    std::int64_t address = segment.address;
    for (Block& block : segment.blocks) {
      if (address == freed) block.used = false;
      address += block.size;
    }
    for (std::size_t b = 0; b + 1 < segment.blocks.size();) {
      if (!segment.blocks[b].used && !segment.blocks[b + 1].used) {
        segment.blocks[b].size += segment.blocks[b + 1].size;
        segment.blocks.erase(segment.blocks.begin() + static_cast<std::ptrdiff_t>(b) + 1);
      } else {
        ++b;
      }
    }
  }
}

void NaiveAllocator::EmptyCache() {
  std::erase_if(segments_,
                [](const Segment& segment) { return segment.blocks.size() == 1 && !segment.blocks[0].used; });
}

}  // namespace shardplan
