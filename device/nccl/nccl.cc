// SPDX-License-Identifier: Apache-2.0
// NCCL's interface.
#include <nccl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <map>
#include <set>

#include "device/nccl/communicator.h"
#include "device/runtime/memory.h"
#include "device/runtime/recorder.h"
#include "device/runtime/state.h"

namespace shardplan::softdevice {
namespace {

struct Communicators {
  std::mutex mutex;
  std::map<ncclComm_t, std::shared_ptr<Communicator>> by_handle;
  std::vector<std::unique_ptr<SharedFile>> offered;  // files whose ids were given out
};
Communicators& TheCommunicators() {
  static auto* const communicators = new Communicators();
  return *communicators;
}

std::shared_ptr<Communicator> Of(ncclComm_t handle) {
  Communicators& all = TheCommunicators();
  const std::lock_guard lock(all.mutex);
  const auto found = all.by_handle.find(handle);
  return found == all.by_handle.end() ? nullptr : found->second;
}

ncclComm_t Add(std::shared_ptr<Communicator> communicator) {
  Communicators& all = TheCommunicators();
  const std::lock_guard lock(all.mutex);
  auto* handle = reinterpret_cast<ncclComm_t>(communicator.get());
  all.by_handle[handle] = std::move(communicator);
  return handle;
}

void Remove(ncclComm_t handle) {
  Communicators& all = TheCommunicators();
  std::shared_ptr<Communicator> last;
  const std::lock_guard lock(all.mutex);
  if (const auto found = all.by_handle.find(handle); found != all.by_handle.end()) {
    last = std::move(found->second);
    all.by_handle.erase(found);
  }
}

struct Id {
  pid_t pid;
  int descriptor;
};

// The file of an id: the one that was made for it, in the process that made it.
std::unique_ptr<SharedFile> FileOf(const Id& id) {
  if (id.pid != getpid()) return SharedFile::Open(id.pid, id.descriptor);
  Communicators& all = TheCommunicators();
  const std::lock_guard lock(all.mutex);
  for (std::unique_ptr<SharedFile>& file : all.offered) {
    if (file->descriptor() != id.descriptor) continue;
    std::unique_ptr<SharedFile> found = std::move(file);
    std::erase(all.offered, nullptr);
    return found;
  }
  return SharedFile::Open(id.pid, id.descriptor);
}

bool IsBlocking(const ncclConfig_t* config) { return config == nullptr || config->blocking != 0; }

// Operations that the ranks of a group of calls launch together.
struct Group {
  int depth = 0;
  struct Launched {
    std::shared_ptr<Communicator> communicator;
    std::vector<Operation> operations;
    std::shared_ptr<Stream> stream;
    std::vector<std::shared_ptr<Stream>> others;
  };
  std::vector<Launched> launched;
};
thread_local Group group;

RecordedTensor ElementsAt(const std::byte* pointer, std::size_t count, ncclDataType_t dtype) {
  return {reinterpret_cast<std::uintptr_t>(pointer), NameOf(dtype), {static_cast<std::int64_t>(count)}, {}};
}

// Which of its memory a rank reads and writes.
void Record(Recorder& recorder, const Group::Launched& launched) {
  const Communicator& communicator = *launched.communicator;
  const auto ranks = static_cast<std::size_t>(communicator.ranks());
  const int batch = launched.operations.size() > 1 ? recorder.NextBatch() : -1;
  for (const Operation& op : launched.operations) {
    const bool is_root = op.peer == communicator.rank();
    Recorder::Collective said;
    said.kind = op.kind == OpKind::kReceive ? "recv" : NameOf(op.kind);
    said.communicator = &communicator;
    said.rank = communicator.rank();
    said.ranks = communicator.ranks();
    said.communicator_name = communicator.name;
    said.dtype = NameOf(op.dtype);
    std::size_t from = op.count, to = op.count;
    switch (op.kind) {
      case OpKind::kAllGather:
        to *= ranks;
        break;
      case OpKind::kReduceScatter:
        from *= ranks;
        break;
      case OpKind::kAllToAll:
        from *= ranks;
        to *= ranks;
        break;
      case OpKind::kGather:
        to = is_root ? to * ranks : 0;
        break;
      case OpKind::kBroadcast:
        from = is_root ? from : 0;
        break;
      case OpKind::kReduce:
        to = is_root ? to : 0;
        break;
      case OpKind::kSend:
      case OpKind::kReceive:
        said.peer = op.peer;
        break;
      case OpKind::kAllReduce:
        break;
    }
    said.bytes = std::max(from, to) * SizeOf(op.dtype);
    if (op.from != nullptr && from > 0) said.reads.push_back(ElementsAt(op.from, from, op.dtype));
    if (op.to != nullptr && to > 0) said.writes.push_back(ElementsAt(op.to, to, op.dtype));
    said.batch = batch;
    recorder.Communicate(*launched.stream, said);
  }
}

// Operations of one communicator are one task, on the first one's stream; the other streams wait for it, and
// it for them.
ncclResult_t Flush() {
  ncclResult_t result = ncclSuccess;
  for (Group::Launched& one : std::exchange(group.launched, {})) {
    Engine& engine = Engine::Get();
    Recorder* recorder = Recorder::Get();
    for (const std::shared_ptr<Stream>& other : one.others) {
      if (recorder != nullptr) recorder->Join(*other, *one.stream);
      (void)engine.Enqueue(one.stream, {"group", {engine.LastOf(other)}, [] { return true; }});
    }
    if (recorder != nullptr) Record(*recorder, one);
    one.communicator->Launch(std::move(one.operations), one.stream);
    for (const std::shared_ptr<Stream>& other : one.others) {
      if (recorder != nullptr) recorder->Join(*one.stream, *other);
      (void)engine.Enqueue(other, {"group", {engine.LastOf(one.stream)}, [] { return true; }});
    }
    if (!one.communicator->blocking() && one.communicator->TakeFirst()) result = ncclInProgress;
  }
  return result;
}

ncclResult_t Issue(ncclComm_t handle, Operation op, cudaStream_t stream_handle) {
  const std::shared_ptr<Communicator> communicator = Of(handle);
  const std::shared_ptr<Stream> stream = StreamOf(stream_handle);
  if (communicator == nullptr || stream == nullptr) return ncclInvalidArgument;
  if (!communicator->IsReady() || stream->device != communicator->device()) return ncclInvalidArgument;
  if (op.peer < 0 || op.peer >= communicator->ranks()) return ncclInvalidArgument;
  if (!TheSettings().null && op.count * SizeOf(op.dtype) * static_cast<std::size_t>(communicator->ranks()) >
                                 SharedFile::kSlotBytes) {
    return ncclInternalError;
  }
  auto found = std::ranges::find(group.launched, communicator, &Group::Launched::communicator);
  if (found == group.launched.end()) {
    group.launched.push_back({communicator, {}, stream, {}});
    found = std::prev(group.launched.end());
  } else if (found->stream != stream) {
    found->others.push_back(stream);
  }
  found->operations.push_back(op);
  return group.depth > 0 ? ncclSuccess : Flush();
}

const std::byte* In(const void* pointer) { return static_cast<const std::byte*>(pointer); }
std::byte* Out(void* pointer) { return static_cast<std::byte*>(pointer); }

ncclResult_t IssueReduction(ncclComm_t handle, OpKind kind, const void* from, void* to, std::size_t count,
                            ncclDataType_t dtype, ncclRedOp_t op, int root, cudaStream_t stream) {
  const std::shared_ptr<Communicator> communicator = Of(handle);
  Reduction reduction;
  if (communicator == nullptr || !CanReduce(dtype) || !communicator->Find(op, reduction)) {
    return ncclInvalidArgument;
  }
  return Issue(handle, {kind, In(from), Out(to), count, dtype, reduction, root}, stream);
}

}  // namespace
}  // namespace shardplan::softdevice

