// SPDX-License-Identifier: Apache-2.0
#include "bound/muon_work.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <map>
#include <optional>
#include <variant>
#include <vector>

#include "bound/cost_lines.h"
#include "cost/operator_costs.h"
#include "shardplan/schemas/exchanges.h"
#include "shardplan/schemas/layout.h"
#include "shardplan/schemas/optimizers.h"

namespace shardplan::internal {
namespace {

constexpr std::int64_t kBytesOfElement = 2;  // bfloat16; only a smaller dtype of the parameter is less
constexpr std::int64_t kWeights = 64;        // steps of w

// The most rows that one of the pieces of `piece` rows each has of the rows from `first` on.
std::int64_t MostInOnePiece(std::int64_t first, std::int64_t rows, std::int64_t piece) {
  const std::int64_t in_first = std::min(rows, piece - first % piece);
  return std::max(in_first, std::min(rows - in_first, piece));
}

class MuonWork {
 public:
  MuonWork(const Trace& trace, const Plan& job, const CostModel& costs, const Unit* mesh)
      : trace_(trace),
        job_(job),
        muon_(*job.strategy.optimizer.muon),
        costs_(costs),
        operators_(costs),
        exchanges_are_known_(mesh != nullptr) {
    if (mesh == nullptr) return;
    shards_ = CommunicatorAt(mesh->shard_communicator);
    replicas_ = CommunicatorAt(mesh->replicate_communicator);
    if (shards_ && replicas_) {
      all_ = ReplicasOfShards(*replicas_, *shards_);
    } else {
      all_ = shards_ ? shards_ : replicas_;
    }
  }

  Nanoseconds Least(Nanoseconds other_ns) {
    std::vector<std::vector<Way>> matrices;
    for (const Parameter& parameter : trace_.parameters) {
      if (!MuonSteps(job_.strategy.optimizer, parameter.fqn, parameter.shared_with)) continue;
      std::vector<Way> ways = WaysOf(parameter);
      if (!ways.empty()) matrices.push_back(std::move(ways));
    }
    SetSlopes(matrices);
    Int128 most = 0;
    for (std::int64_t weight = 0; weight <= kWeights; ++weight) {
      Int128 sum = Int128{other_ns.value} * weight;
      for (const std::vector<Way>& ways : matrices) {
        const auto weighted = [&](const Way& way) {
          return Int128{way.compute_ns} * weight + ExchangesOf(way) * (kWeights - weight);
        };
        Int128 least = weighted(ways.front());
        for (const Way& way : ways) least = std::min(least, weighted(way));
        sum += least;
      }
      most = std::max(most, sum);
    }
    return {static_cast<std::int64_t>(most / kWeights)};
  }

 private:
  struct Way {
    std::int64_t compute_ns = 0;
    bool over_replicas = false;
    std::int64_t there_bytes = 0, back_bytes = 0;  // a mean rank's tensors
    std::int64_t gathered_bytes = 0;               // whole, by every rank
  };

  std::int64_t RanksOf(const std::optional<Communicator>& group) const { return group ? group->size : 1; }

  std::optional<Communicator> CommunicatorAt(CommunicatorId id) const {
    if (id < 0) return std::nullopt;
    return job_.communicators[static_cast<std::size_t>(id)];
  }

  // No way: nothing is known of the parameter.
  std::vector<Way> WaysOf(const Parameter& parameter) {
    std::vector<Way> ways;
    const std::int64_t columns = parameter.shape.back();
    if (columns == 0) return ways;
    const std::int64_t all_rows = Numel(UnitParameter{.shape = parameter.shape}) / columns;
    const bool stack = parameter.shape.size() == 3;
    AddOwners(parameter, stack ? parameter.shape[1] : all_rows, all_rows, ways);
    for (const MatrixRule& rule : muon_.compute) {
      if (!stack && rule.block_rows > 0 && all_rows % rule.block_rows == 0)
        AddOwners(parameter, rule.block_rows, all_rows, ways);
    }
    const TracedOptimizerStep* without_owner =
        stack || !exchanges_are_known_
            ? nullptr
            : Traced(parameter, RanksOf(shards_), RanksOf(replicas_), parameter.shape);
    if (without_owner != nullptr)
      ways.push_back({.compute_ns = std::max(OperatorsOf(*without_owner), CollectivesOf(*without_owner))});
    return ways;
  }

  // The matrices are `rows` of the parameter's rows each.
  void AddOwners(const Parameter& parameter, std::int64_t rows, std::int64_t all_rows,
                 std::vector<Way>& ways) {
    const std::int64_t columns = parameter.shape.back();
    const TracedOptimizerStep* whole = rows == 0 ? nullptr : Traced(parameter, 1, 1, {rows, columns});
    if (whole == nullptr) return;
    const std::int64_t matrices = all_rows / rows, replicas = RanksOf(replicas_);
    const Int128 iterations_ns = Int128{OperatorsOf(*whole)} * matrices;
    const auto mean = [&](Int128 of_all) { return static_cast<std::int64_t>(of_all / job_.world_size); };
    if (!exchanges_are_known_) {
      ways.push_back({.compute_ns = mean(iterations_ns)});
      return;
    }
    const std::int64_t element_bytes = std::min(kBytesOfElement, SizeBytes(parameter.dtype));
    ways.push_back({.compute_ns = static_cast<std::int64_t>(iterations_ns),
                    .gathered_bytes = all_rows * columns * element_bytes});
    // FSDP cuts along the first dimension.
    const std::int64_t first_dimension = parameter.shape.front(), shards = RanksOf(shards_);
    const std::int64_t piece =
        (first_dimension + shards - 1) / shards * (all_rows / std::max<std::int64_t>(1, first_dimension));
    std::int64_t leaving = 0;  // rows that no owner has already
    for (std::int64_t first = 0; first < all_rows; first += rows)
      leaving += rows - MostInOnePiece(first, rows, piece);
    const std::int64_t row_bytes = columns * element_bytes;
    const auto tensor = [&](std::int64_t moved_rows, const std::optional<Communicator>& group) {
      return moved_rows * row_bytes / std::max<std::int64_t>(1, RanksOf(group) - 1);
    };
    const std::int64_t in_replica = tensor(leaving, shards_);
    ways.push_back({mean(iterations_ns * replicas), false, in_replica, in_replica});
    if (replicas > 1) {
      ways.push_back({mean(iterations_ns), true, tensor(leaving, all_),
                      tensor(leaving + (replicas - 1) * all_rows, all_)});
    }
  }

