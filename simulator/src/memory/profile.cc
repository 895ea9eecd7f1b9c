// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <utility>

#include "cost/fixed_log.h"
#include "memory/sink.h"
#include "shardplan/schemas/assert.h"
#include "shardplan/simulator/memory_profile.h"

namespace shardplan {
namespace {

// Sums after every action.
class Profiler final : public internal::MemorySink {
 public:
  Profiler(const Plan& plan, const MemoryOptions& options)
      : plan_(plan),
        options_(options),
        granularity_(std::max<std::int64_t>(1, options.granularity_bytes.value)) {
    by_category_.resize(MemoryCategories().size());
    profile_.step_peak_bytes.resize(plan_.steps.size());
  }

  std::int32_t Allocate(const MemoryBlock& block, const MemoryPoint& at) override {
    Count(block.requested_bytes, block.category, false, at);
    return -1;
  }
  std::int32_t AllocateForModel(const internal::ModelMemory& memory, UnitId, std::int32_t,
                                const MemoryPoint& at) override {
    Count(memory.requested_bytes, memory.category, false, at);
    return -1;
  }
  void Free(const MemoryBlock& block, const MemoryPoint& at) override {
    Count(block.requested_bytes, block.category, true, at);
  }
  void FreeOfModel(const internal::ModelMemory& memory, const MemoryPoint& at) override {
    Count(memory.requested_bytes, memory.category, true, at);
  }
  void BeginRecorded() override { recorded_ = true; }

  MemoryProfile Take() {
    while (step_ + 1 < std::ssize(plan_.steps)) NextStep();
    EndStep();
    if (plan_.steps.empty()) {
      profile_.peak_bytes.value = total_;
      SetPeak(by_category_);
    }
    profile_.end_bytes.value = total_;
    return std::move(profile_);
  }

 private:
  void Count(Bytes requested, std::int32_t category, bool frees, const MemoryPoint& at) {
    ++action_;
    if (recorded_) {
      while (step_ < at.step) NextStep();
      if (frees) KeepPeak();
    }
    Apply(requested, category, frees, at);
  }

  void SetPeak(const std::vector<std::int64_t>& by_category) {
    profile_.peak_by_category.clear();
    for (const std::int64_t bytes : by_category) profile_.peak_by_category.push_back({bytes});
  }

  // Records memory that is alive before the first recorded step, a sample each.
  void RecordAll() {
    for (std::size_t c = 0; c < by_category_.size(); ++c) {
      if (by_category_[c] == 0) continue;
      MemorySample sample{.category = static_cast<std::int32_t>(c),
                          .category_bytes = {by_category_[c]},
                          .total_bytes = {total_},
                          .step = step_};
      sample.action = last_change_;
      profile_.samples.push_back(sample);
    }
  }

  void NextStep() {
    EndStep();
    ++step_;
    step_peak_ = total_;
    step_peak_at_ = {step_, -1, -1, -1};
    peak_is_now_ = true;
    const bool first = step_ == options_.first_sampled_step;
    recording_ = recording_ || (first && options_.record_samples);
    if (first && recording_) RecordAll();
  }

  void EndStep() {
    if (step_ < 0) return;
    KeepPeak();
    profile_.step_peak_bytes[static_cast<std::size_t>(step_)].value = step_peak_;
    if (step_peak_ < profile_.peak_bytes.value) return;
    profile_.peak_bytes.value = step_peak_;
    profile_.peak_at = step_peak_at_;
    SetPeak(step_peak_by_category_);
  }

  void Apply(Bytes requested, std::int32_t category, bool frees, const MemoryPoint& at) {
    const std::int64_t bytes = Rounded(requested.value);
    if (bytes == 0) return;
    if (recorded_) last_change_ = action_;
    std::int64_t& of_category = by_category_[static_cast<std::size_t>(category)];
    of_category += frees ? -bytes : bytes;
    total_ += frees ? -bytes : bytes;
    if (recording_) {
      profile_.samples.push_back({TimeOf(at),
                                  category,
                                  {of_category},
                                  {total_},
                                  at.step,
                                  at.trigger,
                                  at.instruction,
                                  at.entry,
                                  action_});
    }
    if (total_ > step_peak_) {
      step_peak_ = total_;
      step_peak_at_ = at;
      // The categories are copied when the peak is over, i.e. before the first free after it.
      peak_is_now_ = true;
    }
  }

  void KeepPeak() {
    if (!peak_is_now_) return;
    step_peak_by_category_ = by_category_;
    peak_is_now_ = false;
  }

  std::int64_t Rounded(std::int64_t bytes) const {
    if ((granularity_ & (granularity_ - 1)) == 0) return (bytes + granularity_ - 1) & -granularity_;
    return (bytes + granularity_ - 1) / granularity_ * granularity_;
  }

  TimeRange RangeOf(const MemoryPoint& at) const {
    const auto s = static_cast<std::size_t>(std::max(at.step, 0));
    const auto t = static_cast<std::size_t>(std::max(at.trigger, 0));
    const auto i = static_cast<std::size_t>(std::max(at.instruction, 0));
    if (s >= options_.times.size()) return {};
    const auto& triggers = options_.times[s];
    if (t >= triggers.size() || i >= triggers[t].size()) return {};
    return triggers[t][i];
  }