using namespace shardplan::softdevice;  // NOLINT: the rest of the file is NCCL's interface

extern "C" {
#pragma GCC visibility push(default)

ncclResult_t ncclGetVersion(int* version) {
  *version = NCCL_VERSION_CODE;
  return ncclSuccess;
}

const char* ncclGetErrorString(ncclResult_t result) {
  switch (result) {
    case ncclSuccess:
      return "no error";
    case ncclUnhandledCudaError:
      return "unhandled cuda error";
    case ncclSystemError:
      return "unhandled system error";
    case ncclInternalError:
      return "internal error";
    case ncclInvalidArgument:
      return "invalid argument";
    case ncclInvalidUsage:
      return "invalid usage";
    case ncclRemoteError:
      return "remote process exited or there was a network error";
    case ncclInProgress:
      return "NCCL operation in progress";
    default:
      return "unknown result code";
  }
}

const char* ncclGetLastError(ncclComm_t handle) {
  thread_local std::string words;
  const std::shared_ptr<Communicator> communicator = Of(handle);
  words = communicator == nullptr ? "" : communicator->LastError();
  return words.c_str();
}

ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  std::memset(id, 0, sizeof(*id));
  if (TheSettings().null) return ncclSuccess;
  std::unique_ptr<SharedFile> file = SharedFile::Make();
  if (file == nullptr) return ncclSystemError;
  const Id made = {getpid(), file->descriptor()};
  std::memcpy(id->internal, &made, sizeof(made));
  Communicators& all = TheCommunicators();
  const std::lock_guard lock(all.mutex);
  all.offered.push_back(std::move(file));
  return ncclSuccess;
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t* handle, int ranks, ncclUniqueId unique_id, int rank,
                                    ncclConfig_t* config) {
  const bool alone = TheSettings().null;
  if (ranks < 1 || (!alone && ranks > kMaxRanks) || rank < 0 || rank >= ranks) return ncclInvalidArgument;
  Id id;
  std::memcpy(&id, unique_id.internal, sizeof(id));
  std::unique_ptr<SharedFile> file = alone ? nullptr : FileOf(id);
  if (file == nullptr && !alone) return ncclSystemError;
  auto communicator =
      std::make_shared<Communicator>(std::move(file), rank, ranks, CurrentDevice(), IsBlocking(config));
  if (config != nullptr && config->commName != nullptr) communicator->name = config->commName;
  *handle = Add(communicator);
  return communicator->blocking() ? communicator->WaitUntilKnown() : ncclInProgress;
}
ncclResult_t ncclCommInitRank(ncclComm_t* handle, int ranks, ncclUniqueId id, int rank) {
  return ncclCommInitRankConfig(handle, ranks, id, rank, nullptr);
}

