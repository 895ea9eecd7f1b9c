#include "shardplan/simulator/cost_model.h"

#include <algorithm>
#include <array>
#include <utility>

#include "cost/fixed_log.h"
#include "shardplan/schemas/assert.h"

namespace shardplan {
namespace {

using internal::MulDiv;
using internal::MulDivUp;

constexpr std::int64_t kNanosecondsPerSecond = 1'000'000'000;
constexpr std::int64_t kMillion = 1'000'000;

// A step that takes longer is refused where it is lowered.
std::int64_t Limited(std::int64_t time_ns) { return std::min(time_ns, kLongestStep.value); }

// Time to do `amount` at `rate_per_second`; a rate of zero costs nothing.
std::int64_t TimeAt(std::int64_t amount, std::int64_t rate_per_second) {
  if (rate_per_second <= 0 || amount <= 0) return 0;
  return Limited(MulDivUp(amount, kNanosecondsPerSecond, rate_per_second));
}

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
  explicit AnalyticCostModel(const Cluster& cluster) : cluster_(cluster) {}

  // Roofline (Williams et al. 2009): the slower of arithmetic and memory, and no kernel shorter than the
  // overhead.
  Nanoseconds Operator(const OperatorEvent& event) const override {
    const std::int64_t memory_ns = MemoryTime(event.bytes_read + event.bytes_written);
    std::int64_t arithmetic_ns = TimeAt(event.flops, cluster_.device.vector_flops_per_second);
    if (IsMatmulOperator(event.name)) {
      for (const ComputeRate& rate : cluster_.device.matmul) {
        if (rate.dtype != event.dtype) continue;
        arithmetic_ns = TimeAt(event.flops, Scaled(rate.flops_per_second, EfficiencyPpm(rate, event.flops)));
        break;
      }
    }
    return {std::max({arithmetic_ns, memory_ns, cluster_.device.kernel_overhead_ns.value})};
  }

  Result<CollectiveCost> Collective(const CollectiveRequest& request) const override {
    if (request.ranks <= 1) return CollectiveCost{Nanoseconds{0}, "one rank", -1};
    return SlowestGroup(request, [&](const GroupPlacement& place) { return Ring(request, place); });
  }

  Nanoseconds DeviceCopy(Bytes read_bytes, Bytes written_bytes) const override {
    const Bytes moved = read_bytes + written_bytes;
    if (moved.value <= 0 || cluster_.device.memory_bytes_per_second <= 0) return Nanoseconds{0};
    return {std::max(MemoryTime(moved), cluster_.device.kernel_overhead_ns.value)};
  }

  Nanoseconds HostCopy(Bytes size_bytes) const override {
    return {TimeAt(size_bytes.value, cluster_.host_link_bytes_per_second)};
  }

  Nanoseconds HostWork(Bytes moved_bytes) const override {
    return {TimeAt(moved_bytes.value, cluster_.host.memory_bytes_per_second)};
  }

 private:
  // The ring: every rank sends (ranks - 1) / ranks of the tensor to its neighbour in ranks - 1 steps (an
  // all_reduce does it twice). Between nodes, all members of the group in a node send through their own
  // network links at once; the node with the fewest members is the narrowest place of the ring.
  Result<CollectiveCost> Ring(const CollectiveRequest& request, const GroupPlacement& place) const {
    const bool crosses = place.nodes > 1;
    if (cluster_.links.size() < (crosses ? 2U : 1U)) {
      return std::unexpected(Error{ErrorCode::kBadInput,
                                   crosses ? "the cluster has no link between nodes (links[1]) for a "
                                             "communicator that spans nodes"
                                           : "the cluster has no link and no table for a collective",
                                   "", "/cluster/links", std::to_string(cluster_.links.size()),
                                   crosses ? "2" : "1"});
    }
    const Link& inner = cluster_.links[0];
    const Link& outer = cluster_.links[crosses ? 1 : 0];
    std::int64_t rate = inner.bytes_per_second;
    std::int64_t latency_ns = inner.latency_ns.value * (request.ranks - 1);
    if (crosses) {
      const std::int64_t node_rate = MulDiv(outer.bytes_per_second, place.fewest_in_node, 1);
      rate = place.most_in_node == 1 ? node_rate : SlowerRate(inner.bytes_per_second, node_rate);
      latency_ns =
          inner.latency_ns.value * (request.ranks - place.nodes) + outer.latency_ns.value * (place.nodes - 1);
    }
    const std::int64_t sent = MulDivUp(request.full_tensor_bytes.value, request.ranks - 1, request.ranks);
    const std::int64_t passes = request.kind == CollectiveKind::kAllReduce ? 2 : 1;
    return CollectiveCost{Nanoseconds{passes * Limited(latency_ns + TimeAt(sent, rate))},
                          "alpha-beta " + outer.name, crosses ? 1 : 0};
  }

