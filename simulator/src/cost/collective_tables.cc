// SPDX-License-Identifier: Apache-2.0
// [Note: numbers of ranks that nobody measured]
// At one size of the shards a ring of more ranks only takes more steps, so measurements are compared there:
// the algorithm's bandwidth (whole tensor over time) at equal shards is linear in 1 / ranks between and
// beyond two numbers of ranks. An all_reduce is compared with the all_gather and the reduce_scatter of as
// many ranks first: where the library takes another algorithm for it than the ring, their ratio says by how
// much that is faster. A rank's parts of an all_to_all, a gather and a scatter are as large as a shard, and
// the same holds of them. A broadcast, a reduce and a send move the whole tensor through each rank: on any
// number of ranks they take as long at the same size.
#include "cost/collective_tables.h"

#include <algorithm>
#include <cstdlib>
#include <set>
#include <utility>
#include <vector>

#include "cost/collective_model.h"
#include "cost/enclosing.h"
#include "cost/fixed_log.h"
#include "shardplan/schemas/collective_kinds.h"

namespace shardplan {
namespace {

constexpr Bytes kMostTableBytes{std::int64_t{1} << 53};

CollectiveMovement MovementOf(CollectiveKind kind) { return DescriptionOf(kind).movement; }

// A send and its recv are measured as one.
CollectiveKind MeasuredAs(CollectiveKind kind) {
  return kind == CollectiveKind::kReceive ? CollectiveKind::kSend : kind;
}

// Whether each rank has a part of the tensor, and not the whole.
bool IsOfParts(CollectiveKind kind) {
  return MovementOf(kind) != CollectiveMovement::kChain && MovementOf(kind) != CollectiveMovement::kTransfer;
}

// The tables of a placement: those of its link that are of as many nodes. Groups of other numbers of ranks
// are those of as many whole nodes as they fill. A send is from one rank to another, however many nodes the
// group spans.
class TablesOfPlace {
 public:
  TablesOfPlace(const Cluster& cluster, const CollectiveRequest& request, const GroupPlacement& place)
      : cluster_(cluster),
        link_(LinkOf(place)),
        ranks_(request.ranks),
        nodes_(place.nodes),
        concurrent_groups_(place.concurrent_groups) {}

  // That of the nearest number of groups at once, the first among equals; null: none.
  const CollectiveTable* Find(CollectiveKind kind, std::int64_t ranks) const {
    const CollectiveTable* best = nullptr;
    for (const CollectiveTable& table : cluster_.collectives) {
      if (!IsOf(table, kind) || table.ranks != ranks) continue;
      if (best == nullptr || Distance(table) < Distance(*best)) best = &table;
    }
    return best;
  }

  // Numbers of ranks with a table, two or more ranks, but not `except`.
  std::vector<std::int64_t> Ranks(CollectiveKind kind, std::int64_t except) const {
    std::set<std::int64_t> ranks;
    for (const CollectiveTable& table : cluster_.collectives) {
      if (IsOf(table, kind) && table.ranks > 1 && table.ranks != except) ranks.insert(table.ranks);
    }
    return {ranks.begin(), ranks.end()};
  }

 private:
  bool IsOf(const CollectiveTable& table, CollectiveKind kind) const {
    return MeasuredAs(table.kind) == MeasuredAs(kind) && !table.points.empty() && IsHere(table);
  }
  bool IsHere(const CollectiveTable& table) const {
    if (cluster_.links.empty()) {
      if ((table.nodes > 1) != (link_ == 1)) return false;
    } else if (link_ >= cluster_.links.size() || table.link != cluster_.links[link_].name) {
      return false;
    }
    if (table.nodes == 0 || link_ == 0 || MovementOf(table.kind) == CollectiveMovement::kTransfer)
      return true;
    return table.nodes == (table.ranks == ranks_ ? nodes_ : PlaceTable(cluster_, table.ranks, 0, 1).nodes);
  }
  std::int64_t Distance(const CollectiveTable& table) const {
    return std::abs(table.concurrent_groups - concurrent_groups_);
  }

  const Cluster& cluster_;
  const std::size_t link_;
  const std::int64_t ranks_, nodes_, concurrent_groups_;
};

class RankFit {
 public:
  explicit RankFit(const TablesOfPlace& tables) : tables_(tables) {}

  // Points at the sizes of the tables it is from; empty where there is none.
  std::vector<CollectivePoint> Points(CollectiveKind kind, std::int64_t ranks) const {
    const std::vector<std::int64_t> bases = Bases(kind, ranks);
    std::set<Bytes> sizes;
    for (const std::int64_t base : bases) {
      for (const CollectivePoint& point : tables_.Find(kind, base)->points) {
        const Bytes size = SizeOn(kind, ranks, base, point.full_tensor_bytes);
        if (size <= kMostTableBytes) sizes.insert(size);
      }
    }
    std::vector<CollectivePoint> points;
    Nanoseconds longest;  // no larger tensor is faster
    for (const Bytes size : sizes) {
      longest = std::max(longest, {internal::Limited(At(kind, ranks, size))});
      points.push_back({size, longest});
    }
    return points;
  }

