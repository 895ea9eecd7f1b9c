#include "shardplan/simulator/memory_profile.h"

#include <algorithm>
#include <map>
#include <tuple>
#include <utility>

#include "fixed_log.h"
#include "optimizer_cost.h"

namespace shardplan {
namespace {

constexpr std::size_t kBufferRoles = static_cast<std::size_t>(BufferRole::kOptimizerTemp) + 1;
constexpr std::size_t kStorageRoles = static_cast<std::size_t>(StorageRole::kParameterGrad) + 1;

std::int32_t Category(BufferRole role) { return static_cast<std::int32_t>(role); }
std::int32_t Category(StorageRole role) {
  if (role == StorageRole::kParameterGrad) return Category(BufferRole::kGradUnsharded);
  return static_cast<std::int32_t>(kBufferRoles) + static_cast<std::int32_t>(role);
}

template <typename T>
bool Has(const std::vector<T>& values, std::int32_t index) {
  return index >= 0 && static_cast<std::size_t>(index) < values.size();
}

class Profiler {
 public:
  Profiler(const Plan& plan, const MemoryOptions& options) : plan_(plan), options_(options) {
    by_category_.resize(MemoryCategories().size());
    block_of_.assign(plan.buffers.size(), -1);
    states_made_.resize(plan.units.size() + 1);
    for (std::size_t b = 0; b < plan.buffers.size(); ++b) {
      const Buffer& buffer = plan.buffers[b];
      has_state_buffers_ = has_state_buffers_ || buffer.role == BufferRole::kOptimizerState;
      if (buffer.role == BufferRole::kGradUnsharded && Has(plan.units, buffer.unit)) {
        grad_buffers_.resize(plan.units.size());
        grad_buffers_[static_cast<std::size_t>(buffer.unit)].push_back(static_cast<BufferId>(b));
      }
    }
    FindViews();
    SizeStorages();
  }

  MemoryProfile Run() {
    for (std::size_t b = 0; b < plan_.buffers.size(); ++b) {
      if (plan_.buffers[b].persistent) AllocateBuffer(static_cast<BufferId>(b));
    }
    for (const ModuleBuffer& buffer : plan_.model_buffers) {
      Add(Category(StorageRole::kBuffer), Rounded(TensorBytes(buffer.shape, buffer.dtype)));
    }
    profile_.step_peak_bytes.resize(plan_.steps.size());
    // A plan of one step is steady from the start only when the optimizer's states are there: run it once
    // before.
    if (plan_.steps.size() == 1) RunStep(0);
    recording_ = options_.record_samples;
    if (recording_) RecordAll();
    for (std::size_t s = 0; s < plan_.steps.size(); ++s) {
      step_peak_ = 0;
      RunStep(static_cast<std::int32_t>(s));
      profile_.step_peak_bytes[s].value = step_peak_;
      if (step_peak_ < profile_.peak_bytes.value) continue;
      profile_.peak_bytes.value = step_peak_;
      profile_.peak_at = step_peak_at_;
      profile_.peak_by_category.clear();
      for (const std::int64_t bytes : step_peak_by_category_) profile_.peak_by_category.push_back({bytes});
    }
    if (plan_.steps.empty()) {
      profile_.peak_bytes.value = total_;
      for (const std::int64_t bytes : by_category_) profile_.peak_by_category.push_back({bytes});
    }
    profile_.end_bytes.value = total_;
    return std::move(profile_);
  }

 private:
  // Memory that one buffer, or several (views), name.
  struct Block {
    std::int32_t category = 0;
    std::int32_t names = 0;
    std::vector<std::int64_t> parts;  // rounded bytes of each part that is alive
  };
  struct StorageState {
    std::int64_t bytes = 0;
    std::int32_t category = -1;
  };

