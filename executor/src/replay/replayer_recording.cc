// SPDX-License-Identifier: Apache-2.0
// Events of a step for a recorder (step_recorder.h).
#include <algorithm>
#include <utility>

#include "replay/replayer_impl.h"
#include "shardplan/schemas/layout.h"

namespace shardplan::executor {

Status Replayer::Impl::SetRecorder(StepRecorder* recorder) {
  recorder_ = recording_ = nullptr;
  if (recorder == nullptr) return {};
  std::int64_t spans = 0;
  for (std::int32_t t = program_.step_begin[plan_.steady_step];
       t < program_.step_begin[plan_.steady_step + 1]; ++t) {
    const auto first = program_.ops.begin() + program_.triggers[t].first;
    spans += std::count_if(first, first + program_.triggers[t].count, HasWork);
  }
  const bool runs_itself = model_ != nullptr && model_->RunsItself();
  Status attached = recorder->Attach(device_, collectives_, spans, runs_itself);
  if (attached) recorder_ = recorder;
  return attached;
}

void Replayer::Impl::BeginRecordedStep() {
  recording_ = recorder_->BeginStep(program_.triggers[trigger_].step) ? recorder_ : nullptr;
  made_in_segment_.clear();
  if (recording_ == nullptr) return;
  for (std::size_t b = 0; b < plan_.buffers.size(); ++b)
    recording_->BufferIs(static_cast<BufferId>(b), AliveBytes(static_cast<BufferId>(b)));
}

void Replayer::Impl::AbandonRecording() {
  if (recorder_ != nullptr) recorder_->AbandonStep();
  recording_ = nullptr;
}

// A segment's gradients are counted from its end on: nobody sees when it makes which. One that the model runs
// by itself ends with the next trigger.
void Replayer::Impl::NoteGradients() {
  const bool later = model_ != nullptr && model_->RunsItself();
  for (const GradTarget& target : targets_) {
    if (later) {
      made_in_segment_.push_back(target.buffer);
    } else {
      NoteBuffer(target.buffer);
    }
  }
}

Status Replayer::Impl::BeginRecordedTrigger(std::int32_t trigger) {
  Status begun = recording_->BeginTrigger(trigger);
  for (const BufferId buffer : std::exchange(made_in_segment_, {})) NoteBuffer(buffer);
  return begun;
}

// In blocks of the caching allocator.
Bytes Replayer::Impl::AliveBytes(BufferId id) const {
  const Buffer& buffer = plan_.buffers[id];
  if (!alive_[id] || alias_of_[id] >= 0) return {};
  if (buffer.role == BufferRole::kActivation) return {};  // the model's own, which the recorder does not see
  if (inherited_[id].value > 0) return inherited_[id];
  const bool models = model_makes_gradients_ && buffer.role == BufferRole::kGradUnsharded && buffer.unit >= 0;
  const std::vector<std::int32_t> parameters =
      models && buffer.parts_bytes.size() > 1 ? ParametersOf(plan_, buffer) : std::vector<std::int32_t>();
  std::int64_t bytes = 0;
  for (std::size_t part = 0; part < buffer.parts_bytes.size(); ++part) {
    const bool freed =
        std::ranges::find(freed_parts_[id], static_cast<std::int32_t>(part)) != freed_parts_[id].end();
    const bool missing = part < parameters.size() && grads_made_[id][parameters[part]] == 0;
    if (!freed && !missing) bytes += AllocationCount::Rounded(buffer.parts_bytes[part].value);
  }
  return {bytes};
}

// A buffer has come, gone or changed. The memory of one that goes is from then on that of its alias.
void Replayer::Impl::NoteBuffer(BufferId buffer) {
  if (alive_[buffer] == 0) {
    inherited_[buffer] = {};
    const BufferId owner = std::exchange(alias_of_[buffer], -1);
    if (owner >= 0) alias_by_owner_[owner] = -1;
    const BufferId alias = std::exchange(alias_by_owner_[buffer], -1);
    if (alias >= 0) {
      alias_of_[alias] = -1;
      inherited_[alias] = RoundedSizeBytes(plan_.buffers[buffer], {AllocationCount::kGranularityBytes});
      if (recording_ != nullptr) recording_->BufferIs(alias, AliveBytes(alias));
    }
  }
  if (recording_ != nullptr) [[unlikely]] {
    recording_->BufferIs(buffer, AliveBytes(buffer));
  }
}

}  // namespace shardplan::executor