 private:
  // The size on `ranks` ranks that is compared with `size` on `base`.
  static Bytes SizeOn(CollectiveKind kind, std::int64_t ranks, std::int64_t base, Bytes size) {
    return IsOfParts(kind) ? Bytes{internal::MulDiv(size.value, ranks, base)} : size;
  }

  // One or two numbers of ranks to compare with: the nearest on both sides, else the two nearest. One for
  // whole tensors, the nearest.
  std::vector<std::int64_t> Bases(CollectiveKind kind, std::int64_t ranks) const {
    const std::vector<std::int64_t> all = tables_.Ranks(kind, ranks);
    if (all.size() <= 1) return all;
    if (!IsOfParts(kind)) return {Nearest(all, ranks).front()};
    const auto above = static_cast<std::size_t>(std::ranges::upper_bound(all, ranks) - all.begin());
    const std::size_t first = std::clamp<std::size_t>(above, 1, all.size() - 1) - 1;
    return {all[first], all[first + 1]};
  }

  std::int64_t Measured(CollectiveKind kind, std::int64_t base, std::int64_t ranks, Bytes size) const {
    const Bytes there = SizeOn(kind, base, ranks, size);
    return InterpolateDuration(tables_.Find(kind, base)->points, there).value;
  }

  // By the kind's own tables; -1: none.
  std::int64_t ByOwn(CollectiveKind kind, std::int64_t ranks, Bytes size) const {
    if (const CollectiveTable* table = tables_.Find(kind, ranks))
      return InterpolateDuration(table->points, size).value;
    const std::vector<std::int64_t> bases = Bases(kind, ranks);
    if (bases.empty()) return -1;
    const std::int64_t a = bases.front();
    const std::int64_t at_a = Measured(kind, a, ranks, size);
    if (!IsOfParts(kind)) return at_a;
    if (bases.size() == 1) return internal::MulDiv(at_a, ranks - 1, a - 1);
    const std::int64_t b = bases.back();
    const std::int64_t of_a = internal::MulDiv(at_a, ranks, a);
    const std::int64_t of_b = internal::MulDiv(Measured(kind, b, ranks, size), ranks, b);
    // (1 / ranks - 1 / a) / (1 / b - 1 / a) = (a - ranks) b / ((a - b) ranks)
    const std::int64_t time = of_a + internal::MulDiv(of_b - of_a, (ranks - a) * b, (b - a) * ranks);
    return std::max(time, std::min(of_a, of_b) / 2);
  }

  std::int64_t At(CollectiveKind kind, std::int64_t ranks, Bytes size) const {
    const std::int64_t own = ByOwn(kind, ranks, size);
    if (kind != CollectiveKind::kAllReduce) return own;
    const std::int64_t two = Two(ranks, size);
    if (two < 1) return own;
    std::int64_t sum = 0;
    std::int64_t count = 0;
    for (const std::int64_t near : Nearest(tables_.Ranks(kind, ranks), ranks)) {
      const std::int64_t two_there = Two(near, {internal::MulDiv(size.value, near, ranks)});
      if (two_there < 1) return own;
      sum += internal::MulDiv(two, Measured(kind, near, ranks, size), two_there);
      ++count;
    }
    return count > 0 ? internal::MulDiv(sum, 1, count) : own;
  }

  // An all_gather and a reduce_scatter; -1: not known.
  std::int64_t Two(std::int64_t ranks, Bytes size) const {
    const std::int64_t gather = ByOwn(CollectiveKind::kAllGather, ranks, size);
    const std::int64_t scatter = ByOwn(CollectiveKind::kReduceScatter, ranks, size);
    return gather < 0 || scatter < 0 ? -1 : gather + scatter;
  }

  // The numbers of ranks nearest by their ratio, two where they are equally near.
  static std::vector<std::int64_t> Nearest(const std::vector<std::int64_t>& all, std::int64_t ranks) {
    const auto farther = [&](std::int64_t a, std::int64_t b) {  // max(a, r) / min(a, r) of both, crosswise
      return internal::MulDiv(std::max(a, ranks), std::min(b, ranks), 1) -
             internal::MulDiv(std::max(b, ranks), std::min(a, ranks), 1);
    };
    std::vector<std::int64_t> nearest;
    for (const std::int64_t candidate : all) {
      const std::int64_t by = nearest.empty() ? 0 : farther(candidate, nearest.front());
      if (by > 0) continue;
      if (by < 0) nearest.clear();
      nearest.push_back(candidate);
    }
    return nearest;
  }

