// SPDX-License-Identifier: Apache-2.0
#include "memory/gradient_memory.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "memory/categories.h"
#include "memory/gradient_views.h"
#include "shardplan/schemas/instruction_set.h"
#include "shardplan/schemas/policy_knobs.h"

namespace shardplan::internal {
namespace {

// The part of the buffer that has the parameter's gradient; parts_bytes.size(): none.
std::size_t PartOf(const Buffer& buffer, std::int32_t parameter) {
  if (buffer.parameters.empty()) return 0;
  const auto found = std::ranges::find(buffer.parameters, parameter);
  if (found == buffer.parameters.end()) return buffer.parts_bytes.size();
  if (buffer.parts_bytes.size() != buffer.parameters.size()) return 0;
  return static_cast<std::size_t>(found - buffer.parameters.begin());
}

bool IsReducedBy(const InstructionList& hook, UnitId unit) {
  return std::ranges::any_of(
      hook, [&](const Instruction& i) { return i.unit == unit && ReducesGradients(i.kind); });
}

}  // namespace

GradientMemory::GradientMemory(const Plan& plan, bool kernel_temporaries, BufferMemory& buffers,
                               LiveBlocks& blocks)
    : plan_(plan),
      buffers_(buffers),
      blocks_(blocks),
      autograd_adds_up_(buffers.on_device() && AutogradAddsUp(plan)),
      views_gradients_(kernel_temporaries && buffers.on_device() &&
                       KnobsOf(plan.policy).steps_original_parameters(plan.strategy)),
      has_gradient_(plan.units.size()) {
  for (std::size_t b = 0; b < plan.buffers.size(); ++b) {
    const Buffer& buffer = plan.buffers[b];
    if (buffer.role != BufferRole::kGradUnsharded || buffer.unit < 0 || buffer.unit >= std::ssize(plan.units))
      continue;
    buffers_of_.resize(plan.units.size());
    buffers_of_[static_cast<std::size_t>(buffer.unit)].push_back(static_cast<BufferId>(b));
  }
}

void GradientMemory::BeginSegment(const Segment& segment, const MemoryPoint& at) {
  made_.clear();
  arriving_.clear();
  segment_ = &segment;
  if (!autograd_adds_up_) return;
  arrivals_ = ArrivalsOf(plan_, segment, at);
  arrived_.assign(segment.grads.size(), false);
}

void GradientMemory::Add(std::int32_t block, std::size_t op) {
  const std::size_t gradient = NameArriving(block);
  if (gradient == arrivals_.size()) return made_.push_back(block);
  arrived_[gradient] = true;
  const GradientPlaces places = PlacesOf(*segment_, op);
  const bool widened = arrivals_[gradient].kind == GradientArrival::kIsWidened;
  arriving_.push_back({block, gradient, widened ? places.widened : places.added});
}

std::size_t GradientMemory::NameArriving(std::int32_t block) {
  const Bytes made = blocks_.At(block).requested_bytes;
  for (std::size_t g = 0; g < arrivals_.size(); ++g) {
    if (arrivals_[g].kind == GradientArrival::kStays || arrived_[g]) continue;
    const SegmentGrad& grad = segment_->grads[g];
    for (const BufferId id : buffers_of_[static_cast<std::size_t>(grad.unit)]) {
      const Buffer& buffer = BufferOf(id);
      const std::size_t part = PartOf(buffer, grad.parameter);
      if (part >= buffer.parts_bytes.size() || buffer.parts_bytes[part] != made) continue;
      blocks_.Rename(block, grad.unit, id, static_cast<std::int32_t>(part));
      return g;
    }
  }
  return arrivals_.size();
}

void GradientMemory::Arrive(std::int32_t entry) {
  std::erase_if(arriving_, [&](const Arriving& arriving) {
    if (arriving.behind >= entry) return false;
    const GradientArrival& arrival = arrivals_[arriving.gradient];
    // A buffer that is alive already stays as it is.
    if (arrival.kind == GradientArrival::kIsWidened)
      buffers_.Allocate(arrival.sum, blocks_.At(arriving.block).stream);
    blocks_.Free(arriving.block);
    return true;
  });
}

void GradientMemory::EndSegment(const Segment& segment, MemoryBlock block) {
  ComeTo(std::numeric_limits<std::int32_t>::max());
  std::vector<std::pair<BufferId, std::size_t>> missing;
  for (std::size_t g = 0; g < segment.grads.size(); ++g) {
    const SegmentGrad& grad = segment.grads[g];
    if (autograd_adds_up_ && arrived_[g]) continue;
    if (grad.unit < 0 || grad.unit >= std::ssize(buffers_of_)) continue;
    for (const BufferId id : buffers_of_[static_cast<std::size_t>(grad.unit)]) {
      const Buffer& buffer = BufferOf(id);
      const std::size_t part = PartOf(buffer, grad.parameter);
      if (part >= buffer.parts_bytes.size()) continue;
      std::vector<std::int32_t>& parts = buffers_.PartsOf(id);
      if (parts[part] < 0 && !TakeMade(id, part, parts)) missing.emplace_back(id, part);
      break;
    }
  }
  for (const std::int32_t rest : made_) blocks_.Free(rest);
  for (const auto& [id, part] : missing) {
    block.requested_bytes = BufferOf(id).parts_bytes[part];
    block.category = CategoryOf(BufferRole::kGradUnsharded);
    block.unit = BufferOf(id).unit;
    block.buffer = id;
    block.part = static_cast<std::int32_t>(part);
    std::int32_t& at = buffers_.PartsOf(id)[part];
    if (at < 0) at = blocks_.Allocate(block);
  }
}

bool GradientMemory::TakeMade(BufferId id, std::size_t part, std::vector<std::int32_t>& parts) {
  const Bytes wanted = BufferOf(id).parts_bytes[part];
  const auto found = std::ranges::find_if(
      made_, [&](std::int32_t number) { return blocks_.At(number).requested_bytes == wanted; });
  if (found == made_.end()) return false;
  blocks_.Rename(*found, BufferOf(id).unit, id, static_cast<std::int32_t>(part));
  parts[part] = *found;
  made_.erase(found);
  return true;
}

bool GradientMemory::IsShared(BufferId id) const {
  const Buffer& buffer = BufferOf(id);
  return buffer.role == BufferRole::kGradUnsharded && buffer.unit >= 0 &&
         buffer.unit < std::ssize(buffers_of_) &&
         buffers_of_[static_cast<std::size_t>(buffer.unit)].size() > 1;
}

// The note of the block of a parameter's gradient that the buffer holds; nullptr: there is none.
std::int32_t* GradientMemory::BlockOf(BufferId id, std::int32_t parameter) {
  for (const BufferId candidate : buffers_of_[static_cast<std::size_t>(BufferOf(id).unit)]) {
    if (!buffers_.IsAlive(candidate)) continue;
    std::vector<std::int32_t>& parts = buffers_.PartsOf(candidate);
    const std::size_t part = PartOf(BufferOf(candidate), parameter);
    if (part < parts.size() && parts[part] >= 0) return &parts[part];
  }
  return nullptr;
}

void GradientMemory::Free(BufferId id, const std::vector<std::int32_t>& parts,
                          const std::vector<StreamId>& recorded_on) {
  const std::vector<std::int32_t>& parameters = BufferOf(id).parameters;
  for (std::size_t p = 0; p < parameters.size(); ++p) {
    const std::int32_t parameter = parameters[p];
    if (!parts.empty() && !std::ranges::binary_search(parts, static_cast<std::int32_t>(p))) continue;
    if (std::int32_t* block = BlockOf(id, parameter)) blocks_.Free(std::exchange(*block, -1), recorded_on);
  }
}

void GradientMemory::ViewGradients(const Instruction& bound, const InstructionList& hook) {
  if (!views_gradients_ || bound.unit < 0) return;
  const auto unit = static_cast<std::size_t>(bound.unit);
  const auto is_gradient = [&](const Buffer& buffer) {
    return buffer.unit == bound.unit && buffer.role == BufferRole::kGradUnshardedAccumulated &&
           buffers_.IsAlive(static_cast<BufferId>(&buffer - plan_.buffers.data()));
  };
  const auto flat = std::ranges::find_if(plan_.buffers, is_gradient);
  if (flat == plan_.buffers.end() || has_gradient_[unit]) return;
  has_gradient_[unit] = true;
  if (IsReducedBy(hook, bound.unit)) return;
  const std::int32_t gradient = buffers_.PartsOf(static_cast<BufferId>(flat - plan_.buffers.begin()))[0];
  if (gradient < 0) return;
  MemoryBlock block{.category = kKernelTemp, .stream = blocks_.At(gradient).stream, .unit = bound.unit};
  for (const Bytes bytes : GradientViewTemporaries(plan_.units[unit], BufferOf(bound.src), *flat)) {
    block.requested_bytes = bytes;
    blocks_.Free(blocks_.Allocate(block));
  }
}

void GradientMemory::Zero(UnitId unit) {
  for (std::size_t u = 0; u < has_gradient_.size(); ++u) {
    if (unit < 0 || unit == static_cast<UnitId>(u)) has_gradient_[u] = false;
  }
}

}  // namespace shardplan::internal
