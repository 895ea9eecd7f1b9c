// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <optional>
#include <utility>

#include "cost/collective_model.h"
#include "cost/collective_tables.h"
#include "cost/fixed_log.h"
#include "cost/matmul_shapes.h"
#include "cost/operator_class.h"
#include "shardplan/schemas/assert.h"
#include "shardplan/simulator/cost_model.h"

namespace shardplan {
namespace {

using internal::Limited;
using internal::MulDiv;
using internal::MulDivUp;
using internal::TimeAt;

constexpr std::int64_t kMillion = 1'000'000;

std::int64_t Scaled(std::int64_t rate, std::int64_t ppm) { return MulDiv(rate, ppm, kMillion); }

// The cost of the group that takes longest, of the first among equals.
template <typename CostOf>
Result<CollectiveCost> SlowestGroup(const CollectiveRequest& request, CostOf cost_of) {
  SHARDPLAN_ASSERT(!request.placements.empty(), "PlaceGroups finds at least one");
  Result<CollectiveCost> slowest = cost_of(request.placements.front());
  for (const GroupPlacement& place : request.placements.subspan(1)) {
    if (!slowest) break;
    Result<CollectiveCost> cost = cost_of(place);
    if (!cost || cost->duration_ns > slowest->duration_ns) slowest = std::move(cost);
  }
  return slowest;
}

class AnalyticCostModel final : public CostModel {
 public:
  explicit AnalyticCostModel(const Cluster& cluster)
      : cluster_(cluster),
        slowest_ppm_(kMillion +
                     MulDiv(cluster.device.spread_ppm, internal::SlowestOf(cluster.ranks), kMillion)) {}

  // Roofline (Williams et al. 2009): the slower of arithmetic and memory, and no kernel shorter than the
  // overhead. If the host runs the kernels, issuing the operator is part of it.
  Nanoseconds Operator(const OperatorEvent& event) const override {
    const std::int64_t memory_ns = OfClass(event.name, MemoryTime(event.bytes_read + event.bytes_written));
    std::int64_t arithmetic_ns = TimeAt(event.flops, cluster_.device.vector_flops_per_second);
    if (const ComputeRate* rate = internal::RateOf(cluster_.device, event)) {
      const std::optional<Nanoseconds> of_shape = internal::DurationOfShape(*rate, event);
      arithmetic_ns =
          of_shape ? of_shape->value
                   : TimeAt(event.flops, Scaled(rate->flops_per_second, EfficiencyPpm(*rate, event.flops)));
      if (const std::int64_t sequence = internal::SequenceOf(event); sequence > 0)
        arithmetic_ns = Limited(MulDivUp(arithmetic_ns, sequence + rate->half_rate_sequence, sequence));
    }
    // Under a power limit kernels of arithmetic run at a lower clock.
    if (cluster_.device.clock_ppm < kMillion)
      arithmetic_ns =
          Limited(MulDivUp(arithmetic_ns, kMillion, std::max<std::int64_t>(1, cluster_.device.clock_ppm)));
    const Nanoseconds issue_ns = cluster_.host.runs_kernels ? cluster_.host.operator_issue_ns : Nanoseconds{};
    return Nanoseconds{
               OfSlowest(std::max({arithmetic_ns, memory_ns, cluster_.device.kernel_overhead_ns.value}))} +
           issue_ns;
  }

  Result<CollectiveCost> Collective(const CollectiveRequest& request) const override {
    if (request.ranks <= 1) return CollectiveCost{Nanoseconds{0}, "one rank", {}};
    return SlowestGroup(request, [&](const GroupPlacement& place) {
      return internal::ModelledCollective(cluster_, request, place);
    });
  }

  Nanoseconds DeviceCopy(Bytes read_bytes, Bytes written_bytes) const override {
    const Bytes moved = read_bytes + written_bytes;
    if (moved.value <= 0 || cluster_.device.memory_bytes_per_second <= 0) return Nanoseconds{0};
    return {OfSlowest(std::max(MemoryTime(moved), cluster_.device.kernel_overhead_ns.value))};
  }

  Nanoseconds HostCopy(Bytes size_bytes) const override {
    return {TimeAt(size_bytes.value, cluster_.host_link_bytes_per_second)};
  }