  std::int64_t Rounded(std::int64_t bytes) const {
    const std::int64_t granularity = std::max<std::int64_t>(1, options_.granularity_bytes.value);
    return (bytes + granularity - 1) / granularity * granularity;
  }
  static std::int64_t TensorBytes(const std::vector<std::int64_t>& shape, DType dtype) {
    std::int64_t bytes = SizeBytes(dtype);
    for (const std::int64_t size : shape) bytes *= size;
    return bytes;
  }
  const Buffer& BufferOf(BufferId id) const { return plan_.buffers[static_cast<std::size_t>(id)]; }
  std::int32_t& BlockOf(BufferId id) { return block_of_[static_cast<std::size_t>(id)]; }
  Block& BlockAt(std::int32_t block) { return blocks_[static_cast<std::size_t>(block)]; }

  // A reduce-scatter output that becomes the gradient itself (a cast to its own dtype is a view) counts as
  // the gradient for its whole life, as a memory tracker that names storages by their end does.
  void FindViews() {
    std::vector<MemoryPoint> allocated(plan_.buffers.size());
    for (std::size_t s = 0; s < plan_.steps.size(); ++s) {
      const std::vector<Trigger>& triggers = plan_.steps[s].triggers;
      for (std::size_t t = 0; t < triggers.size(); ++t) {
        for (std::size_t i = 0; i < triggers[t].instructions.size(); ++i) {
          const Instruction& instruction = triggers[t].instructions[i];
          if (instruction.kind == InstructionKind::kAllocate && Has(plan_.buffers, instruction.dst)) {
            allocated[static_cast<std::size_t>(instruction.dst)] = {
                static_cast<std::int32_t>(s), static_cast<std::int32_t>(t), static_cast<std::int32_t>(i)};
          } else if (IsView(instruction)) {
            const MemoryPoint& at = allocated[static_cast<std::size_t>(instruction.src)];
            becomes_[{at.step, at.trigger, at.instruction}] = Category(BufferOf(instruction.dst).role);
          }
        }
      }
    }
  }
  bool IsView(const Instruction& i) const {
    if (i.kind != InstructionKind::kGradCast || !Has(plan_.buffers, i.src) || !Has(plan_.buffers, i.dst))
      return false;
    const Buffer& src = BufferOf(i.src);
    const Buffer& dst = BufferOf(i.dst);
    return src.dtype == dst.dtype && src.memory == dst.memory;
  }

  void SizeStorages() {
    for (const Segment& segment : plan_.segments) {
      for (const SegmentEntry& entry : segment.entries) {
        if (const auto* born = std::get_if<AllocateEvent>(&entry)) {
          storages_per_batch_ = std::max(storages_per_batch_, static_cast<std::size_t>(born->storage + 1));
        }
      }
    }
  }

  // What is alive before the first recorded step, a sample each.
  void RecordAll() {
    for (std::size_t c = 0; c < by_category_.size(); ++c) {
      if (by_category_[c] == 0) continue;
      profile_.samples.push_back({{0}, static_cast<std::int32_t>(c), {by_category_[c]}, {total_}, 0, -1});
    }
  }

  void Add(std::int32_t category, std::int64_t bytes) {
    if (bytes == 0) return;
    std::int64_t& of_category = by_category_[static_cast<std::size_t>(category)];
    of_category += bytes;
    total_ += bytes;
    if (recording_) {
      profile_.samples.push_back(
          {{time_ns_}, category, {of_category}, {total_}, at_.step, at_.trigger, at_.instruction, at_.entry});
    }
    if (total_ > step_peak_) {
      step_peak_ = total_;
      step_peak_at_ = at_;
      // The categories are copied when the peak is over, i.e. before the first free after it.
      peak_is_now_ = true;
    }
  }
  void Subtract(std::int32_t category, std::int64_t bytes) {
    if (bytes == 0) return;
    KeepPeak();
    Add(category, -bytes);
  }
  void KeepPeak() {
    if (!peak_is_now_) return;
    step_peak_by_category_ = by_category_;
    peak_is_now_ = false;
  }

