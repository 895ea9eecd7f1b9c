// Runtime: what stands between a torch module and the engine. The hooks tell it which point they have passed;
// it fires the plan's triggers and is the engine's Model: it swaps the modules' parameters and hands
// gradients over both ways.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/python_headers.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "evaluation.h"
#include "model_parameter.h"
#include "shardplan/executor/collectives.h"
#include "shardplan/executor/engine.h"
#include "shardplan/executor/torch_device.h"
#include "shardplan/schemas/plan.h"

namespace shardplan::python {

// [Note: who passes which trigger]
// The model passes pre_forward, post_forward, pre_backward and post_backward, the autograd engine's final
// callback backward_end. All others (step_begin, the optimizer's, user calls, step_end) have no hook: they
// are fired when the next one that has comes. So the optimizer stays the user's, wherever in the loop it is
// called.
//
// Not thread safe, and need not be: the thread of the forward and that of the backward take turns. Members
// throw std::runtime_error with a message for a person; the hooks hand it on to Python as RuntimeError.
class Runtime final : public executor::Model, public std::enable_shared_from_this<Runtime> {
 public:
  // groups: by CommunicatorId, for evaluation.
  Runtime(std::shared_ptr<const Plan> plan, std::int64_t rank, std::unique_ptr<executor::TorchDevice> device,
          std::unique_ptr<executor::Collectives> collectives,
          std::vector<c10::intrusive_ptr<c10d::ProcessGroup>> groups);
  ~Runtime() override;
  Runtime(const Runtime&) = delete;
  Runtime& operator=(const Runtime&) = delete;

  // ---- while a plan is applied, in this order ----
  // The padded flat shards of a unit, one per Unit::parameters. Used in place.
  void SetShards(UnitId unit, std::vector<at::Tensor> padded);
  // Makes the engine. After all shards.
  void Start();
  // The whole parameter, to be made an nn.Parameter of; its storage is empty while the unit is not gathered.
  at::Tensor UnshardedView(UnitId unit, std::int32_t parameter) const;
  // In the order of Unit::parameters.
  void AddParameter(UnitId unit, ModelParameter parameter);

  // ---- from the hooks ----
  void PreForward(UnitId unit);
  void PostForward(UnitId unit);
  void PreBackward(UnitId unit);
  void PostBackward(UnitId unit);
  // Is the unit between its pre_backward and its post_backward? A forward of it is then a recomputation.
  bool IsRecomputing(UnitId unit) const { return unit >= 0 && units_[unit].in_backward; }
  bool BetweenSteps() const;
  // Where the engine is, for people.
  std::string Where() const { return engine_ ? engine_->Where() : "not started"; }

  // ---- executor::Model ----
  bool RunsItself() const override { return true; }
  Status BindUnsharded(UnitId unit, BufferId buffer) override;
  Status BindSharded(UnitId unit, BufferId buffer) override;
  Status TakeGradients(UnitId unit, BufferId buffer) override;
  Status DropGradients(UnitId unit, BufferId buffer) override;
  Status ShardedGradientsReady(UnitId unit, BufferId buffer) override;

 private:
  struct UnitState {
    std::vector<ModelParameter> parameters;
    bool in_backward = false;
  };
  struct ReadyGradients {
    UnitId unit;
    BufferId buffer;
  };

  bool IsEvaluation() const;
  void Evaluate(TriggerKind kind, UnitId unit);
  void Pass(TriggerKind kind, UnitId unit);
  void Fire(const executor::TriggerKey& trigger);
  void BackwardEnd();
  void QueueBackwardEnd();
  void CheckParametersInPlace() const;
  void CheckNoGradientIsLeft() const;
  void PublishGradients();
  std::span<const std::int32_t> ParametersOf(BufferId buffer) const { return buffer_parameters_[buffer]; }
  std::string Describe(UnitId unit, std::int32_t parameter) const;

  std::shared_ptr<const Plan> plan_;
  std::int64_t rank_;
  std::unique_ptr<executor::TorchDevice> device_;
  std::unique_ptr<executor::Collectives> collectives_;
  std::unique_ptr<executor::Engine> engine_;
  std::vector<UnitState> units_;
  std::vector<std::vector<at::Tensor>> shards_;  // by unit and parameter
  std::unique_ptr<Evaluation> evaluation_;
  std::vector<std::vector<std::int32_t>> buffer_parameters_;  // by BufferId
  std::vector<BufferId> unsharded_buffer_;                    // by UnitId
  std::vector<ReadyGradients> ready_;  // reduced in this backward, handed to the parameters at its end
  bool backward_end_queued_ = false;
};

}  // namespace shardplan::python