ncclResult_t ncclCommSplit(ncclComm_t handle, int color, int key, ncclComm_t* child, ncclConfig_t* config) {
  const std::shared_ptr<Communicator> parent = Of(handle);
  if (parent == nullptr || !parent->IsReady()) return ncclInvalidArgument;
  const std::size_t split = parent->SaySplit(color, key);
  if (split >= kMaxSplits) return ncclInternalError;
  *child = nullptr;
  if (color == NCCL_SPLIT_NOCOLOR) return ncclSuccess;
  const bool blocking = config == nullptr || config->blocking == NCCL_CONFIG_UNDEF_INT ? parent->blocking()
                                                                                       : IsBlocking(config);
  auto communicator = std::make_shared<Communicator>(parent, split, color, parent->device(), blocking);
  *child = Add(communicator);
  if (blocking) return communicator->WaitUntilKnown();
  parent->MarkInProgress();
  return ncclInProgress;
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t handle, ncclResult_t* error) {
  const std::shared_ptr<Communicator> communicator = Of(handle);
  if (communicator == nullptr) return ncclInvalidArgument;
  *error = communicator->State();
  return ncclSuccess;
}

// A communicator that is not blocking is done with it when its work is.
ncclResult_t ncclCommFinalize(ncclComm_t handle) {
  const std::shared_ptr<Communicator> communicator = Of(handle);
  if (communicator == nullptr) return ncclInvalidArgument;
  Engine::Get().Wait(communicator->last());
  if (communicator->blocking()) return ncclSuccess;
  communicator->MarkInProgress();
  return ncclInProgress;
}
ncclResult_t ncclCommDestroy(ncclComm_t handle) {
  const std::shared_ptr<Communicator> communicator = Of(handle);
  if (communicator == nullptr) return ncclInvalidArgument;
  Engine::Get().Wait(communicator->last());
  communicator->Leave();
  Remove(handle);
  return ncclSuccess;
}
ncclResult_t ncclCommAbort(ncclComm_t handle) {
  const std::shared_ptr<Communicator> communicator = Of(handle);
  if (communicator == nullptr) return ncclInvalidArgument;
  communicator->Abort();
  communicator->Leave();
  Remove(handle);
  return ncclSuccess;
}

