// SPDX-License-Identifier: Apache-2.0
#include "filler.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/ones.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <functional>
#include <numeric>
#include <set>
#include <utility>

#include "costs.h"
#include "shardplan/schemas/exchanges.h"
#include "shardplan/schemas/layout.h"

namespace shardplan::run {
namespace {

using Clock = std::chrono::steady_clock;

class CpuSpinner final : public Spinner {
 public:
  void Spin(Nanoseconds duration) override {
    const auto end = Clock::now() + std::chrono::nanoseconds(duration.value);
    while (Clock::now() < end) {
    }
  }
};

class MatmulSpinner final : public Spinner {
 public:
  explicit MatmulSpinner(c10::Device device) {
    constexpr std::int64_t kRows = 2048;
    constexpr auto kWarmUp = std::chrono::seconds(1);  // an idle GPU takes its time to raise its clock
    a_ = at::ones({kRows, kRows}, at::TensorOptions(at::kBFloat16).device(device));
    out_ = at::empty_like(a_);
    const auto begin = Clock::now();
    while (Clock::now() - begin < kWarmUp) (void)OfOneProduct(200);
    std::array<double, 5> measured{};
    for (double& one : measured) one = OfOneProduct(1000);
    std::ranges::sort(measured);
    product_ns_ = std::max(1.0, measured[measured.size() / 2]);
  }
  void Spin(Nanoseconds duration) override {
    owed_ns_ += static_cast<double>(duration.value);
    const auto products = static_cast<std::int64_t>(owed_ns_ / product_ns_);
    owed_ns_ -= static_cast<double>(products) * product_ns_;
    Multiply(products);
  }

