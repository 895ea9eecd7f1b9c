// SPDX-License-Identifier: Apache-2.0
#include "tests/executor/virtual/checked_run.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <memory>
#include <vector>

#include "shardplan/executor/replayer.h"
#include "shardplan/executor/virtual_backend.h"
#include "shardplan/verifier/verifier.h"

namespace shardplan::test {

Findings RunChecked(const Plan& plan, ExpectedValues& expected, std::uint64_t seed,
                    const Plan* last_rank_plan) {
  Findings findings;
  findings.stops_at_failure = true;
  const auto machine = executor::VirtualMachine::Create(plan, seed);
  std::vector<std::unique_ptr<VirtualNumbers>> memories;
  std::vector<std::unique_ptr<CheckedModel>> models;
  std::vector<std::unique_ptr<executor::Replayer>> replayers;
  std::vector<executor::Replayer*> pointers;
  for (std::int64_t rank = 0; rank < plan.world_size; ++rank) {
    memories.push_back(std::make_unique<VirtualNumbers>(*machine, rank));
    const Plan& own = last_rank_plan != nullptr && rank + 1 == plan.world_size ? *last_rank_plan : plan;
    models.push_back(std::make_unique<CheckedModel>(expected, *memories.back(), rank, findings, &own));
    auto replayer = executor::Replayer::Create(own, rank, machine->device(rank), machine->collectives(rank),
                                               models.back().get());
    if (!replayer) {
      findings.failure = ToString(replayer.error());
      return findings;
    }
    replayers.push_back(std::move(*replayer));
    pointers.push_back(replayers.back().get());
    (void)models.back()->SetInitialShards();  // only backends of real devices fail
  }
  if (Status status = executor::ReplayOnVirtual(*machine, pointers, expected.steps()); !status) {
    if (findings.failure.empty()) findings.failure = ToString(status.error());
    return findings;
  }
  for (const std::unique_ptr<CheckedModel>& model : models) (void)model->CheckEnd();
  return findings;
}

std::set<std::string> StaleUnits(const Plan& plan) {
  std::set<std::string> units;
  for (const Remark& remark : Remarks(plan)) {
    if (remark.kind == RemarkKind::kStaleParameters) units.insert(plan.units[remark.unit].fqn);
  }
  return units;
}

bool HasNumbersOnDemand(const Plan& plan, const Trace& trace) {
  if (trace.backwards.empty() || !trace.forwards.front().grad_enabled) return false;
  std::vector<bool> has(trace.parameters.size(), false);
  for (const TraceEvent& event : trace.backwards.front().events) {
    if (const auto* grad = std::get_if<ParameterGradEvent>(&event)) has[grad->parameter] = true;
  }
  return std::ranges::all_of(plan.units, [&](const Unit& unit) {
    return std::ranges::all_of(unit.parameters, [&](const UnitParameter& own) {
      const auto traced = std::ranges::find(trace.parameters, own.fqn, &Parameter::fqn);
      return !own.requires_grad || traced == trace.parameters.end() || has[traced - trace.parameters.begin()];
    });
  });
}

std::int64_t OnDemandStepsWithNumbers(const Plan& program) {
  const auto steps = std::ssize(program.steps);
  return steps > 0 && program.steps.back().name == "keep" ? steps - 1 : steps;
}

Plan WithPassesOfTrace(Plan program) {
  for (StepProgram& step : program.strategy.program) {
    for (ProgramCall& call : step) {
      if (auto* forward = std::get_if<ForwardCall>(&call)) forward->trace = 0;
      if (auto* backward = std::get_if<BackwardCall>(&call)) backward->trace = 0;
    }
  }
  return program;
}

std::string WhatIsWrong(const PlanCase& c, const std::set<std::string>& remarked, const Findings& findings) {
  if (!findings.failure.empty()) return findings.failure;
  // The verifier does not know that an optimizer leaves alone what got no gradient: a branch not taken.
  const bool fits = c.name.contains("branchy") ? std::ranges::includes(remarked, findings.stale)
                                               : remarked == findings.stale;
  if (fits) return {};
  return fmt::format("reads stale parameters of [{}], not of [{}]", fmt::join(findings.stale, ", "),
                     fmt::join(remarked, ", "));
}

}  // namespace shardplan::test