ncclResult_t ncclCommCount(const ncclComm_t handle, int* count) {
  const std::shared_ptr<Communicator> communicator = Of(handle);
  if (communicator == nullptr) return ncclInvalidArgument;
  *count = communicator->ranks();
  return ncclSuccess;
}
ncclResult_t ncclCommUserRank(const ncclComm_t handle, int* rank) {
  const std::shared_ptr<Communicator> communicator = Of(handle);
  if (communicator == nullptr) return ncclInvalidArgument;
  *rank = communicator->rank();
  return ncclSuccess;
}
ncclResult_t ncclCommCuDevice(const ncclComm_t handle, int* device) {
  const std::shared_ptr<Communicator> communicator = Of(handle);
  if (communicator == nullptr) return ncclInvalidArgument;
  *device = communicator->device();
  return ncclSuccess;
}

ncclResult_t ncclMemAlloc(void** pointer, size_t bytes) {
  return cudaMalloc(pointer, bytes) == cudaSuccess ? ncclSuccess : ncclUnhandledCudaError;
}
ncclResult_t ncclMemFree(void* pointer) {
  return cudaFree(pointer) == cudaSuccess ? ncclSuccess : ncclUnhandledCudaError;
}

// The handle is the memory's address.
ncclResult_t ncclCommRegister(const ncclComm_t handle, void* memory, size_t bytes, void** registered) {
  if (Of(handle) == nullptr || !Memory::Get().Holds(memory, bytes)) return ncclInvalidArgument;
  *registered = memory;
  return ncclSuccess;
}
ncclResult_t ncclCommDeregister(const ncclComm_t handle, void* registered) {
  return Of(handle) == nullptr || registered == nullptr ? ncclInvalidArgument : ncclSuccess;
}

ncclResult_t ncclRedOpCreatePreMulSum(ncclRedOp_t* op, void* scalar, ncclDataType_t dtype,
                                      ncclScalarResidence_t residence, ncclComm_t handle) {
  const std::shared_ptr<Communicator> communicator = Of(handle);
  if (communicator == nullptr || residence != ncclScalarHostImmediate) return ncclInvalidArgument;
  *op = communicator->AddFactor(FactorOf(scalar, dtype));
  return ncclSuccess;
}
ncclResult_t ncclRedOpDestroy(ncclRedOp_t op, ncclComm_t handle) {
  const std::shared_ptr<Communicator> communicator = Of(handle);
  if (communicator == nullptr) return ncclInvalidArgument;
  communicator->ForgetFactor(op);
  return ncclSuccess;
}

