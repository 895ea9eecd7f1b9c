// Chrome trace event format, as Perfetto reads it: one event a line.
#include <fmt/format.h>

#include <algorithm>

#include "report/format.h"
#include "report/report_builder.h"
#include "shardplan/simulator/simulate.h"

namespace shardplan {
namespace {

using internal::AppendJsonString;
using internal::Microseconds;

constexpr int kProcess = 1;
constexpr int kHostThread = 1;

int ThreadOf(StreamId stream) { return kHostThread + 1 + stream; }

class TimelineWriter {
 public:
  TimelineWriter(const Plan& plan, const Simulation& simulation) : plan_(plan), simulation_(simulation) {}

  std::string Run() {
    out_ = "{\"displayTimeUnit\":\"ms\",\"traceEvents\":[\n";
    Metadata();
    for (const Span& span : simulation_.spans) WriteSpan(span);
    WriteFlows();
    WriteMemory();
    out_.resize(out_.size() - 2);  // the last ",\n"
    out_ += "\n]}\n";
    return std::move(out_);
  }

 private:
  void Named(std::string_view what, int thread, std::string_view name) {
    out_ +=
        fmt::format(R"({{"ph":"M","pid":{},"tid":{},"name":"{}","args":{{"name":)", kProcess, thread, what);
    AppendJsonString(out_, name);
    out_ += "}},\n";
    out_ += fmt::format(
        R"({{"ph":"M","pid":{},"tid":{},"name":"thread_sort_index","args":{{"sort_index":{}}}}},)", kProcess,
        thread, thread);
    out_ += "\n";
  }

  void Metadata() {
    out_ += fmt::format(R"({{"ph":"M","pid":{},"name":"process_name","args":{{"name":)", kProcess);
    AppendJsonString(out_, fmt::format("{} {} rank 0 (simulated)", plan_.model, plan_.policy));
    out_ += "}},\n";
    Named("thread_name", kHostThread, "host");
    for (std::size_t s = 0; s < plan_.streams.size(); ++s) {
      Named("thread_name", ThreadOf(static_cast<StreamId>(s)), "stream " + plan_.streams[s].name);
    }
  }

  const Trigger& TriggerOf(const Span& span) const {
    return plan_.steps[static_cast<std::size_t>(span.step)].triggers[static_cast<std::size_t>(span.trigger)];
  }

  void WriteSpan(const Span& span) {
    const Trigger& trigger = TriggerOf(span);
    out_ += fmt::format(R"({{"ph":"X","pid":{},"tid":{},"ts":{},"dur":{},"cat":)", kProcess,
                        ThreadOf(span.stream), Microseconds(span.start_ns),
                        Microseconds(span.end_ns - span.start_ns));
    if (span.instruction < 0) {
      out_ += R"("trigger","name":)";
      AppendJsonString(out_, internal::TriggerText(plan_, trigger));
      out_ += fmt::format(R"(,"args":{{"step":)");
      AppendJsonString(out_, plan_.steps[static_cast<std::size_t>(span.step)].name);
      out_ += "}},\n";
      return;
    }
    const Instruction& instruction = trigger.instructions[static_cast<std::size_t>(span.instruction)];
    AppendJsonString(out_, Name(instruction.kind));
    out_ += R"(,"name":)";
    AppendJsonString(out_, internal::InstructionText(plan_, instruction));
    out_ += R"(,"args":{"trigger":)";
    AppendJsonString(out_, internal::TriggerText(plan_, trigger));
    if (!instruction.reason.empty()) {
      out_ += R"(,"reason":)";
      AppendJsonString(out_, instruction.reason);
    }
    const bool gathers = instruction.kind == InstructionKind::kAllGather;
    const BufferId tensor = gathers ? instruction.dst : instruction.src;
    if (instruction.communicator >= 0 && tensor >= 0) {
      const Buffer& buffer = plan_.buffers[static_cast<std::size_t>(tensor)];
      out_ += fmt::format(R"(,"bytes":{},"dtype":"{}","communicator":)", SizeBytes(buffer).value,
                          Name(buffer.dtype));
      AppendJsonString(out_, plan_.communicators[static_cast<std::size_t>(instruction.communicator)].name);
    }
    out_ += "}},\n";
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
      out_ += fmt::format(R"({{"ph":"s","id":{},"pid":{},"tid":{},"ts":{},"name":"event","cat":"event"}},)",
                          f, kProcess, ThreadOf(recorded.stream), Microseconds(from));
      out_ += "\n";
      out_ += fmt::format(
          R"({{"ph":"f","bp":"e","id":{},"pid":{},"tid":{},"ts":{},"name":"event","cat":"event"}},)", f,
          kProcess, ThreadOf(waiter.stream), Microseconds(to));
      out_ += "\n";
    }
  }

  // Samples of the same nanosecond become two: the highest, and what is left a nanosecond later.
  void WriteMemory() {
    const std::vector<MemorySample>& samples = simulation_.memory;
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
      WriteCounter(time, highest, used);
      if (highest != now) WriteCounter(time + Nanoseconds{1}, now, used);
    }
  }

  void WriteCounter(Nanoseconds time, const std::vector<std::int64_t>& bytes, const std::vector<bool>& used) {
    out_ += fmt::format(R"({{"ph":"C","pid":{},"ts":{},"name":"allocated bytes","args":{{)", kProcess,
                        Microseconds(time));
    bool first = true;
    for (std::size_t c = 0; c < bytes.size(); ++c) {
      if (!used[c]) continue;
      if (!first) out_ += ',';
      first = false;
      AppendJsonString(out_, simulation_.categories[c]);
      out_ += fmt::format(":{}", bytes[c]);
    }
    out_ += "}},\n";
  }

  const Plan& plan_;
  const Simulation& simulation_;
  std::string out_;
};

}  // namespace

std::string TimelineJson(const Plan& plan, const Simulation& simulation) {
  return TimelineWriter(plan, simulation).Run();
}

}  // namespace shardplan
