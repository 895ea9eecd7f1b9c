// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <limits>
#include <utility>

#include "cost/optimizer_cost.h"
#include "memory/buffer_memory.h"
#include "memory/categories.h"
#include "memory/copy_tables.h"
#include "memory/gradient_memory.h"
#include "memory/live_blocks.h"
#include "memory/optimizer_memory.h"
#include "memory/segment_memory.h"
#include "memory/shard_order.h"
#include "memory/sink.h"
#include "shardplan/schemas/alive_buffers.h"
#include "shardplan/schemas/instruction_set.h"
#include "shardplan/simulator/memory_history.h"

namespace shardplan {
namespace {

using internal::CategoryOf;
using internal::kKernelTemp;
using internal::MemoryCursor;
using internal::MemorySink;
using internal::ModelActions;
using internal::ModelMemory;
using internal::TensorBytes;

// The program, instruction by instruction, in host order.
class MemoryWalk {
 public:
  // `model`: with operators where the options ask for kernels' temporaries.
  MemoryWalk(const Plan& plan, const MemoryHistoryOptions& options, const ModelActions& model,
             MemorySink& sink)
      : plan_(plan),
        options_(options),
        sink_(sink),
        alive_(plan),
        blocks_(sink, cursor_),
        buffers_(plan, options.space, blocks_, cursor_),
        gradients_(plan, options.kernel_temporaries, buffers_, blocks_),
        segments_(plan, model, options.kernel_temporaries, gradients_, blocks_, cursor_),
        optimizer_(plan, OnDevice(), blocks_),
        gathered_by_(plan.buffers.size()),
        begun_(plan.buffers.size()) {}

  void Run() {
    for (const internal::ShardMade& shard : internal::ShardsInOrder(plan_)) buffers_.MakeShard(shard);
    for (std::size_t b = 0; b < plan_.buffers.size(); ++b) {
      if (plan_.buffers[b].persistent) AllocateBuffer(static_cast<BufferId>(b), 0);
    }
    for (std::size_t b = 0; OnDevice() && b < plan_.model_buffers.size(); ++b) {
      const ModuleBuffer& buffer = plan_.model_buffers[b];
      blocks_.Allocate({.requested_bytes = TensorBytes(buffer.shape, buffer.dtype),
                        .category = CategoryOf(StorageRole::kBuffer),
                        .part = static_cast<std::int32_t>(b)});
    }
    if (options_.steady_passes > 0) return RunPasses();
    if (plan_.steps.size() == 1) RunStep(0);
    sink_.BeginRecorded();
    for (std::size_t s = 0; s < plan_.steps.size(); ++s) RunStep(static_cast<std::int32_t>(s));
  }

 private:
  bool OnDevice() const { return options_.space == MemorySpace::kDevice; }
  bool IsBuffer(BufferId id) const { return id >= 0 && id < std::ssize(plan_.buffers); }

  void RunPasses() {
    std::int32_t left = options_.steps > 0 ? options_.steps : std::numeric_limits<std::int32_t>::max();
    for (std::int32_t s = 0; s < plan_.steady_step && left > 0; ++s, --left) {
      sink_.BeginRecorded();
      RunStep(s);
    }
    for (std::int32_t pass = 0; pass < options_.steady_passes && left > 0; ++pass) {
      sink_.BeginRecorded();
      for (auto s = plan_.steady_step; s < std::ssize(plan_.steps) && left > 0; ++s, --left) RunStep(s);
    }
  }

  void RunStep(std::int32_t s) {
    cursor_.at = {s, -1, -1, -1};
    const PlanStep& step = plan_.steps[static_cast<std::size_t>(s)];
    const std::vector<std::int32_t> inputs = AllocateInputs(step);
    for (std::size_t t = 0; t < step.triggers.size(); ++t) {
      const Trigger& trigger = step.triggers[t];
      for (std::size_t i = 0; i < trigger.instructions.size(); ++i) {
        cursor_.at = {s, static_cast<std::int32_t>(t), static_cast<std::int32_t>(i), -1};
        cursor_.microbatch = MicrobatchOf(trigger, trigger.instructions[i]);
        Apply(trigger.instructions[i]);
      }
      EndHook();
    }
    cursor_.at = {s, static_cast<std::int32_t>(step.triggers.size()), -1, -1};
    for (const std::int32_t input : inputs) blocks_.Free(input);
  }

