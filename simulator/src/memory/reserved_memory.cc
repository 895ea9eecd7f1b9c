// SPDX-License-Identifier: Apache-2.0
#include "shardplan/simulator/reserved_memory.h"

#include <algorithm>
#include <array>
#include <tuple>
#include <utility>

#include "cost/fixed_log.h"
#include "shardplan/schemas/assert.h"
#include "shardplan/schemas/instruction_set.h"

namespace shardplan {
namespace {

using Order = std::tuple<std::int32_t, std::int32_t, std::int32_t>;
Order OrderOf(const MemoryPoint& at) { return {at.step, at.trigger, at.instruction}; }

// Work that the host knows to be done: by stream, how many of the allocator's events on it (clocks over
// streams, as the program's records and waits carry them).
class PassedEvents {
 public:
  PassedEvents(const Plan& plan, CachingAllocator& allocator)
      : plan_(plan),
        allocator_(allocator),
        streams_(std::max<std::size_t>(1, plan.streams.size())),
        stream_clock_(streams_, Clock(streams_, 0)),
        event_clock_(plan.events.size(), Clock(streams_, 0)) {}

  // Passes the instructions before `at`. A point before the last one: the step ended and begins again.
  void AdvanceTo(const MemoryPoint& at) {
    if (at.step < 0) return;
    if (step_ >= 0 && (at.step != step_ || OrderOf(at) < Order{step_, trigger_, instruction_})) FinishStep();
    if (at.step != step_) {
      step_ = at.step;
      trigger_ = instruction_ = 0;
    }
    const auto& triggers = plan_.steps[static_cast<std::size_t>(step_)].triggers;
    while (Order{step_, trigger_, instruction_} < OrderOf(at) &&
           static_cast<std::size_t>(trigger_) < triggers.size()) {
      const auto& instructions = triggers[static_cast<std::size_t>(trigger_)].instructions;
      if (static_cast<std::size_t>(instruction_) < instructions.size()) {
        Pass(instructions[static_cast<std::size_t>(instruction_++)]);
      } else {
        ++trigger_;
        instruction_ = 0;
      }
    }
  }

 private:
  using Clock = std::vector<std::int64_t>;

  bool IsStream(StreamId s) const { return s >= 0 && static_cast<std::size_t>(s) < streams_; }
  bool IsEvent(EventId e) const { return e >= 0 && static_cast<std::size_t>(e) < event_clock_.size(); }

  void Pass(const Instruction& i) {
    if (!IsEvent(i.event)) return;
    Clock& event = event_clock_[static_cast<std::size_t>(i.event)];
    const OrderEffect order = DescriptionOf(i.kind).order;
    if (order == OrderEffect::kRecords && IsStream(i.stream)) {
      event = stream_clock_[static_cast<std::size_t>(i.stream)];
      event[static_cast<std::size_t>(i.stream)] = allocator_.RecordedEvents(i.stream);
    } else if (order == OrderEffect::kWaits && IsStream(i.stream)) {
      Clock& stream = stream_clock_[static_cast<std::size_t>(i.stream)];
      for (std::size_t s = 0; s < streams_; ++s) stream[s] = std::max(stream[s], event[s]);
    } else if (order == OrderEffect::kHostWaits) {
      for (std::size_t s = 0; s < streams_; ++s) {
        allocator_.CompleteEvents(static_cast<StreamId>(s), event[s]);
      }
    }
  }

  void FinishStep() {
    for (std::size_t s = 0; s < streams_; ++s) {
      const auto stream = static_cast<StreamId>(s);
      allocator_.CompleteEvents(stream, allocator_.RecordedEvents(stream));
    }
    step_ = -1;
  }

  const Plan& plan_;
  CachingAllocator& allocator_;
  std::size_t streams_;
  std::vector<Clock> stream_clock_;
  std::vector<Clock> event_clock_;
  std::int32_t step_ = -1;
  std::int32_t trigger_ = 0;
  std::int32_t instruction_ = 0;
};

class Reserver {
 public:
  Reserver(const Plan& plan, const MemoryHistory& history, const ReservedOptions& options)
      : plan_(plan),
        history_(history),
        options_(options),
        allocator_(options.settings),
        device_(options.device_bytes, options.other_bytes, options.addresses),
        passed_(plan, allocator_),
        blocks_(history.blocks.size(), kNoBlock) {
    if (options.record_addresses) result_.placements.resize(history.blocks.size());
  }

