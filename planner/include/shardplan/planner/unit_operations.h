// SPDX-License-Identifier: Apache-2.0
// What is done with whole units: gathered, waited for, freed, their gradients reduced. The policy says when;
// this writes how, with fully_shard's own code: copies in and out, all-gathers and reduce-scatters on streams
// of their own, mixed precision, replicas (HSDP), accumulation, offloading, the optimizer, procedures.
//
//   pre_forward A     Gather(A)  Gather(B)  Await(A)      all_gather A | all_gather B
//   segment                                               .............| compute A  |
//   post_forward A    Free(A)                                                       | freed
//
// An operation on a unit without parameters does nothing. One on a unit that there is not is refused
// (ProgramBuilder::Refuse).
#pragma once

#include <cstdint>
#include <memory>

#include "shardplan/planner/policy.h"

namespace shardplan {

class UnitOperations {
 public:
  // Everything that decides what later steps do: a part of the policy's own state (Policy::State).
  class State {
   public:
    bool operator==(const State& other) const;

   private:
    friend class UnitOperations;
    struct Value;
    std::shared_ptr<const Value> value_;
  };

  // Both outlive it.
  UnitOperations(const PolicyInput& input, ProgramBuilder& builder);
  UnitOperations(const UnitOperations&) = delete;
  UnitOperations& operator=(const UnitOperations&) = delete;
  ~UnitOperations();

  // In Policy::SetUp. kBadInput: what torch.optim refuses, a setup call on a module that there is not.
  Status SetUp();
  // First at each point. Begins the point's trigger, and writes what no policy decides: what the model
  // computes, the optimizer's step, zero_grad, set_requires_gradient_sync and set_requires_all_reduce. What
  // is issued at a point without a trigger of its own belongs to the trigger before. kBadInput: a call on a
  // module that there is not.
  Status Begin(const HookPoint& point);

  // Elements of the unit's parameters, whole.
  std::int64_t Numel(UnitId unit) const;
  // From the Gather to the Await.
  bool IsGathering(UnitId unit) const;
  // From the Await to the Free.
  bool IsUnsharded(UnitId unit) const;
  // There are gradients that nothing has reduced yet.
  bool HasGradients(UnitId unit) const;

  // Starts to gather the parameters, which waits for the last optimizer step. Nothing if they are gathering
  // or unsharded. What is gathering when an optimizer steps is awaited first. What is unsharded then stays as
  // it was before the step (the verifier's remark stale_parameters): free it, and gather again.
  void Gather(UnitId unit);
  // The compute stream waits for the gather and copies out: the model may read the parameters. Nothing if
  // they are not gathering.
  void Await(UnitId unit);
  // Frees the whole parameters; the shards stay.
  void Free(UnitId unit);
  // Starts to reduce the gradients that the backward has made. Without gradient sync they are kept, in the
  // dtype that they are reduced in.
  void Reduce(UnitId unit);
  // At kBackwardEnd: reduces what is left, the last unit first; the compute stream waits for all reductions.
  // A gather that nothing awaited is dropped.
  void EndBackward();
  // In Policy::Procedures. kBadInput where fully_shard fails.
  Status Procedures();

  State state() const;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace shardplan
