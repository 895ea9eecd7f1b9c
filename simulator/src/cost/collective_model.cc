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
#include "cost/collective_model.h"

#include <algorithm>
#include <bit>
#include <optional>
#include <string>

#include "cost/fixed_log.h"

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

Road UsualRoad(const Cluster& cluster, const GroupPlacement& place) {
  Road road;
  road.inner_ns = cluster.links[0].latency_ns.value;
  road.inner_rate = cluster.links[0].bytes_per_second;
  if (place.nodes <= 1 || cluster.links.size() < 2) return road;
  const Link& outer = cluster.links[1];
  road.uses_outer = true;
  road.uses_inner = place.most_in_node > 1;
  road.outer_ns = outer.latency_ns.value;
  road.outer_rate = MulDiv(outer.bytes_per_second, place.fewest_in_node, 1);
  if (place.beyond_pod)
    road.outer_rate =
        std::max<std::int64_t>(1, MulDiv(road.outer_rate, outer.beyond_pod_rate_ppm, kWholeRate));
  return road;
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
      : cluster_(cluster), request_(request), place_(place), narrow_(cluster.links[LinkOf(place)]) {
    base_ns_ = cluster.links[0].base_latency_ns.value;
    if (place.nodes > 1) base_ns_ = std::max(base_ns_, cluster.links[1].base_latency_ns.value);
  }

  CollectiveCost Best() {
    const Road usual = UsualRoad(cluster_, place_);
    Try(usual);
    for (const LinkProtocol& protocol : narrow_.protocols) {
      if (const std::optional<Road> road = Under(usual, cluster_, protocol.name)) Try(*road);
    }
    return std::move(best_);
  }

 private:
  bool Has(CollectiveAlgorithm algorithm) const {
    return std::ranges::find(narrow_.algorithms, algorithm) != narrow_.algorithms.end();
  }

  void Try(const Road& road) {
    const std::int64_t size = request_.full_tensor_bytes.value;
    const bool reduces = request_.kind == CollectiveKind::kAllReduce;
    const std::int64_t steps_ns =
        road.inner_ns * (request_.ranks - place_.nodes) + road.outer_ns * (place_.nodes - 1);
    const std::int64_t sent = MulDivUp(size, request_.ranks - 1, request_.ranks);
    Take(road, "", (reduces ? 2 : 1) * Limited(steps_ns + TimeAt(sent, road.Rate())));
    const std::int64_t levels = StepsOfTree(place_.nodes);
    if (reduces && Has(CollectiveAlgorithm::kTree)) {
      const std::int64_t climb_ns = road.inner_ns * (place_.most_in_node - 1) + road.outer_ns * levels;
      Take(road, "tree", 2 * Limited(climb_ns + TimeAt(size, Part(road.Rate(), kTreeRatePpm))));
    }
    if (!reduces && place_.nodes > 1 && place_.most_in_node == 1 && Has(CollectiveAlgorithm::kPat)) {
      const std::int64_t climb_ns = MulDiv(road.outer_ns * levels, 2, 7) + kPatRankNs * request_.ranks;
      Take(road, "pat", Limited(climb_ns + TimeAt(sent, Part(road.Rate(), kPatRatePpm))));
    }
    if (reduces && place_.most_in_node > 2 && road.protocol.empty() && Has(CollectiveAlgorithm::kNvls)) {
      const std::int64_t in_node = size + MulDivUp(size, 1, place_.most_in_node);
      const std::int64_t inner_ns = TimeAt(in_node, Part(road.inner_rate, cluster_.links[0].nvls_rate_ppm));
      const std::int64_t outer_ns = road.uses_outer ? 2 * TimeAt(size, road.outer_rate) : 0;
      Take(road, "nvls",
           Limited(2 * (road.inner_ns + road.outer_ns * levels) + std::max(inner_ns, outer_ns)));
    }
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

Result<CollectiveCost> ModelledExchange(const Cluster& cluster, bool to_all, std::int64_t ranks,
                                        const GroupPlacement& place, Bytes sent_bytes) {
  if (Status checked = CheckLinks(cluster, place); !checked) return std::unexpected(checked.error());
  const Link& narrow = cluster.links[LinkOf(place)];
  const std::int64_t outer = ranks - place.fewest_in_node;  // ranks of other nodes
  const std::int64_t size = sent_bytes.value;
  std::int64_t inner_bytes = place.nodes > 1 ? 0 : size;
  std::int64_t outer_bytes = place.nodes > 1 ? size : 0;
  if (to_all) {
    inner_bytes = MulDivUp(size, place.most_in_node - 1, ranks);
    outer_bytes = place.nodes > 1 ? MulDivUp(size, outer, ranks) : 0;
  }
  std::int64_t time_ns = TimeAt(inner_bytes, cluster.links[0].bytes_per_second);
  if (place.nodes > 1) time_ns = std::max(time_ns, TimeAt(outer_bytes, narrow.bytes_per_second));
  return CollectiveCost{{Limited(narrow.base_latency_ns.value + narrow.latency_ns.value + time_ns)},
                        "alpha-beta " + narrow.name,
                        {}};
}

LinkLoads LoadsOfRing(const Cluster& cluster, const GroupPlacement& place) {
  if (cluster.links.empty()) return {};
  return LoadsOf(UsualRoad(cluster, place));
}

}  // namespace shardplan::internal
