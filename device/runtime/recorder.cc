// SPDX-License-Identifier: Apache-2.0
#include "device/runtime/recorder.h"

#include <dlfcn.h>
#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <optional>
#include <unordered_map>
#include <utility>

#include "device/runtime/memory.h"
#include "device/runtime/state.h"

namespace shardplan::softdevice {
namespace {

std::atomic<Recorder*> the_recorder = nullptr;
pid_t owner = 0;
// The place from which c10's guard of CUDA calls: autograd's engine records its events by it. It is in the
// library of the allocator: so it is told by its place there.
std::atomic<const void*> guards_record = nullptr;

// The state of a thread.
struct Here {
  int thread = -1;
  std::string module;
  bool in_operator = false;
  int place = -1;                      // of the operator; else the last one
  std::vector<const Stream*> streams;  // of the operator's launches
  int outer = 0;                       // operators around it, and where the outermost has launched
  std::vector<const Stream*> outer_streams;
  bool is_guards = false;    // the event that is recorded is c10's guard's
  std::uintptr_t freed = 0;  // the allocator has been given the block back, and may record events for it
};
Here& ThisThread() {
  thread_local Here& here = *new Here();  // never destroyed, either
  return here;
}

struct Autograd {
  AutogradWatch watch;
  std::mutex mutex;
  std::map<std::pair<std::uint64_t, std::uint64_t>, int> forwards;  // places, by thread and number
};
Autograd& TheAutograd() {
  static auto* const autograd = new Autograd();
  return *autograd;
}

std::string_view LibraryOf(const void* caller) {
  // Never destroyed: torch asks about events while the process ends.
  thread_local auto& known = *new std::unordered_map<const void*, std::string>();
  const auto found = known.find(caller);
  if (found != known.end()) return found->second;
  Dl_info info = {};
  const bool is_known = dladdr(caller, &info) != 0 && info.dli_fname != nullptr;
  return known[caller] = is_known ? info.dli_fname : "";
}

}  // namespace

bool IsAllocator(const void* caller) { return LibraryOf(caller).ends_with("libc10_cuda.so"); }
bool IsTorch(const void* caller) {
  return LibraryOf(caller).ends_with("libtorch_cuda.so") || IsAllocator(caller);
}

std::int64_t NextRecord() {
  static std::atomic<std::int64_t> next = 0;
  return next++;
}

Recorder* Recorder::Get() {
  Recorder* recorder = the_recorder.load(std::memory_order_acquire);
  return recorder != nullptr && owner == getpid() ? recorder : nullptr;
}

bool Recorder::Begin(const char* path) {
  if (Get() != nullptr) return false;
  std::FILE* file = std::fopen(path, "w");
  if (file == nullptr) return false;
  owner = getpid();
  the_recorder.store(new Recorder(file), std::memory_order_release);
  if (TheAutograd().watch.begins) TheAutograd().watch.begins();
  return true;
}

void Recorder::End() {
  Recorder* recorder = Get();
  if (recorder == nullptr) return;
  the_recorder.store(nullptr, std::memory_order_release);
  const std::lock_guard lock(recorder->mutex_);
  (void)std::fflush(recorder->file_);
}

void Recorder::Write(RecordedLine line) {
  const std::string text = line.Take();
  const std::lock_guard lock(mutex_);
  (void)std::fwrite(text.data(), 1, text.size(), file_);
}

int Recorder::ThreadId() {
  Here& here = ThisThread();
  if (here.thread >= 0) return here.thread;
  std::array<char, 32> name = {};
  (void)pthread_getname_np(pthread_self(), name.data(), name.size());
  std::string line = R"({"thread":{"name":)";
  AppendText(line, getpid() == gettid() ? "main" : name.data());
  line += "}}\n";
  const std::lock_guard lock(mutex_);
  here.thread = threads_++;
  (void)std::fwrite(line.data(), 1, line.size(), file_);
  return here.thread;
}

int Recorder::IdOf(const Stream& stream) {
  const std::lock_guard lock(mutex_);
  const auto [entry, is_new] = streams_.try_emplace(&stream, static_cast<int>(streams_.size()));
  if (is_new) {
    std::fprintf(file_, "{\"stream\":{\"device\":%d,\"priority\":%d,\"number\":%d}}\n", stream.device,
                 stream.priority, stream.number);
  }
  return entry->second;
}

int Recorder::IdOfPlace(std::vector<PythonFrame> frames, std::string_view module, std::string_view node,
                        int forward) {
  PlaceKey key{std::move(frames), std::string(module), std::string(node), forward};
  const std::lock_guard lock(mutex_);
  const auto [entry, is_new] = places_.try_emplace(std::move(key), static_cast<int>(places_.size()));
  if (!is_new) return entry->second;
  std::string line = R"({"place":{"frames":[)";
  bool first = true;
  for (const auto& [code, number] : entry->first.frames) {
    const PythonCode said = CodeOf(code);
    line += first ? R"({"file":)" : R"(,{"file":)";
    first = false;
    AppendText(line, said.file);
    line += R"(,"line":)" + std::to_string(number) + R"(,"function":)";
    AppendText(line, said.function);
    line += '}';
  }
  line += ']';
  if (!module.empty()) {
    line += R"(,"module":)";
    AppendText(line, module);
  }
  if (!node.empty()) {
    line += R"(,"node":)";
    AppendText(line, node);
  }
  if (forward >= 0) line += R"(,"forward":)" + std::to_string(forward);
  line += "}}\n";
  (void)std::fwrite(line.data(), 1, line.size(), file_);
  return entry->second;
}

int Recorder::Place() {
  Here& here = ThisThread();
  if (here.in_operator) return here.place;
  const std::string module = here.module;
  std::optional<AutogradNode> node;
  if (TheAutograd().watch.node_here) node = TheAutograd().watch.node_here();
  int forward = -1;
  if (node) {
    Autograd& autograd = TheAutograd();
    const std::lock_guard lock(autograd.mutex);
    const auto found = autograd.forwards.find({node->thread, node->number});
    if (found != autograd.forwards.end()) forward = found->second;
  }
  here.place = IdOfPlace(FramesOfThread(), module, node ? node->name : "", forward);
  return here.place;
}

RecordedLine Recorder::Begun(std::string_view tag) {
  const int thread = ThreadId();
  const int place = Place();
  RecordedLine line(tag);
  line.Number(thread).Number(place);
  return line;
}

// [Note: graphs that are recorded] A capture does nothing: what it takes is issued whenever the graph is
// launched, on the launch's stream, one after the other. Branches that run beside each other in the graph
// count as ordered.
void Recorder::Issue(std::string_view tag, const Stream& stream, RecordedLine fields) {
  const int place = Place();
  if (const unsigned long long capture = stream.capture; capture != 0) {
    const std::lock_guard lock(mutex_);
    captured_[capture].push_back({std::string(tag), place, std::move(fields)});
    return;
  }
  RecordedLine line(tag);
  Write(std::move(line.Number(ThreadId()).Number(place).Number(IdOf(stream)).Append(fields)));
}

bool Recorder::GraphLaunched(unsigned long long graph, const Stream& on) {
  std::vector<Captured> works;
  {
    const std::lock_guard lock(mutex_);
    const auto found = captured_.find(graph);
    if (found == captured_.end()) return false;
    works = found->second;
  }
  for (const Captured& work : works) {
    RecordedLine line(work.tag);
    Write(std::move(line.Number(ThreadId()).Number(work.place).Number(IdOf(on)).Append(work.fields)));
  }
  return true;
}

void Recorder::Kernel(const Stream& stream, std::string_view name, bool known,
                      std::span<const RecordedTensor> reads, std::span<const RecordedTensor> writes) {
  RecordedLine fields;
  fields.Text(name);
  if (known) fields.Tensors(reads).Tensors(writes);
  Issue(known ? "kernel" : "launch", stream, std::move(fields));
}

void Recorder::Copy(const Stream& stream, std::string_view direction, std::size_t bytes,
                    std::span<const RecordedTensor> reads, std::span<const RecordedTensor> writes) {
  RecordedLine fields;
  fields.Text(direction).Number(static_cast<std::int64_t>(bytes)).Tensors(reads).Tensors(writes);
  Issue("copy", stream, std::move(fields));
}

void Recorder::Memset(const Stream& stream, std::span<const RecordedTensor> writes) {
  RecordedLine fields;
  fields.Tensors(writes);
  Issue("memset", stream, std::move(fields));
}

void Recorder::Communicate(const Stream& stream, const Collective& collective) {
  int communicator = 0;
  {
    const std::lock_guard lock(mutex_);
    const auto [entry, is_new] =
        communicators_.try_emplace(collective.communicator, static_cast<int>(communicators_.size()));
    communicator = entry->second;
    if (is_new) {
      std::string described = R"({"communicator":{"size":)" + std::to_string(collective.ranks);
      described += R"(,"rank":)" + std::to_string(collective.rank) + R"(,"name":)";
      AppendText(described, collective.communicator_name);
      described += "}}\n";
      (void)std::fwrite(described.data(), 1, described.size(), file_);
    }
  }
  RecordedLine fields;
  fields.Text(collective.kind).Number(communicator).Text(collective.dtype);
  fields.Number(static_cast<std::int64_t>(collective.bytes))
      .Tensors(collective.reads)
      .Tensors(collective.writes);
  fields.Number(collective.peer).Number(collective.batch);
  Issue("collective", stream, std::move(fields));
}

void Recorder::EventRecorded(Event& event, const Stream& stream, const void* caller) {
  Here& here = ThisThread();
  if (here.is_guards) guards_record = caller;
  if (here.freed != 0 && IsAllocator(caller) && caller != guards_record) {
    RecordedLine line("hold");
    line.Number(ThreadId()).Number(IdOf(stream)).Number(static_cast<std::int64_t>(here.freed));
    return Write(std::move(line));
  }
  here.freed = 0;
  if (stream.capture != 0) {
    event.recording = -1;  // a part of the graph
    return;
  }
  event.recording = NextRecord();
  RecordedLine line = Begun("record");
  Write(std::move(line.Number(IdOf(stream)).Number(event.recording)));
}

void Recorder::StreamWaits(const Stream& stream, const Event& event) {
  if (event.recording < 0 || stream.capture != 0) return;
  RecordedLine line = Begun("wait");
  Write(std::move(line.Number(IdOf(stream)).Number(event.recording)));
}

void Recorder::HostWaits(const Event& event) {
  if (event.recording < 0) return;
  RecordedLine line = Begun("wait_for_event");
  Write(std::move(line.Number(event.recording)));
}

// [Note: asking] torch's own code asks whether work is over to give up what it holds: that orders what is
// freed. Its process groups do not let a stream wait for what is over. All is over at once on a device that
// computes nothing, and no wait would be seen. So they are told that work is not over before somebody has
// been told to wait for it (streams.cc). A program that asks decides by the answer, and is behind the work
// then.
void Recorder::HostAsked(const Event& event, const void* caller) {
  if (!IsTorch(caller)) return HostWaits(event);
  if (event.recording < 0) return;
  RecordedLine line("learn");
  Write(std::move(line.Number(ThreadId()).Number(event.recording)));
}

void Recorder::HostWaits(const Stream& stream) {
  RecordedLine line = Begun("wait_for_stream");
  Write(std::move(line.Number(IdOf(stream))));
}

void Recorder::HostWaitsForDevice(int device, const void* caller) {
  const int place = IsAllocator(caller) ? ThisThread().place : Place();
  RecordedLine line("wait_for_device");
  Write(std::move(line.Number(ThreadId()).Number(place).Number(device)));
}

void Recorder::Join(const Stream& earlier, const Stream& later) {
  if (earlier.capture != 0 || later.capture != 0) return;
  const std::int64_t number = NextRecord();
  RecordedLine record = Begun("record");
  Write(std::move(record.Number(IdOf(earlier)).Number(number)));
  RecordedLine wait = Begun("wait");
  Write(std::move(wait.Number(IdOf(later)).Number(number)));
}

void Recorder::Reserved(const void* address, std::size_t bytes, bool pinned, int device) {
  RecordedLine line("reserve");
  line.Number(static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(address)));
  Write(std::move(line.Number(static_cast<std::int64_t>(bytes)).Number(pinned ? -1 : device)));
}

