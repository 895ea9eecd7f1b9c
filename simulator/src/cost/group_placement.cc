// SPDX-License-Identifier: Apache-2.0
// Places of the ranks of a communicator's groups.
#include "cost/group_placement.h"

#include <algorithm>
#include <vector>

#include "shardplan/schemas/assert.h"
#include "shardplan/simulator/cost_model.h"

namespace shardplan {
namespace {

// Members of the groups in nodes. Ranks come in order, so a group's nodes do, too.
class Census {
 public:
  // `pod_nodes` 0: one pod of all nodes.
  Census(std::int64_t ranks, std::int64_t node_ranks, std::int64_t pod_nodes)
      : node_ranks_(node_ranks),
        pod_nodes_(pod_nodes),
        group_of_(static_cast<std::size_t>(ranks), -1),
        groups_in_node_(static_cast<std::size_t>((ranks - 1) / node_ranks + 1), 0) {}

  void Add(std::int64_t leader, std::int64_t rank) {
    std::int32_t& index = group_of_[static_cast<std::size_t>(leader)];
    const std::int64_t node = rank / node_ranks_;
    if (index < 0) {
      index = static_cast<std::int32_t>(groups_.size());
      groups_.push_back({.first_node = node});
    }
    Group& group = groups_[static_cast<std::size_t>(index)];
    if (group.place.nodes == 0 || node != group.node) {
      EndNode(group);
      group.node = node;
      ++group.place.nodes;
      ++groups_in_node_[static_cast<std::size_t>(node)];
    }
    ++group.members;
  }

  // Whether every node takes part in as many groups; then all groups have those.
  bool NodesAreAlike() {
    const auto [least, most] = std::ranges::minmax_element(groups_in_node_);
    if (*least != *most) return false;
    for (Group& group : groups_) group.place.concurrent_groups = *most;
    return true;
  }

  // Once all are added and nodes differ. `leader` and `rank` as they were.
  void NoteNeighbours(std::int64_t leader, std::int64_t rank) {
    GroupPlacement& place =
        groups_[static_cast<std::size_t>(group_of_[static_cast<std::size_t>(leader)])].place;
    place.concurrent_groups =
        std::max(place.concurrent_groups, groups_in_node_[static_cast<std::size_t>(rank / node_ranks_)]);
  }

  std::vector<GroupPlacement> Placements() {
    std::vector<GroupPlacement> placements;
    for (Group& group : groups_) {
      EndNode(group);
      if (pod_nodes_ > 0) group.place.beyond_pod = group.first_node / pod_nodes_ != group.node / pod_nodes_;
      if (placements.empty() || placements.back() != group.place) placements.push_back(group.place);
    }
    std::ranges::sort(placements);
    placements.erase(std::unique(placements.begin(), placements.end()), placements.end());
    return placements;
  }

 private:
  struct Group {
    GroupPlacement place{.nodes = 0, .fewest_in_node = 0, .most_in_node = 0};
    std::int64_t first_node = 0;
    std::int64_t node = 0;     // the one that is counted
    std::int64_t members = 0;  // in it, so far
  };

  static void EndNode(Group& group) {
    if (group.members == 0) return;
    const bool first = group.place.fewest_in_node == 0;
    group.place.fewest_in_node = first ? group.members : std::min(group.place.fewest_in_node, group.members);
    group.place.most_in_node = std::max(group.place.most_in_node, group.members);
    group.members = 0;
  }

  std::int64_t node_ranks_;
  std::int64_t pod_nodes_;
  std::vector<std::int32_t> group_of_;  // by leader
  std::vector<Group> groups_;
  std::vector<std::int64_t> groups_in_node_;
};

}  // namespace

namespace internal {

std::int64_t LeaderOf(const Communicator& communicator, std::int64_t rank) {
  const auto digit_of = [at = static_cast<std::uint32_t>(rank)](std::int64_t size, std::int64_t stride) {
    const auto of_stride = static_cast<std::uint32_t>(stride);
    return at / of_stride % static_cast<std::uint32_t>(size) * of_stride;
  };
  if (communicator.dims.empty()) return rank - digit_of(communicator.size, communicator.stride);
  std::int64_t leader = rank;
  for (const CommunicatorDim& dim : communicator.dims) leader -= digit_of(dim.size, dim.stride);
  return leader;
}

std::int64_t PlaceInGroup(const Communicator& communicator, std::int64_t rank) {
  if (communicator.dims.empty()) return rank / communicator.stride % communicator.size;
  std::int64_t place = 0;
  for (const CommunicatorDim& dim : communicator.dims)
    place = place * dim.size + rank / dim.stride % dim.size;
  return place;
}

std::int64_t RankAtPlace(const Communicator& communicator, std::int64_t leader, std::int64_t place) {
  if (communicator.dims.empty()) return leader + place * communicator.stride;
  std::int64_t rank = leader;
  for (auto dim = communicator.dims.rbegin(); dim != communicator.dims.rend(); ++dim) {
    rank += place % dim->size * dim->stride;
    place /= dim->size;
  }
  return rank;
}

}  // namespace internal

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
  const std::int64_t ranks = std::max(world_size, RanksSpanned(communicator));
  SHARDPLAN_ASSERT(ranks >= 1 && ranks <= kMaxRanks, "the caller refuses more");
  Census census(ranks, node, cluster.links.size() > 1 ? cluster.links[1].pod_nodes : 0);
  for (std::int64_t rank = 0; rank < ranks; ++rank) census.Add(internal::LeaderOf(communicator, rank), rank);
  const bool alike = census.NodesAreAlike();
  for (std::int64_t rank = 0; !alike && rank < ranks; ++rank) {
    census.NoteNeighbours(internal::LeaderOf(communicator, rank), rank);
  }
  return census.Placements();
}

GroupPlacement PlacePair(const Cluster& cluster, std::int64_t a, std::int64_t b) {
  const std::int64_t node = std::max<std::int64_t>(1, std::min(cluster.ranks_per_node, cluster.ranks));
  const std::int64_t pod = cluster.links.size() > 1 ? cluster.links[1].pod_nodes : 0;
  if (a / node == b / node) return {.nodes = 1, .fewest_in_node = 2, .most_in_node = 2};
  return {.nodes = 2,
          .fewest_in_node = 1,
          .most_in_node = 1,
          .concurrent_groups = std::min(std::max(a, b) - std::min(a, b), node),
          .beyond_pod = pod > 0 && a / node / pod != b / node / pod};
}

GroupPlacement PlaceTable(const Cluster& cluster, std::int64_t ranks, std::int64_t nodes,
                          std::int64_t concurrent_groups) {
  const std::int64_t node = std::max<std::int64_t>(1, cluster.ranks_per_node);
  GroupPlacement place;
  if (nodes > 0) {
    place.nodes = std::min(nodes, ranks);
    place.most_in_node = (ranks - 1) / place.nodes + 1;
    place.fewest_in_node = ranks / place.nodes;
  } else {
    place.nodes = (ranks - 1) / node + 1;
    place.most_in_node = std::min(ranks, node);
    place.fewest_in_node = ranks - (place.nodes - 1) * node;
  }
  const std::int64_t room = std::max<std::int64_t>(1, node / place.most_in_node);
  place.concurrent_groups = std::min(concurrent_groups, room);
  const std::int64_t pod = cluster.links.size() > 1 ? cluster.links[1].pod_nodes : 0;
  place.beyond_pod = pod > 0 && place.nodes > pod;
  return place;
}

}  // namespace shardplan
