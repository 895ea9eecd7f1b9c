// SPDX-License-Identifier: Apache-2.0
#include "allocator/free_block_list.h"

#include <algorithm>
#include <limits>

#include "shardplan/schemas/assert.h"

namespace shardplan {

std::size_t FreeBlockList::size() const {
  std::size_t total = 0;
  for (const std::vector<Entry>& chunk : chunks_) total += chunk.size();
  return total;
}

FreeBlockList::Position FreeBlockList::Next(Position position) const {
  if (++position.index < chunks_[position.chunk].size()) return position;
  return {position.chunk + 1, 0};
}

FreeBlockList::Position FreeBlockList::Previous(Position position) const {
  if (position.index > 0) return {position.chunk, position.index - 1};
  return {position.chunk - 1, chunks_[position.chunk - 1].size() - 1};
}

// The chunk whose last entry is the first not less than `entry`; one past the last chunk if there is none.
std::size_t FreeBlockList::ChunkOf(const Entry& entry) const {
  return static_cast<std::size_t>(std::lower_bound(last_.begin(), last_.end(), entry) - last_.begin());
}

FreeBlockList::Position FreeBlockList::LowerBound(std::int64_t size) const {
  constexpr std::int64_t kLowest = std::numeric_limits<std::int64_t>::min();
  const Entry key{size, kLowest, kLowest, -1};
  const std::size_t chunk = ChunkOf(key);
  if (chunk == chunks_.size()) return end();
  const std::vector<Entry>& entries = chunks_[chunk];
  return {chunk,
          static_cast<std::size_t>(std::lower_bound(entries.begin(), entries.end(), key) - entries.begin())};
}

void FreeBlockList::Insert(const Entry& entry) {
  if (chunks_.empty()) {
    chunks_.emplace_back().reserve(kChunk);
    chunks_.back().push_back(entry);
    last_.push_back(entry);
    return;
  }
  const std::size_t chunk = std::min(ChunkOf(entry), chunks_.size() - 1);
  std::vector<Entry>& entries = chunks_[chunk];
  entries.insert(std::lower_bound(entries.begin(), entries.end(), entry), entry);
  last_[chunk] = entries.back();
  if (entries.size() < kChunk) return;
  std::vector<Entry> upper;
  upper.reserve(kChunk);
  upper.assign(entries.begin() + kChunk / 2, entries.end());
  entries.resize(kChunk / 2);
  last_[chunk] = entries.back();
  last_.insert(last_.begin() + static_cast<std::ptrdiff_t>(chunk) + 1, upper.back());
  chunks_.insert(chunks_.begin() + static_cast<std::ptrdiff_t>(chunk) + 1, std::move(upper));
}

void FreeBlockList::Erase(const Entry& entry) {
  const std::size_t chunk = ChunkOf(entry);
  SHARDPLAN_ASSERT(chunk < chunks_.size(), "what is erased was inserted");
  std::vector<Entry>& entries = chunks_[chunk];
  const auto found = std::lower_bound(entries.begin(), entries.end(), entry);
  SHARDPLAN_ASSERT(found != entries.end() && found->block == entry.block, "what is erased was inserted");
  entries.erase(found);
  if (!entries.empty()) {
    last_[chunk] = entries.back();
    return;
  }
  chunks_.erase(chunks_.begin() + static_cast<std::ptrdiff_t>(chunk));
  last_.erase(last_.begin() + static_cast<std::ptrdiff_t>(chunk));
}

}  // namespace shardplan
