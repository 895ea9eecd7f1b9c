// SPDX-License-Identifier: Apache-2.0
// The members of a Training.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "shardplan/executor/training.h"
#include "training/cpp/host_groups.h"
#include "training/cpp/model_tree.h"
#include "training/cpp/module_parameter.h"
#include "training/runtime/runtime.h"
#include "training/units/unit_hooks.h"

namespace shardplan::executor {

// The runtime of a model in C++.
class LibTorchRuntime final : public Runtime {
 public:
  using Runtime::Runtime;
  ~LibTorchRuntime() override;

  // Adds the unit's next parameter, in the order of Unit::parameters.
  void AddModuleParameter(UnitId unit, std::unique_ptr<ModuleParameter> parameter);
  // A module of the unit is about to be entered.
  void NoteEntered(UnitId unit) {
    entered_[unit] = true;
    if (FollowsLastBackward()) [[unlikely]] {
      EndFallback();
    }
  }
  void PrepareToEnter() { entered_.resize(units().size()); }
  // No module is called any more: lets go of the model's parameters.
  void LeaveModel() { DropObjects(); }

 private:
  void AdoptChanges() override;
  std::string ExplainDeviation(UnitId unit) override;

  std::vector<std::vector<ModuleParameter*>> parameters_;  // by unit
  std::vector<bool> entered_;                              // by unit: since the plan is followed
};

class Training::Impl final : public ModuleListener {
 public:
  Impl(std::shared_ptr<torch::nn::Module> model, ModuleCalls calls, Plan plan, TrainingOptions options);
  ~Impl() override;

  // All of Training::Create but making the object.
  Status Begin();

  // ---- ModuleListener ----
  void Enter(std::int32_t module, std::span<at::Tensor* const> inputs) override;
  void Leave(std::int32_t module, std::span<at::Tensor* const> outputs) override;
  void Abandon(std::int32_t) noexcept override {}  // seen where the model is entered next

  // ---- checkpoints (checkpoint.cc) ----
  Status Save(const std::string& path, torch::optim::Optimizer* optimizer,
              const std::map<std::string, at::Tensor>& extra, const SaveOptions& options, bool background);
  Status Load(const std::string& path, torch::optim::Optimizer* optimizer,
              const std::map<std::string, at::Tensor>& extra);

  Runtime& runtime() { return *runtime_; }
  const Plan& plan() const { return *plan_; }
  const TrainingOptions& options() const { return options_; }
  const ModelTree& tree() const { return tree_; }
  HostGroups& groups() { return *groups_; }
  AllocationCount* allocations() { return allocations_.get(); }
  Session* session() { return session_.get(); }
  // The units whose modules have this FQN, in the order of their groups. std::invalid_argument: none.
  std::vector<UnitId> UnitsOf(const std::string& fqn) const;
  void Warn(const std::string& text) const;

 private:
  class State;  // what a checkpoint has
  Status CheckHere() const;
  Status AgreeWithOthers(const Status& here);
  Result<std::shared_ptr<LibTorchRuntime>> MakeRuntime();
  Status Shard();
  Status ShardUnit(UnitId unit);
  void HookModules();
  Session& SessionOfAll();

  std::shared_ptr<torch::nn::Module> model_;
  ModuleCalls calls_;
  std::shared_ptr<const Plan> plan_;
  TrainingOptions options_;
  ModelTree tree_;
  std::shared_ptr<Peers> peers_;
  std::shared_ptr<AllocationCount> allocations_;
  std::shared_ptr<LibTorchRuntime> runtime_;
  std::unique_ptr<HostGroups> groups_;
  std::unique_ptr<Session> session_;
  struct ModuleHooks {
    const torch::nn::Module* module = nullptr;
    std::vector<UnitHooks*> units;  // in the order of their parameter groups
  };
  std::vector<std::unique_ptr<UnitHooks>> hooks_;
  std::vector<ModuleHooks> of_module_;  // by number of ModuleCalls
  bool attached_ = false;
};

}  // namespace shardplan::executor