void Recorder::Released(const void* address) {
  RecordedLine line("release");
  line.Number(ThreadId());
  Write(std::move(line.Number(static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(address)))));
}

// [Note: places under the allocator's lock] The allocator tells with its lock held, which a thread may want
// that holds Python's lock. So Python's lock is not taken here: it is there already, or the place is the
// thread's last.
void Recorder::Allocated(std::uintptr_t address, std::size_t bytes, const Stream& stream) {
  const int place = HoldsPythonsLock() ? Place() : ThisThread().place;
  RecordedLine line("allocate");
  line.Number(ThreadId()).Number(place).Number(IdOf(stream)).Number(static_cast<std::int64_t>(address));
  Write(std::move(line.Number(static_cast<std::int64_t>(bytes))));
}

void Recorder::Freed(std::uintptr_t address, std::size_t bytes) {
  const bool is_exact = ThisThread().in_operator || HoldsPythonsLock();
  const int place = is_exact ? Place() : ThisThread().place;
  ThisThread().freed = address;
  RecordedLine line("free");
  line.Number(ThreadId()).Number(place).Number(static_cast<std::int64_t>(address));
  line.Number(static_cast<std::int64_t>(bytes));
  if (!is_exact) line.Truth(true);
  Write(std::move(line));
}

void Recorder::UsedOn(std::uintptr_t address, const Stream& stream) {
  RecordedLine line = Begun("use");
  Write(std::move(line.Number(IdOf(stream)).Number(static_cast<std::int64_t>(address))));
}

