// SPDX-License-Identifier: Apache-2.0
// How long a step takes with the chain cut into units in one way or another, roughly: compute and one link,
// each in order. Good for the question which cuts are worth planning, and for no other.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "optimize/choice.h"
#include "shardplan/schemas/cluster.h"
#include "shardplan/schemas/plan.h"
#include "shardplan/schemas/trace.h"
#include "shardplan/simulator/cost_model.h"

namespace shardplan::optimize {

class UnitModel {
 public:
  // `like`: a plan of the job, for its mesh and dtypes. None: the model has no chain, or costs are missing.
  static std::optional<UnitModel> Make(const Trace& trace, const Job& job, const Plan& like);

  // `from` with the best cut for each number of units, the best of them first, `most` of them. The kept
  // modules are as many as `from` keeps, or all of a unit more.
  std::vector<Choice> BestCuts(const Choice& from, std::size_t most) const;
  // The model's estimate of one.
  std::int64_t StepOf(const std::vector<std::int32_t>& units, const Choice& from) const;

 private:
  struct Piece {  // of one piece of work
    std::int64_t duration_ns = 0;
    std::int32_t behind = -1;  // index of the work of the other resource that it is behind
  };
  // By first module and number of modules behind it: what the collectives of such a unit take.
  struct Table {
    std::vector<std::int64_t> cost_ns;
  };

  UnitModel() = default;
  void AddModules(const Trace& trace, const Job& job, const Plan& like);
  Status AddCosts(const Plan& like);
  Result<Table> CostsOf(CollectiveKind kind, const Communicator& group, std::int64_t world_size,
                        const std::vector<std::int64_t>& bytes_before, const CostModel& costs) const;
  std::int64_t At(const Table& table, std::int32_t begin, std::int32_t end) const {
    return table.cost_ns[static_cast<std::size_t>(begin * (modules_ + 1) + end)];
  }
  std::int64_t Run(const std::vector<Piece>& compute, const std::vector<Piece>& link) const;
  std::vector<std::int32_t> Improved(std::vector<std::int32_t> units, const Choice& from,
                                     std::int64_t& step_ns) const;
  std::int32_t BeginOfLast(const Choice& from, std::int32_t count) const;

  Cluster cluster_;
  std::int32_t modules_ = 0;
  std::int64_t compute_rate_ppm_ = 1'000'000, link_rate_ppm_ = 1'000'000;
  // Sums over the modules before each.
  std::vector<std::int64_t> forward_ns_, backward_ns_, gathered_bytes_, reduced_bytes_;
  std::int64_t copied_per_mib_ns_ = 0;
  Table gather_, reduce_;
  std::vector<std::pair<std::int64_t, Table>> parts_;  // by ranks of a smaller mesh
};

}  // namespace shardplan::optimize
