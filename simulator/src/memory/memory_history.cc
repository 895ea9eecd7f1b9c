#include "shardplan/simulator/memory_history.h"

#include <algorithm>
#include <bit>
#include <limits>
#include <map>
#include <optional>
#include <tuple>
#include <utility>

#include "allocator/allocator_sizes.h"
#include "cost/optimizer_cost.h"
#include "memory/copy_tables.h"
#include "memory/gradient_views.h"
#include "memory/kernel_memory.h"
#include "memory/memory_actions.h"
#include "memory/memory_categories.h"
#include "memory/model_actions.h"
#include "memory/shard_order.h"
#include "shardplan/schemas/alive_buffers.h"
#include "shardplan/schemas/assert.h"
#include "shardplan/schemas/policy_knobs.h"
#include "shardplan/schemas/program.h"

namespace shardplan {
namespace {

using internal::CategoryOf;
using internal::kCublasWorkspace;
using internal::kKernelTemp;
using internal::ModelAction;

template <typename T>
bool Has(const std::vector<T>& values, std::int32_t index) {
  return index >= 0 && static_cast<std::size_t>(index) < values.size();
}

std::int64_t TensorBytes(const std::vector<std::int64_t>& shape, DType dtype) {
  std::int64_t bytes = SizeBytes(dtype);
  for (const std::int64_t size : shape) bytes *= size;
  return bytes;
}

class StreamBuilder {
 public:
  // `actions`: who gets them instead of a history; null: they are kept.
  // `model`: with operators where the options ask for kernels' temporaries.
  StreamBuilder(const Plan& plan, const MemoryHistoryOptions& options, const internal::ModelActions& model,
                internal::MemoryActions* actions = nullptr)
      : plan_(plan),
        options_(options),
        model_actions_(model),
        actions_(actions),
        optimizer_(plan),
        alive_(plan) {
    memory_of_.assign(plan.buffers.size(), -1);
    gathered_by_.assign(plan.buffers.size(), 0);
    begun_.assign(plan.buffers.size(), false);
    states_made_.resize(plan.units.size() + 1);
    views_gradients_ = KnobsOf(plan.policy).steps_original_parameters(plan.strategy);
    has_gradient_.resize(plan.units.size());
    for (std::size_t b = 0; b < plan.buffers.size(); ++b) {
      const Buffer& buffer = plan.buffers[b];
      says_optimizer_ = says_optimizer_ || buffer.role == BufferRole::kOptimizerState ||
                        buffer.role == BufferRole::kOptimizerTemp;
      if (buffer.role == BufferRole::kGradUnsharded && Has(plan.units, buffer.unit)) {
        grad_buffers_.resize(plan.units.size());
        grad_buffers_[static_cast<std::size_t>(buffer.unit)].push_back(static_cast<BufferId>(b));
      }
    }
    FindViews();
    SizeStorages();
  }

  MemoryHistory Build() {
    for (const internal::ShardMade& shard : internal::ShardsInOrder(plan_)) MakeShard(shard);
    for (std::size_t b = 0; b < plan_.buffers.size(); ++b) {
      if (plan_.buffers[b].persistent) AllocateBuffer(static_cast<BufferId>(b), 0);
    }
    for (std::size_t b = 0; OnDevice() && b < plan_.model_buffers.size(); ++b) {
      const ModuleBuffer& buffer = plan_.model_buffers[b];
      Allocate({.requested_bytes = {TensorBytes(buffer.shape, buffer.dtype)},
                .category = CategoryOf(StorageRole::kBuffer),
                .part = static_cast<std::int32_t>(b)});
    }
    if (options_.steady_passes > 0) {
      RunPasses();
      return std::move(history_);
    }
    if (plan_.steps.size() == 1) RunStep(0);
    history_.first_recorded = history_.actions.size();
    if (actions_ != nullptr) actions_->BeginRecorded();
    for (std::size_t s = 0; s < plan_.steps.size(); ++s) RunStep(static_cast<std::int32_t>(s));
    return std::move(history_);
  }

  void RunPasses() {
    std::int32_t left = options_.steps > 0 ? options_.steps : std::numeric_limits<std::int32_t>::max();
    for (std::int32_t s = 0; s < plan_.steady_step && left > 0; ++s, --left) {
      history_.first_recorded = history_.actions.size();
      RunStep(s);
    }
    for (std::int32_t pass = 0; pass < options_.steady_passes && left > 0; ++pass) {
      history_.first_recorded = history_.actions.size();
      for (auto s = plan_.steady_step; s < std::ssize(plan_.steps) && left > 0; ++s, --left) RunStep(s);
    }
  }

