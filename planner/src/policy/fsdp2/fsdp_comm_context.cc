// SPDX-License-Identifier: Apache-2.0
#include "policy/fsdp2/fsdp_comm_context.h"

#include <fmt/format.h>

#include <algorithm>
#include <string>
#include <string_view>
#include <utility>

#include "shardplan/schemas/assert.h"

namespace shardplan::fsdp2 {

void FsdpCommContext::LazyInit(std::size_t earlier) {
  const auto stream = [&](std::string_view name) {
    return program_.Stream(earlier == 0 ? std::string(name) : fmt::format("{}.{}", name, earlier + 1), -1);
  };
  const State old = std::exchange(state_, {});
  state_.all_gather_copy_in_stream = stream("all_gather_copy_in");
  state_.all_gather_stream = stream("all_gather");
  state_.reduce_scatter_stream = stream("reduce_scatter");
  if (old.all_gather_state) program_.Free(old.all_gather_state->output, state_.all_gather_copy_in_stream);
  for (const ReduceScatterState& pending : old.reduce_scatter_states) program_.Free(pending.input, kCompute);
}

void FsdpCommContext::UseComputeStream() {
  state_.all_gather_copy_in_stream = state_.all_gather_stream = state_.reduce_scatter_stream = kCompute;
}

FsdpCommContext::AllGatherStreams FsdpCommContext::GetAllGatherStreams(bool async_op,
                                                                       TrainingState training_state) const {
  const bool in_hook =
      training_state == TrainingState::kForward || training_state == TrainingState::kPreBackward;
  if (async_op || !in_hook || !initialised()) return {};
  return {state_.all_gather_copy_in_stream, state_.all_gather_stream};
}

StreamId FsdpCommContext::reduce_scatter_stream() const {
  SHARDPLAN_ASSERT(initialised(), "a root has run its first forward before anything is reduced");
  return state_.reduce_scatter_stream;
}

// Named after the reduce-scatter stream of the same context.
StreamId FsdpCommContext::AllReduceStream() const {
  SHARDPLAN_ASSERT(initialised(), "a root has run its first forward before anything is reduced");
  if (state_.reduce_scatter_stream == kCompute) return kCompute;
  const std::string& twin = program_.plan().streams[state_.reduce_scatter_stream].name;
  const std::string_view number = std::string_view(twin).substr(std::string_view("reduce_scatter").size());
  return program_.Stream(fmt::format("all_reduce{}", number));
}

void FsdpCommContext::WaitAllGatherStreamsOnEvent(EventId event) {
  if (!initialised() || state_.all_gather_stream == kCompute) return;
  program_.Wait(event, state_.all_gather_copy_in_stream);
  program_.Wait(event, state_.all_gather_stream);
}

void FsdpCommContext::KeepAllGather(AllGatherState state) {
  SHARDPLAN_ASSERT(initialised() && !state_.all_gather_state,
                   "the wait in a forward takes what was kept before it keeps its own");
  state_.all_gather_state = state;
}

std::optional<FsdpCommContext::AllGatherState> FsdpCommContext::TakeAllGather() {
  if (state_.all_gather_state) WaitAllGatherStreamsOnEvent(state_.all_gather_state->event);
  return std::exchange(state_.all_gather_state, std::nullopt);
}

void FsdpCommContext::Free(const AllGatherState& taken) {
  const UnitId caller = program_.unit();
  program_.SetUnit(-1);
  program_.Free(taken.output, state_.all_gather_copy_in_stream);
  program_.SetUnit(caller);
}

StreamId FsdpCommContext::all_gather_memory_stream() const {
  return initialised() ? state_.all_gather_copy_in_stream : kCompute;
}

bool FsdpCommContext::KeepsFirstOutputOf(UnitId unit) const {
  return state_.all_gather_state && state_.all_gather_state->unit == unit && !state_.all_gather_state->second;
}

void FsdpCommContext::WaitForReduceScatters(std::size_t keep) {
  std::vector<ReduceScatterState>& pending = state_.reduce_scatter_states;
  while (pending.size() > keep) {
    const ReduceScatterState oldest = pending.front();
    pending.erase(pending.begin());
    const UnitId caller = program_.unit();
    program_.Wait(oldest.event, kCompute);
    program_.SetUnit(-1);
    program_.Free(oldest.input, kCompute);
    program_.SetUnit(caller);
  }
}

void FsdpCommContext::FinishReduceScatters() {
  const std::vector<ReduceScatterState> pending = std::exchange(state_.reduce_scatter_states, {});
  for (const ReduceScatterState& state : pending) program_.Wait(state.event, kCompute);
  for (const ReduceScatterState& state : pending) program_.Free(state.input, kCompute);
}

void FsdpCommContext::SetLastPostReduceEvent(StreamId stream, EventId event) {
  const auto last = std::ranges::find(state_.last_post_reduce_events, stream, &PostReduceEvent::stream);
  if (last == state_.last_post_reduce_events.end()) {
    state_.last_post_reduce_events.push_back({.stream = stream, .event = event});
  } else {
    last->event = event;
  }
}

void FsdpCommContext::WaitForLastReductions() {
  for (const PostReduceEvent& last : std::exchange(state_.last_post_reduce_events, {})) {
    program_.Wait(last.event, kCompute);
  }
}

void FsdpCommContext::ReleaseAllGatherOnComputeStream() {
  if (!state_.all_gather_state) return;
  program_.Wait(state_.all_gather_state->event, kCompute);
  Free(*std::exchange(state_.all_gather_state, std::nullopt));
}

std::size_t FsdpCommContext::ReduceScattersOf(UnitId unit) const {
  return static_cast<std::size_t>(
      std::ranges::count(state_.reduce_scatter_states, unit, &ReduceScatterState::unit));
}

}  // namespace shardplan::fsdp2
