#include "filler.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/ones.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <functional>
#include <numeric>

#include "costs.h"

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
    constexpr int kRepeat = 50;
    a_ = at::ones({kRows, kRows}, at::TensorOptions(at::kBFloat16).device(device));
    out_ = at::empty_like(a_);
    Multiply(kRepeat);
    (void)out_.to(c10::kCPU);  // waits
    const auto begin = Clock::now();
    Multiply(kRepeat);
    (void)out_.to(c10::kCPU);
    product_ns_ =
        std::max<double>(1, std::chrono::duration<double, std::nano>(Clock::now() - begin).count() / kRepeat);
  }
  void Spin(Nanoseconds duration) override {
    owed_ns_ += static_cast<double>(duration.value);
    const auto products = static_cast<std::int64_t>(owed_ns_ / product_ns_);
    owed_ns_ -= static_cast<double>(products) * product_ns_;
    Multiply(products);
  }

 private:
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

FillerModel::FillerModel(const Plan& plan, executor::TorchDevice& device, const RunOptions& options,
                         MemoryCount& memory, std::unique_ptr<Spinner> spinner)
    : plan_(plan), device_(device), options_(options), memory_(memory), spinner_(std::move(spinner)) {
  for (const Segment& segment : plan.segments) {
    const auto cost = static_cast<double>(SegmentCost(segment, plan.cluster).value);
    costs_.push_back({std::llround(cost * options.compute_scale)});
  }
  if (!options.activations) return;
  const auto add = [&](const std::vector<std::int64_t>& shape, DType dtype) {
    const std::int64_t numel =
        std::accumulate(shape.begin(), shape.end(), std::int64_t{1}, std::multiplies<>());
    always_.push_back(
        at::empty({numel}, at::TensorOptions(executor::ToScalarType(dtype)).device(device.torch_device())));
    memory_.Add({numel * SizeBytes(dtype)});
  };
  for (const TraceInput& input : plan.inputs) add(input.shape, input.dtype);
  for (const ModuleBuffer& buffer : plan.model_buffers) add(buffer.shape, buffer.dtype);
}

// Gradients of parameters are buffers of the plan: the replayer allocates them.
void FillerModel::AllocateOrFree(const SegmentEntry& entry, std::int32_t microbatch) {
  const auto slot = [&](StorageId storage) -> at::Tensor& {
    const auto m = static_cast<std::size_t>(microbatch);
    if (activations_.size() <= m) activations_.resize(m + 1);
    if (activations_[m].size() <= static_cast<std::size_t>(storage)) activations_[m].resize(storage + 1);
    return activations_[m][storage];
  };
  if (const auto* allocate = std::get_if<AllocateEvent>(&entry)) {
    if (allocate->role == StorageRole::kParameterGrad) return;
    at::Tensor& tensor = slot(allocate->storage);
    if (tensor.defined()) return;
    tensor =
        at::empty({allocate->size_bytes.value}, at::TensorOptions(at::kByte).device(device_.torch_device()));
    memory_.Add(allocate->size_bytes);
  } else if (const auto* free = std::get_if<FreeEvent>(&entry)) {
    at::Tensor& tensor = slot(free->storage);
    if (!tensor.defined()) return;
    memory_.Remove({tensor.numel()});
    tensor.reset();
  }
}

Status FillerModel::Compute(const executor::ComputeCall& call) {
  for (const executor::GradTarget& grad : call.grads) memory_.Allocate(grad.buffer);
  if (options_.activations) {
    for (const SegmentEntry& entry : plan_.segments[call.segment].entries)
      AllocateOrFree(entry, call.microbatch);
  }
  spinner_->Spin(costs_[call.segment]);
  compute_ns_ += costs_[call.segment];
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