 private:
  // Memory that one buffer, or several (views), name.
  struct Memory {
    std::int32_t names = 0;
    std::vector<StreamId> recorded_on;  // by the frees of its names so far
    std::vector<std::int32_t> parts;    // blocks, -1 where there is none
  };
  static constexpr std::size_t kNoKernel = static_cast<std::size_t>(-1);
  // What an operator has taken so far.
  struct Kernel {
    std::size_t entry = kNoKernel;  // the operator's, in the segment
    std::vector<internal::KernelStep> steps;
    std::size_t next = 0;
    std::vector<std::int32_t> blocks;  // by order of taking, -1: given back
  };

  const Buffer& BufferOf(BufferId id) const { return plan_.buffers[static_cast<std::size_t>(id)]; }
  std::int32_t& MemoryIndex(BufferId id) { return memory_of_[static_cast<std::size_t>(id)]; }
  Memory& MemoryAt(std::int32_t index) { return memories_[static_cast<std::size_t>(index)]; }

  // A reduce-scatter output that becomes the gradient itself (a cast to its own dtype is a view) counts as
  // the gradient for its whole life, as a memory tracker that names storages by their end does.
  void FindViews() {
    AliveBuffers alive(plan_);
    std::vector<MemoryPoint> allocated(plan_.buffers.size());
    for (std::size_t s = 0; s < plan_.steps.size(); ++s) {
      const std::vector<Trigger>& triggers = plan_.steps[s].triggers;
      for (std::size_t t = 0; t < triggers.size(); ++t) {
        for (std::size_t i = 0; i < triggers[t].instructions.size(); ++i) {
          const Instruction& instruction = triggers[t].instructions[i];
          if (instruction.kind == InstructionKind::kAllocate && Has(plan_.buffers, instruction.dst)) {
            allocated[static_cast<std::size_t>(instruction.dst)] = {
                static_cast<std::int32_t>(s), static_cast<std::int32_t>(t), static_cast<std::int32_t>(i)};
          } else if (alive.MakesView(instruction)) {
            const MemoryPoint& at = allocated[static_cast<std::size_t>(instruction.src)];
            // A gradient that a segment made has no allocation in the plan.
            if (at.step >= 0) {
              becomes_[{at.step, at.trigger, at.instruction}] = CategoryOf(BufferOf(instruction.dst).role);
            }
          }
          alive.Pass(instruction);
        }
      }
    }
  }

  void SizeStorages() {
    const auto note = [&](StorageId storage, std::int64_t bytes) {
      if (storage < 0) return;
      if (static_cast<std::size_t>(storage) >= storage_bytes_.size()) {
        storage_bytes_.resize(static_cast<std::size_t>(storage) + 1);
      }
      storage_bytes_[static_cast<std::size_t>(storage)] = {bytes};
    };
    storage_bytes_ = model_actions_.storage_bytes();
    storages_per_batch_ = storage_bytes_.size();
    for (const TraceInput& input : plan_.inputs) note(input.storage, TensorBytes(input.shape, input.dtype));
    for (const ModuleBuffer& b : plan_.model_buffers) note(b.storage, TensorBytes(b.shape, b.dtype));
  }

  std::int32_t Allocate(MemoryBlock block) {
    if (actions_ != nullptr) return AllocateUnkept(block);
    const auto index = static_cast<std::int32_t>(history_.blocks.size());
    block.born = static_cast<std::int32_t>(history_.actions.size());
    history_.blocks.push_back(block);
    history_.actions.push_back({index, false, at_});
    return index;
  }
  void Free(std::int32_t block, const std::vector<StreamId>& recorded_on = {}) {
    if (block < 0) return;
    MemoryBlock& freed = history_.blocks[static_cast<std::size_t>(block)];
    SHARDPLAN_ASSERT(freed.died < 0, "whoever frees a block forgets it");
    if (!recorded_on.empty()) freed.recorded_on = recorded_on;
    if (actions_ != nullptr) {
      freed.died = 0;
      unused_blocks_.push_back(block);
      return actions_->Act(freed, true, at_);
    }
    freed.died = static_cast<std::int32_t>(history_.actions.size());
    history_.actions.push_back({block, true, at_});
  }

