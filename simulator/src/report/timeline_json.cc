// SPDX-License-Identifier: Apache-2.0
// Chrome trace event format, as Perfetto reads it: one event a line.
#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "report/trace_events.h"
#include "shardplan/schemas/exchanges.h"
#include "shardplan/schemas/instruction_set.h"
#include "shardplan/simulator/engine.h"
#include "shardplan/simulator/simulate.h"
#include "text/instruction_text.h"

namespace shardplan {
namespace {

using Event = nlohmann::ordered_json;

constexpr int kHostThread = 1;

int ThreadOf(StreamId stream) { return kHostThread + 1 + stream; }

class TimelineWriter {
 public:
  TimelineWriter(const Plan& plan, const Simulation& simulation) : plan_(plan), simulation_(simulation) {}

  std::string Run() {
    out_ = "{\"displayTimeUnit\":\"ms\",\"traceEvents\":[\n";
    WriteMetadata();
    for (const Span& span : simulation_.spans) WriteSpan(span);
    WriteFlows();
    WriteMemory("allocated bytes", simulation_.memory);
    WriteMemory("host bytes", simulation_.host_memory);
    out_ += "\n]}\n";
    return std::move(out_);
  }

 private:
  // Events are written one by one: a plan can have millions.
  void Write(const Event& event) {
    if (!first_) out_ += ",\n";
    first_ = false;
    out_ += event.dump(-1, ' ', true, Event::error_handler_t::replace);
  }

  void NameThread(int thread, const std::string& name) {
    Write({{"ph", "M"},
           {"pid", internal::kTraceProcess},
           {"tid", thread},
           {"name", "thread_name"},
           {"args", {{"name", name}}}});
    Write({{"ph", "M"},
           {"pid", internal::kTraceProcess},
           {"tid", thread},
           {"name", "thread_sort_index"},
           {"args", {{"sort_index", thread}}}});
  }

  void WriteMetadata() {
    Write({{"ph", "M"},
           {"pid", internal::kTraceProcess},
           {"name", "process_name"},
           {"args", {{"name", fmt::format("{} {} rank 0 (simulated)", plan_.model, plan_.policy)}}}});
    NameThread(kHostThread, "host");
    const std::vector<std::string> streams = EngineStreams(plan_);
    for (std::size_t s = 0; s < streams.size(); ++s) {
      NameThread(ThreadOf(static_cast<StreamId>(s)), "stream " + streams[s]);
    }
  }

  const Trigger& TriggerOf(const Span& span) const {
    return plan_.steps[static_cast<std::size_t>(span.step)].triggers[static_cast<std::size_t>(span.trigger)];
  }

  void WriteSpan(const Span& span) {
    const Trigger& trigger = TriggerOf(span);
    Event event = {{"ph", "X"},
                   {"pid", internal::kTraceProcess},
                   {"tid", ThreadOf(span.stream)},
                   {"ts", internal::TraceMicroseconds(span.start_ns)},
                   {"dur", internal::TraceMicroseconds(span.end_ns - span.start_ns)}};
    if (span.instruction < 0) {
      event["cat"] = "trigger";
      event["name"] = internal::TriggerText(plan_, trigger);
      event["args"]["step"] = plan_.steps[static_cast<std::size_t>(span.step)].name;
      return Write(event);
    }
    const Instruction& instruction = trigger.instructions[static_cast<std::size_t>(span.instruction)];
    const OperatorEvent* own = internal::ModelCollectiveAt(plan_, instruction, span.entry);
    const bool waits = internal::WaitsForModelCollective(plan_, instruction, span.stream, span.entry);
    event["cat"] = waits ? "wait" : own == nullptr ? Name(instruction.kind) : Name(own->collective->kind);
    event["name"] = internal::EntryText(plan_, instruction, span.stream, span.entry);
    Event& args = event["args"];
    args["trigger"] = internal::TriggerText(plan_, trigger);
    if (own != nullptr) {
      args["segment"] = internal::InstructionText(plan_, instruction);
      args["operator"] = own->name;
      args["bytes"] = own->collective->size_bytes.value;
      args["dtype"] = Name(own->dtype);
      args["communicator"] =
          plan_.communicators[static_cast<std::size_t>(own->collective->communicator)].name;
    }
    if (!instruction.reason.empty()) args["reason"] = instruction.reason.str();
    const BufferId tensor = FullTensorOf(instruction);
    if (instruction.communicator >= 0 && tensor >= 0) {
      const Buffer& buffer = plan_.buffers[static_cast<std::size_t>(tensor)];
      args["bytes"] = TensorBytesOf(plan_, instruction).value;
      args["dtype"] = Name(buffer.dtype);
      args["communicator"] = plan_.communicators[static_cast<std::size_t>(instruction.communicator)].name;
    }
    Write(event);
  }

