// SPDX-License-Identifier: Apache-2.0
// cudart: streams, events and host functions.
#include <atomic>
#include <chrono>
#include <map>
#include <set>
#include <vector>

#include "device/runtime/recorder.h"
#include "device/runtime/state.h"

namespace shardplan::softdevice {
namespace {

struct Handles {
  std::mutex mutex;
  std::map<cudaStream_t, std::shared_ptr<Stream>> streams;
  std::map<int, std::shared_ptr<Stream>> default_streams;
  std::map<int, int> made;  // streams, by device
  std::set<cudaEvent_t> events;
};
Handles& TheHandles() {
  static auto* const handles = new Handles();
  return *handles;
}

std::shared_ptr<Stream> DefaultStream(Handles& handles, int device) {
  std::shared_ptr<Stream>& stream = handles.default_streams[device];
  if (stream == nullptr) stream = std::make_shared<Stream>(device, 0, 0);
  return stream;
}

double NowMs() {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration<double, std::milli>(now).count();
}

}  // namespace

std::shared_ptr<Stream> StreamOf(cudaStream_t handle) { return StreamOfDevice(handle, CurrentDevice()); }

std::shared_ptr<Stream> StreamOfDevice(cudaStream_t handle, int device) {
  Handles& handles = TheHandles();
  const std::lock_guard lock(handles.mutex);
  if (handle == nullptr || handle == cudaStreamLegacy || handle == cudaStreamPerThread) {
    return DefaultStream(handles, device);
  }
  const auto found = handles.streams.find(handle);
  return found == handles.streams.end() ? nullptr : found->second;
}

void AwaitDevice(int device) {
  Handles& handles = TheHandles();
  const std::lock_guard lock(handles.mutex);
  for (const auto& [handle, stream] : handles.streams) {
    if (stream->device == device) Engine::Await(Engine::Get().LastOf(stream));
  }
  const auto own = handles.default_streams.find(device);
  if (own != handles.default_streams.end()) Engine::Await(Engine::Get().LastOf(own->second));
}

Event* EventOf(cudaEvent_t handle) {
  Handles& handles = TheHandles();
  const std::lock_guard lock(handles.mutex);
  return handles.events.contains(handle) ? reinterpret_cast<Event*>(handle) : nullptr;
}

namespace {

constexpr int kMostAsked = 10'000;

Point PointOf(Event& event) {
  const std::lock_guard lock(event.mutex);
  return event.point;
}

cudaError_t Record(cudaEvent_t handle, cudaStream_t stream_handle, const void* caller) {
  Event* event = EventOf(handle);
  const std::shared_ptr<Stream> stream = StreamOf(stream_handle);
  if (event == nullptr || stream == nullptr) return Answer(cudaErrorInvalidResourceHandle);
  if (event->device != stream->device) {
    Explain(cudaErrorInvalidResourceHandle, "an event is recorded on a stream of another device");
    return Answer(cudaErrorInvalidResourceHandle);
  }
  auto reached = std::make_shared<double>(0.0);
  const Point point = EnqueueOn(stream, "record of an event", [reached] { *reached = NowMs(); });
  if (Recorder* recorder = Recorder::Get()) recorder->EventRecorded(*event, *stream, caller);
  const std::lock_guard lock(event->mutex);
  event->point = point;
  event->asked = 0;
  event->reached_ms = reached;
  event->capture = stream->capture.load();
  return Answer(cudaSuccess);
}

cudaError_t MakeStream(cudaStream_t* handle, int priority) {
  Handles& handles = TheHandles();
  const std::lock_guard lock(handles.mutex);
  auto stream = std::make_shared<Stream>(CurrentDevice(), priority, ++handles.made[CurrentDevice()]);
  *handle = reinterpret_cast<cudaStream_t>(stream.get());
  handles.streams[*handle] = std::move(stream);
  return cudaSuccess;
}

}  // namespace
}  // namespace shardplan::softdevice

using namespace shardplan::softdevice;  // NOLINT: the rest of the file is cudart's interface

