// SPDX-License-Identifier: Apache-2.0
// Simulate: costs -> engine -> memory -> report.
#include "shardplan/simulator/simulate.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <utility>

#include "memory/model_actions.h"
#include "memory/sink.h"
#include "report/builder.h"
#include "shardplan/simulator/cost_model.h"
#include "shardplan/simulator/engine.h"
#include "text/instruction_text.h"

namespace shardplan {
namespace {

constexpr Bytes kMostBytes{std::int64_t{1} << 53};  // of every document

// Turns "/code/N" of an engine error into a place in the plan.
Error Located(Error error, const Plan& plan, const EngineStep& step, std::int32_t s) {
  constexpr std::string_view kPrefix = "/code/";
  if (!error.pointer.starts_with(kPrefix)) return error;
  const std::size_t index = std::stoul(error.pointer.substr(kPrefix.size()));
  if (index >= step.origins.size()) return error;
  const InstructionOrigin origin = step.origins[index];
  error.pointer = fmt::format("/steps/{}/triggers/{}", s, origin.trigger);
  const Trigger& trigger =
      plan.steps[static_cast<std::size_t>(s)].triggers[static_cast<std::size_t>(origin.trigger)];
  error.message = "this instruction waits for ever: the step never ends";
  error.found = internal::TriggerText(plan, trigger);
  if (origin.instruction >= 0) {
    error.pointer += fmt::format("/instructions/{}", origin.instruction);
    const Instruction& instruction = trigger.instructions[static_cast<std::size_t>(origin.instruction)];
    error.found += ": " + internal::InstructionText(plan, instruction);
  }
  return error;
}

// Appends a step's timeline, `offset` later, with a span for each trigger around its instructions.
void AppendTimeline(const Plan& plan, const EngineStep& step, const EngineTimeline& timeline, std::int32_t s,
                    Nanoseconds offset, Nanoseconds end, Simulation& simulation) {
  std::vector<std::int32_t> index_of(timeline.spans.size(), -1);
  for (std::size_t i = 0; i < step.code.size(); ++i) {
    if (step.origins[i].instruction >= 0) continue;
    std::size_t next = i + 1;
    while (next < step.code.size() && step.origins[next].instruction >= 0) ++next;
    const Nanoseconds start = timeline.host_start_ns[i];
    Nanoseconds stop = next < step.code.size() ? timeline.host_start_ns[next] : start;
    if (next == step.code.size()) {
      for (const EngineSpan& span : timeline.spans) {
        if (span.stream < 0) stop = std::max(stop, span.end_ns);
      }
    }
    if (stop > start) {
      simulation.spans.push_back(
          {-1, s, step.origins[i].trigger, -1, start + offset, std::min(stop, end) + offset});
    }
  }
  for (std::size_t i = 0; i < timeline.spans.size(); ++i) {
    const EngineSpan& span = timeline.spans[i];
    const InstructionOrigin& origin = step.origins[static_cast<std::size_t>(span.instruction)];
    if (origin.instruction < 0) continue;  // the trigger's span covers it
    // The stream of a communicator has nothing to do but to wait for the model.
    const bool waits = step.code[static_cast<std::size_t>(span.instruction)].op == EngineOp::kWait;
    if (waits && span.stream >= std::ssize(plan.streams)) continue;
    index_of[i] = static_cast<std::int32_t>(simulation.spans.size());
    simulation.spans.push_back({span.stream, s, origin.trigger, origin.instruction, span.start_ns + offset,
                                span.end_ns + offset, origin.entry});
  }
  for (const EngineFlow& flow : timeline.flows) {
    const std::int32_t recorded = index_of[static_cast<std::size_t>(flow.recorded)];
    const std::int32_t waiter = index_of[static_cast<std::size_t>(flow.waiter)];
    if (recorded >= 0 && waiter >= 0) simulation.flows.push_back({recorded, waiter});
  }
}

// [Note: when memory changes]
// Allocations and frees take effect in host order, and the host is far ahead of the device. A sample's time
// is that at which the compute stream passes it: when the work of streams[0] that was issued before it is
// done. So a chart shows the memory of a segment where the segment runs; the order and the sums are the
// host's.
std::vector<std::vector<TimeRange>> ComputeTimes(const Plan& plan, std::int32_t s, const EngineStep& step,
                                                 const EngineTimeline& timeline, Nanoseconds offset) {
  const std::vector<Trigger>& triggers = plan.steps[static_cast<std::size_t>(s)].triggers;
  std::vector<std::vector<TimeRange>> times(triggers.size());
  for (std::size_t t = 0; t < triggers.size(); ++t) times[t].resize(triggers[t].instructions.size());
  std::vector<const EngineSpan*> span_of(step.code.size(), nullptr);
  for (const EngineSpan& span : timeline.spans) {
    if (span.stream == 0) span_of[static_cast<std::size_t>(span.instruction)] = &span;
  }
  Nanoseconds now = offset;
  for (std::size_t i = 0; i < step.code.size(); ++i) {
    const InstructionOrigin& origin = step.origins[i];
    TimeRange range{now, now};
    if (span_of[i] != nullptr) range = {span_of[i]->start_ns + offset, span_of[i]->end_ns + offset};
    now = std::max(now, range.end_ns);
    if (origin.instruction < 0) continue;
    times[static_cast<std::size_t>(origin.trigger)][static_cast<std::size_t>(origin.instruction)] = range;
  }
  return times;
}

// Sizes as requested, and nothing where all buffers are in device memory.
MemoryProfile ProfileHostMemory(const Plan& plan, MemoryOptions options,
                                const internal::ModelActions& model) {
  const auto on_device = [](const Buffer& buffer) { return buffer.memory == MemoryKind::kDevice; };
  if (std::ranges::all_of(plan.buffers, on_device)) return {};
  options.granularity_bytes = {1};
  options.space = MemorySpace::kHost;
  return internal::ProfileMemory(plan, options, &model);
}

}  // namespace

Result<Simulation> Simulate(const Plan& plan, const SimulationOptions& options) {
  const Cluster& cluster = plan.cluster;
  if (plan.steps.empty()) {
    return std::unexpected(
        Error{ErrorCode::kBadInput, "the plan has no step", "", "/steps", "0", "1 or more"});
  }
  const std::unique_ptr<CostModel> costs = MakeCostModel(cluster);
  const internal::ModelActions model = internal::ModelActionsOf(plan, false);
  Result<EngineProgram> program = LowerPlan(plan, cluster, *costs);
  if (!program) return std::unexpected(program.error());

  Simulation simulation;
  simulation.categories = MemoryCategories();
  MemoryOptions memory_options;
  memory_options.granularity_bytes = options.granularity_bytes;
  memory_options.record_samples = options.record_timeline;
  Nanoseconds offset;
  EngineResult last;
  for (std::size_t s = 0; s < program->steps.size(); ++s) {
    const EngineStep& step = program->steps[s];
    const auto index = static_cast<std::int32_t>(s);
    EngineTimeline timeline;
    Result<EngineResult> run =
        RunStep(*program, index, options.record_timeline ? &timeline : nullptr, {.activities = true});
    if (!run) return std::unexpected(Located(run.error(), plan, step, index));
    last = std::move(*run);
    simulation.instructions += step.plan_instructions;
    if (options.record_timeline) {
      AppendTimeline(plan, step, timeline, index, offset, last.end_ns, simulation);
      memory_options.times.push_back(ComputeTimes(plan, index, step, timeline, offset));
    }
    offset += last.end_ns;
  }
  const auto last_step = static_cast<std::int32_t>(program->steps.size()) - 1;
  Result<EngineResult> synchronized = RunStep(*program, last_step, nullptr, {.synchronize_phases = true});
  if (!synchronized) {
    return std::unexpected(
        Located(synchronized.error(), plan, program->steps[static_cast<std::size_t>(last_step)], last_step));
  }
  MemoryProfile memory = internal::ProfileMemory(plan, memory_options, &model);
  simulation.memory = std::move(memory.samples);
  MemoryProfile host_memory = ProfileHostMemory(plan, std::move(memory_options), model);
  simulation.host_memory = std::move(host_memory.samples);
  for (const Bytes peak : {memory.peak_bytes, host_memory.peak_bytes}) {
    if (peak <= kMostBytes) continue;
    return std::unexpected(Error{ErrorCode::kBadInput, "the plan needs more memory than a report can say", "",
                                 "/buffers", std::to_string(peak.value), std::to_string(kMostBytes.value)});
  }
  Result<DeviceFit> fit = FitDevice(plan, options.fit);
  if (!fit) return std::unexpected(fit.error());
  fit->reserved_bytes = ReservedToShow(plan, options.fit, *fit);
  simulation.report =
      internal::BuildReport(plan, cluster, *program, last, *synchronized, memory, host_memory, *fit);
  simulation.report.plan_digest = options.plan_digest;
  return simulation;
}

}  // namespace shardplan
