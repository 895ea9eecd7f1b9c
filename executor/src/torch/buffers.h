// SPDX-License-Identifier: Apache-2.0
// TorchBuffers: the part of TorchDevice that does not depend on where the memory is: which tensors a buffer
// is made of.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include "shardplan/executor/device.h"
#include "shardplan/executor/torch_device.h"

namespace shardplan::executor {

class TorchBuffers : public TorchDevice {
 public:
  explicit TorchBuffers(MemorySource memory) : memory_(memory) {}

  Status Prepare(const Plan& plan) override;
  Result<CopyId> PrepareCopy(CopySpec spec) override;
  Status Allocate(BufferId buffer, StreamId stream) override;
  Status Free(BufferId buffer, std::span<const StreamId> safe_after) override;
  Status FreeParts(BufferId buffer, std::span<const std::int32_t> parts,
                   std::span<const StreamId> safe_after) override;
  Status MakeAlias(CopyId copy) override;
  Status SetParts(BufferId buffer, std::vector<at::Tensor> parts) override;
  at::Tensor Part(BufferId buffer, std::int32_t part) const override;
  at::Tensor NewTensor(std::int64_t numel, DType dtype) override {
    return MakeTensor(numel, dtype, MemoryKind::kDevice, 0);
  }
  Result<at::Tensor> ParameterView(BufferId buffer, std::int32_t parameter) const override;
  Result<at::Tensor> ShardedView(BufferId buffer, std::int32_t parameter, std::int64_t rank) const override;

  // The 1-D tensors of a living buffer, for kernels and collectives.
  const std::vector<at::Tensor>& Tensors(BufferId buffer) const { return slots_[buffer].parts; }
  const Plan& plan() const { return *plan_; }
  // Undefined without an arena.
  const at::Tensor& arena() const { return arena_; }
  std::string NameOf(BufferId buffer) const { return plan_->buffers[buffer].name; }

 protected:
  // The device's streams and events.
  virtual Status PrepareStreams(const Plan& plan) = 0;
  // A fresh 1-D tensor on the stream's pool (-1: before any stream).
  virtual at::Tensor MakeTensor(std::int64_t numel, DType dtype, MemoryKind memory, StreamId stream) = 0;
  // Gives a tensor's storage `bytes` of fresh memory of the kind that it has / takes it away.
  virtual void FillStorage(const at::Tensor& tensor, std::int64_t bytes, MemoryKind memory,
                           StreamId stream) = 0;
  // Called before the memory of a buffer goes; the kernels that a stream in `safe_after` was given may still
  // use it.
  virtual Status BeforeFree(BufferId buffer, std::span<const StreamId> safe_after) = 0;
  // The memory of the arena, 1-D bytes.
  virtual at::Tensor MakeArena(std::int64_t bytes) = 0;
  // The arena's memory of `buffer`, freed before (see BeforeFree), is given to work on `stream`.
  virtual Status BeforeReuse(BufferId buffer, StreamId stream) = 0;
  // Is the buffer's memory, which is alive, the arena's?
  bool IsInArena(BufferId buffer) const { return slots_[buffer].in_arena; }

  const CopySpec& copy(CopyId id) const { return copies_[id]; }
  // [Note: gradients as autograd makes them]
  // Which dtype autograd makes a gradient in depends on the kernels: RMSNorm's weight in bfloat16 gets a
  // float32 one from a CPU and a bfloat16 one from a GPU, and a plan is made for one of them. Copies that
  // would convert from the wrong dtype are done from the right one.
  bool ReadsAsMade(const CopySpec& spec) const { return spec.src >= 0 && slots_[spec.src].is_as_made; }
  void CopyAsMade(const CopySpec& spec) const;
  void AccumulateAsMade(const CopySpec& spec) const;

 private:
  struct Slot {
    std::vector<at::Tensor> parts;
    bool alive = false;
    bool keeps_storage = false;  // always the same tensors, whose storage comes and goes
    bool in_arena = false;       // alive, in the arena
    bool is_as_made = false;     // gradients of another dtype than the plan foresaw
  };
  DType DTypeOf(BufferId buffer, std::size_t part) const;
  std::int64_t NumelOf(BufferId buffer, std::size_t part) const;
  at::Tensor MakePart(BufferId buffer, std::size_t part, StreamId stream);
  std::vector<at::Tensor> MakeParts(BufferId buffer, StreamId stream);
  std::byte* ArenaPart(BufferId buffer, std::size_t part) const;
  Result<bool> EnterArena(BufferId buffer, StreamId stream);
  Status MakePersistent(BufferId buffer);
  Status CheckPart(BufferId buffer, std::size_t part, const at::Tensor& tensor) const;
  Result<std::pair<at::Tensor, std::int64_t>> Place(BufferId buffer, std::int32_t parameter,
                                                    std::int64_t pieces) const;

  const MemorySource memory_;
  ArenaLayout layout_;  // empty without an arena
  at::Tensor arena_;
  const Plan* plan_ = nullptr;
  std::vector<Slot> slots_;
  std::vector<std::pair<BufferId, std::vector<at::Tensor>>> early_;  // SetParts before Prepare
  std::vector<CopySpec> copies_;
};

}  // namespace shardplan::executor