  std::int64_t MemoryTime(Bytes moved) const {
    return TimeAt(moved.value,
                  Scaled(cluster_.device.memory_bytes_per_second, cluster_.device.memory_efficiency_ppm));
  }
  // The smaller of two rates, where zero means unlimited.
  static std::int64_t SlowerRate(std::int64_t a, std::int64_t b) {
    if (a <= 0) return b;
    if (b <= 0) return a;
    return std::min(a, b);
  }

  const Cluster& cluster_;
};

class MeasuredCollectives final : public CostModel {
 public:
  MeasuredCollectives(const Cluster& cluster, std::unique_ptr<CostModel> base)
      : cluster_(cluster), base_(std::move(base)) {}

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
    const std::int32_t link = place.nodes > 1 ? 1 : 0;
    const CollectiveTable* best = nullptr;
    for (const CollectiveTable& table : cluster_.collectives) {
      if (table.kind != request.kind || table.ranks != request.ranks || table.points.empty()) continue;
      if (!OnLink(table, link)) continue;
      if (best == nullptr || Distance(table, place) < Distance(*best, place)) best = &table;
    }
    if (best == nullptr) {
      request.placements = {&place, 1};
      return base_->Collective(request);
    }
    CollectiveCost cost{InterpolateDuration(best->points, request.full_tensor_bytes), "", -1};
    if (static_cast<std::size_t>(link) < cluster_.links.size()) cost.link = link;
    cost.source = "measured " + std::to_string(request.ranks) + " ranks " + best->link;
    if (best->concurrent_groups > 1) cost.source += " x" + std::to_string(best->concurrent_groups);
    if (request.full_tensor_bytes > best->points.back().full_tensor_bytes) cost.source += ", extrapolated";
    return cost;
  }

  bool OnLink(const CollectiveTable& table, std::int32_t link) const {
    if (static_cast<std::size_t>(link) >= cluster_.links.size()) return cluster_.links.empty() && link == 0;
    return table.link == cluster_.links[static_cast<std::size_t>(link)].name;
  }
  static std::int64_t Distance(const CollectiveTable& table, const GroupPlacement& place) {
    return std::max(table.concurrent_groups, place.concurrent_groups) -
           std::min(table.concurrent_groups, place.concurrent_groups);
  }

  const Cluster& cluster_;
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

// First and last of the two points of `points` that enclose `position`, which is strictly inside the table.
template <typename Point, typename Projection>
std::pair<const Point*, const Point*> Enclosing(const std::vector<Point>& points, std::int64_t position,
                                                Projection projection) {
  const auto upper =
      std::upper_bound(points.begin(), points.end(), position,
                       [&](std::int64_t value, const Point& point) { return value < projection(point); });
  return {&*(upper - 1), &*upper};
}

}  // namespace

