// SPDX-License-Identifier: Apache-2.0
#include "memory/segment_memory.h"

#include <algorithm>
#include <utility>
#include <variant>

#include "memory/categories.h"
#include "shardplan/schemas/program.h"

namespace shardplan::internal {
namespace {

// The operator whose outputs the allocations from `entry` on are: the first entry behind them.
std::size_t NumberOfOperatorAt(const Segment& segment, std::size_t entry) {
  while (entry < segment.entries.size() && std::holds_alternative<AllocateEvent>(segment.entries[entry])) {
    ++entry;
  }
  return entry;
}

}  // namespace

SegmentMemory::SegmentMemory(const Plan& plan, const ModelActions& model, bool kernel_temporaries,
                             GradientMemory& gradients, LiveBlocks& blocks, MemoryCursor& cursor)
    : plan_(plan),
      model_(model),
      kernel_temporaries_(kernel_temporaries),
      gradients_(gradients),
      blocks_(blocks),
      cursor_(cursor),
      rules_(RulesOf(plan.strategy)) {
  SizeStorages();
}

void SegmentMemory::SizeStorages() {
  const auto note = [&](StorageId storage, Bytes bytes) {
    if (storage < 0) return;
    if (static_cast<std::size_t>(storage) >= storage_bytes_.size()) {
      storage_bytes_.resize(static_cast<std::size_t>(storage) + 1);
    }
    storage_bytes_[static_cast<std::size_t>(storage)] = bytes;
  };
  storage_bytes_ = model_.storage_bytes();
  storages_per_batch_ = storage_bytes_.size();
  for (const TraceInput& input : plan_.inputs) note(input.storage, TensorBytes(input.shape, input.dtype));
  for (const ModuleBuffer& b : plan_.model_buffers) note(b.storage, TensorBytes(b.shape, b.dtype));
}

void SegmentMemory::Run(const Instruction& compute) {
  const Segment& segment = plan_.segments[static_cast<std::size_t>(compute.segment)];
  MemoryBlock block{
      .stream = std::max(compute.stream, 0), .unit = segment.unit, .microbatch = cursor_.microbatch};
  gradients_.BeginSegment(segment, cursor_.at);
  kernel_.entry = kNoKernel;
  const auto index = static_cast<std::size_t>(compute.segment);
  for (const ModelAction* a = model_.First(index); a != model_.End(index); ++a) {
    const ModelAction& action = *a;
    cursor_.at.entry = action.entry;
    gradients_.ComeTo(action.entry);
    if (kernel_temporaries_) PassKernel(segment, static_cast<std::size_t>(action.entry), block);
    switch (action.kind) {
      case ModelAction::kMakesGrad:
        block.requested_bytes = action.bytes;
        block.category = action.category;
        gradients_.Add(blocks_.Allocate(block),
                       NumberOfOperatorAt(segment, static_cast<std::size_t>(action.entry)));
        break;
      case ModelAction::kMakes:
        Make(action, block);
        break;
      case ModelAction::kDrops:
        Drop(action.storage);
        break;
      case ModelAction::kRuns:
        break;
    }
  }
  cursor_.at.entry = static_cast<std::int32_t>(segment.entries.size()) - 1;
  gradients_.EndSegment(segment, block);
}

// A kernel takes memory before, between and behind its operator's outputs.
void SegmentMemory::PassKernel(const Segment& segment, std::size_t entry, const MemoryBlock& block) {
  const std::size_t at = NumberOfOperatorAt(segment, entry);
  const auto* op = at < segment.entries.size() ? std::get_if<OperatorEvent>(&segment.entries[at]) : nullptr;
  if (op == nullptr) return;
  if (entry == at) RunCublas(*op, segment, block);
  if (kernel_.entry != at) {
    kernel_ = {.entry = at, .steps = StepsOf(*op, segment, entry)};
  }
  if (entry == at) {
    RunKernel(block, true);
    for (const std::int32_t held : kernel_.blocks) blocks_.Free(held);
    kernel_.entry = kNoKernel;
  } else if (std::ranges::find(op->writes, std::get<AllocateEvent>(segment.entries[entry]).storage) !=
             op->writes.end()) {
    RunKernel(block, false);
  }
}

// `entry`: the first that is not passed yet, up to which the operator's outputs may be allocated.
std::vector<KernelStep> SegmentMemory::StepsOf(const OperatorEvent& op, const Segment& segment,
                                               std::size_t entry) const {
  const std::vector<Bytes> read = StorageSizes(op.reads), written = StorageSizes(op.writes);
  const auto is_gradient = [](const SegmentEntry& e) {
    const auto* made = std::get_if<AllocateEvent>(&e);
    return made != nullptr && made->role == StorageRole::kParameterGrad;
  };
  const bool gradient = !op.writes.empty() && is_gradient(segment.entries[entry]);
  const std::int64_t sequences =
      plan_.inputs.empty() || plan_.inputs[0].shape.empty() ? 0 : plan_.inputs[0].shape[0];
  return KernelSteps(op,
                     {.read = read, .written = written, .makes_gradient = gradient, .sequences = sequences},
                     plan_.cluster.device, rules_);
}

// Up to the next output, or to the end.
void SegmentMemory::RunKernel(MemoryBlock block, bool to_the_end) {
  for (; kernel_.next < kernel_.steps.size(); ++kernel_.next) {
    KernelStep& step = kernel_.steps[kernel_.next];
    switch (step.kind) {
      case KernelStep::Kind::kTake:
        block.requested_bytes = step.bytes;
        block.category = step.workspace ? kCublasWorkspace : kKernelTemp;
        kernel_.blocks.push_back(blocks_.Allocate(block));
        break;
      case KernelStep::Kind::kGiveBack:
        blocks_.Free(std::exchange(kernel_.blocks[static_cast<std::size_t>(step.count)], -1));
        break;
      case KernelStep::Kind::kOutputs:
        if (!to_the_end && step.count-- > 0) return;
        break;
    }
  }
}

std::vector<Bytes> SegmentMemory::StorageSizes(const std::vector<StorageId>& storages) const {
  std::vector<Bytes> bytes;
  for (const StorageId s : storages) {
    bytes.push_back(s >= 0 && s < std::ssize(storage_bytes_) ? storage_bytes_[static_cast<std::size_t>(s)]
                                                             : Bytes{0});
  }
  return bytes;
}

void SegmentMemory::RunCublas(const OperatorEvent& op, const Segment& segment, const MemoryBlock& block) {
  if (rules_.workspaces_are_given_back || !UsesCublas(op.name)) return;
  // The autograd engine's thread has a handle of its own.
  bool& made = workspace_made_[IsBackward(segment.phase) ? 1 : 0];
  if (made) return;
  made = true;
  blocks_.Allocate({.requested_bytes = CublasWorkspaceBytes(plan_.cluster.device.name),
                    .category = kCublasWorkspace,
                    .stream = block.stream});
}

// The memory of the storage in the micro-batch that runs.
inline ModelMemory& SegmentMemory::Storage(StorageId storage) {
  const std::size_t batch = static_cast<std::size_t>(std::max(cursor_.microbatch, 0));
  const std::size_t index = batch * storages_per_batch_ + static_cast<std::size_t>(storage);
  if (index >= storages_.size()) storages_.resize((batch + 1) * storages_per_batch_);
  return storages_[index];
}

void SegmentMemory::Make(const Buffer& activations, StreamId stream) {
  for (std::size_t p = 0; p < activations.storages.size(); ++p) {
    ModelMemory& memory = Storage(activations.storages[p]);
    blocks_.Free(memory);
    memory = {.requested_bytes = activations.parts_bytes[p],
              .category = CategoryOf(StorageRole::kSaved),
              .stream = std::max(stream, 0)};
    blocks_.Allocate(memory, activations.unit);
  }
}

void SegmentMemory::Drop(const Buffer& activations) {
  for (const StorageId storage : activations.storages) Drop(storage);
}

// Storages are there already where a step before never freed them.
inline void SegmentMemory::Make(const ModelAction& action, const MemoryBlock& block) {
  ModelMemory& memory = Storage(action.storage);
  blocks_.Free(memory);
  memory = {.requested_bytes = action.bytes, .category = action.category, .stream = block.stream};
  blocks_.Allocate(memory, block.unit);
}

inline void SegmentMemory::Drop(StorageId storage) {
  if (static_cast<std::size_t>(storage) < storages_per_batch_) blocks_.Free(Storage(storage));
}

}  // namespace shardplan::internal
