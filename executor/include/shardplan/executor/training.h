// SPDX-License-Identifier: Apache-2.0
// Training: a LibTorch model in C++ trained by a plan, without Python in the process (docs/guide/cpp.md).
//
//   Gpt model(config);
//   auto training = Training::Create(model.ptr(), model->calls, plan, options);
//   if (!training) ...                                                 // ToString(training.error())
//   torch::optim::AdamW optimizer((*training)->parameters(), 1e-3);
//   while (...) {
//     at::Tensor loss = Loss(model->calls(model, tokens), targets);   // every forward through ModuleCalls
//     loss.backward();
//     (*training)->Step(optimizer);
//     optimizer.zero_grad();
//   }
//
// Between steps every parameter of the model is this rank's shard: `parameter.sizes()` are those of the
// shard, and so are those of its gradient and of what the optimizer keeps. Inside of a module's forward and
// backward it is the whole parameter. Modules hold handles of one tensor, so the tensor stays the same and
// what is in it changes; an optimizer may be made before or after.
//
// Members that return no Status throw TrainingError, as the model's forward and backward do, where the model
// leaves its plan or a rank fails. Members that are said to be collective are called on all ranks, in the
// same order.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

#include "shardplan/executor/checkpoints.h"
#include "shardplan/executor/device.h"
#include "shardplan/executor/module_calls.h"
#include "shardplan/executor/peers.h"
#include "shardplan/executor/training_error.h"
#include "shardplan/schemas/error.h"
#include "shardplan/schemas/plan.h"

namespace shardplan::executor {

// The reaction to a step that is not the plan's: other micro-batches, another order of modules, a parameter
// without gradient.
enum class OnDeviation : std::uint8_t {
  kStop,      // forward or backward throws TrainingError (kNegative)
  kOnDemand,  // the step is finished by the plan's procedures, unit by unit; the next one follows the plan
};

struct TrainingOptions {
  // For a process that a launcher has started (launch.h): rank, ranks, store, address and device. Without one
  // it is a training of one rank. kCUDA: the GPU of LOCAL_RANK. kUsage: the environment says something that
  // cannot be. kEnvironment: the store cannot be reached within the timeout, or there is no such GPU.
  static Result<TrainingOptions> FromEnvironment(
      c10::DeviceType device = c10::DeviceType::CPU,
      std::chrono::milliseconds timeout = std::chrono::minutes(10));

  std::int64_t rank = 0;   // in the plan's world
  std::int64_t ranks = 1;  // the plan's world_size
  // That all ranks share, for this training alone (c10d::PrefixStore); one rank: null.
  c10::intrusive_ptr<c10d::Store> store = nullptr;
  // The rank whose process serves the store, where it is a rank's and known.
  std::optional<std::int64_t> store_rank = {};
  // Which ranks are alive; null: the training finds out itself, through the store.
  std::shared_ptr<Peers> peers = nullptr;
  c10::Device device = c10::Device(c10::DeviceType::CPU);  // or a CUDA device
  // cpu: the address at which other ranks reach this machine, as GlooOptions::address.
  std::string address = "127.0.0.1";
  std::chrono::milliseconds timeout{600'000};  // for the slowest rank
  MemorySource memory = MemorySource::kAllocator;
  OnDeviation on_deviation = OnDeviation::kStop;
  bool verify = true;                                      // the verifier looks at the plan first
  std::function<void(const std::string& text)> warn = {};  // empty: standard error
};

// A rank's device memory, by an allocator's blocks of 512 bytes. On the CPU what the calling thread allocates
// from Training::Create on, on a GPU all that the process does.
struct TrainingMemory {
  std::int64_t allocated_bytes = 0;
  std::int64_t peak_bytes = 0;  // since it was asked for last
};

class Training {
 public:
  // Takes the model to the device, replaces its parameters by this rank's shards, unit by unit, and listens
  // to its calls. Collective: all ranks have the same plan, the same model and the same version, or every
  // rank has the error. `model` holds whole parameters, the same on all ranks. (Parameters on the meta device
  // cannot be: the modules' handles could not be given memory.) kBadInput: the plan does not verify, was made
  // for another model (each parameter that differs is named), for another number of ranks or in a layout that
  // C++ modules cannot have (flat parameters, parameters that are tied across units, all-gather extensions,
  // tensor parallel placements). kNegative: ranks differ, or one has an error. kEnvironment: a rank died or
  // did not come within the timeout, or there is no such device.
  static Result<std::unique_ptr<Training>> Create(std::shared_ptr<torch::nn::Module> model, ModuleCalls calls,
                                                  Plan plan, TrainingOptions options);
  // The model is not to be called afterwards. Waits for a save that is under way.
  ~Training();
  Training(const Training&) = delete;
  Training& operator=(const Training&) = delete;

  const Plan& plan() const;
  // The model's parameters, each once, in the order of model.parameters(): for an optimizer.
  std::vector<at::Tensor> parameters() const;
  c10::Device device() const;

