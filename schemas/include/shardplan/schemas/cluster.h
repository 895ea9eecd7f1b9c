// SPDX-License-Identifier: Apache-2.0
// The cluster: the machine model that costs are computed from (docs/reference/cluster-format.md).
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "shardplan/schemas/dtype.h"
#include "shardplan/schemas/quantity.h"

namespace shardplan {

// Limit for a cluster and for a mesh.
inline constexpr std::int64_t kMostRanks = std::int64_t{1} << 30;

// One measured point of an efficiency curve: at `flops` of one operator, the fraction (parts per million) of
// peak.
struct EfficiencyPoint {
  std::int64_t flops = 0;
  std::int64_t efficiency_ppm = 1'000'000;
  bool operator==(const EfficiencyPoint&) const = default;
};

// A matrix product whose inner dimension is `inner`.
struct MatmulPoint {
  std::int64_t inner = 0;
  Nanoseconds duration_ns;
  bool operator==(const MatmulPoint&) const = default;
};

// Durations of products with so many elements of output: batch x rows x columns.
struct MatmulRow {
  std::int64_t output_elements = 0;
  std::vector<MatmulPoint> points;  // ascending inner
  bool operator==(const MatmulRow&) const = default;
};

struct ComputeRate {
  DType dtype = DType::kBFloat16;
  std::int64_t flops_per_second = 0;  // peak of dense matrix work in that dtype
  std::vector<EfficiencyPoint>
      efficiency;                 // ascending flops, interpolated in log(flops), clamped; empty: 100 %
  std::vector<MatmulRow> shapes;  // ascending output_elements; of products of matrices, before `efficiency`
  // Fused attention reaches half of its rate at this sequence, and at a sequence s the part s / (s + half).
  std::int64_t half_rate_sequence = 0;
  bool operator==(const ComputeRate&) const = default;
};

// Kernels that move so many bytes reach this part of the peak bandwidth.
struct BandwidthPoint {
  Bytes moved_bytes;
  std::int64_t efficiency_ppm = 1'000'000;
  bool operator==(const BandwidthPoint&) const = default;
};

// Operators of a class (simulator/src/cost/operator_class.h) that are bound by memory reach this part of
// what their bytes alone say.
struct ClassRate {
  std::string operator_class;
  std::int64_t memory_rate_ppm = 1'000'000;
  bool operator==(const ClassRate&) const = default;
};

struct Device {
  std::string name;  // "H100 SXM 80GB"
  Bytes memory_bytes;
  Bytes context_bytes;  // what the driver context takes away
  std::int64_t memory_bytes_per_second = 0;
  std::int64_t memory_efficiency_ppm = 1'000'000;
  std::int64_t vector_flops_per_second = 0;       // pointwise arithmetic, any dtype
  std::vector<BandwidthPoint> memory_efficiency;  // ascending, in log(bytes), clamped; before the one figure
  std::vector<ComputeRate> matmul;
  // Fused attention by its FLOPs, which grow with the sequence; empty: as matmul.
  std::vector<ComputeRate> attention;
  std::vector<ComputeRate> attention_backward;
  std::vector<ClassRate> class_rates;
  Nanoseconds kernel_overhead_ns;  // device time no operator goes below
  // Clock under a power limit, of the clock that the rates were measured at. Memory keeps its rate.
  std::int64_t clock_ppm = 1'000'000;
  // Devices of a kind differ in speed: the standard deviation. A step waits for the slowest of all ranks.
  std::int64_t spread_ppm = 0;
  std::string table_name;  // what tables of measurements call it: "h100-sxm"
  // The temporaries of some kernels depend on it. 0: those of an H100.
  std::int32_t multiprocessors = 0;
  bool operator==(const Device&) const = default;
};

// Host cost of issuing one thing, and the rate of what the host computes itself.
struct Host {
  Nanoseconds operator_issue_ns;  // one operator of the model (dispatch + autograd + launch)
  // One operator of an optimizer's step, on a sharded parameter; 0: operator_issue_ns.
  Nanoseconds optimizer_issue_ns;
  Nanoseconds collective_issue_ns;
  Nanoseconds copy_issue_ns;
  Nanoseconds allocate_ns;
  Nanoseconds event_ns;    // record or wait
  Nanoseconds trigger_ns;  // a hook
  // Host memory that one rank reads and writes while all ranks of its node do (offload); 0: costs nothing.
  std::int64_t memory_bytes_per_second = 0;
  // Launches that a stream holds; the host waits for room. 0: any number.
  std::int64_t launch_queue_depth = 0;
  // The device is the host (CPU ranks): its thread runs the kernels, and goes on when one is done.
  bool runs_kernels = false;
  bool operator==(const Host&) const = default;
};

// Host::optimizer_issue_ns, or what stands for it.
constexpr Nanoseconds OptimizerIssue(const Host& host) {
  return host.optimizer_issue_ns.value > 0 ? host.optimizer_issue_ns : host.operator_issue_ns;
}

// FSDP's own collectives, and those that a model may have of its own (collective_kinds.h).
enum class CollectiveKind : std::uint8_t {
  kAllGather,
  kReduceScatter,
  kAllReduce,
  kAllToAll,
  kBroadcast,
  kReduce,
  kGather,
  kScatter,
  kSend,
  kReceive,
};

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
  std::int64_t nodes = 0;               // that a group spans; 0: any number that the link is for
  std::vector<CollectivePoint> points;  // ascending bytes; interpolated in log size
  std::string source;                   // where it was measured
  // Median distance of measurements below 16 MiB from these points, which are made monotone there.
  std::int64_t scatter_ppm = 0;
  bool operator==(const CollectiveTable&) const = default;
};