  const TracedOptimizerStep* Traced(const Parameter& parameter, std::int64_t shards, std::int64_t replicas,
                                    const std::vector<std::int64_t>& shape) const {
    return TracedMuonStep(trace_, muon_, shards, replicas, shape, parameter.dtype);
  }

  // Kernels of the iterations.
  std::int64_t OperatorsOf(const TracedOptimizerStep& step) {
    const auto [found, added] = operators_ns_.try_emplace(&step, 0);
    if (!added) return found->second;
    for (const SegmentEntry& entry : step.orthogonalize) {
      const auto* op = std::get_if<OperatorEvent>(&entry);
      if (op != nullptr && !op->collective) found->second += operators_.Of(*op).duration_ns.value;
    }
    return found->second;
  }

  std::int64_t CollectivesOf(const TracedOptimizerStep& step) {
    const auto [found, added] = collectives_ns_.try_emplace(&step, 0);
    if (!added) return found->second;
    for (const std::vector<SegmentEntry>* part : {&step.update, &step.orthogonalize, &step.apply}) {
      for (const SegmentEntry& entry : *part) {
        const auto* op = std::get_if<OperatorEvent>(&entry);
        if (op == nullptr || !op->collective) continue;
        const CommunicatorId traced = op->collective->communicator;
        const std::optional<Communicator>& group = traced == kOfShards     ? shards_
                                                   : traced == kOfReplicas ? replicas_
                                                                           : all_;
        if (!group) continue;
        const Result<CollectiveCost> cost = CostOfTraced(costs_, job_.cluster, *group, job_.world_size,
                                                         *op->collective, op->collective->size_bytes);
        if (cost) found->second += (op->duration_ns.value >= 0 ? op->duration_ns : cost->duration_ns).value;
      }
    }
    return found->second;
  }

  // No exchange is smaller than a matrix, or larger than all together.
  void SetSlopes(const std::vector<std::vector<Way>>& matrices) {
    std::int64_t least_gathered = 0;
    Int128 padded = 0;  // a gather has the first rank's rows of each rank
    for (const std::vector<Way>& ways : matrices) {
      for (const Way& way : ways) {
        if (way.gathered_bytes == 0) continue;
        least_gathered =
            least_gathered == 0 ? way.gathered_bytes : std::min(least_gathered, way.gathered_bytes);
        padded += Int128{way.gathered_bytes} * RanksOf(shards_);
      }
    }
    if (padded > 0 && shards_) {
      gather_slope_ =
          SlopeBelow(costs_, job_.cluster, CollectiveKind::kAllGather, *shards_, job_.world_size,
                     least_gathered, static_cast<std::int64_t>(std::min<Int128>(padded, Int128{1} << 50)));
    }
    for (const bool over_replicas : {false, true}) {
      std::int64_t least = 0;
      Int128 in_all = 0;
      for (const std::vector<Way>& ways : matrices) {
        for (const Way& way : ways) {
          if (way.over_replicas != over_replicas) continue;
          for (const std::int64_t bytes : {way.there_bytes, way.back_bytes}) {
            if (bytes > 0) least = least == 0 ? bytes : std::min(least, bytes);
            in_all += bytes;
          }
        }
      }
      const std::optional<Communicator>& group = over_replicas ? all_ : shards_;
      if (in_all == 0 || !group) continue;
      const auto most = static_cast<std::int64_t>(std::min<Int128>(2 * in_all + 2, Int128{1} << 50));
      slopes_[over_replicas ? 1 : 0] =
          SlopeBelow(costs_, job_.cluster, CollectiveKind::kAllToAll, *group, job_.world_size, least, most);
    }
  }

  // The way there may be under the backward where it may begin there.
  Int128 ExchangesOf(const Way& way) const {
    const std::int64_t there_bytes = muon_.begin_in_backward ? 0 : way.there_bytes;
    return Int128{there_bytes + way.back_bytes} * slopes_[way.over_replicas ? 1 : 0] / kSlopeScale +
           Int128{way.gathered_bytes} * gather_slope_ / kSlopeScale;
  }

  const Trace& trace_;
  const Plan& job_;
  const Muon& muon_;
  const CostModel& costs_;
  OperatorCosts operators_;
  const bool exchanges_are_known_;
  std::optional<Communicator> shards_, replicas_, all_;  // none: of one rank
  std::map<const TracedOptimizerStep*, std::int64_t> operators_ns_, collectives_ns_;
  std::array<std::int64_t, 2> slopes_ = {0, 0};  // in each replica, among all
  std::int64_t gather_slope_ = 0;
};

}  // namespace

Nanoseconds LeastMuonTime(const Trace& trace, const Plan& job, const CostModel& costs, const Unit* mesh,
                          Nanoseconds other_ns) {
  return MuonWork(trace, job, costs, mesh).Least(other_ns);
}

}  // namespace shardplan::internal
