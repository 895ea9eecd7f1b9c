// SPDX-License-Identifier: Apache-2.0
// The filler: computes nothing, but takes as long, and allocates and frees what the model would.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <utility>
#include <vector>

#include "options.h"
#include "peak_meter.h"
#include "shardplan/executor/replayer.h"
#include "shardplan/executor/torch_device.h"

namespace shardplan::run {

// Takes the given time on a device, from the current stream's point of view.
class Spinner {
 public:
  virtual ~Spinner() = default;
  virtual void Spin(Nanoseconds duration) = 0;
};
std::unique_ptr<Spinner> MakeCpuSpinner();
// Matrix products, as many as take that long (measured once on this GPU).
std::unique_ptr<Spinner> MakeMatmulSpinner(c10::Device device);

class FillerModel final : public executor::Model {
 public:
  FillerModel(const Plan& plan, std::int64_t rank, executor::TorchDevice& device, const RunOptions& options,
              PeakMeter& peak, std::unique_ptr<Spinner> spinner);

  // Behind Replayer::Create: the modules' buffers.
  void AllocateBuffers();
  // The batches of all micro-batches of plan.steps[step] are there from its begin to its end.
  void BeginStep(std::int32_t step);
  void EndStep() { inputs_.clear(); }

  bool MakesGradients() const override { return true; }
  Status Compute(const executor::ComputeCall& call) override;
  Status TakeGradients(UnitId unit, BufferId buffer) override;
  Status DropGradients(UnitId unit, BufferId buffer, std::span<const std::int32_t> parts) override;
  bool HoldsActivations() const override { return options_.activations; }
  Status TakeActivations(UnitId unit, BufferId buffer, std::int32_t microbatch) override;
  Status DropActivations(UnitId unit, BufferId buffer, std::int32_t microbatch) override;
  Status GiveActivations(UnitId unit, BufferId buffer, std::int32_t microbatch) override;
  Status OptimizerStep(UnitId unit, std::int32_t parameter, StreamId stream) override;
  Status Update(const Instruction& instruction) override;

  // Time the filler was asked to take so far.
  Nanoseconds compute_ns() const { return compute_ns_; }

 private:
  at::Tensor New(std::int64_t numel, DType dtype);
  at::Tensor& Activation(StorageId storage, std::int32_t microbatch);
  void AllocateOrFree(const SegmentEntry& entry, std::int32_t microbatch);
  void SettleGradients(const Segment& segment);
  at::Tensor& GradientOf(BufferId buffer, std::size_t part);
  std::vector<at::Tensor> ShardsOf(const Exchange& exchange, BufferRole role);

  const Plan& plan_;
  const std::int64_t rank_;
  executor::TorchDevice& device_;
  const RunOptions& options_;
  PeakMeter& peak_;
  std::unique_ptr<Spinner> spinner_;
  std::vector<Nanoseconds> costs_;                    // by segment, scaled
  std::vector<std::vector<at::Tensor>> activations_;  // by micro-batch and storage
  std::vector<at::Tensor> buffers_, inputs_;          // of the modules; of the step's micro-batches
  std::vector<std::vector<BufferId>> grad_buffers_;   // by unit
  std::vector<std::vector<at::Tensor>> gradients_;  // by unit and parameter; of several in one: at the first
  std::vector<at::Tensor> new_gradients_;           // of the segment that runs, as bytes
  Nanoseconds compute_ns_;
};

}  // namespace shardplan::run
