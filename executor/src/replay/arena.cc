// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <functional>
#include <map>
#include <numeric>
#include <utility>

#include "shardplan/executor/device.h"
#include "shardplan/schemas/alive_buffers.h"
#include "shardplan/schemas/assert.h"
#include "shardplan/schemas/buffer_roles.h"

namespace shardplan::executor {
namespace {

struct Interval {
  std::int64_t begin = 0;
  std::int64_t end = 0;  // exclusive
};

struct Candidate {
  StreamId stream = -1;  // of its first allocation
  bool several_streams = false;
  std::vector<Interval> alive;  // ascending, in instructions of the host
};

// Device memory between instructions of a step, but what autograd makes or adds to.
bool IsScratch(const Buffer& buffer) {
  if (buffer.persistent || IsOnHost(buffer) || IsWholeGradient(buffer.role)) return false;
  switch (LifetimeOf(buffer.role)) {
    case RoleLifetime::kScratch:
    case RoleLifetime::kUnsharded:
    case RoleLifetime::kAccumulated:
      return true;
    case RoleLifetime::kBackward:
    case RoleLifetime::kPasses:
    case RoleLifetime::kOptimizer:
    case RoleLifetime::kState:
    case RoleLifetime::kPersistent:
      return false;
  }
  return false;
}

// When each buffer is alive. The steady step is walked twice: what is alive at its end meets its beginning.
class Lifetimes {
 public:
  explicit Lifetimes(const Plan& plan)
      : plan_(plan), alive_(plan), candidates_(plan.buffers.size()), out_(plan.buffers.size()) {
    for (std::size_t b = 0; b < plan.buffers.size(); ++b) out_[b] = !IsScratch(plan.buffers[b]);
    for (const PlanStep& step : plan.steps) Walk(step);
    for (std::size_t s = static_cast<std::size_t>(plan.steady_step); s < plan.steps.size(); ++s)
      Walk(plan.steps[s]);
    for (std::size_t b = 0; b < candidates_.size(); ++b) {
      if (open_[b] >= 0) candidates_[b].alive.push_back({open_[b], now_});
      if (candidates_[b].several_streams || candidates_[b].alive.empty()) out_[b] = true;
    }
  }

  bool IsIn(std::size_t buffer) const { return !out_[buffer]; }
  StreamId StreamOf(std::size_t buffer) const { return candidates_[buffer].stream; }
  const std::vector<Interval>& AliveOf(std::size_t buffer) const { return candidates_[buffer].alive; }
  // Are they alive at the same time?
  bool Meet(std::size_t a, std::size_t b) const {
    const std::vector<Interval>&x = candidates_[a].alive, &y = candidates_[b].alive;
    for (std::size_t i = 0, j = 0; i < x.size() && j < y.size();) {
      if (x[i].begin < y[j].end && y[j].begin < x[i].end) return true;
      x[i].end < y[j].end ? ++i : ++j;
    }
    return false;
  }

 private:
  void Walk(const PlanStep& step) {
    for (const Trigger& trigger : step.triggers) {
      for (const Instruction& i : trigger.instructions) {
        ++now_;
        if (i.kind == InstructionKind::kAllocate) Begin(static_cast<std::size_t>(i.dst), i.stream);
        if (i.kind == InstructionKind::kFree && i.parts.empty()) End(static_cast<std::size_t>(i.src));
        if (alive_.MakesView(i)) out_[i.src] = true;  // the user gets the memory
        alive_.Pass(i);
      }
    }
  }
  void Begin(std::size_t buffer, StreamId stream) {
    Candidate& candidate = candidates_[buffer];
    const StreamId pool = std::max(stream, 0);
    if (candidate.stream < 0) candidate.stream = pool;
    candidate.several_streams = candidate.several_streams || candidate.stream != pool;
    open_[buffer] = now_;
  }
  void End(std::size_t buffer) {
    if (open_[buffer] < 0) return;
    candidates_[buffer].alive.push_back({open_[buffer], now_});
    open_[buffer] = -1;
  }

  const Plan& plan_;
  AliveBuffers alive_;
  std::vector<Candidate> candidates_;
  std::vector<bool> out_;
  std::vector<std::int64_t> open_ = std::vector<std::int64_t>(candidates_.size(), -1);
  std::int64_t now_ = 0;
};

std::int64_t RoundUp(std::int64_t bytes) {
  return (bytes + kArenaAlignment - 1) / kArenaAlignment * kArenaAlignment;
}

// The lowest address where `bytes` bytes meet none of the taken ranges (sorted by begin).
std::int64_t LowestGap(const std::vector<Interval>& taken, std::int64_t bytes) {
  std::int64_t at = 0;
  for (const Interval& range : taken) {
    if (at + bytes <= range.begin) break;
    at = std::max(at, range.end);
  }
  return at;
}

// The buffers of one stream: no other may have their addresses.
//
// [Note: how they are packed]
// The largest first, each at the lowest address where nothing is that is alive at the same time. If that
// takes more than is alive at once, the topmost buffers go first in another try, the best of which counts.
class StreamArena {
 public:
  StreamArena(const Plan& plan, const Lifetimes& lifetimes, std::vector<std::size_t> buffers)
      : buffers_(std::move(buffers)), meets_(buffers_.size()), bytes_(buffers_.size()) {
    for (std::size_t i = 0; i < buffers_.size(); ++i) {
      bytes_[i] = ArenaBytes(plan.buffers[buffers_[i]]);
      for (std::size_t j = 0; j < i; ++j) {
        if (!lifetimes.Meet(buffers_[i], buffers_[j])) continue;
        meets_[i].push_back(j);
        meets_[j].push_back(i);
      }
    }
    SetAlive(lifetimes);
    Pack();
  }