extern "C" {
#pragma GCC visibility push(default)

// All streams are non-blocking: none waits for the default stream because it is the default stream.
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned int, int priority) {
  return Answer(MakeStream(stream, priority));
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned int flags) {
  return cudaStreamCreateWithPriority(stream, flags, 0);
}
cudaError_t cudaStreamCreate(cudaStream_t* stream) { return cudaStreamCreateWithPriority(stream, 0, 0); }

// Work that it has is still done.
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  Handles& handles = TheHandles();
  const std::lock_guard lock(handles.mutex);
  if (!handles.streams.contains(stream)) return Answer(cudaErrorInvalidResourceHandle);
  // The object stays, so that a handle is never that of another stream.
  static auto* const ended = new std::vector<std::shared_ptr<Stream>>();
  ended->push_back(handles.streams[stream]);
  handles.streams.erase(stream);
  return Answer(cudaSuccess);
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  const std::shared_ptr<Stream> of = StreamOf(stream);
  if (of == nullptr) return Answer(cudaErrorInvalidResourceHandle);
  Engine::Get().Wait(Engine::Get().LastOf(of));
  if (Recorder* recorder = Recorder::Get()) recorder->HostWaits(*of);
  return Answer(cudaSuccess);
}

cudaError_t cudaStreamQuery(cudaStream_t stream) {
  const std::shared_ptr<Stream> of = StreamOf(stream);
  if (of == nullptr) return Answer(cudaErrorInvalidResourceHandle);
  const bool done = Engine::Get().IsDone(Engine::Get().LastOf(of));
  if (Recorder* recorder = Recorder::Get(); recorder != nullptr && done) recorder->HostWaits(*of);
  return Answer(done ? cudaSuccess : cudaErrorNotReady);
}

cudaError_t cudaStreamGetPriority(cudaStream_t stream, int* priority) {
  const std::shared_ptr<Stream> of = StreamOf(stream);
  if (of == nullptr) return Answer(cudaErrorInvalidResourceHandle);
  *priority = of->priority;
  return Answer(cudaSuccess);
}

cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  if (least != nullptr) *least = 0;
  if (greatest != nullptr) *greatest = -5;
  return Answer(cudaSuccess);
}

