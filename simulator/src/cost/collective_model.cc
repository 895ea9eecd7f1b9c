// SPDX-License-Identifier: Apache-2.0
// [Note: what a collective does to the links]
// In a ring every rank sends (ranks - 1) / ranks of the tensor to its neighbour, in ranks - 1 steps; an
// all_reduce does it twice. Over several nodes as many rings run as the narrowest node has members, each
// through an adapter of its own, and every byte that comes into a node goes on inside it: both links carry
// the whole tensor at the same time, and the slower one says when it is done. A tree moves as much in fewer
// steps at 90 % of the rate, PAT in steps of the logarithm of the ranks at 75 % (one rank in each node only),
// a switch that reduces (NVLS) lets each rank send the tensor once. These factors, and 2.8 us for each rank
// of PAT, are those of NCCL's own tuning model; the latencies are the links'. NCCL takes what it expects to
// be fastest, and so does this.
//
// A broadcast and a reduce are a ring that begins at the root. All of the tensor has to leave it or reach it
// (nccl-tests, PERFORMANCE.md: bus bandwidth = size / time). Its pieces follow each other through the ranks
// (NCCL, device/broadcast.h).
//
// An all_to_all is a send and a recv of each rank with each other one (NCCL, enqueue.cc). They go to the
// ranks of its node over the first link, and at the same time to the others through its own adapter. They
// begin in the rounds of NCCL's schedule, from node to node and in a node from rank to rank (init.cc). The
// root of a gather and a scatter has the same sends or recvs.
#include "cost/collective_model.h"

#include <algorithm>
#include <bit>
#include <optional>
#include <string>

#include "cost/fixed_log.h"
#include "shardplan/schemas/collective_kinds.h"

namespace shardplan::internal {
namespace {

constexpr std::int64_t kWholeRate = 1'000'000;
constexpr std::int64_t kTreeRatePpm = 900'000;
constexpr std::int64_t kPatRatePpm = 750'000;
constexpr std::int64_t kPatRankNs = 2'800;

// The smaller of two rates, where zero means unlimited.
std::int64_t SlowerRate(std::int64_t a, std::int64_t b) {
  if (a <= 0) return b;
  if (b <= 0) return a;
  return std::min(a, b);
}

std::int64_t StepsOfTree(std::int64_t ranks) { return std::bit_width(static_cast<std::uint64_t>(ranks - 1)); }

// The links of a group under one protocol.
struct Road {
  std::string protocol;                         // "": the usual one
  std::int64_t inner_ns = 0, outer_ns = 0;      // of a step
  std::int64_t inner_rate = 0, outer_rate = 0;  // of a rank, and of a node's members together
  bool uses_inner = true, uses_outer = false;

