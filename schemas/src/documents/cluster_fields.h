// The cluster in JSON (docs/cluster-format.md).
#pragma once

#include "json/json_fields.h"
#include "shardplan/schemas/cluster.h"

namespace shardplan {

inline constexpr std::int64_t kWholePpm = 1'000'000;

template <>
inline constexpr auto kFields<EfficiencyPoint> =
    FieldList(Required("flops", &EfficiencyPoint::flops),
              Required("efficiency_ppm", &EfficiencyPoint::efficiency_ppm).AtLeast(1).AtMost(kWholePpm));

template <>
inline constexpr bool kIsBlock<ComputeRate> = true;
template <>
inline constexpr auto kFields<ComputeRate> =
    FieldList(Required("dtype", &ComputeRate::dtype),
              Required("flops_per_second", &ComputeRate::flops_per_second).AtLeast(1),
              Optional("efficiency", &ComputeRate::efficiency).Lines());

template <>
inline constexpr bool kIsBlock<Device> = true;
template <>
inline constexpr auto kFields<Device> = FieldList(
    Required("name", &Device::name), Required("memory_bytes", &Device::memory_bytes),
    Optional("context_bytes", &Device::context_bytes),
    Optional("memory_bytes_per_second", &Device::memory_bytes_per_second),
    Optional("memory_efficiency_ppm", &Device::memory_efficiency_ppm).AtLeast(1).AtMost(kWholePpm),
    Optional("vector_flops_per_second", &Device::vector_flops_per_second),
    Optional("matmul", &Device::matmul).Lines(), Optional("kernel_overhead_ns", &Device::kernel_overhead_ns));

template <>
inline constexpr bool kIsBlock<Host> = true;
template <>
inline constexpr auto kFields<Host> = FieldList(Optional("operator_issue_ns", &Host::operator_issue_ns),
                                                Optional("collective_issue_ns", &Host::collective_issue_ns),
                                                Optional("copy_issue_ns", &Host::copy_issue_ns),
                                                Optional("allocate_ns", &Host::allocate_ns),
                                                Optional("event_ns", &Host::event_ns),
                                                Optional("trigger_ns", &Host::trigger_ns));

template <>
inline constexpr auto kFields<CollectivePoint> =
    FieldList(Required("full_tensor_bytes", &CollectivePoint::full_tensor_bytes),
              Required("duration_ns", &CollectivePoint::duration_ns));

template <>
inline constexpr bool kIsBlock<CollectiveTable> = true;
template <>
inline constexpr auto kFields<CollectiveTable> =
    FieldList(Required("kind", &CollectiveTable::kind), Required("ranks", &CollectiveTable::ranks).AtLeast(1),
              Optional("concurrent_groups", &CollectiveTable::concurrent_groups).AtLeast(1),
              Required("link", &CollectiveTable::link), Required("points", &CollectiveTable::points).Lines(),
              Optional("source", &CollectiveTable::source));

template <>
inline constexpr auto kFields<Link> =
    FieldList(Required("name", &Link::name), Optional("latency_ns", &Link::latency_ns),
              Required("bytes_per_second", &Link::bytes_per_second).AtLeast(1));

template <>
inline constexpr bool kIsBlock<Cluster> = true;
template <>
inline constexpr auto kFields<Cluster> = FieldList(
    Required("name", &Cluster::name), Required("ranks", &Cluster::ranks).AtLeast(1),
    Optional("ranks_per_node", &Cluster::ranks_per_node).AtLeast(1), Required("device", &Cluster::device),
    Optional("host", &Cluster::host), Optional("links", &Cluster::links).Lines(),
    Optional("collectives", &Cluster::collectives).Lines(),
    Optional("compute_rate_while_communicating_ppm", &Cluster::compute_rate_while_communicating_ppm)
        .AtLeast(1)
        .AtMost(kWholePpm),
    Optional("communication_rate_while_computing_ppm", &Cluster::communication_rate_while_computing_ppm)
        .AtLeast(1)
        .AtMost(kWholePpm),
    Optional("host_link_bytes_per_second", &Cluster::host_link_bytes_per_second));

}  // namespace shardplan