  // ---- a step ----
  // optimizer.step(), which may be a torch::optim optimizer, or what `step` does. A step of the plan that is
  // not over then deviates. Without it (optimizer.step() called directly) the plan's optimizer_step passes
  // with the next forward: right, unless the plan keeps shards in host memory.
  void Step(torch::optim::Optimizer& optimizer);
  void Step(const std::function<void()>& step);
  // Do backwards reduce gradients from now on? FSDPModule.set_requires_gradient_sync of all units.
  void SetRequiresGradientSync(bool value);
  // Until it ends, backwards keep their gradients for a later one.
  class NoSync {
   public:
    explicit NoSync(Training& training) : training_(training) { training_.SetRequiresGradientSync(false); }
    ~NoSync() { training_.SetRequiresGradientSync(true); }
    NoSync(const NoSync&) = delete;
    NoSync& operator=(const NoSync&) = delete;

   private:
    Training& training_;
  };
  // Scales all gradients so that their norm, as one vector over all ranks, is at most max_norm. Returns the
  // norm before, a scalar on the device. norm_type: 1, 2, any positive one, or infinity. Collective. The same
  // as torch.nn.utils.clip_grad_norm_ of an FSDP2 model.
  at::Tensor ClipGradNorm(double max_norm, double norm_type = 2.0);
  // The mean of what the ranks give, for people (a loss). Collective.
  double MeanOverRanks(double mine);
  // Does any rank say so? Collective; for what all ranks have to do alike (a signal that one of them got).
  bool AnyRank(bool mine);
  // The step under way is given up: gradients and gathered parameters are dropped, shards stay as they are,
  // and the next forward begins a step. For a loop that catches an exception. Collective.
  void AbandonStep();
  // Makes a unit's parameters whole, and shards again, beside the plan: between steps, for reading them.
  // `fqn`: of a unit's module. std::invalid_argument: no unit has it. Collective.
  void Unshard(const std::string& fqn);
  void Reshard(const std::string& fqn);

  // ---- what is known of it ----
  // The deviation of the last step that left its plan; "": none did.
  std::string deviation() const;
  // Steps that have begun and are over.
  std::int64_t step() const;
  // The position of the replayer, for people.
  std::string Where() const;
  TrainingMemory TakeMemory();

  // ---- checkpoints (docs/guide/checkpoints.md) ----
  // Parameters, buffers, the states of a torch::optim::AdamW, Adam or SGD (null: none), and `extra`: tensors
  // that are the same on all ranks (step numbers, say), each in a torch.distributed.checkpoint folder. Names
  // are those that shardplan.torch.save gives them: Python loads what C++ saved and the other way round, on
  // any number of ranks. Between steps. Collective. kUsage: `path` is there, and `options` do not replace it.
  Status Save(const std::string& path, torch::optim::Optimizer* optimizer = nullptr,
              const std::map<std::string, at::Tensor>& extra = {}, const SaveOptions& options = {});
  // The same beside training: returns when the copies are under way. Step waits for these. Wait says how it
  // ended, once; a save before this one is waited for.
  Status SaveInBackground(const std::string& path, torch::optim::Optimizer* optimizer = nullptr,
                          const std::map<std::string, at::Tensor>& extra = {},
                          const SaveOptions& options = {});
  Status Wait();
  bool IsSaving() const;
  SaveFigures save_figures() const;
  // Any checkpoint with these names, whatever ranks and layout wrote it. `extra`: filled, of the shapes and
  // dtypes that were saved. kBadInput: a tensor is not there, or of another shape or dtype; nothing is
  // promised of the model then. Between steps. Collective.
  Status Load(const std::string& path, torch::optim::Optimizer* optimizer = nullptr,
              const std::map<std::string, at::Tensor>& extra = {});

 private:
  class Impl;
  explicit Training(std::unique_ptr<Impl> impl);
  const std::unique_ptr<Impl> impl_;
};

// Scales a loss so that gradients in float16 do not vanish, and leaves out steps in which any rank has one
// that is not finite: torch.amp.GradScaler for a model of a Training.
//
//   scaler.Scale(loss).backward();
//   scaler.Unscale();                       // before clipping, if there is any
//   if (scaler.Step(optimizer)) ...         // false: it was left out
class GradScaler {
 public:
  struct Options {
    double initial_scale = 65536.0;
    double growth_factor = 2.0;
    double backoff_factor = 0.5;
    std::int64_t growth_interval = 2000;  // steps without a gradient that is not finite
  };
  // `training` outlives this.
  explicit GradScaler(Training& training) : GradScaler(training, Options()) {}
  GradScaler(Training& training, Options options);

  at::Tensor Scale(const at::Tensor& loss) const;
  // Divides all gradients by the scale; once a step. Collective.
  void Unscale();
  // Unscale, unless it was done; the optimizer's step, unless a gradient of any rank was not finite; the
  // scale of the next step. Collective. Waits for the device.
  bool Step(torch::optim::Optimizer& optimizer);
  double scale() const { return scale_; }

 private:
  Training& training_;
  Options options_;
  double scale_;
  std::int64_t good_steps_ = 0;
  bool unscaled_ = false;
  bool finite_ = true;
};

}  // namespace shardplan::executor