bool IsMatmulOperator(std::string_view name) {
  // Parts of names rather than whole ones: kernels come in many spellings
  // ("_scaled_dot_product_flash_attention", "flash_attn_backward"), and a new one should not silently run at
  // the vector rate.
  static constexpr std::array<std::string_view, 12> kExact = {"mm",     "bmm",    "addmm",      "baddbmm",
                                                              "addbmm", "mv",     "addmv",      "dot",
                                                              "matmul", "linear", "_scaled_mm", "_int_mm"};
  static constexpr std::array<std::string_view, 6> kParts = {"attention",  "flash_attn", "convolution",
                                                             "grouped_mm", "conv_",      "linear_backward"};
  if (const std::size_t dot = name.find("::"); dot != std::string_view::npos) name.remove_prefix(dot + 2);
  if (name.starts_with("aten.")) name.remove_prefix(5);
  if (const std::size_t dot = name.find('.'); dot != std::string_view::npos) name = name.substr(0, dot);
  if (std::ranges::find(kExact, name) != kExact.end()) return true;
  return std::ranges::any_of(
      kParts, [&](std::string_view part) { return name.find(part) != std::string_view::npos; });
}

std::int64_t EfficiencyPpm(const ComputeRate& rate, std::int64_t flops) {
  const std::vector<EfficiencyPoint>& points = rate.efficiency;
  if (points.empty()) return kMillion;
  if (flops <= points.front().flops) return points.front().efficiency_ppm;
  if (flops >= points.back().flops) return points.back().efficiency_ppm;
  const auto [low, high] = Enclosing(points, flops, [](const EfficiencyPoint& p) { return p.flops; });
  const std::int64_t start = internal::Log2Fixed(low->flops);
  return low->efficiency_ppm + MulDiv(high->efficiency_ppm - low->efficiency_ppm,
                                      internal::Log2Fixed(flops) - start,
                                      internal::Log2Fixed(high->flops) - start);
}

Nanoseconds InterpolateDuration(const std::vector<CollectivePoint>& points, Bytes size_bytes) {
  const CollectivePoint& first = points.front();
  const CollectivePoint& last = points.back();
  if (size_bytes <= first.full_tensor_bytes || points.size() == 1) return first.duration_ns;
  if (size_bytes == last.full_tensor_bytes) return last.duration_ns;
  if (size_bytes > last.full_tensor_bytes) {
    const CollectivePoint& before = points[points.size() - 2];
    const std::int64_t rise = std::max<std::int64_t>(0, last.duration_ns.value - before.duration_ns.value);
    return {
        Limited(last.duration_ns.value + MulDiv(rise, (size_bytes - last.full_tensor_bytes).value,
                                                (last.full_tensor_bytes - before.full_tensor_bytes).value))};
  }
  const auto [low, high] =
      Enclosing(points, size_bytes.value, [](const CollectivePoint& p) { return p.full_tensor_bytes.value; });
  if (low->full_tensor_bytes == size_bytes || low->duration_ns == high->duration_ns) return low->duration_ns;
  if (low->duration_ns.value < 1 || high->duration_ns.value < 1 || low->full_tensor_bytes.value < 1) {
    // No logarithm of zero: a straight line.
    return {low->duration_ns.value + MulDiv((high->duration_ns - low->duration_ns).value,
                                            (size_bytes - low->full_tensor_bytes).value,
                                            (high->full_tensor_bytes - low->full_tensor_bytes).value)};
  }
  const std::int64_t from = internal::Log2Fixed(low->full_tensor_bytes.value);
  const std::int64_t to = internal::Log2Fixed(high->full_tensor_bytes.value);
  const std::int64_t at = internal::Log2Fixed(size_bytes.value);
  const std::int64_t start = internal::Log2Fixed(low->duration_ns.value);
  const std::int64_t rise = internal::Log2Fixed(high->duration_ns.value) - start;
  const std::int64_t duration = internal::Exp2Fixed(start + MulDiv(rise, at - from, to - from));
  const auto [least, most] = std::minmax(low->duration_ns.value, high->duration_ns.value);
  return {std::clamp(duration, least, most)};
}

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
