// SPDX-License-Identifier: Apache-2.0
// The units of fully_shard: each parameter is cut by itself.
#include "shardplan/planner/planner.h"
#include "units/unit_communicators.h"
#include "units/unit_maker.h"
#include "units/unit_parameters.h"

namespace shardplan {
namespace {

class PerParameterUnits final : public UnitMaker {
 public:
  PerParameterUnits(const Trace& trace, const ModelIndex& index, const Strategy& strategy)
      : trace_(trace), index_(index), strategy_(strategy), communicators_(strategy) {}

  bool InTreeOrder() const override { return false; }
  bool HasRoot() const override { return strategy_.fsdp2.shard_root; }

  Status Begin(std::int64_t cluster_ranks, Partition& partition) override {
    return communicators_.Begin(trace_, cluster_ranks, partition);
  }

  Result<std::vector<UnitRule>> Rules(std::vector<UnitRule> rules, const std::set<ModuleId>&,
                                      const std::set<ParameterId>&) override {
    return rules.empty() ? DefaultUnits(trace_) : std::move(rules);
  }

  Status CheckKnobs() override {
    if (Status s = CheckParameterRules(trace_, strategy_); !s) return s;
    return communicators_.FindHooks(trace_, index_);
  }

  Status BeginUnit(const UnitRule* rule, const std::string& pointer, UnitChoice& choice) override {
    const bool own = rule != nullptr && rule->data_parallel.has_value();
    return communicators_.SetRanks(own ? &*rule->data_parallel : nullptr, pointer, choice);
  }

  Status FinishUnit(const std::string& pointer, UnitChoice& choice, Partition& partition) override {
    if (Status s = SetParameterKnobs(strategy_, communicators_.mesh(), pointer, choice); !s) return s;
    return communicators_.SetCommunicators(pointer, choice, partition);
  }

 private:
  const Trace& trace_;
  const ModelIndex& index_;
  const Strategy& strategy_;
  UnitCommunicators communicators_;
};

}  // namespace

std::unique_ptr<UnitMaker> MakePerParameterUnits(const Trace& trace, const ModelIndex& index,
                                                 const Strategy& strategy) {
  return std::make_unique<PerParameterUnits>(trace, index, strategy);
}

}  // namespace shardplan
