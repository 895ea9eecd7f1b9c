// SPDX-License-Identifier: Apache-2.0
// A simulated step of a recording as torch.profiler writes a profile.
#include <fmt/format.h>

#include <nlohmann/json.hpp>
#include <string>
#include <variant>

#include "report/trace_events.h"
#include "shardplan/simulator/simulate_recording.h"

namespace shardplan {
namespace {

using Event = nlohmann::ordered_json;

struct Described {
  std::string name;
  std::string category;  // of the device's event; "": none
  std::string host;      // of the host's event
  Event args = Event::object();
};

Described Describe(const Recording& recording, std::int64_t number) {
  return std::visit(
      [&]<typename Issued>(const Issued& event) -> Described {
        if constexpr (std::is_same_v<Issued, IssuedKernel> || std::is_same_v<Issued, IssuedLaunch>) {
          return {event.name, "kernel", "cudaLaunchKernel"};
        } else if constexpr (std::is_same_v<Issued, IssuedCopy>) {
          return {"Memcpy", "gpu_memcpy", "cudaMemcpyAsync", {{"bytes", event.size_bytes.value}}};
        } else if constexpr (std::is_same_v<Issued, IssuedMemset>) {
          return {"Memset (Device)", "gpu_memset", "cudaMemsetAsync"};
        } else if constexpr (std::is_same_v<Issued, IssuedCollective>) {
          const RecordedCommunicator& group =
              recording.communicators[static_cast<std::size_t>(event.communicator)];
          Event args = {{"Collective name", std::string(Name(event.kind))},
                        {"dtype", std::string(Name(event.dtype))},
                        {"size_bytes", event.size_bytes.value},
                        {"Group size", group.size},
                        {"Process Group Name", group.name},
                        {"Process Group Ranks", group.ranks}};
          return {fmt::format("nccl:{}", Name(event.kind)), "kernel", "cudaLaunchKernelExC", std::move(args)};
        } else if constexpr (std::is_same_v<Issued, IssuedRecord>) {
          return {"cudaEventRecord", "", "cudaEventRecord"};
        } else if constexpr (std::is_same_v<Issued, IssuedWait>) {
          return {"cudaStreamWaitEvent", "", "cudaStreamWaitEvent"};
        } else if constexpr (std::is_same_v<Issued, HostWaitForEvent>) {
          return {"cudaEventSynchronize", "", "cudaEventSynchronize"};
        } else if constexpr (std::is_same_v<Issued, HostWaitForStream>) {
          return {"cudaStreamSynchronize", "", "cudaStreamSynchronize"};
        } else if constexpr (std::is_same_v<Issued, HostWaitForDevice>) {
          return {"cudaDeviceSynchronize", "", "cudaDeviceSynchronize"};
        } else {
          return {};
        }
      },
      recording.events[static_cast<std::size_t>(number)]);
}

RecordedId ThreadOf(const Recording& recording, std::int64_t number) {
  return std::visit(
      [](const auto& event) -> RecordedId {
        if constexpr (requires { event.thread; }) {
          return event.thread;
        } else {
          return 0;
        }
      },
      recording.events[static_cast<std::size_t>(number)]);
}

Event Slice(const std::string& name, const char* category, int process, std::int64_t thread,
            Nanoseconds start, Nanoseconds end, Event args) {
  return {{"ph", "X"},
          {"cat", category},
          {"name", name},
          {"pid", process},
          {"tid", thread},
          {"ts", internal::TraceMicroseconds(start)},
          {"dur", internal::TraceMicroseconds(end - start)},
          {"args", std::move(args)}};
}

// The device of a rank is the process of its number, its threads are those of another.
void AddRank(const Recording& recording, const RecordingSimulation& simulation, int device, int host,
             Event& events) {
  events.push_back(
      {{"ph", "M"}, {"name", "process_name"}, {"pid", host}, {"tid", 0}, {"args", {{"name", "python"}}}});
  events.push_back({{"ph", "M"},
                    {"name", "process_labels"},
                    {"pid", device},
                    {"tid", 0},
                    {"args", {{"labels", fmt::format("GPU {}", device)}}}});
  for (std::size_t t = 0; t < recording.threads.size(); ++t) {
    events.push_back({{"ph", "M"},
                      {"name", "thread_name"},
                      {"pid", host},
                      {"tid", t},
                      {"args", {{"name", recording.threads[t].name}}}});
  }
  events.push_back(Slice(fmt::format("ProfilerStep#{}", simulation.step), "user_annotation", host, 0, {},
                         simulation.report.step_ns, Event::object()));
  for (const RecordedSpan& span : simulation.spans) {
    const Described described = Describe(recording, span.event);
    if (described.name.empty()) continue;
    const RecordedId thread = ThreadOf(recording, span.event);
    if (span.stream < 0) {
      const bool is_operator = described.name.find("::") != std::string::npos;
      events.push_back(Slice(is_operator ? described.name : described.host,
                             is_operator ? "cpu_op" : "cuda_runtime", host, thread, span.start_ns,
                             span.end_ns, {{"correlation", span.event}}));
      continue;
    }
    if (described.category.empty()) continue;
    Event args = described.args;
    args["device"] = device;
    args["stream"] = internal::kFirstTraceStream + span.stream;
    args["correlation"] = span.event;
    events.push_back(Slice(described.name, described.category.c_str(), device,
                           internal::kFirstTraceStream + span.stream, span.start_ns, span.end_ns,
                           std::move(args)));
  }
}

}  // namespace

std::string KinetoTrace(const std::vector<const Recording*>& recordings,
                        const std::vector<RecordingSimulation>& simulations, const Cluster& cluster) {
  Event events = Event::array(), devices = Event::array();
  for (std::size_t r = 0; r < recordings.size(); ++r) {
    const auto device = static_cast<int>(r);
    AddRank(*recordings[r], simulations[r], device, internal::kTraceProcess + device, events);
    devices.push_back({{"id", device},
                       {"name", cluster.device.name},
                       {"totalGlobalMem", cluster.device.memory_bytes.value}});
  }
  const Recording& first = *recordings.front();
  const Event trace = {
      {"schemaVersion", 1},
      {"deviceProperties", std::move(devices)},
      {"distributedInfo", {{"backend", "nccl"}, {"rank", first.rank}, {"world_size", first.world_size}}},
      {"displayTimeUnit", "ms"},
      {"shardplan", {{"simulated", true}, {"cluster", cluster.name}}},
      {"traceEvents", std::move(events)}};
  return trace.dump(-1, ' ', false, Event::error_handler_t::replace) + "\n";
}

}  // namespace shardplan