void Recorder::HostRan(std::string_view name, std::span<const RecordedTensor> reads,
                       std::span<const RecordedTensor> writes) {
  RecordedLine line = Begun("host");
  Write(std::move(line.Text(name).Tensors(reads).Tensors(writes)));
}

void Recorder::HandedOver(std::uint64_t object) {
  RecordedLine line("hand_over");
  Write(std::move(line.Number(ThreadId()).Number(static_cast<std::int64_t>(object))));
}

void Recorder::TakenOver(std::uint64_t object) {
  RecordedLine line("take_over");
  Write(std::move(line.Number(ThreadId()).Number(static_cast<std::int64_t>(object))));
}

void Recorder::Mark(std::string_view phase, int step) {
  RecordedLine line("phase");
  Write(std::move(line.Text(phase).Number(step)));
  const std::lock_guard lock(mutex_);
  (void)std::fflush(file_);
}

void Recorder::EnterModule(std::string_view module) { ThisThread().module = module; }

void NoteLaunch(const Stream& stream, std::string_view name) {
  Recorder* recorder = Recorder::Get();
  if (recorder == nullptr) return;
  Here& here = ThisThread();
  if (!here.in_operator && here.outer == 0) return recorder->Kernel(stream, name, false, {}, {});
  std::vector<const Stream*>& streams = here.in_operator ? here.streams : here.outer_streams;
  if (std::ranges::find(streams, &stream) == streams.end()) streams.push_back(&stream);
}

