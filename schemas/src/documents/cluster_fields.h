// SPDX-License-Identifier: Apache-2.0
// The cluster in JSON (docs/reference/cluster-format.md).
#pragma once

#include "json/fields.h"
#include "json/types.h"
#include "shardplan/schemas/cluster.h"

namespace shardplan {

inline constexpr std::int64_t kLongestSequence = std::int64_t{1} << 31;
inline constexpr std::int64_t kWholePpm = 1'000'000;
// The limit for one thing that the host issues, a kernel or a ring's step: an hour.
inline constexpr std::int64_t kLongestCost = 3'600'000'000'000;

template <>
inline constexpr Definition kDefinition<EfficiencyPoint> = {.says = "How efficient operators of a size are."};
template <>
inline constexpr auto kFields<EfficiencyPoint> =
    FieldList(Required("flops", &EfficiencyPoint::flops, "FLOPs of one operator.").AtLeast(1),
              Required("efficiency_ppm", &EfficiencyPoint::efficiency_ppm, "Fraction of the peak reached.")
                  .AtLeast(1)
                  .AtMost(kWholePpm));

template <>
inline constexpr Definition kDefinition<MatmulPoint> = {.says = "One measured inner dimension."};
template <>
inline constexpr auto kFields<MatmulPoint> =
    FieldList(Required("inner", &MatmulPoint::inner, "Inner dimension of the product.").AtLeast(1),
              Required("duration_ns", &MatmulPoint::duration_ns, "Measured duration.").AtMost(kLongestCost));

template <>
inline constexpr Definition kDefinition<MatmulRow> = {.says = "Products with outputs of one size."};
template <>
inline constexpr auto kFields<MatmulRow> = FieldList(
    Required("output_elements", &MatmulRow::output_elements, "Batch x rows x columns of the output.")
        .AtLeast(1),
    Required("points", &MatmulRow::points, "Ascending inner dimension; straight lines between."));

template <>
inline constexpr bool kIsBlock<ComputeRate> = true;
template <>
inline constexpr Definition kDefinition<ComputeRate> = {"cluster", "compute_rate",
                                                        "Matrix work in one dtype."};
template <>
inline constexpr auto kFields<ComputeRate> = FieldList(
    Required("dtype", &ComputeRate::dtype, "Of the inputs."),
    Required("flops_per_second", &ComputeRate::flops_per_second, "Peak of dense matrix work.").AtLeast(1),
    Optional("efficiency", &ComputeRate::efficiency,
             "Ascending FLOPs; interpolated in log(flops), clamped. Empty: 100 %.")
        .Lines(),
    Optional("shapes", &ComputeRate::shapes,
             "Products of matrices by the elements of their output, ascending, before `efficiency`.")
        .Lines(),
    Optional(
        "half_rate_sequence", &ComputeRate::half_rate_sequence,
        "Fused attention: the sequence at which it reaches half of its rate; at s the part s / (s + half).")
        .AtMost(kLongestSequence));

template <>
inline constexpr Definition kDefinition<BandwidthPoint> = {
    .says = "How much of the bandwidth kernels of a size reach."};
template <>
inline constexpr auto kFields<BandwidthPoint> =
    FieldList(Required("moved_bytes", &BandwidthPoint::moved_bytes, "Bytes read and written.").AtLeast(1),
              Required("efficiency_ppm", &BandwidthPoint::efficiency_ppm, "Fraction of the peak reached.")
                  .AtLeast(1)
                  .AtMost(kWholePpm));

template <>
inline constexpr Definition kDefinition<ClassRate> = {
    .says = "How much of the rate that their bytes say operators of a class reach."};
template <>
inline constexpr auto kFields<ClassRate> = FieldList(
    Required("operator_class", &ClassRate::operator_class, "As reports name it: normalization, softmax, ..."),
    Required("memory_rate_ppm", &ClassRate::memory_rate_ppm, "Parts per million.").AtLeast(1));

template <>
inline constexpr bool kIsBlock<Device> = true;
template <>
inline constexpr Definition kDefinition<Device> = {"cluster", "device", "One accelerator."};
template <>
inline constexpr auto kFields<Device> = FieldList(
    Required("name", &Device::name, "\"H100 SXM 80GB\"."),
    Required("memory_bytes", &Device::memory_bytes, "Device memory."),
    Optional("context_bytes", &Device::context_bytes, "What the driver context takes away."),
    Optional("memory_bytes_per_second", &Device::memory_bytes_per_second, "Peak memory bandwidth."),
    Optional("memory_efficiency_ppm", &Device::memory_efficiency_ppm,
             "Fraction of the peak bandwidth reached.")
        .AtLeast(1)
        .AtMost(kWholePpm),
    Optional("vector_flops_per_second", &Device::vector_flops_per_second, "Pointwise arithmetic, any dtype."),
    Optional("memory_efficiency", &Device::memory_efficiency,
             "The fraction by bytes moved, ascending; in log(bytes), clamped.")
        .Lines(),
    Optional("matmul", &Device::matmul, "Matrix rates by dtype.").Lines(),
    Optional("attention", &Device::attention, "Rates of fused attention by dtype; empty: as `matmul`.")
        .Lines(),
    Optional("attention_backward", &Device::attention_backward,
             "The same of its backward; empty: as its forward.")
        .Lines(),
    Optional("class_rates", &Device::class_rates, "Of operators that are bound by memory, by class.").Lines(),
    Optional("kernel_overhead_ns", &Device::kernel_overhead_ns, "Device time that no operator goes below.")
        .AtMost(kLongestCost),
    Optional("clock_ppm", &Device::clock_ppm,
             "Clock under a power limit, of the one that the rates hold for. Memory keeps its rate.")
        .AtLeast(1)
        .AtMost(kWholePpm),
    Optional("spread_ppm", &Device::spread_ppm,
             "Standard deviation of the speed among devices; a step waits for the slowest of all ranks.")
        .AtMost(kWholePpm / 10),
    Optional("table_name", &Device::table_name, "What tables of measurements call it."),
    Optional("multiprocessors", &Device::multiprocessors,
             "What the memory inside of some kernels depends on; 0: as an H100."));

template <>
inline constexpr bool kIsBlock<Host> = true;
template <>
inline constexpr Definition kDefinition<Host> = {"cluster", "host",
                                                 "Host cost of issuing one thing, and the host's memory."};
template <>
inline constexpr auto kFields<Host> = FieldList(
    Optional("operator_issue_ns", &Host::operator_issue_ns, "One operator of the model.")
        .AtMost(kLongestCost),
    Optional("optimizer_issue_ns", &Host::optimizer_issue_ns,
             "One operator of an optimizer's step on a sharded parameter; 0: as operator_issue_ns.")
        .AtMost(kLongestCost),
    Optional("collective_issue_ns", &Host::collective_issue_ns, "One collective.").AtMost(kLongestCost),
    Optional("copy_issue_ns", &Host::copy_issue_ns, "One copy.").AtMost(kLongestCost),
    Optional("allocate_ns", &Host::allocate_ns, "One allocation.").AtMost(kLongestCost),
    Optional("event_ns", &Host::event_ns, "One record or wait.").AtMost(kLongestCost),
    Optional("trigger_ns", &Host::trigger_ns, "One hook.").AtMost(kLongestCost),
    Optional("memory_bytes_per_second", &Host::memory_bytes_per_second,
             "Host memory that one rank reads and writes while all ranks of its node do."),
    Optional("launch_queue_depth", &Host::launch_queue_depth,
             "Launches that a stream holds before the host has to wait; 0: any number."),
    Optional("runs_kernels", &Host::runs_kernels,
             "The host's thread runs the kernels and goes on when one is done (CPU ranks)."));

template <>
inline constexpr Definition kDefinition<CollectivePoint> = {.says = "One measurement."};
template <>
inline constexpr auto kFields<CollectivePoint> = FieldList(
    Required("full_tensor_bytes", &CollectivePoint::full_tensor_bytes,
             "Gathered output of an all_gather, input of a reduce_scatter, tensor of an all_reduce."),
    Required("duration_ns", &CollectivePoint::duration_ns, "Measured duration."));

template <>
inline constexpr bool kIsBlock<CollectiveTable> = true;
template <>
inline constexpr Definition kDefinition<CollectiveTable> = {"cluster", "collective_table",
                                                            "Measured durations of one collective."};
template <>
inline constexpr auto kFields<CollectiveTable> = FieldList(
    Required("kind", &CollectiveTable::kind, "Which collective."),
    Required("ranks", &CollectiveTable::ranks, "Size of the group.").AtLeast(1),
    Optional("concurrent_groups", &CollectiveTable::concurrent_groups, "Groups that ran at once.").AtLeast(1),
    Required("link", &CollectiveTable::link, "Name of the link."),
    Optional("nodes", &CollectiveTable::nodes,
             "Nodes that the group spans; 0: any number that the link is for.")
        .AtMost(kMostRanks),
    Required("points", &CollectiveTable::points, "Ascending bytes; interpolated in log size.").Lines(),
    Optional("source", &CollectiveTable::source, "Where it was measured."),
    Optional("scatter_ppm", &CollectiveTable::scatter_ppm,
             "Median distance of the measurements below 16 MiB from the points."));

template <>
inline constexpr Definition kDefinition<LinkProtocol> = {.says = "A protocol besides the usual one."};
template <>
inline constexpr auto kFields<LinkProtocol> = FieldList(
    Required("name", &LinkProtocol::name, "\"LL\", \"LL128\"."),
    Required("latency_ns", &LinkProtocol::latency_ns, "Per step.").AtMost(kLongestCost),
    Required("rate_ppm", &LinkProtocol::rate_ppm, "Of the link's rate.").AtLeast(1).AtMost(kWholePpm));

template <>
inline constexpr Definition kDefinition<Link> = {"cluster", "link", "A link class that communicators share."};
template <>
inline constexpr auto kFields<Link> = FieldList(
    Required("name", &Link::name, "\"nvlink\", \"network\"."),
    Optional("latency_ns", &Link::latency_ns, "Per step of a ring.").AtMost(kLongestCost),
    Required("bytes_per_second", &Link::bytes_per_second, "Per rank and direction.").AtLeast(1),
    Optional("base_latency_ns", &Link::base_latency_ns, "Once for each collective.").AtMost(kLongestCost),
    Optional("protocols", &Link::protocols, "Protocols of less latency and less rate."),
    Optional("algorithms", &Link::algorithms, "What is chosen from besides the ring."),
    Optional("nvls_rate_ppm", &Link::nvls_rate_ppm, "Of the rate, when the switch reduces.")
        .AtLeast(1)
        .AtMost(kWholePpm),
    Optional("pod_nodes", &Link::pod_nodes, "Nodes that reach each other at the full rate; 0: all."),
    Optional("beyond_pod_rate_ppm", &Link::beyond_pod_rate_ppm, "Part of the rate beyond them.")
        .AtLeast(1)
        .AtMost(kWholePpm));

template <>
inline constexpr Definition kDefinition<FigureSource> = {.says = "Where a figure came from."};
template <>
inline constexpr auto kFields<FigureSource> =
    FieldList(Required("figure", &FigureSource::figure, "Which."),
              Required("origin", &FigureSource::origin, "How it is known."),
              Required("off_ppm", &FigureSource::off_ppm, "How far it may be off, two times in three.")
                  .AtMost(kWholePpm),
              Optional("note", &FigureSource::note, "More about it."),
              Optional("measured_with", &FigureSource::measured_with,
                       "Program and version that it was measured with, \"torch 2.11.0\". Empty: not known."));

template <>
inline constexpr bool kIsBlock<Cluster> = true;
template <>
inline constexpr Definition kDefinition<Cluster> = {"cluster", "cluster",
                                                    "The machine model that costs are computed from."};
template <>
inline constexpr auto kFields<Cluster> = FieldList(
    Required("name", &Cluster::name, "A name for people."),
    Required("ranks", &Cluster::ranks, "Number of ranks.").AtLeast(1).AtMost(kMostRanks),
    Optional("ranks_per_node", &Cluster::ranks_per_node, "Ranks inside a node.")
        .AtLeast(1)
        .AtMost(kMostRanks),
    Required("device", &Cluster::device, "The accelerators."),
    Optional("host", &Cluster::host, "The host threads."),
    Optional("links", &Cluster::links, "The first is inside a node, the second between nodes.").Lines(),
    Optional("collectives", &Cluster::collectives, "Measured collectives.").Lines(),
    Optional("compute_rate_while_communicating_ppm", &Cluster::compute_rate_while_communicating_ppm,
             "Rate of compute while a collective runs.")
        .AtLeast(1)
        .AtMost(kWholePpm),
    Optional("communication_rate_while_computing_ppm", &Cluster::communication_rate_while_computing_ppm,
             "Rate of collectives while compute runs.")
        .AtLeast(1)
        .AtMost(kWholePpm),
    Optional("host_link_bytes_per_second", &Cluster::host_link_bytes_per_second,
             "Device to pinned host memory and back, each direction."),
    Optional("sources", &Cluster::sources, "Where figures came from, and how far they may be off.").Lines());

// cluster_json.cc defines them.
extern template const JsonObjectType& JsonObjectTypeOf<Cluster>();

}  // namespace shardplan
