// Where the ranks of a communicator's groups are.
#include <algorithm>
#include <map>
#include <set>

#include "shardplan/schemas/assert.h"
#include "shardplan/simulator/cost_model.h"

namespace shardplan {
namespace {

// The first rank of a rank's group: the one whose digits in the communicator are zero.
std::int64_t LeaderOf(const Communicator& communicator, std::int64_t rank) {
  if (communicator.dims.empty()) {
    return rank - rank / communicator.stride % communicator.size * communicator.stride;
  }
  std::int64_t leader = rank;
  for (const CommunicatorDim& dim : communicator.dims) leader -= rank / dim.stride % dim.size * dim.stride;
  return leader;
}

// Members of each group in each node.
class Census {
 public:
  void Add(std::int64_t leader, std::int64_t node) { ++members_[leader][node]; }

  // `pod_nodes` 0: one pod of all nodes.
  std::set<GroupPlacement> Placements(std::int64_t pod_nodes) const {
    std::map<std::int64_t, std::int64_t> groups_in_node;
    for (const auto& [leader, nodes] : members_) {
      for (const auto& [node, members] : nodes) ++groups_in_node[node];
    }
    std::set<GroupPlacement> placements;
    for (const auto& [leader, nodes] : members_) {
      GroupPlacement place{.nodes = static_cast<std::int64_t>(nodes.size()),
                           .fewest_in_node = nodes.begin()->second};
      if (pod_nodes > 0)
        place.beyond_pod = nodes.begin()->first / pod_nodes != nodes.rbegin()->first / pod_nodes;
      for (const auto& [node, members] : nodes) {
        place.fewest_in_node = std::min(place.fewest_in_node, members);
        place.most_in_node = std::max(place.most_in_node, members);
        place.concurrent_groups = std::max(place.concurrent_groups, groups_in_node[node]);
      }
      placements.insert(place);
    }
    return placements;
  }

 private:
  std::map<std::int64_t, std::map<std::int64_t, std::int64_t>> members_;  // by leader, by node
};

}  // namespace

std::int64_t RanksSpanned(const Communicator& communicator) {
  const auto spanned = [](std::int64_t size, std::int64_t stride) {
    return size > kMaxRanks / stride ? kMaxRanks + 1 : size * stride;
  };
  std::int64_t ranks = spanned(communicator.size, communicator.stride);
  for (const CommunicatorDim& dim : communicator.dims) ranks = std::max(ranks, spanned(dim.size, dim.stride));
  return ranks;
}

std::vector<GroupPlacement> PlaceGroups(const Cluster& cluster, const Communicator& communicator,
                                        std::int64_t world_size) {
  const std::int64_t node = std::max<std::int64_t>(1, std::min(cluster.ranks_per_node, cluster.ranks));
  Census census;
  const std::int64_t ranks = std::max(world_size, RanksSpanned(communicator));
  SHARDPLAN_ASSERT(ranks >= 1 && ranks <= kMaxRanks, "the caller refuses more");
  for (std::int64_t rank = 0; rank < ranks; ++rank) {
    census.Add(LeaderOf(communicator, rank), rank / node);
  }
  const std::set<GroupPlacement> placements =
      census.Placements(cluster.links.size() > 1 ? cluster.links[1].pod_nodes : 0);
  return {placements.begin(), placements.end()};
}

}  // namespace shardplan