 private:
  // Nanoseconds, in a row of so many. Reading one element waits for all of them.
  double OfOneProduct(int repeat) {
    Multiply(1);
    (void)out_[0][0].item();
    const auto begin = Clock::now();
    Multiply(repeat);
    (void)out_[0][0].item();
    return std::chrono::duration<double, std::nano>(Clock::now() - begin).count() / repeat;
  }
  void Multiply(std::int64_t times) {
    for (std::int64_t i = 0; i < times; ++i) at::mm_out(out_, a_, a_);
  }
  at::Tensor a_;
  at::Tensor out_;
  double product_ns_ = 1;
  double owed_ns_ = 0;
};

}  // namespace

std::unique_ptr<Spinner> MakeCpuSpinner() { return std::make_unique<CpuSpinner>(); }
std::unique_ptr<Spinner> MakeMatmulSpinner(c10::Device device) {
  return std::make_unique<MatmulSpinner>(device);
}

namespace {

std::int64_t NumelOfShape(const std::vector<std::int64_t>& shape) {
  return std::accumulate(shape.begin(), shape.end(), std::int64_t{1}, std::multiplies<>());
}

// The part of a buffer of gradients that holds the parameter's; -1: none.
std::int64_t PartOf(const Plan& plan, const Buffer& buffer, std::int32_t parameter) {
  const std::vector<std::int32_t> parameters = ParametersOf(plan, buffer);
  const auto found = std::ranges::find(parameters, parameter);
  if (found == parameters.end()) return -1;
  return buffer.parts_bytes.size() == 1 ? 0 : found - parameters.begin();
}

}  // namespace

FillerModel::FillerModel(const Plan& plan, std::int64_t rank, executor::TorchDevice& device,
                         const RunOptions& options, PeakMeter& peak, std::unique_ptr<Spinner> spinner)
    : plan_(plan),
      rank_(rank),
      device_(device),
      options_(options),
      peak_(peak),
      spinner_(std::move(spinner)),
      grad_buffers_(plan.units.size()),
      gradients_(plan.units.size()) {
  for (const Segment& segment : plan.segments) {
    const auto cost = static_cast<double>(SegmentCost(segment, plan.cluster).value);
    costs_.push_back({std::llround(cost * options.compute_scale)});
  }
  for (std::size_t u = 0; u < plan.units.size(); ++u) gradients_[u].resize(plan.units[u].parameters.size());
  for (std::size_t b = 0; b < plan.buffers.size(); ++b) {
    const Buffer& buffer = plan.buffers[b];
    const bool is_gradient = buffer.role == BufferRole::kGradUnsharded && buffer.unit >= 0;
    if (is_gradient) grad_buffers_[buffer.unit].push_back(static_cast<BufferId>(b));
  }
}

at::Tensor FillerModel::New(std::int64_t numel, DType dtype) {
  at::Tensor tensor = device_.NewTensor(numel, dtype);
  peak_.Look();
  return tensor;
}

void FillerModel::AllocateBuffers() {
  if (!options_.activations) return;
  for (const ModuleBuffer& buffer : plan_.model_buffers)
    buffers_.push_back(New(NumelOfShape(buffer.shape), buffer.dtype));
}

void FillerModel::BeginStep(std::int32_t step) {
  if (!options_.activations) return;
  std::int32_t microbatches = 1;
  for (const Trigger& trigger : plan_.steps[step].triggers)
    microbatches = std::max(microbatches, trigger.microbatch + 1);
  for (std::int32_t m = 0; m < microbatches; ++m) {
    for (const TraceInput& input : plan_.inputs)
      inputs_.push_back(New(NumelOfShape(input.shape), input.dtype));
  }
}

at::Tensor& FillerModel::Activation(StorageId storage, std::int32_t microbatch) {
  const auto m = static_cast<std::size_t>(microbatch);
  if (activations_.size() <= m) activations_.resize(m + 1);
  if (activations_[m].size() <= static_cast<std::size_t>(storage)) activations_[m].resize(storage + 1);
  return activations_[m][storage];
}

Status FillerModel::TakeActivations(UnitId, BufferId buffer, std::int32_t microbatch) {
  std::vector<at::Tensor> parts;
  for (const StorageId storage : plan_.buffers[buffer].storages)
    parts.push_back(Activation(storage, microbatch));
  return device_.SetParts(buffer, std::move(parts));
}

Status FillerModel::DropActivations(UnitId, BufferId buffer, std::int32_t microbatch) {
  for (const StorageId storage : plan_.buffers[buffer].storages) Activation(storage, microbatch).reset();
  return {};
}

Status FillerModel::GiveActivations(UnitId, BufferId buffer, std::int32_t microbatch) {
  const std::vector<StorageId>& storages = plan_.buffers[buffer].storages;
  for (std::size_t p = 0; p < storages.size(); ++p) {
    Activation(storages[p], microbatch) = device_.Part(buffer, static_cast<std::int32_t>(p));
  }
  peak_.Look();
  return {};
}

void FillerModel::AllocateOrFree(const SegmentEntry& entry, std::int32_t microbatch) {
  const auto slot = [&](StorageId storage) -> at::Tensor& { return Activation(storage, microbatch); };
  if (const auto* allocate = std::get_if<AllocateEvent>(&entry)) {
    const std::int64_t bytes = allocate->size_bytes.value;
    if (allocate->role == StorageRole::kParameterGrad) {
      new_gradients_.push_back(New(bytes, DType::kUInt8));
      return;
    }
    at::Tensor& tensor = slot(allocate->storage);
    tensor.reset();  // there already where a step before never freed it
    tensor = New(bytes, DType::kUInt8);
  } else if (const auto* free = std::get_if<FreeEvent>(&entry)) {
    slot(free->storage).reset();
  }
}

// The gradient that the part of a grad_unsharded buffer holds, whichever buffer of the unit takes it.
at::Tensor& FillerModel::GradientOf(BufferId buffer, std::size_t part) {
  const Buffer& of = plan_.buffers[buffer];
  return gradients_[of.unit][ParametersOf(plan_, of)[part]];
}

// Gradients that the segment lists take the memory that it made for them, by size; where one was there
// before, the new one was added to it and goes.
void FillerModel::SettleGradients(const Segment& segment) {
  std::vector<std::pair<BufferId, std::size_t>> missing;
  for (const SegmentGrad& grad : segment.grads) {
    for (const BufferId id : grad_buffers_[grad.unit]) {
      const Buffer& buffer = plan_.buffers[id];
      const std::int64_t part = PartOf(plan_, buffer, grad.parameter);
      if (part < 0) continue;
      at::Tensor& gradient = GradientOf(id, static_cast<std::size_t>(part));
      if (gradient.defined()) break;
      const auto made = std::ranges::find_if(new_gradients_, [&](const at::Tensor& bytes) {
        return bytes.numel() == buffer.parts_bytes[part].value;
      });
      if (made == new_gradients_.end()) {
        missing.emplace_back(id, part);
        break;
      }
      gradient = made->view(executor::ToScalarType(buffer.dtype));
      new_gradients_.erase(made);
      break;
    }
  }
  new_gradients_.clear();
  for (const auto& [id, part] : missing) {
    const Buffer& buffer = plan_.buffers[id];
    at::Tensor& gradient = GradientOf(id, part);
    if (gradient.defined()) continue;
    gradient = New(buffer.parts_bytes[part].value / SizeBytes(buffer.dtype), buffer.dtype);
  }
}

Status FillerModel::TakeGradients(UnitId, BufferId buffer) {
  std::vector<at::Tensor> parts;
  for (std::size_t p = 0; p < plan_.buffers[buffer].parts_bytes.size(); ++p) {
    parts.push_back(GradientOf(buffer, p));
  }
  return device_.SetParts(buffer, std::move(parts));
}

Status FillerModel::DropGradients(UnitId, BufferId buffer, std::span<const std::int32_t> parts) {
  for (std::size_t p = 0; p < plan_.buffers[buffer].parts_bytes.size(); ++p) {
    const bool goes = parts.empty() || std::ranges::find(parts, static_cast<std::int32_t>(p)) != parts.end();
    if (goes) GradientOf(buffer, p).reset();
  }
  return {};
}

Status FillerModel::Compute(const executor::ComputeCall& call) {
  const Segment& segment = plan_.segments[call.segment];
  if (options_.activations) {
    for (const SegmentEntry& entry : segment.entries) AllocateOrFree(entry, call.microbatch);
  }
  SettleGradients(segment);
  spinner_->Spin(costs_[call.segment]);
  compute_ns_ += costs_[call.segment];
  return {};
}

// The rank's shards of the exchange's parameters in buffers of a role, each parameter once.
std::vector<at::Tensor> FillerModel::ShardsOf(const Exchange& exchange, BufferRole role) {
  std::set<std::pair<UnitId, std::int32_t>> of;
  for (const ExchangedMatrix& matrix : exchange.matrices) of.emplace(matrix.unit, matrix.parameter);
  std::vector<at::Tensor> shards;
  for (std::size_t b = 0; b < plan_.buffers.size(); ++b) {
    const Buffer& buffer = plan_.buffers[b];
    if (buffer.role != role) continue;
    const std::vector<std::int32_t> parameters = ParametersOf(plan_, buffer);
    for (std::size_t p = 0; p < buffer.parts_bytes.size() && p < parameters.size(); ++p) {
      if (!of.contains({buffer.unit, parameters[p]})) continue;
      at::Tensor part = device_.Part(static_cast<BufferId>(b), static_cast<std::int32_t>(p));
      if (part.defined()) shards.push_back(std::move(part));
    }
  }
  return shards;
}

// It moves the optimizer's bytes, and takes the time of the matrices that the rank has whole.
Status FillerModel::Update(const Instruction& instruction) {
  const Exchange& exchange = plan_.exchanges[instruction.exchange];
  if (instruction.kind == InstructionKind::kOrthogonalize) {
    return Compute({.segment = instruction.segment, .stream = instruction.stream});
  }
  const bool applies = instruction.kind == InstructionKind::kUpdateApply;
  at::Tensor pieces = device_.Part(applies ? instruction.src : instruction.dst, 0);
  if (applies && !HasOwners(exchange)) {  // the rank's own rows of all
    const Communicator& group = plan_.communicators[exchange.communicator];
    const std::int64_t own = pieces.numel() / group.size;
    pieces = pieces.narrow(0, executor::RankInGroup(group, rank_) * own, own);
  }
  std::int64_t first = 0;
  for (at::Tensor& shard :
       ShardsOf(exchange, applies ? BufferRole::kParamSharded : BufferRole::kGradSharded)) {
    const std::int64_t numel = std::min(shard.numel(), pieces.numel() - first);
    const at::Tensor piece = pieces.narrow(0, first, numel);
    at::Tensor rows = shard.view({-1}).narrow(0, 0, numel);
    if (applies) {
      rows.sub_(piece, 1e-3);
    } else {
      piece.copy_(rows);
    }
    first += numel;
  }
  return {};
}

// One pass over the shards and their gradients, as SGD makes.
Status FillerModel::OptimizerStep(UnitId unit, std::int32_t, StreamId) {
  for (std::size_t g = 0; g < plan_.buffers.size(); ++g) {
    const Buffer& gradients = plan_.buffers[g];
    if (gradients.role != BufferRole::kGradSharded || (unit >= 0 && gradients.unit != unit)) continue;
    const auto shards = std::ranges::find_if(plan_.buffers, [&](const Buffer& b) {
      return b.role == BufferRole::kParamSharded && b.unit == gradients.unit;
    });
    if (shards == plan_.buffers.end()) continue;
    const auto shard_buffer = static_cast<BufferId>(shards - plan_.buffers.begin());
    for (std::size_t i = 0; i < gradients.parts_bytes.size(); ++i) {
      const auto index = gradients.parameters.empty() || shards->parts_bytes.size() == 1
                             ? static_cast<std::int32_t>(i)
                             : gradients.parameters[i];
      at::Tensor shard = device_.Part(shard_buffer, index);
      const at::Tensor gradient = device_.Part(static_cast<BufferId>(g), static_cast<std::int32_t>(i));
      if (gradient.defined() && shard.defined() && gradient.numel() == shard.numel())
        shard.sub_(gradient, 1e-3);
    }
  }
  return {};
}

}  // namespace shardplan::run
