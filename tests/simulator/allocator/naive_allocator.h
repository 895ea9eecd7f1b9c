// SPDX-License-Identifier: Apache-2.0
// An allocator for comparison, written to be obviously right and slow: every segment is a list of blocks,
// every search looks at all of them. No expandable segments. Shares no code with the model.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

namespace shardplan {

struct NaiveSettings {
  std::int64_t max_split = std::int64_t{1} << 62;
  std::int64_t max_non_split_rounding = 20 << 20;
  std::int64_t capacity = 0;
};

class NaiveAllocator {
 public:
  explicit NaiveAllocator(NaiveSettings settings) : settings_(settings) {}

  // The address; nullopt: out of memory.
  std::optional<std::int64_t> Allocate(std::int64_t bytes, int stream);
  void Free(std::int64_t address);
  void EmptyCache();
  std::int64_t Reserved() const;

 private:
  struct Block {
    std::int64_t size;
    bool used;
  };
  struct Segment {
    std::int64_t address;
    int stream;
    bool small;
    std::vector<Block> blocks;
    std::int64_t Size() const;
  };
  struct Place {
    std::size_t segment, block;
    std::int64_t size, address;
  };

  std::optional<Place> Find(std::int64_t size, int stream, bool small) const;
  std::int64_t Occupy(const Place& place, std::int64_t size);
  bool NewSegment(std::int64_t size, int stream, bool small);
  bool ReleaseOversize(std::int64_t size, int stream, bool small);

  NaiveSettings settings_;
  std::int64_t next_address_ = std::int64_t{1} << 32;
  std::vector<Segment> segments_;
};

}  // namespace shardplan