// [Note: graphs]
// In null mode a capture is a number: the streams that it takes have it, so that the allocator uses its
// private pool. Work issued meanwhile is done as ever, and a graph that is launched is work without content.
// In the other modes a graph would have to do its work again: captures are refused.
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t handle, cudaStreamCaptureStatus* status,
                                     unsigned long long* id, cudaGraph_t* graph,
                                     const cudaGraphNode_t** nodes, const cudaGraphEdgeData** edges,
                                     size_t* count) {
  const std::shared_ptr<Stream> stream = StreamOf(handle);
  if (stream == nullptr) return Answer(cudaErrorInvalidResourceHandle);
  const unsigned long long capture = stream->capture;
  *status = capture == 0 ? cudaStreamCaptureStatusNone : cudaStreamCaptureStatusActive;
  if (id != nullptr) *id = capture;
  if (graph != nullptr) *graph = reinterpret_cast<cudaGraph_t>(capture);
  if (nodes != nullptr) *nodes = nullptr;
  if (edges != nullptr) *edges = nullptr;
  if (count != nullptr) *count = 0;
  return Answer(cudaSuccess);
}
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  return cudaStreamGetCaptureInfo(stream, status, nullptr, nullptr, nullptr, nullptr, nullptr);
}
cudaError_t cudaStreamBeginCapture(cudaStream_t handle, cudaStreamCaptureMode) {
  static std::atomic<unsigned long long> next = 1;
  if (!TheSettings().null) {
    Explain(cudaErrorNotSupported, "no graphs are captured");
    return Answer(cudaErrorNotSupported);
  }
  const std::shared_ptr<Stream> stream = StreamOf(handle);
  if (stream == nullptr) return Answer(cudaErrorInvalidResourceHandle);
  stream->capture = next++;
  return Answer(cudaSuccess);
}
cudaError_t cudaStreamBeginCaptureToGraph(cudaStream_t stream, cudaGraph_t, const cudaGraphNode_t*,
                                          const cudaGraphEdgeData*, size_t, cudaStreamCaptureMode mode) {
  return cudaStreamBeginCapture(stream, mode);
}
cudaError_t cudaStreamUpdateCaptureDependencies(cudaStream_t, cudaGraphNode_t*, const cudaGraphEdgeData*,
                                                size_t, unsigned int) {
  return Answer(cudaSuccess);
}
cudaError_t cudaStreamEndCapture(cudaStream_t handle, cudaGraph_t* graph) {
  const std::shared_ptr<Stream> stream = StreamOf(handle);
  if (stream == nullptr) return Answer(cudaErrorInvalidResourceHandle);
  const unsigned long long capture = stream->capture;
  if (capture == 0) return Answer(cudaErrorIllegalState);
  Handles& handles = TheHandles();
  const std::lock_guard lock(handles.mutex);
  const auto leave = [&](const std::shared_ptr<Stream>& of) {
    if (of->capture == capture) of->capture = 0;
  };
  for (const auto& [key, of] : handles.streams) leave(of);
  for (const auto& [key, of] : handles.default_streams) leave(of);
  if (graph != nullptr) *graph = reinterpret_cast<cudaGraph_t>(capture);
  return Answer(cudaSuccess);
}
cudaError_t cudaGraphInstantiate(cudaGraphExec_t* executable, cudaGraph_t graph, unsigned long long) {
  *executable = reinterpret_cast<cudaGraphExec_t>(graph);
  return Answer(cudaSuccess);
}
cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* executable, cudaGraph_t graph,
                                          unsigned long long flags) {
  return cudaGraphInstantiate(executable, graph, flags);
}
cudaError_t cudaGraphGetNodes(cudaGraph_t, cudaGraphNode_t*, size_t* count) {
  *count = 1;
  return Answer(cudaSuccess);
}
cudaError_t cudaGraphNodeGetDependencies(cudaGraphNode_t, cudaGraphNode_t*, cudaGraphEdgeData*,
                                         size_t* count) {
  *count = 0;
  return Answer(cudaSuccess);
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t graph, cudaStream_t stream) {
  const std::shared_ptr<Stream> on = StreamOf(stream);
  if (on == nullptr) return Answer(cudaErrorInvalidResourceHandle);
  Recorder* recorder = Recorder::Get();
  const auto capture = reinterpret_cast<unsigned long long>(graph);
  if (recorder == nullptr || !recorder->GraphLaunched(capture, *on)) NoteLaunch(*on, "graph");
  (void)EnqueueData(on, "graph", {});
  return Answer(cudaSuccess);
}
cudaError_t cudaGraphDestroy(cudaGraph_t) { return Answer(cudaSuccess); }
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t) { return Answer(cudaSuccess); }
cudaError_t cudaGraphDebugDotPrint(cudaGraph_t, const char*, unsigned int) { return Answer(cudaSuccess); }
cudaError_t cudaUserObjectCreate(cudaUserObject_t* object, void*, cudaHostFn_t, unsigned int, unsigned int) {
  static int anything = 0;
  *object = reinterpret_cast<cudaUserObject_t>(&anything);
  return Answer(cudaSuccess);
}
cudaError_t cudaUserObjectRelease(cudaUserObject_t, unsigned int) { return Answer(cudaSuccess); }
cudaError_t cudaGraphRetainUserObject(cudaGraph_t, cudaUserObject_t, unsigned int, unsigned int) {
  return Answer(cudaSuccess);
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* handle, unsigned int flags) {
  auto* event = new Event();
  event->device = CurrentDevice();
  event->timing = (flags & cudaEventDisableTiming) == 0;
  *handle = reinterpret_cast<cudaEvent_t>(event);
  Handles& handles = TheHandles();
  const std::lock_guard lock(handles.mutex);
  handles.events.insert(*handle);
  return Answer(cudaSuccess);
}
cudaError_t cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, 0); }