  // The numbers of blocks that are gone are used again.
  std::int32_t AllocateUnkept(const MemoryBlock& block) {
    auto index = static_cast<std::int32_t>(history_.blocks.size());
    if (unused_blocks_.empty()) {
      history_.blocks.push_back(block);
    } else {
      index = unused_blocks_.back();
      unused_blocks_.pop_back();
      history_.blocks[static_cast<std::size_t>(index)] = block;
    }
    actions_->Act(block, false, at_);
    return index;
  }

  Memory& NewMemory(BufferId id) {
    std::int32_t index = static_cast<std::int32_t>(memories_.size());
    if (unused_memories_.empty()) {
      memories_.emplace_back();
    } else {
      index = unused_memories_.back();
      unused_memories_.pop_back();
    }
    MemoryIndex(id) = index;
    Memory& memory = MemoryAt(index);
    memory.names = 1;
    memory.recorded_on.clear();
    memory.parts.assign(BufferOf(id).parts_bytes.size(), -1);
    return memory;
  }

  void AllocateBuffer(BufferId id, StreamId stream) {
    if (MemoryIndex(id) >= 0) return;
    const Buffer& buffer = BufferOf(id);
    Memory& memory = NewMemory(id);
    if ((buffer.memory == MemoryKind::kDevice) != OnDevice()) return;
    MemoryBlock block{.category = CategoryMadeHere(buffer),
                      .stream = std::max(stream, 0),
                      .unit = buffer.unit,
                      .buffer = id};
    if (PlaysTemporaries(buffer)) {
      PlayTemporaries(block);
      return;
    }
    if (IsOneAllocation(buffer)) {
      block.requested_bytes = Taken(buffer, SizeBytes(buffer));
      memory.parts[0] = Allocate(block);
      return;
    }
    for (std::size_t p = 0; p < buffer.parts_bytes.size(); ++p) {
      block.requested_bytes = Taken(buffer, buffer.parts_bytes[p]);
      block.part = static_cast<std::int32_t>(p);
      memory.parts[p] = Allocate(block);
    }
  }

  // The temporaries of a step of all units have one buffer, of what is alive where that is most. Where their
  // steps come to just that, they are taken and dropped one by one.
  bool PlaysTemporaries(const Buffer& buffer) {
    if (buffer.role != BufferRole::kOptimizerTemp || buffer.unit >= 0) return false;
    if (!temporaries_) temporaries_ = optimizer_.TensorSteps(OnDevice());
    Bytes now, most, whole;
    std::vector<Bytes> taken;
    for (const OptimizerTensorStep& step : *temporaries_) {
      if (step.dropped < 0) {
        taken.push_back(InBlocks(step.taken));
        now += taken.back();
      } else {
        now -= taken[static_cast<std::size_t>(step.dropped)];
      }
      most = std::max(most, now);
    }
    for (const Bytes part : buffer.parts_bytes) whole += InBlocks(part);
    return most.value > 0 && most == whole;
  }
  void PlayTemporaries(MemoryBlock block) {
    std::vector<std::int32_t> blocks;
    for (const OptimizerTensorStep& step : *temporaries_) {
      block.requested_bytes = step.taken;
      if (step.dropped < 0) {
        blocks.push_back(Allocate(block));
      } else {
        Free(std::exchange(blocks[static_cast<std::size_t>(step.dropped)], -1));
      }
    }
    for (const std::int32_t left : blocks) Free(left);
  }

  // A buffer's, or that of what becomes of it.
  std::int32_t CategoryMadeHere(const Buffer& buffer) const {
    if (!becomes_.empty()) {
      const auto found = becomes_.find({at_.step, at_.trigger, at_.instruction});
      if (found != becomes_.end()) return found->second;
    }
    return CategoryOf(buffer.role);
  }

  void MakeShard(const internal::ShardMade& shard) {
    const Buffer& buffer = BufferOf(shard.buffer);
    Memory& memory =
        MemoryIndex(shard.buffer) < 0 ? NewMemory(shard.buffer) : MemoryAt(MemoryIndex(shard.buffer));
    if ((buffer.memory == MemoryKind::kDevice) != OnDevice()) return;
    memory.parts[static_cast<std::size_t>(shard.part)] =
        Allocate({.requested_bytes = Taken(buffer, buffer.parts_bytes[static_cast<std::size_t>(shard.part)]),
                  .category = CategoryOf(buffer.role),
                  .unit = buffer.unit,
                  .buffer = shard.buffer,
                  .part = shard.part});
  }

  bool OnDevice() const { return options_.space == MemorySpace::kDevice; }

