// SPDX-License-Identifier: Apache-2.0
// Replayer: replays a plan, trigger by trigger, on one rank.
//
//   auto replayer = Replayer::Create(plan, rank, device, collectives, &model);
//   while (training) {
//     (*replayer)->Fire({TriggerKind::kStepBegin, -1, 0});
//     (*replayer)->Fire({TriggerKind::kPreForward, 0, 0});   // as the model passes them
//     ...
//   }
//
// Create resolves the program once: names, layouts, offsets and roles are gone afterwards. Fire checks that
// the trigger is the next one of the plan and issues its instructions. It is not thread safe: one call at a
// time (the forward's thread and the autograd thread may take turns).
#pragma once

#include <cstdint>
#include <exception>
#include <memory>
#include <span>
#include <string>

#include "shardplan/executor/collectives.h"
#include "shardplan/executor/device.h"
#include "shardplan/schemas/error.h"
#include "shardplan/schemas/plan.h"

namespace shardplan::executor {

// A point the host passes. `unit` is -1 for step_begin, backward_end, optimizer_step, zero_grad and step_end.
struct TriggerKey {
  TriggerKind kind = TriggerKind::kStepBegin;
  UnitId unit = -1;
  std::int32_t microbatch = 0;
  bool operator==(const TriggerKey&) const = default;
};

// The destination of a segment's gradient of one parameter: part `part` of a grad_unsharded buffer. `adds`:
// the new gradient is added to the one that the part holds.
struct GradTarget {
  BufferId buffer = -1;
  std::int32_t part = 0;
  UnitId unit = -1;
  std::int32_t parameter = -1;
  bool adds = false;
};

// Activations that the plan moves (role activation), of which a segment makes, uses or frees storages.
struct ActivationUse {
  BufferId buffer = -1;
  std::int32_t made = 0, freed = 0;  // storages
};

// The request of a compute instruction.
struct ComputeCall {
  SegmentId segment = -1;
  std::int32_t microbatch = 0;
  StreamId stream = 0;
  std::int64_t step = 0;  // steps completed before this one
  std::span<const GradTarget>
      grads;  // in the order of Segment::grads; empty for a model that makes them itself
  std::span<const ActivationUse> activations;
};

class StepRecorder;

// The interface between the replayer and whatever computes. Every function has a default that does nothing.
// They are called from Fire, on its thread; an error they return ends the replay.
class Model {
 public:
  virtual ~Model() = default;

  // True: the model runs by itself between two calls of Fire (a torch module). Then a compute instruction
  // only marks the gradients of its segment as made, and the grad_unsharded buffers are the model's: never
  // allocated by the device, supplied in TakeGradients. False: Compute issues the work (filler, toy model),
  // and grad_unsharded buffers are allocated by the device before the first segment that makes them.
  virtual bool RunsItself() const { return false; }
  virtual Status Compute(const ComputeCall&) { return {}; }

  // True: the gradients are the model's, as those of one that runs itself are; the rest is as RunsItself
  // says.
  virtual bool MakesGradients() const { return RunsItself(); }

  // The modules' parameters become views of `buffer` (TorchDevice::ParameterView) / the sharded ones again.
  virtual Status BindUnsharded(UnitId, BufferId) { return {}; }
  virtual Status BindSharded(UnitId, BufferId) { return {}; }

  // Before an instruction reads the unit's param_sharded buffer: bring into it what the user did to the
  // parameters in another place, on the stream of that instruction.
  virtual Status ShardedParametersRead(UnitId, StreamId) { return {}; }

  // A copy from `src` to `dst` (an all-gather's input or of its output) of a unit with an all-gather
  // extension is to be made on the stream. True: the model has filled `dst` itself.
  virtual Result<bool> MoveExtended(BufferId /*src*/, BufferId /*dst*/, StreamId) { return false; }

  // MakesGradients only. Before an instruction reads a grad_unsharded buffer: give the device the gradients,
  // one tensor per part, in the order of Buffer::parameters (TorchDevice::SetParts). They may be of any
  // layout and strides; a parameter that got no gradient gives zeros.
  virtual Status TakeGradients(UnitId, BufferId) { return {}; }
  // MakesGradients only. The plan frees a grad_unsharded buffer: drop your references (parameter.grad =
  // None). The device has dropped its own.
  virtual Status DropGradients(UnitId, BufferId, std::span<const std::int32_t> /*parts*/) { return {}; }

  // True: activations are the model's until the plan frees them, and again when they are back. False: the
  // device has them all the time.
  virtual bool HoldsActivations() const { return RunsItself(); }
  // HoldsActivations only. Before a copy to the host: give the device the storages, a tensor of bytes for
  // each part (TorchDevice::SetParts).
  virtual Status TakeActivations(UnitId, BufferId, std::int32_t /*microbatch*/) { return {}; }
  // HoldsActivations only. The plan frees them: drop your references.
  virtual Status DropActivations(UnitId, BufferId, std::int32_t /*microbatch*/) { return {}; }
  // HoldsActivations only. They come back with the work issued so far on the stream of the copy: take the
  // parts (TorchDevice::Part), which the device forgets.
  virtual Status GiveActivations(UnitId, BufferId, std::int32_t /*microbatch*/) { return {}; }

