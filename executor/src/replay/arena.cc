#include "shardplan/executor/arena.h"

#include <algorithm>
#include <numeric>

#include "shardplan/schemas/alive_buffers.h"

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

bool IsScratch(const Buffer& buffer) {
  if (buffer.persistent || buffer.memory != MemoryKind::kDevice) return false;
  switch (buffer.role) {
    case BufferRole::kParamUnsharded:
    case BufferRole::kExtensionGathered:
    case BufferRole::kExtensionUnsharded:
    case BufferRole::kParamPostForwardShard:
    case BufferRole::kAllGatherInput:
    case BufferRole::kAllGatherOutput:
    case BufferRole::kReduceScatterInput:
    case BufferRole::kReduceScatterOutput:
    case BufferRole::kPartialReduceOutput:
      return true;
    default:
      return false;
  }
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
  // May they not share memory?
  bool Conflict(std::size_t a, std::size_t b) const {
    if (candidates_[a].stream != candidates_[b].stream) return true;
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
  std::vector<std::size_t> order;
  for (std::size_t b = 0; b < plan.buffers.size(); ++b) {
    if (lifetimes.IsIn(b)) order.push_back(b);
  }
  std::ranges::stable_sort(order, std::greater<>(),
                           [&](std::size_t b) { return ArenaBytes(plan.buffers[b]); });
  std::vector<std::size_t> placed;
  for (const std::size_t b : order) {
    std::vector<Interval> taken;
    for (const std::size_t other : placed) {
      if (!lifetimes.Conflict(b, other)) continue;
      taken.push_back({layout.offsets[other], layout.offsets[other] + ArenaBytes(plan.buffers[other])});
    }
    std::ranges::sort(taken, {}, &Interval::begin);
    const std::int64_t bytes = ArenaBytes(plan.buffers[b]);
    const std::int64_t at = LowestGap(taken, bytes);
    layout.offsets[b] = at;
    layout.size_bytes = std::max(layout.size_bytes, at + bytes);
    for (const std::size_t other : placed) {
      const std::int64_t begin = layout.offsets[other];
      if (begin >= at + bytes || at >= begin + ArenaBytes(plan.buffers[other])) continue;
      layout.sharers[b].push_back(static_cast<BufferId>(other));
      layout.sharers[other].push_back(static_cast<BufferId>(b));
    }
    placed.push_back(b);
  }
  for (std::vector<BufferId>& sharers : layout.sharers) std::ranges::sort(sharers);
  return layout;
}

}  // namespace shardplan::executor
