// SPDX-License-Identifier: Apache-2.0
// The cost of one operator, copy or collective that runs alone on an idle cluster
// (docs/internals/simulator.md).
//
// [Note: layers of cost models]
// A cost model is an interface with decorators. The analytic model knows only rates: a roofline for operators
// and alpha-beta for collectives. The measured layers answer where something was measured and pass on the
// rest. Every answer says where it came from, so that a report never shows an assumed figure as a measured
// one.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "shardplan/schemas/cluster.h"
#include "shardplan/schemas/error.h"
#include "shardplan/schemas/plan.h"
#include "shardplan/schemas/quantity.h"
#include "shardplan/schemas/trace.h"

namespace shardplan {

// How a group of ranks lies on the nodes of a cluster.
struct GroupPlacement {
  std::int64_t nodes = 1;           // nodes the group spans
  std::int64_t fewest_in_node = 1;  // members that share a node, where they are fewest
  std::int64_t most_in_node = 1;    // ... and most
  std::int64_t concurrent_groups =
      1;                    // groups of the communicator that one of its nodes takes part in (SPMD)
  bool beyond_pod = false;  // its nodes are in several pods of Link::pod_nodes
  auto operator<=>(const GroupPlacement&) const = default;
};

inline constexpr std::int64_t kMaxRanks = 1 << 20;
// 104 days, the longest time that a document can say.
inline constexpr Nanoseconds kLongestStep{std::int64_t{1} << 53};
// The ranks that one group of the communicator needs; kMaxRanks + 1: more than kMaxRanks.
std::int64_t RanksSpanned(const Communicator& communicator);
// The different placements of the communicator's groups on `world_size` ranks (or as many as one group needs,
// if that is more), in order. Ranks fill one node after the other. At most kMaxRanks.
std::vector<GroupPlacement> PlaceGroups(const Cluster& cluster, const Communicator& communicator,
                                        std::int64_t world_size);

// Two ranks that exchange messages, and so do all that lie as far apart.
GroupPlacement PlacePair(const Cluster& cluster, std::int64_t a, std::int64_t b);

// The placement of a group of `ranks` of which a table or a row of measurements says no more than that: ranks
// fill one node after the other, `concurrent_groups` groups (as many of them as there is room for) share a
// node. `nodes` above 0: the group spans so many, its ranks evenly among them.
GroupPlacement PlaceTable(const Cluster& cluster, std::int64_t ranks, std::int64_t nodes,
                          std::int64_t concurrent_groups);
// The link whose tables answer for such a group, an index into Cluster::links.
constexpr std::size_t LinkOf(const GroupPlacement& place) { return place.nodes > 1 ? 1 : 0; }

// A collective in all groups of a communicator of `ranks` ranks at once. The slowest of them counts.
struct CollectiveRequest {
  CollectiveKind kind = CollectiveKind::kAllGather;
  std::int64_t ranks = 1;
  std::span<const GroupPlacement> placements;  // of its groups, at least one
  Bytes full_tensor_bytes;                     // of what: CollectiveDescription::size
  std::int64_t busiest_ppm = 1'000'000;  // all_to_all: what the busiest rank moves, of full_tensor_bytes
};

// The load of a collective on each link while it runs alone, in parts per million of the link's capacity. A
// collective over several nodes uses the link inside a node and the one between them at once, and the
// narrower of the two wholly; a send between nodes uses the latter alone. The engine shares links by this,
// and bounds on communication follow from it: a link cannot carry more than a second's worth in a second, so
// collectives take at least the sum of duration x load on any one link.
struct LinkLoads {
  std::array<std::int32_t, 2> ppm{};  // by index into Cluster::links
  auto operator<=>(const LinkLoads&) const = default;
};

struct CollectiveCost {
  Nanoseconds duration_ns;
  std::string source;  // "measured 8 ranks nvlink", "fitted 6 ranks nvlink", "alpha-beta network"
  LinkLoads loads;
};

class CostModel {
 public:
  virtual ~CostModel() = default;
  // Device time of one operator, by its name, dtype, FLOPs, bytes and measured duration alone.
  virtual Nanoseconds Operator(const OperatorEvent& event) const = 0;
  // kBadInput: the cluster has neither a table nor a link for it.
  virtual Result<CollectiveCost> Collective(const CollectiveRequest& request) const = 0;
  // A kernel that reads and writes that many bytes of device memory. Zero when nothing is moved.
  virtual Nanoseconds DeviceCopy(Bytes read_bytes, Bytes written_bytes) const = 0;
  // A copy between device and pinned host memory, one direction.
  virtual Nanoseconds HostCopy(Bytes size_bytes) const = 0;
  // Work of the host's thread that reads and writes so many bytes of host memory.
  virtual Nanoseconds HostWork(Bytes moved_bytes) const = 0;
};

// Roofline and alpha-beta. A rate of zero means "costs nothing". `cluster` must outlive the model.
std::unique_ptr<CostModel> MakeAnalyticCostModel(const Cluster& cluster);
// Collectives from cluster.collectives where a table fits; for numbers of ranks between or beyond those of
// the tables fitted to them; else from `base`. Keeps what it fitted: for one thread.
std::unique_ptr<CostModel> WithMeasuredCollectives(const Cluster& cluster, std::unique_ptr<CostModel> base);
// Operators from OperatorEvent::duration_ns where it is not negative, else from `base`.
std::unique_ptr<CostModel> WithMeasuredOperators(std::unique_ptr<CostModel> base);
// All three: measured operators over measured collectives over the analytic model.
std::unique_ptr<CostModel> MakeCostModel(const Cluster& cluster);

// Fraction of peak (parts per million) at `flops`: linear in log(flops) between points, clamped at both ends;
// 1'000'000 without points.
std::int64_t EfficiencyPpm(const ComputeRate& rate, std::int64_t flops);

// Duration of a product of matrices at a shape of `shapes` (one row or more): straight lines between the
// inner dimensions of a row and between the rows, and on beyond the last; a row holds for all smaller
// outputs.
Nanoseconds MatmulDuration(const std::vector<MatmulRow>& shapes, std::int64_t output_elements,
                           std::int64_t inner);

// Duration at `size_bytes` in a measured table: exactly a point's duration at its size; between two points
// the bandwidth is linear in the logarithm of the size, the duration not outside of theirs; below the first
// point that point's (latency), above the last one the line through the last two (bandwidth), never less than
// the last. A table of one point is a constant.
Nanoseconds InterpolateDuration(const std::vector<CollectivePoint>& points, Bytes size_bytes);

}  // namespace shardplan