  Nanoseconds TimeOf(const MemoryPoint& at) {
    if (options_.times.empty()) return {};
    const auto triggers = plan_.steps[static_cast<std::size_t>(std::max(at.step, 0))].triggers.size();
    if (at.trigger >= 0 && static_cast<std::size_t>(at.trigger) >= triggers)
      return last_time_ns_;  // inputs' end
    const TimeRange range = RangeOf(at);
    last_time_ns_ = range.start_ns;
    if (at.entry < 0) return last_time_ns_;
    FindOperators(at);
    if (segment_operators_ == 0) return last_time_ns_;
    while (entry_ <= at.entry) {
      operators_ +=
          std::holds_alternative<OperatorEvent>(segment_->entries[static_cast<std::size_t>(entry_++)]);
    }
    last_time_ns_.value +=
        internal::MulDiv((range.end_ns - range.start_ns).value, operators_, segment_operators_);
    return last_time_ns_;
  }

  // Starts to count the operators of the segment that `at` is in.
  void FindOperators(const MemoryPoint& at) {
    const MemoryPoint instruction{at.step, at.trigger, at.instruction, -1};
    if (segment_ != nullptr && instruction == segment_at_ && entry_ <= at.entry + 1) return;
    segment_at_ = instruction;
    SHARDPLAN_ASSERT(at.trigger >= 0 && at.instruction >= 0, "only an action of a segment has an entry");
    const Trigger& trigger =
        plan_.steps[static_cast<std::size_t>(at.step)].triggers[static_cast<std::size_t>(at.trigger)];
    const Instruction& compute = trigger.instructions[static_cast<std::size_t>(at.instruction)];
    SHARDPLAN_ASSERT(compute.segment >= 0, "only a compute instruction has entries");
    segment_ = &plan_.segments[static_cast<std::size_t>(compute.segment)];
    segment_operators_ = std::ranges::count_if(
        segment_->entries, [](const SegmentEntry& e) { return std::holds_alternative<OperatorEvent>(e); });
    entry_ = 0;
    operators_ = 0;
  }

  const Plan& plan_;
  const MemoryOptions& options_;
  const std::int64_t granularity_;
  MemoryProfile profile_;
  bool recorded_ = false;          // the steps have begun
  std::int32_t step_ = -1;         // the one under way
  std::int32_t action_ = -1;       // index in the history
  std::int32_t last_change_ = -1;  // the last of them that changed a sum, in the steps
  std::vector<std::int64_t> by_category_;
  std::vector<std::int64_t> step_peak_by_category_;
  std::int64_t total_ = 0;
  std::int64_t step_peak_ = 0;
  MemoryPoint step_peak_at_;
  bool peak_is_now_ = false;
  bool recording_ = false;
  // The place of a segment's samples among its operators.
  const Segment* segment_ = nullptr;
  MemoryPoint segment_at_;
  std::int32_t entry_ = 0;
  std::int64_t operators_ = 0;
  std::int64_t segment_operators_ = 0;
  Nanoseconds last_time_ns_;
};

}  // namespace

MemoryProfile internal::ProfileMemory(const Plan& plan, const MemoryOptions& options,
                                      const ModelActions* model) {
  Profiler profiler(plan, options);
  WalkMemory(plan, {.space = options.space, .kernel_temporaries = options.kernel_temporaries}, profiler,
             model);
  return profiler.Take();
}

MemoryProfile ProfileMemory(const Plan& plan, const MemoryOptions& options) {
  return internal::ProfileMemory(plan, options, nullptr);
}

MemoryProfile ProfileMemory(const Plan& plan, const MemoryHistory& history, const MemoryOptions& options) {
  Profiler profiler(plan, options);
  for (std::size_t a = 0; a < history.actions.size(); ++a) {
    if (a == history.first_recorded) profiler.BeginRecorded();
    const MemoryAction& action = history.actions[a];
    const MemoryBlock& block = history.blocks[static_cast<std::size_t>(action.block)];
    action.frees ? profiler.Free(block, action.at) : (void)profiler.Allocate(block, action.at);
  }
  return profiler.Take();
}

Bytes NcclBufferBytes(const Communicator& communicator) {
  constexpr std::int64_t kChannels = 16;
  constexpr std::int64_t kSimpleBytes = 4 << 20;
  constexpr std::int64_t kLl128Bytes = 120 * 640 * 8 * 8;
  constexpr std::int64_t kLlBytes = 8 * 512 * 8 * 16;
  if (communicator.size <= 1) return {};
  return {kChannels * (kSimpleBytes + kLl128Bytes + kLlBytes)};
}

Bytes NcclBufferBytes(const Plan& plan) {
  Bytes bytes;
  for (const Communicator& communicator : plan.communicators) bytes += NcclBufferBytes(communicator);
  return bytes;
}

}  // namespace shardplan