  std::int64_t Rate() const {
    if (!uses_outer) return inner_rate;
    return uses_inner ? SlowerRate(inner_rate, outer_rate) : outer_rate;
  }
};

std::int64_t Beyond(const Link& outer, std::int64_t rate) {
  return std::max<std::int64_t>(1, MulDiv(rate, outer.beyond_pod_rate_ppm, kWholeRate));
}

Road RingRoad(const Cluster& cluster, const GroupPlacement& place) {
  Road road;
  road.inner_ns = cluster.links[0].latency_ns.value;
  road.inner_rate = cluster.links[0].bytes_per_second;
  if (place.nodes <= 1 || cluster.links.size() < 2) return road;
  const Link& outer = cluster.links[1];
  road.uses_outer = true;
  road.uses_inner = place.most_in_node > 1;
  road.outer_ns = outer.latency_ns.value;
  road.outer_rate = MulDiv(outer.bytes_per_second, place.fewest_in_node, 1);
  if (place.beyond_pod) road.outer_rate = Beyond(outer, road.outer_rate);
  return road;
}

// The road of sends from rank to rank: each has its own adapter. Rates are of the whole tensor, of which
// `in_node` / `ranks` stay in the node and `out_of_node` / `ranks` do not.
Road DirectRoad(const Cluster& cluster, const GroupPlacement& place, std::int64_t ranks, std::int64_t in_node,
                std::int64_t out_of_node) {
  Road road = RingRoad(cluster, place);
  const auto of_whole = [&](std::int64_t rate, std::int64_t moved) {
    return rate <= 0 ? 0 : MulDivUp(rate, ranks, moved);
  };
  road.uses_inner = in_node > 0;
  if (road.uses_inner) road.inner_rate = of_whole(road.inner_rate, in_node);
  if (road.uses_outer) {
    const Link& outer = cluster.links[1];
    const std::int64_t rate = outer.bytes_per_second;
    road.outer_rate = of_whole(place.beyond_pod ? Beyond(outer, rate) : rate, out_of_node);
  }
  return road;
}

// The road of a collective under the usual protocol.
Road RoadOf(const Cluster& cluster, const CollectiveRequest& request, const GroupPlacement& place) {
  switch (DescriptionOf(request.kind).movement) {
    case CollectiveMovement::kRing:
    case CollectiveMovement::kRingTwice:
    case CollectiveMovement::kChain:
      return RingRoad(cluster, place);
    case CollectiveMovement::kExchange:
    case CollectiveMovement::kRooted:
      return DirectRoad(cluster, place, request.ranks, place.most_in_node - 1,
                        request.ranks - place.fewest_in_node);
    case CollectiveMovement::kTransfer:
      return DirectRoad(cluster, place, 1, place.nodes > 1 ? 0 : 1, 1);
  }
  return {};
}

const LinkProtocol* FindProtocol(const Link& link, const std::string& name) {
  const auto found = std::ranges::find(link.protocols, name, &LinkProtocol::name);
  return found == link.protocols.end() ? nullptr : &*found;
}

// The road under another protocol; nothing where one of the links does not have it.
std::optional<Road> Under(Road road, const Cluster& cluster, const std::string& name) {
  const auto scaled = [](std::int64_t rate, const LinkProtocol& protocol) {
    return std::max<std::int64_t>(1, MulDiv(rate, protocol.rate_ppm, kWholeRate));
  };
  road.protocol = name;
  if (road.uses_inner) {
    const LinkProtocol* inner = FindProtocol(cluster.links[0], name);
    if (inner == nullptr) return std::nullopt;
    road.inner_ns = inner->latency_ns.value;
    road.inner_rate = scaled(road.inner_rate, *inner);
  }
  if (road.uses_outer) {
    const LinkProtocol* outer = FindProtocol(cluster.links[1], name);
    if (outer == nullptr) return std::nullopt;
    road.outer_ns = outer->latency_ns.value;
    road.outer_rate = scaled(road.outer_rate, *outer);
  }
  return road;
}

LinkLoads LoadsOf(const Road& road) {
  const auto load = [&](bool uses, std::int64_t rate) -> std::int32_t {
    if (!uses) return 0;
    if (rate <= 0) return road.Rate() <= 0 ? kWholeRate : 0;  // unlimited: the widest place
    return static_cast<std::int32_t>(std::max<std::int64_t>(1, MulDiv(kWholeRate, road.Rate(), rate)));
  };
  return {{load(road.uses_inner, road.inner_rate), load(road.uses_outer, road.outer_rate)}};
}

class Choice {
 public:
  Choice(const Cluster& cluster, const CollectiveRequest& request, const GroupPlacement& place)
      : cluster_(cluster),
        request_(request),
        place_(place),
        narrow_(cluster.links[LinkOf(place)]),
        movement_(DescriptionOf(request.kind).movement),
        size_(BusiestBytes(request).value) {
    base_ns_ = cluster.links[0].base_latency_ns.value;
    if (place.nodes > 1) base_ns_ = std::max(base_ns_, cluster.links[1].base_latency_ns.value);
  }

  CollectiveCost Best() {
    const Road usual = RoadOf(cluster_, request_, place_);
    Try(usual);
    if (!InRing()) return std::move(best_);
    for (const LinkProtocol& protocol : narrow_.protocols) {
      if (const std::optional<Road> road = Under(usual, cluster_, protocol.name)) Try(*road);
    }
    return std::move(best_);
  }

 private:
  bool Has(CollectiveAlgorithm algorithm) const {
    return std::ranges::find(narrow_.algorithms, algorithm) != narrow_.algorithms.end();
  }
  bool InRing() const {
    return movement_ == CollectiveMovement::kRing || movement_ == CollectiveMovement::kRingTwice ||
           movement_ == CollectiveMovement::kChain;
  }

  void Try(const Road& road) {
    const std::int64_t sent = MulDivUp(size_, request_.ranks - 1, request_.ranks);
    switch (movement_) {
      case CollectiveMovement::kRing:
        Take(road, "", Limited(StepsNs(road) + TimeAt(sent, road.Rate())));
        TryPat(road, sent);
        break;
      case CollectiveMovement::kRingTwice:
        Take(road, "", 2 * Limited(StepsNs(road) + TimeAt(sent, road.Rate())));
        TryTree(road);
        TryNvls(road);
        break;
      case CollectiveMovement::kChain:
        Take(road, "", Limited(StepsNs(road) + TimeAt(size_, road.Rate())));
        break;
      case CollectiveMovement::kExchange:
      case CollectiveMovement::kRooted:
        Take(road, "", Limited(RoundsNs(road) + TimeAt(size_, road.Rate())));
        break;
      case CollectiveMovement::kTransfer:
        Take(road, "",
             Limited((road.uses_outer ? road.outer_ns : road.inner_ns) + TimeAt(size_, road.Rate())));
        break;
    }
  }

