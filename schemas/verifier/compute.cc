// SPDX-License-Identifier: Apache-2.0
#include "verifier/compute.h"

#include <fmt/format.h>

#include <algorithm>
#include <variant>

#include "shardplan/schemas/program.h"
#include "verifier/rules.h"

namespace shardplan::verifier {
namespace {

StorageId LargestStorage(const Plan& plan) {
  StorageId largest = -1;
  const auto see = [&](StorageId storage) { largest = std::max(largest, storage); };
  for (const Segment& segment : plan.segments) {
    for (const SegmentEntry& entry : segment.entries) {
      if (const auto* op = std::get_if<OperatorEvent>(&entry)) {
        for (const StorageId storage : op->reads) see(storage);
        for (const StorageId storage : op->writes) see(storage);
      } else if (const auto* born = std::get_if<AllocateEvent>(&entry)) {
        see(born->storage);
      } else if (const auto* dead = std::get_if<FreeEvent>(&entry)) {
        see(dead->storage);
      }
    }
  }
  return largest;
}

// By unit: do forwards say where they read it? Plans made of points (without the model's operators) need not
// say it.
std::vector<char> UnitsThatForwardsRead(const Plan& plan) {
  const auto has_operator = [](const Segment& segment) {
    return segment.phase != SegmentPhase::kOptimizer &&
           std::ranges::any_of(segment.entries, [](const SegmentEntry& entry) {
             return std::holds_alternative<OperatorEvent>(entry);
           });
  };
  std::vector<char> said(plan.units.size(), std::ranges::any_of(plan.segments, has_operator) ? 1 : 0);
  for (const Segment& segment : plan.segments) {
    if (IsBackward(segment.phase)) continue;
    for (const UnitId unit : segment.reads) said[static_cast<std::size_t>(unit)] = 1;
  }
  return said;
}

bool JoinsMicrobatches(const Plan& plan) {
  for (const StepProgram& step : plan.strategy.program) {
    for (const ProgramCall& call : step) {
      const auto* backward = std::get_if<BackwardCall>(&call);
      if (backward != nullptr && backward->microbatches.size() > 1) return true;
    }
  }
  return false;
}

}  // namespace

Compute::Compute(const Plan& plan, const Clocks& clocks, Words& words, Reporter& reporter)
    : plan_(plan), clocks_(clocks), words_(words), reporter_(reporter), rules_(RulesOf(plan.strategy)) {
  StreamId stream = -1;
  for (const PlanStep& step : plan.steps) {
    for (const Trigger& trigger : step.triggers) {
      for (const Instruction& i : trigger.instructions) {
        if (i.kind != InstructionKind::kCompute) continue;
        microbatches_ = std::max(microbatches_, MicrobatchOf(trigger, i) + 1);
        on_several_streams_ = on_several_streams_ || (stream >= 0 && i.stream != stream);
        stream = i.stream;
      }
    }
  }
  // A micro-batch is one of a step's few.
  microbatches_ = std::min(microbatches_, std::int32_t{1} << 12);
  const auto storages = static_cast<std::size_t>(LargestStorage(plan) + 1);
  is_gathered_.assign(plan.units.size(), 0);
  for (const Buffer& buffer : plan.buffers) {
    const bool unsharded = buffer.role == BufferRole::kParamUnsharded;
    if (unsharded && buffer.unit >= 0) is_gathered_[static_cast<std::size_t>(buffer.unit)] = 1;
  }
  read_in_step_.assign(plan.units.size() * static_cast<std::size_t>(microbatches_), -1);
  // Storages of a backward are named by its own forwards, whose micro-batches it does not say.
  joins_microbatches_ = JoinsMicrobatches(plan);
  forwards_say_ = UnitsThatForwardsRead(plan);
  follows_storages_ = !joins_microbatches_ && storages < (std::size_t{1} << 26) / microbatches_;
  if (!follows_storages_) return;
  lives_.assign(storages * static_cast<std::size_t>(microbatches_), Life::kAbsent);
  from_outside_.assign(storages, 0);
  const auto comes_from_outside = [&](StorageId storage) {
    if (storage >= 0 && storage < std::ssize(from_outside_)) from_outside_[storage] = 1;
  };
  for (const TraceInput& input : plan.inputs) comes_from_outside(input.storage);
  for (const ModuleBuffer& buffer : plan.model_buffers) comes_from_outside(buffer.storage);
  for (const Segment& segment : plan.segments) {
    for (const SegmentEntry& entry : segment.entries) {
      const auto* born = std::get_if<AllocateEvent>(&entry);
      // Gradients are the plan's: gradients.h follows them.
      if (born != nullptr && born->role == StorageRole::kParameterGrad) comes_from_outside(born->storage);
    }
  }
}

void Compute::Add(Position at, SegmentId segment, std::string what) {
  reporter_.Add(Rule::kComputeOrder, at, segment, std::move(what),
                at.step < 0 ? std::vector<std::string>() : std::vector{"at: " + reporter_.Describe(at)});
}

// ---- a step ----

void Compute::BeginStep() {
  entered_.clear();
  ++step_;
}

void Compute::Pass(const Trigger& trigger) {
  // Parameter groups of the same modules are entered together.
  if (trigger.unit >= 0 && plan_.units[trigger.unit].parameter_group > 0) return;
  const bool one_by_one = rules_.members_enter_one_by_one;
  if (trigger.kind == TriggerKind::kPreForward) {
    const bool again = one_by_one && plan_.units[trigger.unit].modules.size() > 1 &&
                       std::ranges::find(entered_, trigger.unit) != entered_.end();
    if (!again) entered_.push_back(trigger.unit);
  }
  // Calls of the user stand between passes: what is entered there was left by an exception.
  if (trigger.kind == TriggerKind::kUserCall) entered_.clear();
  // Nothing else says that a group is left of which the loss runs a part.
  if (one_by_one && trigger.kind == TriggerKind::kBackwardEnd) entered_.clear();
  if (trigger.kind != TriggerKind::kPostForward) return;
  const auto left = std::find(entered_.rbegin(), entered_.rend(), trigger.unit);
  if (left == entered_.rend()) return;
  // A unit that is left completes those inside it that have not been.
  entered_.erase(std::next(left).base(), one_by_one ? entered_.end() : left.base());
}

Compute::Life* Compute::Of(StorageId storage, std::int32_t microbatch) {
  if (storage < 0 || from_outside_[storage] != 0) return nullptr;
  const auto index = static_cast<std::size_t>(storage) * static_cast<std::size_t>(microbatches_);
  return &lives_[index + static_cast<std::size_t>(microbatch)];
}

void Compute::Take(const std::vector<StorageId>& storages, std::int32_t microbatch, bool there) {
  if (!follows_storages_ || microbatch < 0 || microbatch >= microbatches_) return;
  for (const StorageId storage : storages) {
    if (Life* life = Of(storage, microbatch)) *life = there ? Life::kThere : Life::kAbsent;
  }
}

void Compute::CheckStorages(SegmentId id, std::int32_t microbatch, Position at) {
  const Segment& segment = plan_.segments[id];
  const auto need = [&](StorageId storage, const char* does) {
    const Life* life = Of(storage, microbatch);
    if (life == nullptr || *life == Life::kThere) return;
    Add(at, id,
        fmt::format("{} {} storage {} of micro-batch {}, which no segment has made or one has freed",
                    segment.name, does, storage, microbatch));
  };
  for (const SegmentEntry& entry : segment.entries) {
    if (const auto* op = std::get_if<OperatorEvent>(&entry)) {
      for (const StorageId storage : op->reads) need(storage, "reads");
      for (const StorageId storage : op->writes) need(storage, "writes");
    } else if (const auto* dead = std::get_if<FreeEvent>(&entry)) {
      need(dead->storage, "frees");
      if (Life* life = Of(dead->storage, microbatch)) *life = Life::kAbsent;
    } else if (const auto* born = std::get_if<AllocateEvent>(&entry)) {
      // A storage that is still there is another one: of a forward that no backward followed.
      if (Life* life = Of(born->storage, microbatch)) *life = Life::kThere;
    }
  }
}

void Compute::Read(Uses& uses, StorageId storage, const Work& work) {
  if (ReadBeforeWriteOfTensor(uses.written, work, clocks_))
    words_.TensorReadNotOrdered(storage, uses.written, work);
  uses.read.push_back(work);
}

void Compute::Write(Uses& uses, StorageId storage, const Work& work) {
  uses.read.push_back(uses.written);
  for (const Work& other : WriteRaceOfTensor(uses.read, work, clocks_)) {
    words_.TensorWrittenInRace(storage, other, work);
  }
  uses = {work, {}};
}

void Compute::Use(SegmentId id, std::int32_t microbatch, const Work& work) {
  if (!on_several_streams_ || !follows_storages_) return;
  const auto of = [&](StorageId storage, auto use) {
    if (storage < 0 || from_outside_[storage] != 0) return;
    (this->*use)(uses_[{storage, microbatch}], storage, work);
  };
  for (const SegmentEntry& entry : plan_.segments[id].entries) {
    if (const auto* op = std::get_if<OperatorEvent>(&entry)) {
      for (const StorageId storage : op->reads) of(storage, &Compute::Read);
      for (const StorageId storage : op->writes) of(storage, &Compute::Write);
    } else if (const auto* dead = std::get_if<FreeEvent>(&entry)) {
      of(dead->storage, &Compute::Write);
      uses_.erase({dead->storage, microbatch});
    } else if (const auto* born = std::get_if<AllocateEvent>(&entry)) {
      // An earlier storage of that id is another tensor.
      uses_[{born->storage, microbatch}] = {work, {}};
    }
  }
}

void Compute::CheckGradients(SegmentId id, std::int32_t microbatch, Position at) {
  const Segment& segment = plan_.segments[id];
  const auto read_at = [&](UnitId unit) -> std::int32_t& {
    return read_in_step_[static_cast<std::size_t>(unit) * static_cast<std::size_t>(microbatches_) +
                         static_cast<std::size_t>(microbatch)];
  };
  if (!IsBackward(segment.phase)) {
    for (const UnitId unit : segment.reads) read_at(unit) = step_;
  }
  if (joins_microbatches_) return;
  for (const SegmentGrad& grad : segment.grads) {
    const bool is_gathered = is_gathered_[static_cast<std::size_t>(grad.unit)] != 0 &&
                             forwards_say_[static_cast<std::size_t>(grad.unit)] != 0;
    if (!ComputeOrderOfGradient(is_gathered, read_at(grad.unit), step_)) continue;
    return Add(at, id,
               fmt::format("{} makes gradients of {} of micro-batch {}, in which no forward has read it",
                           segment.name, reporter_.UnitName(grad.unit), microbatch));
  }
}

bool Compute::MayEvaluate(std::int32_t microbatch, Position at) const {
  if (!plan_.strategy.fsdp1.full_precision_in_eval) return false;
  return std::ranges::any_of(ProgramOfStep(plan_.strategy, at.step), [&](const ProgramCall& call) {
    const auto* forward = std::get_if<ForwardCall>(&call);
    return forward != nullptr && forward->microbatch == microbatch && !forward->training.value_or(false);
  });
}

void Compute::Pass(const Instruction& compute, const Trigger& trigger, Position at) {
  const Segment& segment = plan_.segments[compute.segment];
  const std::int32_t microbatch = MicrobatchOf(trigger, compute);
  if (microbatch < 0 || microbatch >= microbatches_) {
    return Add(at, compute.segment, fmt::format("there is no micro-batch {}", microbatch));
  }
  if (ComputeOrderOfForward(segment, entered_)) {
    Add(at, compute.segment,
        fmt::format("{} runs while the host is in the forward of {}", segment.name,
                    reporter_.UnitName(entered_.back())));
  }
  CheckGradients(compute.segment, microbatch, at);
  if (follows_storages_) CheckStorages(compute.segment, microbatch, at);
}

// ---- the rules ----

bool ReadBeforeWriteOfTensor(const Work& written, const Work& reader, const Clocks& clocks) {
  return written.stream != reader.stream && !clocks.IsBefore(written, reader.stream);
}

std::vector<Work> WriteRaceOfTensor(const std::vector<Work>& uses, const Work& writer, const Clocks& clocks) {
  std::vector<Work> unordered;
  for (const Work& use : uses) {
    if (use.stream != writer.stream && !clocks.IsBefore(use, writer.stream)) unordered.push_back(use);
  }
  return unordered;
}

bool ComputeOrderOfGradient(bool is_gathered, std::int32_t read_in_step, std::int32_t step) {
  return is_gathered && read_in_step != step;
}

bool ComputeOrderOfForward(const Segment& segment, const std::vector<UnitId>& entered) {
  if (segment.phase != SegmentPhase::kForward || segment.unit < 0 || entered.empty()) return false;
  return entered.back() != segment.unit;
}

}  // namespace shardplan::verifier