  // The last collective of a reduction was issued on the stream: reduce_scatter, all_reduce where there are
  // replicas. `buffer` holds its result when the stream gets there; work issued now on the stream may change
  // it.
  virtual Status GradientsReduced(UnitId, BufferId, StreamId) { return {}; }
  // A grad_sharded (or grad_host) buffer holds this step's gradient once its stream is done (TorchDevice::
  // ShardedView gives the tensors). Called at each grad_cast, grad_accumulate or copy_to_host into one.
  virtual Status ShardedGradientsReady(UnitId, BufferId) { return {}; }
  // optimizer_step and zero_grad instructions; unit -1: all; parameter -1: all of the unit's; stream -1: on
  // the host, now. After ZeroGrad returns, the replayer frees the sharded gradients of the unit that are
  // still alive (memory that you still refer to stays alive).
  virtual Status OptimizerStep(UnitId, std::int32_t /*parameter*/, StreamId) { return {}; }
  // update_copy_in, orthogonalize (on the matrix' owner alone) and update_apply instructions: issue the work
  // on the instruction's stream. Not called for a model that runs itself, whose optimizer is the user's.
  virtual Status Update(const Instruction&) { return {}; }
  virtual Status ZeroGrad(UnitId) { return {}; }
};

// Sees every instruction; for measuring and tests.
class Observer {
 public:
  virtual ~Observer() = default;
  virtual void BeforeInstruction(const Instruction&) {}
  virtual void AfterInstruction(const Instruction&) {}
};

class Replayer {
 public:
  // `plan`, `device`, `collectives` and `model` outlive the replayer; each is used by one replayer only.
  // `model` may be null: nothing is computed. kUsage: rank is not in the plan's world. kBadInput, with a
  // pointer into the plan: ids out of range, or sizes of buffers that do not fit their unit's layout, or (for
  // a model that runs itself) an instruction between a compute instruction and the end of its trigger that
  // needs what was computed.
  static Result<std::unique_ptr<Replayer>> Create(const Plan& plan, std::int64_t rank, Device& device,
                                                  Collectives& collectives, Model* model = nullptr);
  ~Replayer();
  Replayer(const Replayer&) = delete;
  Replayer& operator=(const Replayer&) = delete;

  // Issues the instructions of the trigger, which must be the next one of the plan. kNegative: it is not;
  // found and expected name both, and the step. Any other error is of the instruction that failed: message,
  // trigger and unit are named. After an error every further call returns that same error. After the last
  // trigger of a step the next step follows (after the last step plan.steady_step).
  Status Fire(const TriggerKey& trigger);

  // The next trigger. A host that learns of points in an order of its own (the final callback of a backward,
  // several output tensors of a unit) can ask here.
  const TriggerKey& Expected() const;
  // Steps completed, instructions issued since the replayer was made, the index into plan.steps of the one
  // under way (or about to begin), and the index in it of the next trigger.
  std::int64_t steps_completed() const;
  // Steps that the host has begun and is no longer in: completed, left and given up ones (Restart). Messages
  // name it. CountFrom: it is `step` from now on (a host that changes replayers goes on counting).
  std::int64_t step() const;
  void CountFrom(std::int64_t step);
  std::int64_t instructions_issued() const;
  std::int32_t step_index() const;
  std::int32_t trigger_index() const;
  // True before the first trigger of a step.
  bool AtStepBegin() const;

  // Procedures run beside the steps, between two triggers. The state of the unit has to be the procedure's
  // (plan.h, ProcedureKind); kBadInput where it is not, kUsage: the plan has no such procedure.
  bool Has(ProcedureKind kind, UnitId unit) const;
  Status Call(ProcedureKind kind, UnitId unit);
  bool IsAlive(BufferId buffer) const;
  // Makes a buffer alive, with undefined content, that a procedure is to find filled by the caller.
  Status Provide(BufferId buffer);
  // Frees a buffer that the caller has taken over; memory that it refers to stays alive.
  Status Release(BufferId buffer);

  // The host leaves the step: waits until everything issued is done and frees what is only on its way.
  // Gathered parameters that the modules hold, gradients and persistent buffers stay.
  Status Leave();
  // Frees all that is not persistent; the next trigger is the plan's first. The gathered parameters are no
  // longer bound (the model has seen to it). It makes good an error of a deviation, of memory, or of the
  // model; not one of a collective.
  Status Restart();

  // Fire in pieces, for hosts that must not block (the virtual machine's single thread): Begin, then Advance
  // until it says true. Advance issues at most one instruction; false: call again.
  Status Begin(const TriggerKey& trigger);
  Result<bool> Advance();

  // The replayer's position for people: "pre_forward of layers.3 (micro-batch 0, step 2), instruction 4:
  // all_gather ...".
  std::string Where() const;
  void SetObserver(Observer* observer);  // null: none
  // Records from the next step on, on the replayer's device; the recorder outlives that. Null: nothing is
  // recorded from now on.
  Status SetRecorder(StepRecorder* recorder);
  // The exception of the operation that made the replayer fail (a device's, the collectives', the model's).
  // Null: nothing.
  std::exception_ptr thrown() const;
  // Marks the replayer failed and aborts the collectives; what the model does when it fails between two
  // triggers.
  void Abort(const std::string& reason);

 private:
  class Impl;
  explicit Replayer(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace shardplan::executor