  const TablesOfPlace& tables_;
};

// The rank counts of a table between nodes stand for whole nodes. Sends have no part in that.
bool CanBeFitted(const Cluster& cluster, CollectiveKind kind, const GroupPlacement& place) {
  return place.nodes <= 1 || MovementOf(kind) == CollectiveMovement::kTransfer ||
         (place.fewest_in_node == place.most_in_node && place.most_in_node == cluster.ranks_per_node);
}

}  // namespace

Nanoseconds InterpolateDuration(const std::vector<CollectivePoint>& points, Bytes size_bytes) {
  const CollectivePoint& first = points.front();
  const CollectivePoint& last = points.back();
  if (size_bytes <= first.full_tensor_bytes || points.size() == 1) return first.duration_ns;
  if (size_bytes == last.full_tensor_bytes) return last.duration_ns;
  if (size_bytes > last.full_tensor_bytes) {
    const CollectivePoint& before = points[points.size() - 2];
    const std::int64_t rise = std::max<std::int64_t>(0, last.duration_ns.value - before.duration_ns.value);
    return {internal::Limited(last.duration_ns.value +
                              internal::MulDiv(rise, (size_bytes - last.full_tensor_bytes).value,
                                               (last.full_tensor_bytes - before.full_tensor_bytes).value))};
  }
  const auto [low, high] = internal::Enclosing(
      points, size_bytes.value, [](const CollectivePoint& p) { return p.full_tensor_bytes.value; });
  if (low->full_tensor_bytes == size_bytes || low->duration_ns == high->duration_ns) return low->duration_ns;
  if (low->duration_ns.value < 1 || high->duration_ns.value < 1 || low->full_tensor_bytes.value < 1) {
    // No bandwidth: a straight line.
    return {low->duration_ns.value +
            internal::MulDiv((high->duration_ns - low->duration_ns).value,
                             (size_bytes - low->full_tensor_bytes).value,
                             (high->full_tensor_bytes - low->full_tensor_bytes).value)};
  }
  // The durations at the bandwidths of both, and the one at a bandwidth between them.
  const std::int64_t slow =
      internal::MulDiv(low->duration_ns.value, size_bytes.value, low->full_tensor_bytes.value);
  const std::int64_t fast = std::max<std::int64_t>(
      1, internal::MulDiv(high->duration_ns.value, size_bytes.value, high->full_tensor_bytes.value));
  const std::int64_t from = internal::Log2Fixed(low->full_tensor_bytes.value);
  const std::int64_t whole = internal::Log2Fixed(high->full_tensor_bytes.value) - from;
  const std::int64_t part = internal::Log2Fixed(size_bytes.value) - from;
  const std::int64_t mixed =
      internal::MulDiv(fast, whole - part, whole) + internal::MulDiv(slow, part, whole);
  const auto [least, most] = std::minmax(low->duration_ns.value, high->duration_ns.value);
  return {std::clamp(internal::MulDiv(slow, fast, std::max<std::int64_t>(1, mixed)), least, most)};
}

namespace internal {

std::optional<CollectiveCost> CollectiveTables::Cost(const CollectiveRequest& request,
                                                     const GroupPlacement& place) {
  const std::size_t link = LinkOf(place);
  const TablesOfPlace tables(cluster_, request, place);
  const CollectiveTable* table = tables.Find(request.kind, request.ranks);
  const bool measured = table != nullptr;
  if (!measured) {
    if (!CanBeFitted(cluster_, request.kind, place)) return std::nullopt;
    const Key key{request.kind, request.ranks, place.nodes, place.concurrent_groups};
    auto found = fitted_.find(key);
    if (found == fitted_.end()) {
      CollectiveTable made{.kind = request.kind, .ranks = request.ranks};
      if (link < cluster_.links.size()) made.link = cluster_.links[link].name;
      made.points = RankFit(tables).Points(request.kind, request.ranks);
      found = fitted_.emplace(key, std::move(made)).first;
    }
    table = &found->second;
    if (table->points.empty()) return std::nullopt;
  }
  const Bytes size = BusiestBytes(request);
  CollectiveCost cost{InterpolateDuration(table->points, size), "", ModelledLoads(cluster_, request, place)};
  cost.source =
      (measured ? "measured " : "fitted ") + std::to_string(request.ranks) + " ranks " + table->link;
  if (table->concurrent_groups > 1) cost.source += " x" + std::to_string(table->concurrent_groups);
  if (size > table->points.back().full_tensor_bytes) cost.source += ", extrapolated";
  return cost;
}

}  // namespace internal
}  // namespace shardplan