  // The batch of every micro-batch is there from the step's beginning.
  std::vector<std::int32_t> AllocateInputs(const PlanStep& step) {
    if (!OnDevice()) return {};
    std::int32_t microbatches = 1;
    for (const Trigger& trigger : step.triggers)
      microbatches = std::max(microbatches, trigger.microbatch + 1);
    std::vector<std::int32_t> blocks;
    for (std::int32_t m = 0; m < microbatches; ++m) {
      for (std::size_t i = 0; i < plan_.inputs.size(); ++i) {
        blocks.push_back(
            blocks_.Allocate({.requested_bytes = TensorBytes(plan_.inputs[i].shape, plan_.inputs[i].dtype),
                              .category = CategoryOf(StorageRole::kInput),
                              .part = static_cast<std::int32_t>(i),
                              .microbatch = m}));
      }
    }
    return blocks;
  }

  void Apply(const Instruction& instruction) {
    switch (DescriptionOf(instruction.kind).family) {
      case InstructionFamily::kCompute:
        EndHook();
        if (OnDevice() && instruction.segment >= 0 && instruction.segment < std::ssize(plan_.segments))
          segments_.Run(instruction);
        break;
      case InstructionFamily::kMemory:
        ApplyMemory(instruction);
        break;
      case InstructionFamily::kCollective:
        if (DescriptionOf(instruction.kind).collective == CollectiveKind::kAllGather)
          gathered_by_[static_cast<std::size_t>(instruction.dst)] =
              plan_.communicators[static_cast<std::size_t>(instruction.communicator)].size;
        break;
      case InstructionFamily::kCopy:
        ApplyCopy(instruction);
        break;
      case InstructionFamily::kBind:
        if (instruction.kind != InstructionKind::kBindSharded) break;
        bound_ = &instruction;
        if (Here().kind != TriggerKind::kPostBackward) EndHook();
        break;
      case InstructionFamily::kOptimizer:
        ApplyOptimizer(instruction);
        break;
      case InstructionFamily::kScale:
      case InstructionFamily::kOrder:
        break;
    }
    alive_.Pass(instruction);
  }

  void ApplyMemory(const Instruction& instruction) {
    if (DescriptionOf(instruction.kind).lifetime == LifetimeEffect::kEnds) {
      if (IsBuffer(instruction.src)) FreeBuffer(instruction.src, instruction.parts, instruction.safe_after);
      return;
    }
    if (!IsBuffer(instruction.dst)) return;
    AllocateBuffer(instruction.dst, instruction.stream);
    begun_[static_cast<std::size_t>(instruction.dst)] = false;
  }

  // Copies whose kernels take tables, and views.
  void ApplyCopy(const Instruction& instruction) {
    switch (DescriptionOf(instruction.kind).movement) {
      case Movement::kFromSlots:
      case Movement::kToSlots:
        return RunCopy(instruction);
      case Movement::kWithin:
        if (alive_.MakesView(instruction)) buffers_.MakeView(instruction.src, instruction.dst);
        return;
      case Movement::kNone:
      case Movement::kToSlot:
      case Movement::kToPostForward:
        return;
    }
  }

  void ApplyOptimizer(const Instruction& instruction) {
    if (instruction.exchange >= 0) {
      if (instruction.kind == InstructionKind::kOrthogonalize && OnDevice()) segments_.Run(instruction);
      return;
    }
    if (DescriptionOf(instruction.kind).value == ValueEffect::kSteps)
      return optimizer_.Step(instruction.unit);
    gradients_.Zero(instruction.unit);
    for (std::size_t b = 0; b < plan_.buffers.size(); ++b) {
      const Buffer& buffer = plan_.buffers[b];
      if (!ZeroGradTakes(instruction.unit, buffer) || buffer.persistent) continue;
      FreeBuffer(static_cast<BufferId>(b));
    }
  }

  void AllocateBuffer(BufferId id, StreamId stream) {
    const Buffer& buffer = plan_.buffers[static_cast<std::size_t>(id)];
    if (buffer.role == BufferRole::kActivation) {
      if (OnDevice()) segments_.Make(buffer, stream);
      return;
    }
    if (buffers_.IsAlive(id) || !buffers_.IsHere(buffer) || !optimizer_.Plays(buffer)) {
      return buffers_.Allocate(id, stream);
    }
    buffers_.PartsOf(id);  // it is alive; its blocks are the optimizer's
    optimizer_.Play({.category = CategoryOf(buffer.role), .stream = std::max(stream, 0), .buffer = id});
  }

  // `parts`: only these; empty: what is left.
  void FreeBuffer(BufferId id, const std::vector<std::int32_t>& parts = {},
                  const std::vector<StreamId>& recorded_on = {}) {
    const Buffer& buffer = plan_.buffers[static_cast<std::size_t>(id)];
    if (buffer.role == BufferRole::kActivation) {
      if (OnDevice()) segments_.Drop(buffer);
      return;
    }
    gradients_.IsShared(id) ? gradients_.Free(id, parts, recorded_on) : buffers_.Free(id, parts, recorded_on);
  }

