// SPDX-License-Identifier: Apache-2.0
// Blocks of torch's caching allocator: who has them, and what the next owner of a freed one is behind.
//
// [Note: the allocator's rule] A block belongs to a stream. When it is freed it may be handed out at once,
// for that stream, unless the allocator holds it until other streams are done with what they have
// (record_stream). So the next owner of a freed block, whose accesses begin behind what that stream has, has
// to be behind every access to it. Which block is handed out depends on the addresses and sizes of a run. So
// each owner of a block of the stream that is handed out behind the free has to be: in another run it is
// given this one.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "races/order.h"
#include "races/shadow.h"
#include "shardplan/schemas/recording.h"

namespace shardplan {

// An access that a free did not wait for.
struct EarlyFree {
  std::int64_t freed = -1;
  Access access;
};

struct Block {
  std::int64_t end = 0;
  RecordedId stream = -1;
  std::int64_t allocated = -1;  // event
  Clock ready;                  // what is over before its owner touches it
  struct Part {
    std::int64_t begin = 0, end = 0, freed = -1;
  };
  std::vector<Part> before;      // what it was made of
  std::vector<EarlyFree> early;  // frees that it may be the next owner of; until it is first touched
};

class Blocks {
 public:
  explicit Blocks(std::size_t streams) : pending_(2 * streams) {}
  void On(const BlockAllocated& event, std::int64_t number, const Order& order);
  void On(const BlockFreed& event, std::int64_t number, const Order& order, const Shadow& shadow);
  void On(const BlockHeld& event, const Order& order);
  // The block that has the byte; null: none.
  Block* Of(std::int64_t address);
  // The next byte that another block has, or none; at most `end`.
  std::int64_t BorderBehind(std::int64_t address, std::int64_t end);
  // The free that gave the byte to the block's owner; -1: not known.
  static std::int64_t FreeBefore(const Block& block, std::int64_t address);

 private:
  struct Freed {
    std::int64_t end = 0;
    std::int64_t event = -1;
    RecordedId stream = -1;
    std::shared_ptr<Clock> over;  // before the next owner touches it on the block's own stream
    std::shared_ptr<Clock>
        told;  // on any stream: what the host knew to be over before it handed the block out
  };
  // Small blocks and large ones lie in segments of their own.
  std::vector<EarlyFree>& PendingOf(RecordedId stream, std::int64_t bytes);

  std::map<std::int64_t, Block> blocks_;
  std::map<std::int64_t, Freed> freed_;
  std::vector<std::vector<EarlyFree>> pending_;
};

}  // namespace shardplan
