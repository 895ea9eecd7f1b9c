// The filler: computes nothing, but takes as long, and allocates and frees what the model would.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <vector>

#include "memory_count.h"
#include "options.h"
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
  FillerModel(const Plan& plan, executor::TorchDevice& device, const RunOptions& options, MemoryCount& memory,
              std::unique_ptr<Spinner> spinner);

  Status Compute(const executor::ComputeCall& call) override;
  Status OptimizerStep(UnitId unit, std::int32_t parameter, StreamId stream) override;

  // Time the filler was asked to take so far.
  Nanoseconds compute_ns() const { return compute_ns_; }

 private:
  void AllocateOrFree(const SegmentEntry& entry, std::int32_t microbatch);

  const Plan& plan_;
  executor::TorchDevice& device_;
  const RunOptions& options_;
  MemoryCount& memory_;
  std::unique_ptr<Spinner> spinner_;
  std::vector<Nanoseconds> costs_;                    // by segment, scaled
  std::vector<std::vector<at::Tensor>> activations_;  // by micro-batch and storage
  std::vector<at::Tensor> always_;                    // inputs and module buffers
  Nanoseconds compute_ns_;
};

}  // namespace shardplan::run