bool IsRecording() { return Recorder::Get() != nullptr; }

void BeginOperator(const std::optional<AutogradNode>& makes) {
  Recorder* recorder = Recorder::Get();
  if (recorder == nullptr) return;
  Here& here = ThisThread();
  here.place = recorder->Place();
  here.in_operator = true;
  here.streams.clear();
  if (!makes) return;
  Autograd& autograd = TheAutograd();
  const std::lock_guard lock(autograd.mutex);
  autograd.forwards[{makes->thread, makes->number}] = here.place;
}

void EndOperator(std::string_view name, std::span<const RecordedTensor> reads,
                 std::span<const RecordedTensor> writes, const cudaStream_t* stream) {
  Recorder* recorder = Recorder::Get();
  if (recorder == nullptr) return;
  Here& here = ThisThread();
  for (const Stream* launched : here.streams) recorder->Kernel(*launched, name, true, reads, writes);
  if (here.streams.empty() && stream != nullptr) {
    if (const std::shared_ptr<Stream> on = StreamOf(*stream))
      recorder->Kernel(*on, name, true, reads, writes);
  }
  here.in_operator = false;
}

void AbandonOperator() { ThisThread().in_operator = false; }

void BeginOuterOperator() {
  Here& here = ThisThread();
  if (here.outer++ == 0) here.outer_streams.clear();
}

void EndOuterOperator(std::string_view name, std::span<const RecordedTensor> reads,
                      std::span<const RecordedTensor> writes, bool raised) {
  Here& here = ThisThread();
  Recorder* recorder = Recorder::Get();
  if (--here.outer > 0 || raised || recorder == nullptr) return;
  for (const Stream* launched : std::exchange(here.outer_streams, {})) {
    recorder->Kernel(*launched, name, true, reads, writes);
  }
}

