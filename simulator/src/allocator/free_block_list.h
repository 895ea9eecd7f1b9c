// SPDX-License-Identifier: Apache-2.0
// The free blocks of one pool and stream, ordered by size, then segment, then address: what best fit
// searches.
#pragma once

#include <compare>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace shardplan {

// A sorted sequence in chunks of bounded length: a search is two binary searches, an insertion moves at most
// a chunk. Faster than a node-based set for up to millions of entries, and the order is exact. Entries are
// unique.
class FreeBlockList {
 public:
  struct Entry {
    std::int64_t size = 0;
    std::int64_t segment = 0;
    std::int64_t address = 0;
    std::int32_t block = -1;

    friend bool operator<(const Entry& a, const Entry& b) {
      if (a.size != b.size) return a.size < b.size;
      return a.segment != b.segment ? a.segment < b.segment : a.address < b.address;
    }
  };
  // A place in the list; valid until the list changes.
  struct Position {
    std::size_t chunk = 0;
    std::size_t index = 0;
    bool operator==(const Position&) const = default;
  };

  bool empty() const { return chunks_.empty(); }
  std::size_t size() const;
  Position begin() const { return {}; }
  Position end() const { return {chunks_.size(), 0}; }
  Position Next(Position position) const;
  // The position before one that is not the first.
  Position Previous(Position position) const;
  const Entry& operator[](Position position) const { return chunks_[position.chunk][position.index]; }

  // First entry that is not less than {size, any segment and address}.
  Position LowerBound(std::int64_t size) const;

  void Insert(const Entry& entry);
  // The entry must be there.
  void Erase(const Entry& entry);

 private:
  static constexpr std::size_t kChunk = 128;

  std::size_t ChunkOf(const Entry& entry) const;

  std::vector<std::vector<Entry>> chunks_;  // none is empty
  std::vector<Entry> last_;                 // of each chunk
};

}  // namespace shardplan
