// SPDX-License-Identifier: Apache-2.0
// Expected values of every number of a planned run, from the trace, the strategy's program and the layout of
// the
// units: never from the plan's instructions.
//
// [Note: a model of integers]
// A parameter's elements are small integers, a pattern of its own for every group of ranks that share it. The
// k-th gradient that the backward makes of it on a rank is a pattern of (parameter, k, rank), a multiple of
// what it will be divided by. An optimizer step takes the mean of the gradients off the parameter and brings
// it back to [-8, 8]; where the parameter is in an exchange, the mean turned round. All of these and their
// sums are exact in every dtype, whatever the order of summation, so a run is right only if every byte is.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <set>
#include <span>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "shardplan/schemas/plan.h"
#include "shardplan/schemas/trace.h"

namespace shardplan::test {

// A stretch of a parameter that a rank's shard holds, in elements.
struct ShardRun {
  std::int32_t parameter = -1;
  std::int64_t in_whole = 0;  // first element in the whole parameter
  std::int64_t in_shard = 0;  // ... in the parameter's piece (per_parameter) or in the flat shard
  std::int64_t numel = 0;
};

class ExpectedValues {
 public:
  // The plan is one of `trace`; both outlive this. `steps`: how many will be run.
  ExpectedValues(const Plan& plan, const Trace& trace, std::int64_t steps);

  const Plan& plan() const { return plan_; }
  std::int64_t steps() const { return steps_; }

  // Elements of `dtype`: the whole parameter after `version` optimizer steps, as the rank's data-parallel
  // group has it.
  std::span<const std::byte> Parameter(UnitId unit, std::int32_t parameter, std::int64_t rank,
                                       std::int64_t version, DType dtype);
  // The whole reduced gradient that takes `version` to the next one. Empty: there is none.
  std::span<const std::byte> Reduced(UnitId unit, std::int32_t parameter, std::int64_t rank,
                                     std::int64_t version, DType dtype);
  // The update that a matrix optimizer by owners makes of it: each matrix turned round, last element first,
  // so that every rank needs rows of others. Empty: the parameter is in no exchange.
  std::span<const std::byte> Updated(UnitId unit, std::int32_t parameter, std::int64_t rank,
                                     std::int64_t version, DType dtype);
  // The gradient that the rank's backward makes as the parameter's `index`-th since the beginning.
  std::span<const std::byte> Made(UnitId unit, std::int32_t parameter, std::int64_t rank, std::int64_t index,
                                  DType dtype);
  // Optimizer steps that a parameter has been through, and gradients made of it, at the end of the run.
  std::int64_t Versions(UnitId unit, std::int32_t parameter) const {
    return std::ssize(of_[unit][parameter].reduced);
  }
  std::int64_t GradientsMade(UnitId unit, std::int32_t parameter) const { return of_[unit][parameter].made; }
  // (micro-batch, unit) that the forwards of a step have to read.
  const std::set<std::pair<std::int32_t, UnitId>>& Reads(std::int64_t step) const { return reads_[step]; }

  // The content of the rank's shard of a unit.
  const std::vector<ShardRun>& Shard(UnitId unit, std::int64_t rank) const { return shards_[unit][rank]; }

 private:
  using Numbers = std::vector<double>;
  struct OfParameter {
    std::int64_t numel = 0;
    std::int64_t made = 0;
    std::vector<std::int64_t> waiting;               // made, not reduced yet
    std::vector<std::int64_t> arrived;               // reduced since the last zero_grad
    std::vector<std::vector<std::int64_t>> reduced;  // by version: the gradients that its optimizer step sees
    double divisor = 1;
  };

  void MakeGroups();
  void MakeShards();
  void RunProgram();
  void RunForward(const ForwardCall& call, std::int64_t step);
  bool GetsGradient(const UnitParameter& own, const shardplan::Parameter& traced, const Pass& backward) const;
  void RunBackward(const BackwardCall& call);
  void Call(const ModuleCall& call);
  void StepOptimizer(UnitId unit, std::int32_t parameter);
  std::vector<Communicator> ReducedOver(const Unit& unit, const UnitParameter& parameter) const;
  bool IsUnder(UnitId unit, const std::string& module) const;
  double DivisorOf(UnitId unit) const;

  Numbers MadeNumbers(UnitId unit, std::int32_t parameter, std::int64_t rank, std::int64_t index) const;
  Numbers ReducedNumbers(UnitId unit, std::int32_t parameter, std::int64_t rank, std::int64_t version) const;
  const Numbers& ParameterNumbers(UnitId unit, std::int32_t parameter, std::int64_t rank,
                                  std::int64_t version);

  Numbers UpdatedNumbers(UnitId unit, std::int32_t parameter, std::int64_t rank, std::int64_t version) const;

  enum class What : std::uint8_t { kParameter, kReduced, kUpdated, kMade };
  using Key = std::tuple<What, UnitId, std::int32_t, std::int64_t, std::int64_t, DType>;
  std::span<const std::byte> Bytes(const Key& key, const Numbers& numbers);

  const Plan& plan_;
  const Trace& trace_;
  const std::int64_t steps_;
  std::vector<std::vector<OfParameter>> of_;
  // By unit, parameter and rank: the ranks that share the parameter and whose gradients are summed.
  std::vector<std::vector<std::vector<std::vector<std::int64_t>>>> groups_;
  std::vector<std::vector<std::vector<ShardRun>>> shards_;  // by unit and rank
  std::vector<std::set<std::pair<std::int32_t, UnitId>>> reads_;
  std::vector<bool> syncs_, all_reduces_;  // by unit
  std::map<Key, std::vector<std::byte>> bytes_;
  std::map<std::tuple<UnitId, std::int32_t, std::int64_t, std::int64_t>, Numbers> parameters_;
};

}  // namespace shardplan::test