  Nanoseconds HostWork(Bytes moved_bytes) const override {
    return {TimeAt(moved_bytes.value, cluster_.host.memory_bytes_per_second)};
  }

 private:
  std::int64_t OfClass(std::string_view name, std::int64_t memory_ns) const {
    if (cluster_.device.class_rates.empty() || memory_ns == 0) return memory_ns;
    const std::string_view of = OperatorClasses()[OperatorClassOf(name)];
    const auto found = std::ranges::find(cluster_.device.class_rates, of, &ClassRate::operator_class);
    if (found == cluster_.device.class_rates.end()) return memory_ns;
    return Limited(MulDivUp(memory_ns, kMillion, found->memory_rate_ppm));
  }

  std::int64_t MemoryTime(Bytes moved) const {
    return TimeAt(moved.value, Scaled(cluster_.device.memory_bytes_per_second,
                                      internal::MemoryPpm(cluster_.device, moved)));
  }
  std::int64_t OfSlowest(std::int64_t duration_ns) const {
    return slowest_ppm_ == kMillion ? duration_ns : Limited(MulDivUp(duration_ns, slowest_ppm_, kMillion));
  }

  const Cluster& cluster_;
  const std::int64_t slowest_ppm_;
};

class MeasuredCollectives final : public CostModel {
 public:
  MeasuredCollectives(const Cluster& cluster, std::unique_ptr<CostModel> base)
      : tables_(cluster), base_(std::move(base)) {}

  Nanoseconds Operator(const OperatorEvent& event) const override { return base_->Operator(event); }
  Nanoseconds DeviceCopy(Bytes read_bytes, Bytes written_bytes) const override {
    return base_->DeviceCopy(read_bytes, written_bytes);
  }
  Nanoseconds HostCopy(Bytes size_bytes) const override { return base_->HostCopy(size_bytes); }
  Nanoseconds HostWork(Bytes moved_bytes) const override { return base_->HostWork(moved_bytes); }

  Result<CollectiveCost> Collective(const CollectiveRequest& request) const override {
    if (request.ranks <= 1) return base_->Collective(request);
    return SlowestGroup(request, [&](const GroupPlacement& place) { return OfGroup(request, place); });
  }

 private:
  Result<CollectiveCost> OfGroup(CollectiveRequest request, const GroupPlacement& place) const {
    if (std::optional<CollectiveCost> cost = tables_.Cost(request, place)) return *std::move(cost);
    request.placements = {&place, 1};
    return base_->Collective(request);
  }

  mutable internal::CollectiveTables tables_;
  std::unique_ptr<CostModel> base_;
};

class MeasuredOperators final : public CostModel {
 public:
  explicit MeasuredOperators(std::unique_ptr<CostModel> base) : base_(std::move(base)) {}
  Nanoseconds Operator(const OperatorEvent& event) const override {
    return event.duration_ns.value >= 0 ? event.duration_ns : base_->Operator(event);
  }
  Result<CollectiveCost> Collective(const CollectiveRequest& request) const override {
    return base_->Collective(request);
  }
  Nanoseconds DeviceCopy(Bytes read_bytes, Bytes written_bytes) const override {
    return base_->DeviceCopy(read_bytes, written_bytes);
  }
  Nanoseconds HostCopy(Bytes size_bytes) const override { return base_->HostCopy(size_bytes); }
  Nanoseconds HostWork(Bytes moved_bytes) const override { return base_->HostWork(moved_bytes); }

 private:
  std::unique_ptr<CostModel> base_;
};

}  // namespace

std::unique_ptr<CostModel> MakeAnalyticCostModel(const Cluster& cluster) {
  return std::make_unique<AnalyticCostModel>(cluster);
}
std::unique_ptr<CostModel> WithMeasuredCollectives(const Cluster& cluster, std::unique_ptr<CostModel> base) {
  return std::make_unique<MeasuredCollectives>(cluster, std::move(base));
}
std::unique_ptr<CostModel> WithMeasuredOperators(std::unique_ptr<CostModel> base) {
  return std::make_unique<MeasuredOperators>(std::move(base));
}
std::unique_ptr<CostModel> MakeCostModel(const Cluster& cluster) {
  return WithMeasuredOperators(WithMeasuredCollectives(cluster, MakeAnalyticCostModel(cluster)));
}

}  // namespace shardplan