  std::int64_t size_bytes() const { return size_bytes_; }
  // Adds `base` to all addresses.
  void Write(std::int64_t base, ArenaLayout& layout) const {
    for (std::size_t i = 0; i < buffers_.size(); ++i) {
      layout.offsets[buffers_[i]] = base + offsets_[i];
      std::vector<BufferId>& sharers = layout.sharers[buffers_[i]];
      for (std::size_t j = 0; j < buffers_.size(); ++j) {
        const bool apart = offsets_[j] >= offsets_[i] + bytes_[i] || offsets_[i] >= offsets_[j] + bytes_[j];
        if (i != j && !apart) sharers.push_back(static_cast<BufferId>(buffers_[j]));
      }
      std::ranges::sort(sharers);
    }
  }

 private:
  static constexpr int kMostTries = 48;
  static constexpr std::int64_t kMostWork = 8'000'000;  // buffers looked at, in all tries but the first

  void SetAlive(const Lifetimes& lifetimes) {
    std::vector<std::pair<std::int64_t, std::int64_t>> changes;  // when, and of how many bytes
    for (std::size_t i = 0; i < buffers_.size(); ++i) {
      for (const Interval& alive : lifetimes.AliveOf(buffers_[i])) {
        changes.emplace_back(alive.begin, bytes_[i]);
        changes.emplace_back(alive.end, -bytes_[i]);
      }
    }
    std::ranges::sort(changes);  // what ends goes before what begins
    std::int64_t now = 0;
    for (const auto& [when, bytes] : changes) alive_bytes_ = std::max(alive_bytes_, now += bytes);
  }

  void Pack() {
    std::vector<std::size_t> order(buffers_.size());
    std::iota(order.begin(), order.end(), std::size_t{0});
    std::ranges::stable_sort(order, std::greater<>(), [&](std::size_t i) { return bytes_[i]; });
    for (int tries = 0; tries < kMostTries; ++tries) {
      const std::vector<std::int64_t> offsets = Place(order);
      std::size_t top = 0;
      for (std::size_t i = 0; i < offsets.size(); ++i) {
        if (offsets[i] + bytes_[i] > offsets[top] + bytes_[top]) top = i;
      }
      const std::int64_t size = offsets.empty() ? 0 : offsets[top] + bytes_[top];
      if (tries == 0 || size < size_bytes_) {
        size_bytes_ = size;
        offsets_ = offsets;
      }
      if (size_bytes_ <= alive_bytes_ || work_ > kMostWork) return;
      const auto at = std::ranges::find(order, top);
      std::rotate(order.begin(), at, at + 1);
    }
  }

  std::vector<std::int64_t> Place(const std::vector<std::size_t>& order) {
    std::vector<std::int64_t> offsets(buffers_.size(), -1);
    std::vector<Interval> taken;
    for (const std::size_t i : order) {
      taken.clear();
      work_ += std::ssize(meets_[i]);
      for (const std::size_t other : meets_[i]) {
        if (offsets[other] >= 0) taken.push_back({offsets[other], offsets[other] + bytes_[other]});
      }
      std::ranges::sort(taken, {}, &Interval::begin);
      offsets[i] = LowestGap(taken, bytes_[i]);
      SHARDPLAN_ASSERT(offsets[i] % kArenaAlignment == 0, "every buffer takes a multiple of the alignment");
    }
    return offsets;
  }

  const std::vector<std::size_t> buffers_;
  std::vector<std::vector<std::size_t>> meets_;  // alive at the same time
  std::vector<std::int64_t> bytes_;
  std::vector<std::int64_t> offsets_;
  std::int64_t size_bytes_ = 0;
  std::int64_t alive_bytes_ = 0;  // at most at once
  std::int64_t work_ = 0;
};

}  // namespace

std::int64_t ArenaPartOffset(const Buffer& buffer, std::int32_t part) {
  std::int64_t offset = 0;
  for (std::int32_t i = 0; i < part; ++i) offset += RoundUp(buffer.parts_bytes[i].value);
  return offset;
}

std::int64_t ArenaBytes(const Buffer& buffer) {
  return ArenaPartOffset(buffer, static_cast<std::int32_t>(buffer.parts_bytes.size()));
}

ArenaLayout LayOutArena(const Plan& plan) {
  const Lifetimes lifetimes(plan);
  ArenaLayout layout;
  layout.offsets.assign(plan.buffers.size(), -1);
  layout.sharers.resize(plan.buffers.size());
  std::map<StreamId, std::vector<std::size_t>> by_stream;
  for (std::size_t b = 0; b < plan.buffers.size(); ++b) {
    if (lifetimes.IsIn(b)) by_stream[lifetimes.StreamOf(b)].push_back(b);
  }
  for (auto& [stream, buffers] : by_stream) {
    const StreamArena arena(plan, lifetimes, std::move(buffers));
    arena.Write(layout.size_bytes, layout);
    layout.size_bytes += arena.size_bytes();
  }
  return layout;
}

}  // namespace shardplan::executor
