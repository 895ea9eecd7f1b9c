// SPDX-License-Identifier: Apache-2.0
// Events that this process gives to its devices, written to a file as they are issued
// (docs/reference/recording-format.md). A line is one event. Each thread, stream, place and communicator has
// a line before the first that names it ({"stream": {...}}); its id is its number among those of its kind.
//
// [Note: the allocator's own events]
// torch's allocator records an event on each stream that a freed block was recorded for, and asks for it
// until it is reached. That orders the block's next owner alone, so these are written as what the freed block
// waits for, not as events of the program. They are told by who calls: libc10_cuda.so.
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <compare>
#include <cstdint>
#include <cstdio>
#include <map>
#include <mutex>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "device/runtime/python_frames.h"
#include "device/runtime/recorded_line.h"
#include "device/runtime/software_device.h"

namespace shardplan::softdevice {

class Stream;
struct Event;

class Recorder {
 public:
  // Null: nothing is recorded, or this is a fork of the process that records.
  static Recorder* Get();
  // False: the file cannot be written, or one is written already.
  static bool Begin(const char* path);
  // Nothing is recorded from now on. Who is in a call of it may still write.
  static void End();

  void Kernel(const Stream& stream, std::string_view name, bool known, std::span<const RecordedTensor> reads,
              std::span<const RecordedTensor> writes);
  // Device memory or pinned memory alone is named in `reads` and `writes`.
  void Copy(const Stream& stream, std::string_view direction, std::size_t bytes,
            std::span<const RecordedTensor> reads, std::span<const RecordedTensor> writes);
  void Memset(const Stream& stream, std::span<const RecordedTensor> writes);
  // False: nothing is known of the graph.
  bool GraphLaunched(unsigned long long graph, const Stream& on);
  struct Collective {
    std::string_view kind;
    const void* communicator = nullptr;
    std::string communicator_name;
    int rank = 0, ranks = 0;
    std::string_view dtype;
    std::size_t bytes = 0;
    int peer = -1;
    int batch = -1;
    std::vector<RecordedTensor> reads, writes;
  };
  void Communicate(const Stream& stream, const Collective& collective);
  // A number for operations that are launched together.
  int NextBatch() { return next_batch_++; }

  void EventRecorded(Event& event, const Stream& stream, const void* caller);
  void StreamWaits(const Stream& stream, const Event& event);
  void HostWaits(const Event& event);
  // It asked, and the event was over.
  void HostAsked(const Event& event, const void* caller);
  void HostWaits(const Stream& stream);
  void HostWaitsForDevice(int device, const void* caller);
  // `later` goes on behind what `earlier` has now.
  void Join(const Stream& earlier, const Stream& later);

  void Reserved(const void* address, std::size_t bytes, bool pinned, int device);
  void Released(const void* address);
  void Allocated(std::uintptr_t address, std::size_t bytes, const Stream& stream);
  void Freed(std::uintptr_t address, std::size_t bytes);
  void UsedOn(std::uintptr_t address, const Stream& stream);

  void HostRan(std::string_view name, std::span<const RecordedTensor> reads,
               std::span<const RecordedTensor> writes);
  void HandedOver(std::uint64_t object);
  void TakenOver(std::uint64_t object);
  void Mark(std::string_view phase, int step);
  void EnterModule(std::string_view module);

  // The place of this thread now.
  int Place();

 private:
  explicit Recorder(std::FILE* file) : file_(file) {}
  int ThreadId();
  int IdOf(const Stream& stream);
  struct Captured {
    std::string tag;
    int place = -1;
    RecordedLine fields;  // behind the stream
  };

  void Write(RecordedLine line);
  void Issue(std::string_view tag, const Stream& stream, RecordedLine fields);
  // The tag, the thread and the place: what every event begins with.
  RecordedLine Begun(std::string_view tag);
  int IdOfPlace(std::vector<PythonFrame> frames, std::string_view module, std::string_view node, int forward);

  struct PlaceKey {
    std::vector<PythonFrame> frames;
    std::string module, node;
    int forward = -1;
    auto operator<=>(const PlaceKey&) const = default;
  };

  std::mutex mutex_;
  std::FILE* const file_;
  int threads_ = 0;
  std::map<const Stream*, int> streams_;
  std::map<const void*, int> communicators_;
  std::map<PlaceKey, int> places_;
  std::map<unsigned long long, std::vector<Captured>> captured_;  // by capture
  std::atomic<int> next_batch_ = 0;
};

// The number of the next record of an event: whoever waits for an event waits for its latest.
std::int64_t NextRecord();
// Do torch's allocators of device memory call from there?
bool IsAllocator(const void* caller);
// Does torch's own C++ call from there, and not the program through Python?
bool IsTorch(const void* caller);

// A kernel was launched on the stream: it belongs to the operator that this thread is in, or its accesses are
// not known.
void NoteLaunch(const Stream& stream, std::string_view name);

}  // namespace shardplan::softdevice