  static Bytes Taken(const Buffer& buffer, Bytes requested) {
    if (buffer.memory != MemoryKind::kPinnedHost || requested.value <= 0) return requested;
    return {static_cast<std::int64_t>(std::bit_ceil(static_cast<std::uint64_t>(requested.value)))};
  }

  // `parts`: only these; empty: what is left.
  void FreeBuffer(BufferId id, const std::vector<std::int32_t>& parts = {},
                  const std::vector<StreamId>& recorded_on = {}) {
    if (SharesGradients(id)) {
      FreeGradients(id, parts, recorded_on);
      return;
    }
    if (MemoryIndex(id) >= 0) NoteRecorded(MemoryAt(MemoryIndex(id)).recorded_on, recorded_on);
    if (!parts.empty()) {
      if (MemoryIndex(id) >= 0) FreeParts(MemoryAt(MemoryIndex(id)), parts);
      return;
    }
    const std::int32_t index = std::exchange(MemoryIndex(id), -1);
    if (index < 0) return;
    Memory& memory = MemoryAt(index);
    SHARDPLAN_ASSERT(memory.names > 0, "each buffer that names the memory was counted");
    if (--memory.names > 0) return;
    for (const std::int32_t block : memory.parts) Free(block, memory.recorded_on);
    unused_memories_.push_back(index);
  }

  void FreeParts(Memory& memory, const std::vector<std::int32_t>& parts) {
    for (const std::int32_t part : parts) {
      if (!Has(memory.parts, part)) continue;
      Free(std::exchange(memory.parts[static_cast<std::size_t>(part)], -1), memory.recorded_on);
    }
  }
  static void NoteRecorded(std::vector<StreamId>& all, const std::vector<StreamId>& more) {
    for (const StreamId stream : more) {
      if (std::ranges::find(all, stream) == all.end()) all.push_back(stream);
    }
  }

  // A gradient may have several buffers: taken with others of its unit in one step, and by itself in another.
  // It is freed with the buffer that the plan frees, whichever of them it was counted for.
  bool SharesGradients(BufferId id) const {
    const Buffer& buffer = BufferOf(id);
    return buffer.role == BufferRole::kGradUnsharded && Has(grad_buffers_, buffer.unit) &&
           grad_buffers_[static_cast<std::size_t>(buffer.unit)].size() > 1;
  }
  // Where the block of a parameter's gradient is noted that the buffer holds; nullptr: there is none.
  std::int32_t* GradientBlock(BufferId id, std::int32_t parameter) {
    std::vector<BufferId> candidates = {id};
    if (SharesGradients(id)) candidates = grad_buffers_[static_cast<std::size_t>(BufferOf(id).unit)];
    for (const BufferId candidate : candidates) {
      if (MemoryIndex(candidate) < 0) continue;
      std::vector<std::int32_t>& parts = MemoryAt(MemoryIndex(candidate)).parts;
      const std::size_t part = PartOf(BufferOf(candidate), parameter);
      if (part < parts.size() && parts[part] >= 0) return &parts[part];
    }
    return nullptr;
  }
  void FreeGradients(BufferId id, const std::vector<std::int32_t>& parts,
                     const std::vector<StreamId>& recorded_on) {
    const std::vector<std::int32_t>& parameters = BufferOf(id).parameters;
    for (std::size_t p = 0; p < parameters.size(); ++p) {
      const std::int32_t parameter = parameters[p];
      if (!parts.empty() && !std::ranges::binary_search(parts, static_cast<std::int32_t>(p))) continue;
      if (std::int32_t* block = GradientBlock(id, parameter)) Free(std::exchange(*block, -1), recorded_on);
    }
  }

  void MakeView(BufferId src, BufferId dst) {
    if (MemoryIndex(src) < 0 || MemoryIndex(dst) >= 0) return;
    MemoryIndex(dst) = MemoryIndex(src);
    ++MemoryAt(MemoryIndex(src)).names;
  }

