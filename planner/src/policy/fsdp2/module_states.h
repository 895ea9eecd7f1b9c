// SPDX-License-Identifier: Apache-2.0
// The model's modules and their FSDPStates: what PyTorch finds with named_modules and
// _get_module_fsdp_state.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "policy/fsdp2/fsdp_state.h"
#include "shardplan/schemas/strategy.h"
#include "shardplan/schemas/trace.h"
#include "units/model_index.h"
#include "units/partition.h"

namespace shardplan::fsdp2 {

enum class PrefetchPass : std::uint8_t { kForward, kBackward };

class ModuleStates {
 public:
  ModuleStates(const Trace& trace, const ModelIndex& index, const Partition& partition)
      : trace_(trace), index_(index), partition_(partition) {}

  // The state of the next unit.
  void Add(std::unique_ptr<FsdpState> state) { states_.push_back(std::move(state)); }

  std::size_t size() const { return states_.size(); }
  FsdpState& operator[](UnitId unit) const { return *states_[static_cast<std::size_t>(unit)]; }

  // PyTorch has one state of a module, with a list of parameter groups; here each group has a state, and
  // these are called one after the other.
  std::vector<FsdpState*> GroupsOf(const FsdpState& state) const;
  // The explicit list of one pass: the groups of each target in their order, in the backward the last first.
  void SetPrefetch(const FsdpState& state, const std::vector<FsdpState*>& targets, PrefetchPass pass) const;
  // The state of the unit of this name, or that hooks this module. Null: none.
  FsdpState* Find(const std::string& fqn) const;
  // kBadInput: there is no such module, or fully_shard is not called on it.
  Result<FsdpState*> OfModule(const std::string& fqn) const;
  // States of the modules under `root`, in the order of named_modules; one of two modules is there twice.
  std::vector<FsdpState*> StatesUnder(ModuleId root) const;
  // The states that a setter called on `module` with recurse reaches, each once.
  std::vector<FsdpState*> StatesUnder(const std::string& module) const;
  // The states that manage the parameters of a module under `module`, module by module.
  std::vector<FsdpState*> ManagersUnder(const std::string& module) const;
  std::size_t CountRoots() const;

 private:
  std::vector<ModuleId> ModulesUnder(const std::string& module) const;

  const Trace& trace_;
  const ModelIndex& index_;
  const Partition& partition_;
  std::vector<std::unique_ptr<FsdpState>> states_;  // by unit
};

}  // namespace shardplan::fsdp2