  std::int32_t NewBlock(BufferId id, std::int32_t category) {
    std::int32_t index = static_cast<std::int32_t>(blocks_.size());
    if (unused_blocks_.empty()) {
      blocks_.emplace_back();
    } else {
      index = unused_blocks_.back();
      unused_blocks_.pop_back();
    }
    Block& block = BlockAt(index);
    block.category = category;
    block.names = 1;
    block.parts.assign(BufferOf(id).parts_bytes.size(), 0);
    BlockOf(id) = index;
    return index;
  }

  void AllocateBuffer(BufferId id) {
    if (BlockOf(id) >= 0) return;
    const Buffer& buffer = BufferOf(id);
    const auto becomes = becomes_.find({at_.step, at_.trigger, at_.instruction});
    const std::int32_t index =
        NewBlock(id, becomes == becomes_.end() ? Category(buffer.role) : becomes->second);
    if (buffer.memory != MemoryKind::kDevice) return;
    if (IsFlat(buffer)) {
      BlockAt(index).parts[0] = Rounded(SizeBytes(buffer).value);
      Add(BlockAt(index).category, BlockAt(index).parts[0]);
      return;
    }
    for (std::size_t p = 0; p < buffer.parts_bytes.size(); ++p) {
      BlockAt(index).parts[p] = Rounded(buffer.parts_bytes[p].value);
      Add(BlockAt(index).category, BlockAt(index).parts[p]);
    }
  }

  // What a reduce-scatter gives is cast as a whole; the parameters' gradients are views of the result
  // (foreach_reduce).
  static bool IsFlat(const Buffer& buffer) {
    return !buffer.parts_bytes.empty() &&
           (buffer.role == BufferRole::kGradSharded || buffer.role == BufferRole::kReduceScatterOutput);
  }

  void FreeBuffer(BufferId id) {
    const std::int32_t index = std::exchange(BlockOf(id), -1);
    if (index < 0) return;
    Block& block = BlockAt(index);
    if (--block.names > 0) return;
    for (const std::int64_t part : block.parts) Subtract(block.category, part);
    unused_blocks_.push_back(index);
  }

  void MakeView(BufferId src, BufferId dst) {
    if (BlockOf(src) < 0 || BlockOf(dst) >= 0) return;
    BlockOf(dst) = BlockOf(src);
    ++BlockAt(BlockOf(src)).names;
  }

  void RunStep(std::int32_t s) {
    at_ = {s, -1, -1, -1};
    time_ns_ = TimesOf(0, 0).start_ns.value;
    step_peak_ = total_;
    step_peak_at_ = at_;
    peak_is_now_ = true;
    const PlanStep& step = plan_.steps[static_cast<std::size_t>(s)];
    const std::int64_t input_bytes = InputBytes(step);
    Add(Category(StorageRole::kInput), input_bytes);
    for (std::size_t t = 0; t < step.triggers.size(); ++t) {
      const Trigger& trigger = step.triggers[t];
      for (std::size_t i = 0; i < trigger.instructions.size(); ++i) {
        at_.trigger = static_cast<std::int32_t>(t);
        at_.instruction = static_cast<std::int32_t>(i);
        at_.entry = -1;
        range_ = TimesOf(t, i);
        time_ns_ = range_.start_ns.value;
        Apply(trigger.instructions[i]);
      }
    }
    at_ = {s, static_cast<std::int32_t>(step.triggers.size()), -1, -1};
    Subtract(Category(StorageRole::kInput), input_bytes);
    KeepPeak();
  }

  // The batch of every micro-batch is there from the step's beginning.
  std::int64_t InputBytes(const PlanStep& step) const {
    std::int64_t microbatches = 1, bytes = 0;
    for (const Trigger& trigger : step.triggers) {
      microbatches = std::max<std::int64_t>(microbatches, trigger.microbatch + 1);
    }
    for (const TraceInput& input : plan_.inputs) bytes += Rounded(TensorBytes(input.shape, input.dtype));
    return microbatches * bytes;
  }

  TimeRange TimesOf(std::size_t trigger, std::size_t instruction) const {
    const auto s = static_cast<std::size_t>(at_.step);
    if (s >= options_.times.size()) return {};
    const auto& triggers = options_.times[s];
    if (trigger >= triggers.size() || instruction >= triggers[trigger].size()) return {};
    return triggers[trigger][instruction];
  }

