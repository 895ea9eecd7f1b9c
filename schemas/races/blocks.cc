// SPDX-License-Identifier: Apache-2.0
#include "races/blocks.h"

#include <algorithm>
#include <set>
#include <utility>

namespace shardplan {
namespace {

// c10's CUDACachingAllocator: kSmallSize.
constexpr std::int64_t kSmallBytes = std::int64_t{1} << 20;

bool IsOver(const Access& access, const Clock& clock) {
  return access.tick <= clock[static_cast<std::size_t>(access.stream)];
}

}  // namespace

std::vector<EarlyFree>& Blocks::PendingOf(RecordedId stream, std::int64_t bytes) {
  return pending_[2 * static_cast<std::size_t>(stream) + (bytes > kSmallBytes ? 1 : 0)];
}

void Blocks::On(const BlockAllocated& event, std::int64_t number, const Order& order) {
  const std::int64_t begin = event.address, end = begin + event.size_bytes.value;
  const Clock& now = order.OfStream(event.stream);
  std::vector<EarlyFree>& pending = PendingOf(event.stream, event.size_bytes.value);
  std::erase_if(pending, [&](const EarlyFree& early) { return IsOver(early.access, now); });
  Block block{.end = end, .stream = event.stream, .allocated = number, .ready = Clock(now.size(), 0)};
  block.early = pending;
  auto part = freed_.upper_bound(begin);
  if (part != freed_.begin() && std::prev(part)->second.end > begin) --part;
  while (part != freed_.end() && part->first < end) {
    const auto [from, freed] = *part;
    Join(block.ready, *freed.told);
    block.before.push_back({from, freed.end, freed.event});
    part = freed_.erase(part);
    Freed rest = freed;
    if (freed.end > end) part = freed_.emplace(end, rest).first;
    rest.end = begin;
    if (from < begin) freed_[from] = rest;
  }
  blocks_[begin] = std::move(block);
}

void Blocks::On(const BlockFreed& event, std::int64_t number, const Order& order, const Shadow& shadow) {
  const auto found = blocks_.find(event.address);
  if (found == blocks_.end()) return;  // handed out before the recording began
  const Block& block = found->second;
  auto over = std::make_shared<Clock>(order.OfStream(block.stream));
  auto told = std::make_shared<Clock>(order.KnownBy(event.thread));
  Join(*told, block.ready);  // it was handed out: what it waited for then is over for whoever is next
  Join(*over, *told);
  std::vector<EarlyFree>& pending = PendingOf(block.stream, event.size_bytes.value);
  std::set<std::int64_t> seen;
  shadow.ForEach(found->first, block.end, [&](const Access& access) {
    if (!IsOver(access, *over) && seen.insert(access.what.event).second) pending.push_back({number, access});
  });
  freed_[found->first] = {block.end, number, block.stream, std::move(over), std::move(told)};
  blocks_.erase(found);
}

void Blocks::On(const BlockHeld& event, const Order& order) {
  const auto found = freed_.find(event.address);
  if (found == freed_.end()) return;
  const Freed& freed = found->second;
  Join(*freed.over, order.OfStream(event.stream));
  Join(*freed.told, order.OfStream(event.stream));
  std::erase_if(PendingOf(freed.stream, freed.end - found->first), [&](const EarlyFree& early) {
    return early.freed == freed.event && IsOver(early.access, *freed.over);
  });
}

Block* Blocks::Of(std::int64_t address) {
  auto found = blocks_.upper_bound(address);
  if (found == blocks_.begin()) return nullptr;
  --found;
  return address < found->second.end ? &found->second : nullptr;
}

std::int64_t Blocks::BorderBehind(std::int64_t address, std::int64_t end) {
  if (const Block* block = Of(address)) return std::min(end, block->end);
  const auto next = blocks_.upper_bound(address);
  return next == blocks_.end() ? end : std::min(end, next->first);
}

std::int64_t Blocks::FreeBefore(const Block& block, std::int64_t address) {
  for (const Block::Part& part : block.before) {
    if (part.begin <= address && address < part.end) return part.freed;
  }
  return -1;
}

}  // namespace shardplan