// How NCCL moves data besides its Simple protocol: sooner, at a part of the rate (LL, LL128).
struct LinkProtocol {
  std::string name;
  Nanoseconds latency_ns;             // instead of Link::latency_ns
  std::int64_t rate_ppm = 1'000'000;  // of Link::bytes_per_second
  bool operator==(const LinkProtocol&) const = default;
};

enum class CollectiveAlgorithm : std::uint8_t { kRing, kTree, kPat, kNvls };

// A link class that communicators share: alpha-beta cost where no table fits, fair sharing when several are
// in flight.
struct Link {
  std::string name;                   // "nvlink", "network"
  Nanoseconds latency_ns;             // alpha, per step of a ring
  std::int64_t bytes_per_second = 0;  // beta, per rank and direction
  Nanoseconds base_latency_ns;        // once for each collective
  std::vector<LinkProtocol> protocols;
  // The algorithms besides the ring that NCCL chooses from when this is the slowest link of the group.
  std::vector<CollectiveAlgorithm> algorithms;
  std::int64_t nvls_rate_ppm = 1'000'000;  // of bytes_per_second, when the switch reduces
  // Between nodes: nodes that reach each other at the full rate (0: all), and the part of it beyond them.
  std::int64_t pod_nodes = 0;
  std::int64_t beyond_pod_rate_ppm = 1'000'000;
  bool operator==(const Link&) const = default;
};

enum class ClusterFigure : std::uint8_t {
  kMatmul,
  kAttention,
  kVector,
  kMemory,
  kKernelOverhead,
  kHost,
  kHostMemory,
  kHostLink,
  kCollectives,  // the tables
  kInnerLink,
  kNetwork,
  kComputeSlowdown,
  kCommunicationSlowdown,
};
enum class FigureOrigin : std::uint8_t { kMeasured, kFitted, kDataSheet, kGuess };

// The source of a figure and its standard error: about two times in three the truth is within it.
struct FigureSource {
  ClusterFigure figure = ClusterFigure::kMatmul;
  FigureOrigin origin = FigureOrigin::kGuess;
  std::int64_t off_ppm = 0;
  std::string note;
  std::string measured_with;  // as Recording::recorded_with: "torch 2.11.0"; "": not known
  bool operator==(const FigureSource&) const = default;
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
  std::vector<FigureSource> sources;            // at most one of each figure
  bool operator==(const Cluster&) const = default;
};

// Names in the documents.
std::string_view Name(CollectiveKind kind);   // "all_gather"
std::string_view Name(ClusterFigure figure);  // "inner_link"
std::string_view Name(FigureOrigin origin);   // "data_sheet"

}  // namespace shardplan