  // `before_recorded`: the statistics before the history's first recorded action.
  ReservedMemory Run(AllocatorStats* before_recorded = nullptr) {
    for (std::size_t a = 0; a < history_.actions.size() && !result_.out_of_memory; ++a) {
      if (before_recorded != nullptr && a == history_.first_recorded) *before_recorded = allocator_.stats();
      Apply(a);
      if (options_.record_stats) result_.stats.push_back(allocator_.stats());
      if (options_.stop_at_release && allocator_.stats().retries > 0) break;
    }
    const AllocatorStats& stats = allocator_.stats();
    result_.end_reserved_bytes = stats.reserved_bytes;
    result_.peak_allocated_bytes = stats.peak_allocated_bytes;
    result_.retries = stats.retries;
    return std::move(result_);
  }

  std::size_t peak_action() const { return peak_action_; }
  const AllocatorStats& allocator_stats() const { return allocator_.stats(); }
  // The map after the first `count` actions, from a run of its own.
  std::vector<SegmentView> MapAfter(std::size_t count) {
    for (std::size_t a = 0; a < count; ++a) Apply(a);
    return allocator_.MemoryMap();
  }

 private:
  void Apply(std::size_t a) {
    const MemoryAction& action = history_.actions[a];
    const MemoryBlock& block = history_.blocks[static_cast<std::size_t>(action.block)];
    passed_.AdvanceTo(action.at);
    BlockId& id = blocks_[static_cast<std::size_t>(action.block)];
    SHARDPLAN_ASSERT(action.frees != (id == kNoBlock),
                     "a block of the history is allocated once, then freed");
    if (action.frees) {
      if (id < 0) return;
      for (const StreamId used : block.recorded_on) allocator_.RecordStream(id, used);
      allocator_.Free(id);
      if (options_.completion == Completion::kAtOnce) {
        for (const StreamId used : block.recorded_on) {
          allocator_.CompleteEvents(used, allocator_.RecordedEvents(used));
        }
      }
      return;
    }
    id = allocator_.Allocate(block.requested_bytes, block.stream, device_);
    Record(a, block.stream);
    if (id == kNoBlock) {
      result_.out_of_memory = true;
      result_.out_of_memory_at = action.at;
      return;
    }
    if (options_.record_addresses && id >= 0) {
      result_.placements[static_cast<std::size_t>(action.block)] = {allocator_.Address(id),
                                                                    allocator_.Size(id)};
    }
    const AllocatorStats& stats = allocator_.stats();
    if (stats.reserved_bytes <= result_.peak_reserved_bytes) {
      // The fullest moment of those with the reserved peak is the one to look at.
      if (stats.reserved_bytes < result_.peak_reserved_bytes ||
          stats.allocated_bytes <= result_.allocated_at_peak_bytes)
        return;
    } else {
      result_.peak_at = action.at;
    }
    result_.peak_reserved_bytes = stats.reserved_bytes;
    result_.allocated_at_peak_bytes = stats.allocated_bytes;
    peak_action_ = a;
  }

  void Record(std::size_t a, StreamId stream) {
    if (!options_.record_addresses) return;
    const auto now = static_cast<std::int32_t>(a);
    for (const SegmentAction& action : allocator_.last_actions()) {
      const bool taken =
          action.kind == SegmentActionKind::kSegmentAlloc || action.kind == SegmentActionKind::kSegmentMap;
      if (taken) {
        result_.segments.push_back({action.address, action.size_bytes, stream, now, -1});
        continue;
      }
      for (SegmentLife& life : result_.segments) {
        const bool inside = life.to < 0 && life.address >= action.address &&
                            life.address < action.address + action.size_bytes.value;
        if (inside) life.to = now;
      }
    }
  }