  void Apply(const Instruction& instruction) {
    switch (instruction.kind) {
      case InstructionKind::kCompute:
        if (Has(plan_.segments, instruction.segment)) {
          RunSegment(plan_.segments[static_cast<std::size_t>(instruction.segment)], instruction.microbatch);
        }
        break;
      case InstructionKind::kAllocate:
        if (Has(plan_.buffers, instruction.dst)) AllocateBuffer(instruction.dst);
        break;
      case InstructionKind::kFree:
        if (Has(plan_.buffers, instruction.src)) FreeBuffer(instruction.src);
        break;
      case InstructionKind::kGradCast:
        if (IsView(instruction)) MakeView(instruction.src, instruction.dst);
        break;
      case InstructionKind::kOptimizerStep:
        RunOptimizer(instruction.unit);
        break;
      case InstructionKind::kZeroGrad:
        for (std::size_t b = 0; b < plan_.buffers.size(); ++b) {
          const Buffer& buffer = plan_.buffers[b];
          if (buffer.role != BufferRole::kGradSharded || buffer.persistent) continue;
          if (instruction.unit < 0 || buffer.unit == instruction.unit) FreeBuffer(static_cast<BufferId>(b));
        }
        break;
      default:
        break;
    }
  }

  void RunSegment(const Segment& segment, std::int32_t microbatch) {
    const std::int64_t length_ns = (range_.end_ns - range_.start_ns).value;
    const std::int64_t count = std::ranges::count_if(
        segment.entries, [](const SegmentEntry& e) { return std::holds_alternative<OperatorEvent>(e); });
    std::int64_t operators = 0;
    std::int64_t new_grad_bytes = 0;
    for (const SegmentEntry& entry : segment.entries) {
      ++at_.entry;
      if (std::holds_alternative<OperatorEvent>(entry)) {
        ++operators;
        time_ns_ = range_.start_ns.value + internal::MulDiv(length_ns, operators, count);
      } else if (const auto* born = std::get_if<AllocateEvent>(&entry)) {
        const std::int64_t bytes = Rounded(born->size_bytes.value);
        if (born->role == StorageRole::kParameterGrad) {
          Add(Category(born->role), bytes);
          new_grad_bytes += bytes;
        } else {
          StorageState& state = Storage(born->storage, microbatch);
          Drop(state);  // of a step before that never freed it
          state = {bytes, Category(born->role)};
          Add(state.category, bytes);
        }
      } else if (const auto* dead = std::get_if<FreeEvent>(&entry)) {
        if (static_cast<std::size_t>(dead->storage) < storages_per_batch_) {
          Drop(Storage(dead->storage, microbatch));
        }
      }
    }
    SettleGradients(segment, new_grad_bytes);
  }

  StorageState& Storage(StorageId storage, std::int32_t microbatch) {
    const std::size_t index = static_cast<std::size_t>(std::max(microbatch, 0)) * storages_per_batch_ +
                              static_cast<std::size_t>(storage);
    if (index >= storages_.size()) {
      storages_.resize((static_cast<std::size_t>(std::max(microbatch, 0)) + 1) * storages_per_batch_);
    }
    return storages_[index];
  }
  void Drop(StorageState& state) {
    Subtract(state.category, state.bytes);
    state = {};
  }