  void RunStep(std::int32_t s) {
    at_ = {s, -1, -1, -1};
    const PlanStep& step = plan_.steps[static_cast<std::size_t>(s)];
    const std::vector<std::int32_t> inputs = AllocateInputs(step);
    for (std::size_t t = 0; t < step.triggers.size(); ++t) {
      const Trigger& trigger = step.triggers[t];
      for (std::size_t i = 0; i < trigger.instructions.size(); ++i) {
        at_ = {s, static_cast<std::int32_t>(t), static_cast<std::int32_t>(i), -1};
        microbatch_ = MicrobatchOf(trigger, trigger.instructions[i]);
        Apply(trigger.instructions[i]);
      }
      EndHook();
    }
    at_ = {s, static_cast<std::int32_t>(step.triggers.size()), -1, -1};
    for (const std::int32_t input : inputs) Free(input);
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
            Allocate({.requested_bytes = {TensorBytes(plan_.inputs[i].shape, plan_.inputs[i].dtype)},
                      .category = CategoryOf(StorageRole::kInput),
                      .part = static_cast<std::int32_t>(i),
                      .microbatch = m}));
      }
    }
    return blocks;
  }

  void Apply(const Instruction& instruction) {
    switch (instruction.kind) {
      case InstructionKind::kCompute:
        EndHook();
        if (OnDevice() && Has(plan_.segments, instruction.segment)) RunSegment(instruction);
        break;
      case InstructionKind::kAllocate:
        if (!Has(plan_.buffers, instruction.dst)) break;
        AllocateBuffer(instruction.dst, instruction.stream);
        begun_[static_cast<std::size_t>(instruction.dst)] = false;
        break;
      case InstructionKind::kAllGather:
        gathered_by_[static_cast<std::size_t>(instruction.dst)] =
            plan_.communicators[static_cast<std::size_t>(instruction.communicator)].size;
        break;
      case InstructionKind::kCopyOut:
      case InstructionKind::kGradCopyIn:
        RunCopy(instruction);
        break;
      case InstructionKind::kFree:
        if (Has(plan_.buffers, instruction.src))
          FreeBuffer(instruction.src, instruction.parts, instruction.safe_after);
        break;
      case InstructionKind::kBindSharded:
        bound_ = &instruction;
        if (TriggerOf(at_).kind != TriggerKind::kPostBackward) EndHook();
        break;
      case InstructionKind::kGradCast:
        if (alive_.MakesView(instruction)) MakeView(instruction.src, instruction.dst);
        break;
      case InstructionKind::kOptimizerStep:
        RunOptimizer(instruction.unit);
        break;
      case InstructionKind::kZeroGrad:
        for (std::size_t u = 0; u < has_gradient_.size(); ++u) {
          if (instruction.unit < 0 || instruction.unit == static_cast<UnitId>(u)) has_gradient_[u] = false;
        }
        for (std::size_t b = 0; b < plan_.buffers.size(); ++b) {
          const Buffer& buffer = plan_.buffers[b];
          if (!ZeroGradTakes(instruction.unit, buffer) || buffer.persistent) continue;
          FreeBuffer(static_cast<BufferId>(b));
        }
        break;
      case InstructionKind::kBindUnsharded:
      case InstructionKind::kCopyIn:
      case InstructionKind::kReshardPostForward:
      case InstructionKind::kGradScale:
      case InstructionKind::kReduceScatter:
      case InstructionKind::kAllReduce:
      case InstructionKind::kGradAccumulate:
      case InstructionKind::kCopyToHost:
      case InstructionKind::kCopyToDevice:
      case InstructionKind::kRecord:
      case InstructionKind::kWait:
      case InstructionKind::kHostWait:
        break;
    }
    alive_.Pass(instruction);
  }

  void RunSegment(const Instruction& instruction) {
    const Segment& segment = plan_.segments[static_cast<std::size_t>(instruction.segment)];
    MemoryBlock block{
        .stream = std::max(instruction.stream, 0), .unit = segment.unit, .microbatch = microbatch_};
    new_grads_.clear();
    kernel_.entry = kNoKernel;
    const auto index = static_cast<std::size_t>(instruction.segment);
    for (const ModelAction* a = model_actions_.First(index); a != model_actions_.End(index); ++a) {
      const ModelAction& action = *a;
      at_.entry = action.entry;
      if (options_.kernel_temporaries) PassKernel(segment, static_cast<std::size_t>(action.entry), block);
      switch (action.kind) {
        case ModelAction::kMakesGrad:
          block.requested_bytes = action.bytes;
          block.category = action.category;
          new_grads_.push_back(Allocate(block));
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
    at_.entry = static_cast<std::int32_t>(segment.entries.size()) - 1;
    SettleGradients(segment, block);
  }

  // The operator whose outputs the allocations from `entry` on are: the first entry behind them.
  static std::size_t OperatorOf(const Segment& segment, std::size_t entry) {
    while (entry < segment.entries.size() && std::holds_alternative<AllocateEvent>(segment.entries[entry])) {
      ++entry;
    }
    return entry;
  }

  // A kernel takes memory before, between and behind its operator's outputs.
  void PassKernel(const Segment& segment, std::size_t entry, const MemoryBlock& block) {
    const std::size_t at = OperatorOf(segment, entry);
    const auto* op = at < segment.entries.size() ? std::get_if<OperatorEvent>(&segment.entries[at]) : nullptr;
    if (op == nullptr) return;
    if (entry == at) RunCublas(*op, segment, block);
    if (kernel_.entry != at) {
      kernel_ = {.entry = at, .steps = StepsOf(*op, segment, entry)};
    }
    if (entry == at) {
      RunKernel(block, true);
      for (const std::int32_t held : kernel_.blocks) Free(held);
      kernel_.entry = kNoKernel;
    } else if (std::ranges::find(op->writes, std::get<AllocateEvent>(segment.entries[entry]).storage) !=
               op->writes.end()) {
      RunKernel(block, false);
    }
  }

  // `entry`: the first that is not passed yet, up to which the operator's outputs may be allocated.
  std::vector<internal::KernelStep> StepsOf(const OperatorEvent& op, const Segment& segment,
                                            std::size_t entry) const {
    const std::vector<Bytes> read = StorageSizes(op.reads), written = StorageSizes(op.writes);
    const auto is_gradient = [](const SegmentEntry& e) {
      const auto* made = std::get_if<AllocateEvent>(&e);
      return made != nullptr && made->role == StorageRole::kParameterGrad;
    };
    const bool gradient = !op.writes.empty() && is_gradient(segment.entries[entry]);
    const std::int64_t sequences =
        plan_.inputs.empty() || plan_.inputs[0].shape.empty() ? 0 : plan_.inputs[0].shape[0];
    return internal::KernelSteps(
        op, {.read = read, .written = written, .makes_gradient = gradient, .sequences = sequences},
        plan_.cluster.device);
  }

  // Up to the next output, or to the end.
  void RunKernel(MemoryBlock block, bool to_the_end) {
    block.category = kKernelTemp;
    for (; kernel_.next < kernel_.steps.size(); ++kernel_.next) {
      internal::KernelStep& step = kernel_.steps[kernel_.next];
      switch (step.kind) {
        case internal::KernelStep::Kind::kTake:
          block.requested_bytes = step.bytes;
          kernel_.blocks.push_back(Allocate(block));
          break;
        case internal::KernelStep::Kind::kGiveBack:
          Free(std::exchange(kernel_.blocks[static_cast<std::size_t>(step.count)], -1));
          break;
        case internal::KernelStep::Kind::kOutputs:
          if (!to_the_end && step.count-- > 0) return;
          break;
      }
    }
  }

  std::vector<Bytes> StorageSizes(const std::vector<StorageId>& storages) const {
    std::vector<Bytes> bytes;
    for (const StorageId s : storages) {
      bytes.push_back(Has(storage_bytes_, s) ? storage_bytes_[static_cast<std::size_t>(s)] : Bytes{0});
    }
    return bytes;
  }

  void RunCublas(const OperatorEvent& op, const Segment& segment, const MemoryBlock& block) {
    if (!internal::UsesCublas(op.name)) return;
    // The autograd engine's thread has a handle of its own.
    bool& made = workspace_made_[IsBackward(segment.phase) ? 1 : 0];
    if (made) return;
    made = true;
    Allocate({.requested_bytes = internal::CublasWorkspaceBytes(plan_.cluster.device.name),
              .category = kCublasWorkspace,
              .stream = block.stream});
  }

  const Trigger& TriggerOf(const MemoryPoint& at) const {
    return plan_.steps[static_cast<std::size_t>(at.step)].triggers[static_cast<std::size_t>(at.trigger)];
  }

  void EndHook() {
    if (bound_ != nullptr) ViewGradients(*std::exchange(bound_, nullptr));
  }

  // Behind a unit's backward. A gradient that is not reduced becomes that of the original parameters: where
  // the parameters become views of the shard, but at the end of the post-backward hook, before the model goes
  // on.
  void ViewGradients(const Instruction& bound) {
    const auto unit = static_cast<std::size_t>(bound.unit);
    if (!OnDevice() || !options_.kernel_temporaries || !views_gradients_ || bound.unit < 0) return;
    const auto is_gradient = [&](const Buffer& buffer) {
      return buffer.unit == bound.unit && buffer.role == BufferRole::kGradUnshardedAccumulated &&
             memory_of_[static_cast<std::size_t>(&buffer - plan_.buffers.data())] >= 0;
    };
    const auto flat = std::ranges::find_if(plan_.buffers, is_gradient);
    if (flat == plan_.buffers.end() || has_gradient_[unit]) return;
    has_gradient_[unit] = true;
    if (IsReducedInTheSameHook(bound)) return;
    const auto memory = memory_of_[static_cast<std::size_t>(flat - plan_.buffers.begin())];
    const std::int32_t gradient = MemoryAt(memory).parts[0];
    if (gradient < 0) return;
    MemoryBlock block{.category = kKernelTemp,
                      .stream = history_.blocks[static_cast<std::size_t>(gradient)].stream,
                      .unit = bound.unit};
    for (const Bytes bytes :
         internal::GradientViewTemporaries(plan_.units[unit], BufferOf(bound.src), *flat)) {
      block.requested_bytes = bytes;
      Free(Allocate(block));
    }
  }

  bool IsReducedInTheSameHook(const Instruction& bound) const {
    return std::ranges::any_of(TriggerOf(at_).instructions, [&](const Instruction& i) {
      return i.unit == bound.unit &&
             (i.kind == InstructionKind::kReduceScatter || i.kind == InstructionKind::kAllReduce);
    });
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
    Free(Allocate({.requested_bytes = table,
                   .category = kKernelTemp,
                   .stream = std::max(instruction.stream, 0),
                   .unit = instruction.unit}));
  }

  // What the storage has in the micro-batch that runs; `none` where it has nothing yet.
  template <typename T>
  T& Storage(std::vector<T>& storages, StorageId storage, const T& none) {
    const std::size_t batch = static_cast<std::size_t>(std::max(microbatch_, 0));
    const std::size_t index = batch * storages_per_batch_ + static_cast<std::size_t>(storage);
    if (index >= storages.size()) storages.resize((batch + 1) * storages_per_batch_, none);
    return storages[index];
  }

  // Storages are there already where a step before never freed them.
  void Make(const ModelAction& action, MemoryBlock& block) {
    block.requested_bytes = action.bytes;
    block.category = action.category;
    if (actions_ == nullptr) {
      std::int32_t& kept = Storage(storages_, action.storage, -1);
      Free(std::exchange(kept, -1));
      kept = Allocate(block);
      return;
    }
    internal::ModelMemory& memory = Storage(unkept_storages_, action.storage, {});
    DropUnkept(memory);
    memory = {action.bytes, action.category, block.stream};
    actions_->ActOfModel(memory, false, at_);
  }
  void Drop(StorageId storage) {
    if (static_cast<std::size_t>(storage) >= storages_per_batch_) return;
    if (actions_ == nullptr) {
      Free(std::exchange(Storage(storages_, storage, -1), -1));
    } else {
      DropUnkept(Storage(unkept_storages_, storage, {}));
    }
  }
  void DropUnkept(internal::ModelMemory& memory) {
    if (memory.category < 0) return;
    actions_->ActOfModel(memory, true, at_);
    memory.category = -1;
  }

  // The gradients that the segment lists are alive from now on. What it allocated for a gradient that existed
  // before was added to that one and is freed.
  void SettleGradients(const Segment& segment, MemoryBlock block) {
    std::vector<std::pair<BufferId, std::size_t>> missing;
    for (const SegmentGrad& grad : segment.grads) {
      if (!Has(grad_buffers_, grad.unit)) continue;
      for (const BufferId id : grad_buffers_[static_cast<std::size_t>(grad.unit)]) {
        const Buffer& buffer = BufferOf(id);
        const std::size_t part = PartOf(buffer, grad.parameter);
        if (part >= buffer.parts_bytes.size()) continue;
        Memory& memory = MemoryIndex(id) >= 0 ? MemoryAt(MemoryIndex(id)) : NewMemory(id);
        if (memory.parts[part] < 0 && !TakeNewGrad(id, part, memory)) missing.emplace_back(id, part);
        break;
      }
    }
    for (const std::int32_t rest : new_grads_) Free(rest);
    for (const auto& [id, part] : missing) {
      block.requested_bytes = BufferOf(id).parts_bytes[part];
      block.category = CategoryOf(BufferRole::kGradUnsharded);
      block.unit = BufferOf(id).unit;
      block.buffer = id;
      block.part = static_cast<std::int32_t>(part);
      std::int32_t& at = MemoryAt(MemoryIndex(id)).parts[part];
      if (at < 0) at = Allocate(block);
    }
  }

  static std::size_t PartOf(const Buffer& buffer, std::int32_t parameter) {
    if (buffer.parameters.empty()) return 0;
    const auto found = std::ranges::find(buffer.parameters, parameter);
    if (found == buffer.parameters.end()) return buffer.parts_bytes.size();
    if (buffer.parts_bytes.size() != buffer.parameters.size()) return 0;
    return static_cast<std::size_t>(found - buffer.parameters.begin());
  }

  bool TakeNewGrad(BufferId id, std::size_t part, Memory& memory) {
    const Bytes wanted = BufferOf(id).parts_bytes[part];
    const auto found = std::ranges::find_if(new_grads_, [&](std::int32_t b) {
      return history_.blocks[static_cast<std::size_t>(b)].requested_bytes == wanted;
    });
    if (found == new_grads_.end()) return false;
    MemoryBlock& block = history_.blocks[static_cast<std::size_t>(*found)];
    block.unit = BufferOf(id).unit;
    block.buffer = id;
    block.part = static_cast<std::int32_t>(part);
    memory.parts[part] = *found;
    new_grads_.erase(found);
    return true;
  }

  void RunOptimizer(UnitId unit) {
    if (says_optimizer_) return;  // the plan's buffers say all of it
    MemoryBlock block{.category = CategoryOf(BufferRole::kOptimizerState), .unit = unit};
    std::vector<bool>::reference made = states_made_[static_cast<std::size_t>(unit) + 1];
    if (!made) {
      made = true;
      for (const Bytes tensor : optimizer_.States(unit, OnDevice())) {
        block.requested_bytes = tensor;
        Allocate(block);
      }
    }
    block.category = CategoryOf(BufferRole::kOptimizerTemp);
    std::vector<std::int32_t> blocks;
    for (const Bytes tensor : optimizer_.Temporaries(unit, OnDevice())) {
      block.requested_bytes = tensor;
      blocks.push_back(Allocate(block));
    }
    std::ranges::for_each(blocks, [&](std::int32_t b) { Free(b); });
  }

  const Plan& plan_;
  const MemoryHistoryOptions& options_;
  const internal::ModelActions& model_actions_;
  internal::MemoryActions* const actions_;
  std::vector<std::int32_t> unused_blocks_;  // where actions are not kept
  const OptimizerSteps optimizer_;
  AliveBuffers alive_;
  MemoryHistory history_;
  std::vector<std::int32_t> memory_of_;    // by buffer: index into memories_, -1: not alive
  std::vector<std::int64_t> gathered_by_;  // by buffer: ranks of the gather that wrote it last
  std::vector<bool> begun_;                // by buffer: something was copied into it since it was allocated
  std::vector<Memory> memories_;
  std::vector<std::int32_t> unused_memories_;
  // Allocations (step, trigger, instruction) whose memory ends in another role.
  std::map<std::tuple<std::int32_t, std::int32_t, std::int32_t>, std::int32_t> becomes_;
  std::vector<std::vector<BufferId>> grad_buffers_;     // by unit
  std::vector<std::int32_t> new_grads_;                 // blocks, of the segment that runs
  std::vector<std::int32_t> storages_;                  // by micro-batch and storage: block, -1: not alive
  std::vector<internal::ModelMemory> unkept_storages_;  // the same where actions are not kept
  std::size_t storages_per_batch_ = 0;
  std::vector<Bytes> storage_bytes_;  // by storage
  Kernel kernel_;
  const Instruction* bound_ = nullptr;  // bind_sharded of a hook that has not ended yet
  bool views_gradients_ = false;        // original parameters, of flat units
  std::vector<bool> has_gradient_;      // by unit: its original parameters have one
  bool workspace_made_[2] = {false, false};
  std::vector<bool> states_made_;  // [0]: of all units
  bool says_optimizer_ = false;
  std::optional<std::vector<OptimizerTensorStep>> temporaries_;  // of a step of all units
  MemoryPoint at_;
  std::int32_t microbatch_ = 0;  // of the compute there
};

}  // namespace

void internal::ForEachMemoryAction(const Plan& plan, const MemoryHistoryOptions& options,
                                   MemoryActions& actions, const ModelActions* model) {
  if (model != nullptr && !options.kernel_temporaries) {
    StreamBuilder(plan, options, *model, &actions).Build();
    return;
  }
  const ModelActions own = ModelActionsOf(plan, options.kernel_temporaries);
  StreamBuilder(plan, options, own, &actions).Build();
}

MemoryHistory MemoryHistoryOf(const Plan& plan, const MemoryHistoryOptions& options) {
  const internal::ModelActions model = internal::ModelActionsOf(plan, options.kernel_temporaries);
  return StreamBuilder(plan, options, model).Build();
}

}  // namespace shardplan