  std::int64_t StepsNs(const Road& road) const {
    return road.inner_ns * (request_.ranks - place_.nodes) + road.outer_ns * (place_.nodes - 1);
  }
  // One for each other rank of the node, and one for each other node.
  std::int64_t RoundsNs(const Road& road) const {
    return road.inner_ns * (place_.most_in_node - 1) + road.outer_ns * (place_.nodes - 1);
  }

  void TryTree(const Road& road) {
    if (!Has(CollectiveAlgorithm::kTree)) return;
    const std::int64_t climb_ns =
        road.inner_ns * (place_.most_in_node - 1) + road.outer_ns * StepsOfTree(place_.nodes);
    Take(road, "tree", 2 * Limited(climb_ns + TimeAt(size_, Part(road.Rate(), kTreeRatePpm))));
  }

  void TryNvls(const Road& road) {
    if (place_.most_in_node <= 2 || !road.protocol.empty() || !Has(CollectiveAlgorithm::kNvls)) return;
    const std::int64_t in_node = size_ + MulDivUp(size_, 1, place_.most_in_node);
    const std::int64_t inner_ns = TimeAt(in_node, Part(road.inner_rate, cluster_.links[0].nvls_rate_ppm));
    const std::int64_t outer_ns = road.uses_outer ? 2 * TimeAt(size_, road.outer_rate) : 0;
    const std::int64_t steps_ns = 2 * (road.inner_ns + road.outer_ns * StepsOfTree(place_.nodes));
    Take(road, "nvls", Limited(steps_ns + std::max(inner_ns, outer_ns)));
  }

  void TryPat(const Road& road, std::int64_t sent) {
    if (place_.nodes <= 1 || place_.most_in_node != 1 || !Has(CollectiveAlgorithm::kPat)) return;
    const std::int64_t climb_ns =
        MulDiv(road.outer_ns * StepsOfTree(place_.nodes), 2, 7) + kPatRankNs * request_.ranks;
    Take(road, "pat", Limited(climb_ns + TimeAt(sent, Part(road.Rate(), kPatRatePpm))));
  }

  static std::int64_t Part(std::int64_t rate, std::int64_t ppm) {
    return rate <= 0 ? rate : std::max<std::int64_t>(1, MulDiv(rate, ppm, kWholeRate));
  }

  void Take(const Road& road, const std::string& algorithm, std::int64_t time_ns) {
    const Nanoseconds duration{Limited(base_ns_ + time_ns)};
    if (found_ && duration >= best_.duration_ns) return;
    found_ = true;
    best_ = {duration, "alpha-beta " + narrow_.name, LoadsOf(road)};
    for (const std::string& word : {algorithm, road.protocol}) {
      if (!word.empty()) best_.source += " " + word;
    }
  }

  const Cluster& cluster_;
  const CollectiveRequest& request_;
  const GroupPlacement& place_;
  const Link& narrow_;
  const CollectiveMovement movement_;
  const std::int64_t size_;
  std::int64_t base_ns_ = 0;
  bool found_ = false;
  CollectiveCost best_;
};

Status CheckLinks(const Cluster& cluster, const GroupPlacement& place) {
  const bool crosses = LinkOf(place) > 0;
  if (cluster.links.size() > LinkOf(place)) return {};
  return std::unexpected(Error{ErrorCode::kBadInput,
                               crosses ? "the cluster has no link between nodes (links[1]) for a "
                                         "communicator that spans nodes"
                                       : "the cluster has no link and no table for a collective",
                               "", "/cluster/links", std::to_string(cluster.links.size()),
                               crosses ? "2" : "1"});
}

}  // namespace

Result<CollectiveCost> ModelledCollective(const Cluster& cluster, const CollectiveRequest& request,
                                          const GroupPlacement& place) {
  if (Status checked = CheckLinks(cluster, place); !checked) return std::unexpected(checked.error());
  return Choice(cluster, request, place).Best();
}

LinkLoads ModelledLoads(const Cluster& cluster, const CollectiveRequest& request,
                        const GroupPlacement& place) {
  if (cluster.links.empty()) return {};
  return LoadsOf(RoadOf(cluster, request, place));
}

Bytes BusiestBytes(const CollectiveRequest& request) {
  return {MulDivUp(request.full_tensor_bytes.value, request.busiest_ppm, kWholeRate)};
}

}  // namespace shardplan::internal