  // The gradients that the segment lists are alive from now on. What it allocated for a gradient that existed
  // before was added to that one and is gone.
  void SettleGradients(const Segment& segment, std::int64_t new_grad_bytes) {
    std::int64_t alive_bytes = 0;
    for (const SegmentGrad& grad : segment.grads) {
      if (!Has(grad_buffers_, grad.unit)) continue;
      for (const BufferId id : grad_buffers_[static_cast<std::size_t>(grad.unit)]) {
        const Buffer& buffer = BufferOf(id);
        std::size_t part = 0;
        if (!buffer.parameters.empty()) {
          const auto found = std::ranges::find(buffer.parameters, grad.parameter);
          if (found == buffer.parameters.end()) continue;
          if (buffer.parts_bytes.size() == buffer.parameters.size()) {
            part = static_cast<std::size_t>(found - buffer.parameters.begin());
          }
        }
        if (part >= buffer.parts_bytes.size()) continue;
        const std::int32_t index =
            BlockOf(id) >= 0 ? BlockOf(id) : NewBlock(id, Category(BufferRole::kGradUnsharded));
        std::int64_t& bytes = BlockAt(index).parts[part];
        if (bytes == 0) {
          bytes = Rounded(buffer.parts_bytes[part].value);
          alive_bytes += bytes;
        }
        break;
      }
    }
    const std::int64_t rest = alive_bytes - new_grad_bytes;
    if (rest > 0) Add(Category(BufferRole::kGradUnsharded), rest);
    if (rest < 0) Subtract(Category(BufferRole::kGradUnsharded), -rest);
  }

  void RunOptimizer(UnitId unit) {
    if (has_state_buffers_) return;  // the plan says it all
    std::vector<bool>::reference made = states_made_[static_cast<std::size_t>(unit + 1)];
    if (!made) {
      made = true;
      for (const Bytes tensor : OptimizerStateTensors(plan_, unit)) {
        Add(Category(BufferRole::kOptimizerState), Rounded(tensor.value));
      }
    }
    const std::vector<Bytes> temporaries = OptimizerTemporaries(plan_, unit);
    for (const Bytes tensor : temporaries) Add(Category(BufferRole::kOptimizerTemp), Rounded(tensor.value));
    for (const Bytes tensor : temporaries)
      Subtract(Category(BufferRole::kOptimizerTemp), Rounded(tensor.value));
  }

  const Plan& plan_;
  const MemoryOptions& options_;
  MemoryProfile profile_;
  std::vector<std::int32_t> block_of_;  // by buffer, -1: not alive
  std::vector<Block> blocks_;
  std::vector<std::int32_t> unused_blocks_;
  // Allocations (step, trigger, instruction) whose memory ends in another role.
  std::map<std::tuple<std::int32_t, std::int32_t, std::int32_t>, std::int32_t> becomes_;
  std::vector<std::vector<BufferId>> grad_buffers_;  // by unit
  std::vector<StorageState> storages_;
  std::size_t storages_per_batch_ = 0;
  std::vector<bool> states_made_;  // [0]: of all units
  bool has_state_buffers_ = false;
  std::vector<std::int64_t> by_category_;
  std::vector<std::int64_t> step_peak_by_category_;
  std::int64_t total_ = 0;
  std::int64_t step_peak_ = 0;
  MemoryPoint step_peak_at_;
  bool peak_is_now_ = false;
  bool recording_ = false;
  MemoryPoint at_;
  TimeRange range_;
  std::int64_t time_ns_ = 0;
};

}  // namespace

const std::vector<std::string>& MemoryCategories() {
  static const std::vector<std::string> kNames = [] {
    std::vector<std::string> names;
    for (std::size_t r = 0; r < kBufferRoles; ++r) names.emplace_back(Name(static_cast<BufferRole>(r)));
    for (std::size_t r = 0; r < kStorageRoles; ++r) names.emplace_back(Name(static_cast<StorageRole>(r)));
    return names;
  }();
  return kNames;
}

MemoryProfile ProfileMemory(const Plan& plan, const MemoryOptions& options) {
  return Profiler(plan, options).Run();
}

Bytes NcclBufferBytes(const Plan& plan) {
  constexpr std::int64_t kChannels = 16;
  constexpr std::int64_t kSimpleBytes = 4 << 20;
  constexpr std::int64_t kLl128Bytes = 120 * 640 * 8 * 8;
  constexpr std::int64_t kLlBytes = 8 * 512 * 8 * 16;
  const auto longer =
      std::ranges::count_if(plan.communicators, [](const Communicator& c) { return c.size > 1; });
  return {longer * kChannels * (kSimpleBytes + kLl128Bytes + kLlBytes)};
}

}  // namespace shardplan