cudaError_t cudaEventDestroy(cudaEvent_t event) {
  Handles& handles = TheHandles();
  const std::lock_guard lock(handles.mutex);
  if (handles.events.erase(event) == 0) return Answer(cudaErrorInvalidResourceHandle);
  delete reinterpret_cast<Event*>(event);
  return Answer(cudaSuccess);
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  return Record(event, stream, __builtin_return_address(0));
}
cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned int) {
  return Record(event, stream, __builtin_return_address(0));
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream_handle, cudaEvent_t handle, unsigned int) {
  Event* event = EventOf(handle);
  const std::shared_ptr<Stream> stream = StreamOf(stream_handle);
  if (event == nullptr || stream == nullptr) return Answer(cudaErrorInvalidResourceHandle);
  const Point point = PointOf(*event);
  // Who waits for what is captured is captured.
  if (event->capture != 0 && point.stream != nullptr && point.stream->capture == event->capture) {
    stream->capture = event->capture.load();
  }
  Engine::Await(point);
  if (point.stream != nullptr) {
    (void)Engine::Get().Enqueue(stream, {"wait for an event", {point}, [] { return true; }});
    if (Recorder* recorder = Recorder::Get()) recorder->StreamWaits(*stream, *event);
  }
  return Answer(cudaSuccess);
}

cudaError_t cudaEventQuery(cudaEvent_t handle) {
  Event* event = EventOf(handle);
  if (event == nullptr) return Answer(cudaErrorInvalidResourceHandle);
  const Point point = PointOf(*event);
  if (!Engine::Get().IsDone(point)) return Answer(cudaErrorNotReady);
  if (Recorder* recorder = Recorder::Get()) {
    const void* caller = __builtin_return_address(0);
    const bool is_awaited = point.stream == nullptr || point.stream->awaited >= point.position;
    // Work for which nobody ever waits: a process group that is destroyed asks until it is over.
    const bool is_asked = IsTorch(caller) && !IsAllocator(caller);
    if (is_asked && !is_awaited && ++event->asked < kMostAsked) return Answer(cudaErrorNotReady);
    recorder->HostAsked(*event, caller);
  }
  return Answer(cudaSuccess);
}

cudaError_t cudaEventSynchronize(cudaEvent_t handle) {
  Event* event = EventOf(handle);
  if (event == nullptr) return Answer(cudaErrorInvalidResourceHandle);
  Engine::Get().Wait(PointOf(*event));
  if (Recorder* recorder = Recorder::Get()) recorder->HostWaits(*event);
  return Answer(cudaSuccess);
}

cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t start, cudaEvent_t end) {
  Event* from = EventOf(start);
  Event* to = EventOf(end);
  if (from == nullptr || to == nullptr || !from->timing || !to->timing || !from->reached_ms ||
      !to->reached_ms) {
    return Answer(cudaErrorInvalidResourceHandle);
  }
  if (!Engine::Get().IsDone(PointOf(*from)) || !Engine::Get().IsDone(PointOf(*to))) {
    return Answer(cudaErrorNotReady);
  }
  *ms = static_cast<float>(*to->reached_ms - *from->reached_ms);
  return Answer(cudaSuccess);
}

cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* data) {
  const std::shared_ptr<Stream> on = StreamOf(stream);
  if (on == nullptr) return Answer(cudaErrorInvalidResourceHandle);
  (void)EnqueueOn(on, "host function", [function, data] { function(data); });
  return Answer(cudaSuccess);
}

cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t callback, void* data,
                                  unsigned int) {
  const std::shared_ptr<Stream> on = StreamOf(stream);
  if (on == nullptr) return Answer(cudaErrorInvalidResourceHandle);
  (void)EnqueueOn(on, "stream callback", [=] { callback(stream, cudaSuccess, data); });
  return Answer(cudaSuccess);
}

#pragma GCC visibility pop
}
