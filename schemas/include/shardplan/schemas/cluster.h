// The cluster: the machine model that costs are computed from (docs/cluster-format.md).
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "shardplan/schemas/dtype.h"
#include "shardplan/schemas/quantity.h"

namespace shardplan {

// Of a cluster and of a mesh.
inline constexpr std::int64_t kMostRanks = std::int64_t{1} << 30;

// One measured point of an efficiency curve: at `flops` of one operator, the fraction (parts per million) of
// peak.
struct EfficiencyPoint {
  std::int64_t flops = 0;
  std::int64_t efficiency_ppm = 1'000'000;
  bool operator==(const EfficiencyPoint&) const = default;
};

struct ComputeRate {
  DType dtype = DType::kBFloat16;
  std::int64_t flops_per_second = 0;  // peak of dense matrix work in that dtype
  std::vector<EfficiencyPoint>
      efficiency;  // ascending flops, interpolated in log(flops), clamped; empty: 100 %
  bool operator==(const ComputeRate&) const = default;
};

struct Device {
  std::string name;  // "H100 SXM 80GB"
  Bytes memory_bytes;
  Bytes context_bytes;  // what the driver context takes away
  std::int64_t memory_bytes_per_second = 0;
  std::int64_t memory_efficiency_ppm = 1'000'000;
  std::int64_t vector_flops_per_second = 0;  // pointwise arithmetic, any dtype
  std::vector<ComputeRate> matmul;
  Nanoseconds kernel_overhead_ns;  // device time no operator goes below
  bool operator==(const Device&) const = default;
};

// Host cost of issuing one thing, and the rate of what the host computes itself.
struct Host {
  Nanoseconds operator_issue_ns;  // one operator of the model (dispatch + autograd + launch)
  Nanoseconds collective_issue_ns;
  Nanoseconds copy_issue_ns;
  Nanoseconds allocate_ns;
  Nanoseconds event_ns;    // record or wait
  Nanoseconds trigger_ns;  // a hook
  // Host memory that one rank reads and writes while all ranks of its node do (offload); 0: costs nothing.
  std::int64_t memory_bytes_per_second = 0;
  bool operator==(const Host&) const = default;
};

enum class CollectiveKind : std::uint8_t { kAllGather, kReduceScatter, kAllReduce };

struct CollectivePoint {
  Bytes full_tensor_bytes;  // gathered output of an all_gather, input of a reduce_scatter, tensor of an
                            // all_reduce
  Nanoseconds duration_ns;
  bool operator==(const CollectivePoint&) const = default;
};

// Measured durations of one collective in groups of `ranks`, `concurrent_groups` of them at once.
struct CollectiveTable {
  CollectiveKind kind = CollectiveKind::kAllGather;
  std::int64_t ranks = 0;
  std::int64_t concurrent_groups = 1;
  std::string link;                     // Link::name
  std::vector<CollectivePoint> points;  // ascending bytes; interpolated in log size
  std::string source;                   // where it was measured
  bool operator==(const CollectiveTable&) const = default;
};

// A link class that communicators share: alpha-beta cost where no table fits, fair sharing when several are
// in flight.
struct Link {
  std::string name;                   // "nvlink", "network"
  Nanoseconds latency_ns;             // alpha, per step of a ring
  std::int64_t bytes_per_second = 0;  // beta, per rank and direction
  bool operator==(const Link&) const = default;
};

struct Cluster {
  std::string name;
  std::int64_t ranks = 1;
  std::int64_t ranks_per_node = 8;
  Device device;
  Host host;
  std::vector<Link> links;  // links[0] inside a node, links[1] between nodes (when there are several)
  std::vector<CollectiveTable> collectives;
  // While any collective runs, compute proceeds at this rate (1'000'000: not slowed); and the reverse.
  std::int64_t compute_rate_while_communicating_ppm = 1'000'000;
  std::int64_t communication_rate_while_computing_ppm = 1'000'000;
  std::int64_t host_link_bytes_per_second = 0;  // device <-> pinned host memory, each direction
  bool operator==(const Cluster&) const = default;
};

}  // namespace shardplan