  // A flow binds to the slice that encloses its time on its thread: just before the end of what was recorded,
  // and at the start of what waited.
  void WriteFlows() {
    for (std::size_t f = 0; f < simulation_.flows.size(); ++f) {
      const Flow& flow = simulation_.flows[f];
      const Span& recorded = simulation_.spans[static_cast<std::size_t>(flow.recorded)];
      const Span& waiter = simulation_.spans[static_cast<std::size_t>(flow.waiter)];
      const Nanoseconds from = std::max(recorded.start_ns, recorded.end_ns - Nanoseconds{1});
      const Nanoseconds to = std::max(waiter.start_ns, from);
      Write({{"ph", "s"},
             {"id", f},
             {"pid", internal::kTraceProcess},
             {"tid", ThreadOf(recorded.stream)},
             {"ts", internal::TraceMicroseconds(from)},
             {"name", "event"},
             {"cat", "event"}});
      Write({{"ph", "f"},
             {"bp", "e"},
             {"id", f},
             {"pid", internal::kTraceProcess},
             {"tid", ThreadOf(waiter.stream)},
             {"ts", internal::TraceMicroseconds(to)},
             {"name", "event"},
             {"cat", "event"}});
    }
  }

  // Samples of the same nanosecond become two: the highest, and what is left a nanosecond later.
  void WriteMemory(std::string_view track, const std::vector<MemorySample>& samples) {
    std::vector<bool> used(simulation_.categories.size());
    for (const MemorySample& sample : samples) used[static_cast<std::size_t>(sample.category)] = true;
    std::vector<std::int64_t> now(simulation_.categories.size());
    for (std::size_t i = 0; i < samples.size();) {
      const Nanoseconds time = samples[i].time_ns;
      std::vector<std::int64_t> highest;
      Bytes highest_total{-1};
      for (; i < samples.size() && samples[i].time_ns == time; ++i) {
        now[static_cast<std::size_t>(samples[i].category)] = samples[i].category_bytes.value;
        if (samples[i].total_bytes < highest_total) continue;
        highest_total = samples[i].total_bytes;
        highest = now;
      }
      WriteCounter(track, time, highest, used);
      if (highest != now) WriteCounter(track, time + Nanoseconds{1}, now, used);
    }
  }

  void WriteCounter(std::string_view track, Nanoseconds time, const std::vector<std::int64_t>& bytes,
                    const std::vector<bool>& used) {
    Event by_category = Event::object();
    for (std::size_t c = 0; c < bytes.size(); ++c) {
      if (used[c]) by_category[simulation_.categories[c]] = bytes[c];
    }
    Write({{"ph", "C"},
           {"pid", internal::kTraceProcess},
           {"ts", internal::TraceMicroseconds(time)},
           {"name", track},
           {"args", std::move(by_category)}});
  }

  const Plan& plan_;
  const Simulation& simulation_;
  std::string out_;
  bool first_ = true;
};

}  // namespace

std::string TimelineJson(const Plan& plan, const Simulation& simulation) {
  return TimelineWriter(plan, simulation).Run();
}

}  // namespace shardplan