bool IsPinned(const void* pointer) {
  const auto range = Memory::Get().Find(pointer);
  return range && range->kind == Memory::Kind::kPinned;
}

void RecordHostOperator(std::string_view name, std::span<const RecordedTensor> reads,
                        std::span<const RecordedTensor> writes) {
  if (Recorder* recorder = Recorder::Get()) recorder->HostRan(name, reads, writes);
}

void RecordAllocated(std::uintptr_t address, std::size_t bytes, cudaStream_t stream, int device) {
  Recorder* recorder = Recorder::Get();
  const std::shared_ptr<Stream> on = recorder == nullptr ? nullptr : StreamOfDevice(stream, device);
  if (on != nullptr) recorder->Allocated(address, bytes, *on);
}

void RecordFreed(std::uintptr_t address, std::size_t bytes) {
  if (Recorder* recorder = Recorder::Get()) recorder->Freed(address, bytes);
}

void RecordFreeCompleted() { ThisThread().freed = 0; }

void GuardRecords(bool now) { ThisThread().is_guards = now; }

void RecordUsedOn(std::uintptr_t address, cudaStream_t stream) {
  Recorder* recorder = Recorder::Get();
  const std::shared_ptr<Stream> on = recorder == nullptr ? nullptr : StreamOf(stream);
  if (on != nullptr) recorder->UsedOn(address, *on);
}

void WatchAutograd(AutogradWatch watch) {
  TheAutograd().watch = std::move(watch);
  if (IsRecording()) TheAutograd().watch.begins();
}

namespace {

// SHARDPLAN_DEVICE_RECORD=FOLDER: each process that loads the library writes FOLDER/PID.
const bool begun = [] {
  const char* folder = std::getenv("SHARDPLAN_DEVICE_RECORD");
  return folder != nullptr && Recorder::Begin((std::string(folder) + "/" + std::to_string(getpid())).c_str());
}();

}  // namespace
}  // namespace shardplan::softdevice

using namespace shardplan::softdevice;  // NOLINT: what Python calls

extern "C" {
#pragma GCC visibility push(default)

int shardplan_record_begin(const char* path) { return Recorder::Begin(path) ? 0 : 1; }
void shardplan_record_module(const char* name) {
  if (Recorder* recorder = Recorder::Get()) recorder->EnterModule(name);
}
// A kernel that Python launches is an operator, too.
void shardplan_record_operator_begin() { BeginOperator(std::nullopt); }
// count: tensors; -1: it raised. sizes and strides: dims[i] of each, one after the other; the first stride of
// a tensor without gaps is -1. A tensor of no dimension has one of each.
void shardplan_record_operator_end(const char* name, int count, const std::uint64_t* addresses,
                                   const char* const* dtypes, const std::int32_t* dims,
                                   const std::int64_t* sizes, const std::int64_t* strides,
                                   const std::uint8_t* written) {
  if (count < 0) return AbandonOperator();
  std::vector<RecordedTensor> reads, writes;
  for (int i = 0; i < count; ++i) {
    RecordedTensor tensor = {addresses[i], dtypes[i], {sizes, sizes + dims[i]}, {}};
    if (dims[i] > 0 && strides[0] >= 0) tensor.strides.assign(strides, strides + dims[i]);
    const std::int32_t step = std::max(dims[i], 1);
    sizes += step;
    strides += step;
    (written[i] != 0 ? writes : reads).push_back(std::move(tensor));
  }
  EndOperator(name, reads, writes, nullptr);
}
void shardplan_record_phase(const char* phase, int step) {
  if (Recorder* recorder = Recorder::Get()) recorder->Mark(phase, step);
}
// All is in the file then. Threads that go on are not recorded: Python, whose frames they would ask for, may
// end.
void shardplan_record_end() { Recorder::End(); }
void shardplan_record_hand_over(std::uint64_t object) {
  if (Recorder* recorder = Recorder::Get()) recorder->HandedOver(object);
}
void shardplan_record_take_over(std::uint64_t object) {
  if (Recorder* recorder = Recorder::Get()) recorder->TakenOver(object);
}

#pragma GCC visibility pop
}