  const Trigger& Here() const {
    const MemoryPoint& at = cursor_.at;
    return plan_.steps[static_cast<std::size_t>(at.step)].triggers[static_cast<std::size_t>(at.trigger)];
  }

  // Gradients become those of the original parameters where these become views of the shard, but at the end
  // of the post-backward hook, before the model goes on.
  void EndHook() {
    if (bound_ != nullptr) gradients_.ViewGradients(*std::exchange(bound_, nullptr), Here().instructions);
  }

  // FSDP2 copies all gradients of a reduction at once: the first copy stands for all.
  void RunCopy(const Instruction& instruction) {
    if (!OnDevice() || !options_.kernel_temporaries) return;
    const bool out = instruction.kind == InstructionKind::kCopyOut;
    if (!out && begun_[static_cast<std::size_t>(instruction.dst)]) return;
    if (!out) begun_[static_cast<std::size_t>(instruction.dst)] = true;
    const std::int64_t ranks = out ? gathered_by_[static_cast<std::size_t>(instruction.src)] : 1;
    const Bytes table = internal::CopyTableBytes(plan_, instruction, ranks);
    if (table.value == 0) return;
    blocks_.Free(blocks_.Allocate({.requested_bytes = table,
                                   .category = kKernelTemp,
                                   .stream = std::max(instruction.stream, 0),
                                   .unit = instruction.unit}));
  }

  const Plan& plan_;
  const MemoryHistoryOptions& options_;
  MemorySink& sink_;
  MemoryCursor cursor_;
  AliveBuffers alive_;
  internal::LiveBlocks blocks_;
  internal::BufferMemory buffers_;
  internal::GradientMemory gradients_;
  internal::SegmentMemory segments_;
  internal::OptimizerMemory optimizer_;
  std::vector<std::int64_t> gathered_by_;  // by buffer: ranks of the gather that wrote it last
  std::vector<bool> begun_;                // by buffer: something was copied into it since it was allocated
  const Instruction* bound_ = nullptr;     // bind_sharded of a hook that has not ended yet
};

// Keeps all of it.
class HistorySink final : public MemorySink {
 public:
  std::int32_t Allocate(const MemoryBlock& block, const MemoryPoint& at) override {
    const auto number = static_cast<std::int32_t>(history_.blocks.size());
    history_.blocks.push_back(block);
    history_.blocks.back().born = static_cast<std::int32_t>(history_.actions.size());
    history_.actions.push_back({number, false, at});
    return number;
  }
  std::int32_t AllocateForModel(const ModelMemory& memory, UnitId unit, std::int32_t microbatch,
                                const MemoryPoint& at) override {
    return Allocate({.requested_bytes = memory.requested_bytes,
                     .category = memory.category,
                     .stream = memory.stream,
                     .unit = unit,
                     .microbatch = microbatch},
                    at);
  }
  void Free(const MemoryBlock& block, const MemoryPoint& at) override {
    At(block.born).recorded_on = block.recorded_on;
    End(block.born, at);
  }
  void FreeOfModel(const ModelMemory& memory, const MemoryPoint& at) override { End(memory.born, at); }
  void Rename(const MemoryBlock& block) override {
    MemoryBlock& kept = At(block.born);
    kept.unit = block.unit;
    kept.buffer = block.buffer;
    kept.part = block.part;
  }
  void BeginRecorded() override { history_.first_recorded = history_.actions.size(); }

  MemoryHistory Take() { return std::move(history_); }

 private:
  MemoryBlock& At(std::int32_t number) { return history_.blocks[static_cast<std::size_t>(number)]; }
  void End(std::int32_t number, const MemoryPoint& at) {
    At(number).died = static_cast<std::int32_t>(history_.actions.size());
    history_.actions.push_back({number, true, at});
  }

  MemoryHistory history_;
};

}  // namespace

void internal::WalkMemory(const Plan& plan, const MemoryHistoryOptions& options, MemorySink& sink,
                          const ModelActions* model) {
  if (model != nullptr && !options.kernel_temporaries) return MemoryWalk(plan, options, *model, sink).Run();
  const ModelActions own = ModelActionsOf(plan, options.kernel_temporaries);
  MemoryWalk(plan, options, own, sink).Run();
}

MemoryHistory MemoryHistoryOf(const Plan& plan, const MemoryHistoryOptions& options) {
  HistorySink sink;
  internal::WalkMemory(plan, options, sink);
  return sink.Take();
}

}  // namespace shardplan