  const Plan& plan_;
  const MemoryHistory& history_;
  const ReservedOptions& options_;
  CachingAllocator allocator_;
  SimpleDevice device_;
  PassedEvents passed_;
  std::vector<BlockId> blocks_;
  std::size_t peak_action_ = 0;
  ReservedMemory result_;
};

}  // namespace

std::int64_t ReservedMemory::FragmentationPpm() const {
  if (peak_reserved_bytes.value == 0) return 0;
  return internal::MulDiv((peak_reserved_bytes - allocated_at_peak_bytes).value, 1'000'000,
                          peak_reserved_bytes.value);
}

ReservedMemory ReserveMemory(const Plan& plan, const MemoryHistory& history, const ReservedOptions& options) {
  Reserver reserver(plan, history, options);
  ReservedMemory result = reserver.Run();
  if (options.record_addresses && !history.actions.empty()) {
    Reserver again(plan, history, options);
    result.map_at_peak = again.MapAfter(reserver.peak_action() + 1);
  }
  // Values only, nothing that points into the reserver.
  return result;  // NOLINT(clang-analyzer-core.StackAddressEscape)
}

SteadyReplay ReplayUntilSteady(const Plan& plan, MemoryHistoryOptions history_options,
                               const ReservedOptions& options, std::int32_t steps) {
  const auto repeating = static_cast<std::int32_t>(plan.steps.size()) - plan.steady_step;
  const std::int32_t asked =
      steps > 0 ? std::max((steps - plan.steady_step + repeating - 1) / std::max(repeating, 1), 1) : 0;
  history_options.steps = steps;
  const std::int32_t most_passes = asked > 0 ? asked : 8;
  SteadyReplay replay;
  for (std::int32_t pass = asked > 0 ? asked : 2; pass <= most_passes; ++pass) {
    history_options.steady_passes = pass;
    replay.history = MemoryHistoryOf(plan, history_options);
    AllocatorStats before;
    Reserver reserver(plan, replay.history, options);
    replay.reserved = reserver.Run(&before);
    replay.end = reserver.allocator_stats();
    const bool released = options.stop_at_release && replay.reserved.retries > 0;
    if (replay.reserved.out_of_memory || released || replay.history.actions.empty()) break;
    const bool stays = replay.history.first_recorded > 0 &&
                       before.peak_reserved_bytes == replay.end.peak_reserved_bytes &&
                       before.reserved_bytes == replay.end.reserved_bytes;
    if (stays) break;
  }
  return replay;
}

SteadyReserved ReserveUntilSteady(const Plan& plan, MemoryHistoryOptions history_options,
                                  const ReservedOptions& options, std::int32_t steps) {
  ReservedOptions recording = options;
  recording.record_stats = true;
  SteadyReplay replay = ReplayUntilSteady(plan, history_options, recording, steps);
  SteadyReserved steady{.reserved = std::move(replay.reserved),
                        .history = std::move(replay.history),
                        .rows = {},
                        .at_rows = {},
                        .end = replay.end};
  if (steady.reserved.out_of_memory || steady.reserved.stats.empty()) return steady;
  std::size_t before_steps = 0;
  while (before_steps < steady.history.actions.size() && steady.history.actions[before_steps].at.step < 0) {
    ++before_steps;
  }
  if (before_steps > 0) {
    const AllocatorStats& made = steady.reserved.stats[before_steps - 1];
    steady.end.device_allocs -= made.device_allocs;
    steady.end.device_frees -= made.device_frees;
  }
  const MemoryProfile profile = ProfileMemory(plan, steady.history, {.record_samples = true});
  const std::int32_t row_step = steps > 0 ? std::min(steps - 1, plan.steady_step) : plan.steady_step;
  steady.rows = RowsOf(plan, profile, row_step).rows;
  const auto first = static_cast<std::int32_t>(steady.history.first_recorded);
  for (const MemoryRow& row : steady.rows) {
    steady.at_rows.push_back(
        steady.reserved.stats[static_cast<std::size_t>(std::max({row.action, first - 1, 0}))]);
  }
  return steady;
}

std::vector<SettingsTrial> TryAllocatorSettings(const Plan& plan, const MemoryHistory& history,
                                                const ReservedOptions& options) {
  constexpr std::array<std::string_view, 7> kTrials = {
      "expandable_segments:True",
      "max_split_size_mb:128",
      "max_split_size_mb:512",
      "max_split_size_mb:2048",
      "roundup_power2_divisions:4",
      "roundup_power2_divisions:16",
      "expandable_segments:True,roundup_power2_divisions:16",
  };
  std::vector<SettingsTrial> trials;
  for (const std::string_view text : kTrials) {
    ReservedOptions changed = options;
    changed.record_addresses = false;
    if (!ParseAllocatorSettings(text, options.device_bytes, changed.settings)) continue;
    const ReservedMemory result = ReserveMemory(plan, history, changed);
    trials.push_back({changed.settings, std::string(text), result.peak_reserved_bytes, result.retries,
                      result.out_of_memory});
  }
  return trials;
}

}  // namespace shardplan