ncclResult_t ncclAllGather(const void* from, void* to, size_t count, ncclDataType_t dtype, ncclComm_t comm,
                           cudaStream_t stream) {
  return Issue(comm, {OpKind::kAllGather, In(from), Out(to), count, dtype, {}, 0}, stream);
}
ncclResult_t ncclAlltoAll(const void* from, void* to, size_t count, ncclDataType_t dtype, ncclComm_t comm,
                          cudaStream_t stream) {
  return Issue(comm, {OpKind::kAllToAll, In(from), Out(to), count, dtype, {}, 0}, stream);
}
ncclResult_t ncclGather(const void* from, void* to, size_t count, ncclDataType_t dtype, int root,
                        ncclComm_t comm, cudaStream_t stream) {
  return Issue(comm, {OpKind::kGather, In(from), Out(to), count, dtype, {}, root}, stream);
}
ncclResult_t ncclReduceScatter(const void* from, void* to, size_t count, ncclDataType_t dtype, ncclRedOp_t op,
                               ncclComm_t comm, cudaStream_t stream) {
  return IssueReduction(comm, OpKind::kReduceScatter, from, to, count, dtype, op, 0, stream);
}
ncclResult_t ncclAllReduce(const void* from, void* to, size_t count, ncclDataType_t dtype, ncclRedOp_t op,
                           ncclComm_t comm, cudaStream_t stream) {
  return IssueReduction(comm, OpKind::kAllReduce, from, to, count, dtype, op, 0, stream);
}
ncclResult_t ncclReduce(const void* from, void* to, size_t count, ncclDataType_t dtype, ncclRedOp_t op,
                        int root, ncclComm_t comm, cudaStream_t stream) {
  return IssueReduction(comm, OpKind::kReduce, from, to, count, dtype, op, root, stream);
}
ncclResult_t ncclBroadcast(const void* from, void* to, size_t count, ncclDataType_t dtype, int root,
                           ncclComm_t comm, cudaStream_t stream) {
  return Issue(comm, {OpKind::kBroadcast, In(from), Out(to), count, dtype, {}, root}, stream);
}
ncclResult_t ncclBcast(void* memory, size_t count, ncclDataType_t dtype, int root, ncclComm_t comm,
                       cudaStream_t stream) {
  return ncclBroadcast(memory, memory, count, dtype, root, comm, stream);
}
ncclResult_t ncclSend(const void* from, size_t count, ncclDataType_t dtype, int peer, ncclComm_t comm,
                      cudaStream_t stream) {
  return Issue(comm, {OpKind::kSend, In(from), nullptr, count, dtype, {}, peer}, stream);
}
ncclResult_t ncclRecv(void* to, size_t count, ncclDataType_t dtype, int peer, ncclComm_t comm,
                      cudaStream_t stream) {
  return Issue(comm, {OpKind::kReceive, nullptr, Out(to), count, dtype, {}, peer}, stream);
}

// Not there: whoever needs one of these gets an answer, not the real library's.
ncclResult_t ncclCommInitAll(ncclComm_t*, int, const int*) { return ncclInvalidUsage; }
ncclResult_t ncclCommInitRankScalable(ncclComm_t* handle, int ranks, int rank, int ids, ncclUniqueId* id,
                                      ncclConfig_t* config) {
  const bool one_file = ids == 1 || TheSettings().null;  // without peers no id is read
  return one_file ? ncclCommInitRankConfig(handle, ranks, *id, rank, config) : ncclInvalidUsage;
}
ncclResult_t ncclCommShrink(ncclComm_t, int*, int, ncclComm_t*, ncclConfig_t*, int) {
  return ncclInvalidUsage;
}
ncclResult_t ncclCommWindowRegister(ncclComm_t, void*, size_t, ncclWindow_t*, int) {
  return ncclInvalidUsage;
}
ncclResult_t ncclCommWindowDeregister(ncclComm_t, ncclWindow_t) { return ncclInvalidUsage; }
// Functions of NCCL 2.30; an older header declares none of them.
ncclResult_t ncclCommGetUniqueId(ncclComm_t, ncclUniqueId*) { return ncclInvalidUsage; }
ncclResult_t ncclCommGrow(ncclComm_t, int, const ncclUniqueId*, int, ncclComm_t*, ncclConfig_t*) {
  return ncclInvalidUsage;
}
ncclResult_t ncclCommRevoke(ncclComm_t, int) { return ncclInvalidUsage; }
ncclResult_t ncclCommSuspend(ncclComm_t, int) { return ncclInvalidUsage; }
ncclResult_t ncclCommResume(ncclComm_t) { return ncclInvalidUsage; }
ncclResult_t ncclGroupSimulateEnd(ncclSimInfo_t*) { return ncclInvalidUsage; }

ncclResult_t ncclGroupStart() {
  ++group.depth;
  return ncclSuccess;
}
ncclResult_t ncclGroupEnd() {
  if (group.depth == 0) return ncclInvalidUsage;
  return --group.depth == 0 ? Flush() : ncclSuccess;
}

#pragma GCC visibility pop
}
