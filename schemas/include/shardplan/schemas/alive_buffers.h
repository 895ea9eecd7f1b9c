// SPDX-License-Identifier: Apache-2.0
// Lifetimes of buffers, instruction by instruction in host order: one rule for everybody who walks a program
// (docs/reference/plan-format.md, "Lifetimes").
#pragma once

#include <vector>

#include "shardplan/schemas/buffer_roles.h"
#include "shardplan/schemas/plan.h"

namespace shardplan {

// Whether a grad_cast makes dst a second name of src's memory: both have the same dtype and kind of memory,
// and dst has no memory of its own (`dst_is_alive` false). Then it is no work on any stream. Source: FSDP2's
// foreach_reduce and FSDP1's _cast_grad_to_param_dtype, whose .to(dtype) returns the tensor itself.
bool MakesView(const Plan& plan, const Instruction& grad_cast, bool dst_is_alive);

// Whether a zero_grad of `unit` (-1: of all) takes the reduced gradients in the buffer. The buffer is freed;
// a persistent one is emptied and stays.
bool ZeroGradTakes(UnitId unit, const Buffer& buffer);

// Whether the buffer's parts are views of one allocation: FSDP2 casts what a reduce-scatter gives as a whole,
// and the parameters' gradients are views of the result (foreach_reduce). Each part of any other is an
// allocation.
bool IsOneAllocation(const Buffer& buffer);

// Which buffers are alive while a program is walked in host order. Ids out of range change nothing.
class AliveBuffers {
 public:
  // Before the first step: the persistent ones.
  explicit AliveBuffers(const Plan& plan);

  // Takes the effect of the instruction: allocate, a free of the whole buffer, a view,
  // zero_grad.
  void Pass(const Instruction& instruction);
  bool IsAlive(BufferId buffer) const;
  // MakesView, as things are before the instruction is passed; false for every other kind.
  bool MakesView(const Instruction& instruction) const;

 private:
  void Set(BufferId buffer, bool alive);

  const Plan& plan_;
  std::vector<bool> alive_;
};

// Activations that a plan moves to host memory and back (docs/reference/plan-format.md): buffers of the role
// activation, whose parts are storages of the model. Segments make and free the storages one by one.

// The effect of a segment on one of them. A segment that only reads or writes storages has neither.
struct ActivationTouch {
  BufferId buffer = -1;
  std::vector<StorageId> made, freed;
  bool operator==(const ActivationTouch&) const = default;
};

// By segment: the activation buffers of which it makes, uses or frees a storage, in the order in which it
// comes to them. A storage that is in several buffers counts for the last.
std::vector<std::vector<ActivationTouch>> ActivationsTouched(const Plan& plan);

}  // namespace shardplan
