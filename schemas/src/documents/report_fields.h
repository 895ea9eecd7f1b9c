// The report in JSON (docs/report-format.md).
#pragma once

#include "json/json_fields.h"
#include "shardplan/schemas/report.h"

namespace shardplan {

template <>
inline constexpr auto kFields<CategoryBytes> = FieldList(Required("category", &CategoryBytes::category),
                                                         Required("size_bytes", &CategoryBytes::size_bytes));

template <>
inline constexpr auto kFields<StreamReport> = FieldList(Required("stream", &StreamReport::stream),
                                                        Required("busy_ns", &StreamReport::busy_ns),
                                                        Required("operations", &StreamReport::operations));

template <>
inline constexpr auto kFields<CollectiveReport> = FieldList(
    Required("kind", &CollectiveReport::kind), Required("communicator", &CollectiveReport::communicator),
    Required("count", &CollectiveReport::count),
    Required("full_tensor_bytes", &CollectiveReport::full_tensor_bytes),
    Required("busy_ns", &CollectiveReport::busy_ns), Required("exposed_ns", &CollectiveReport::exposed_ns),
    Optional("cost_source", &CollectiveReport::cost_source));

template <>
inline constexpr auto kFields<UnitReport> = FieldList(Required("unit", &UnitReport::unit),
                                                      Required("param_bytes", &UnitReport::param_bytes),
                                                      Required("forward_ns", &UnitReport::forward_ns),
                                                      Required("backward_ns", &UnitReport::backward_ns),
                                                      Required("exposed_ns", &UnitReport::exposed_ns));

template <>
inline constexpr bool kIsBlock<MemoryReport> = true;
template <>
inline constexpr auto kFields<MemoryReport> =
    FieldList(Required("peak_bytes", &MemoryReport::peak_bytes), Required("peak_at", &MemoryReport::peak_at),
              Required("peak_by_category", &MemoryReport::peak_by_category).Lines(),
              Required("steady_bytes", &MemoryReport::steady_bytes),
              Required("context_bytes", &MemoryReport::context_bytes),
              Required("device_memory_bytes", &MemoryReport::device_memory_bytes),
              Required("fits", &MemoryReport::fits));

template <>
inline constexpr bool kIsBlock<Report> = true;
template <>
inline constexpr auto kFields<Report> = FieldList(
    Required("model", &Report::model), Required("policy", &Report::policy),
    Required("cluster", &Report::cluster), Optional("plan_digest", &Report::plan_digest),
    Required("world_size", &Report::world_size).AtLeast(1), Required("step_ns", &Report::step_ns),
    Required("forward_ns", &Report::forward_ns), Required("backward_ns", &Report::backward_ns),
    Required("optimizer_ns", &Report::optimizer_ns), Required("compute_ns", &Report::compute_ns),
    Required("communication_ns", &Report::communication_ns),
    Required("exposed_communication_ns", &Report::exposed_communication_ns),
    Required("overlap_ppm", &Report::overlap_ppm).AtMost(1'000'000), Required("host_ns", &Report::host_ns),
    Required("tokens_per_second_per_rank", &Report::tokens_per_second_per_rank),
    Required("model_flops_utilization_ppm", &Report::model_flops_utilization_ppm),
    Required("streams", &Report::streams).Lines(), Required("collectives", &Report::collectives).Lines(),
    Required("units", &Report::units).Lines(), Required("memory", &Report::memory),
    Optional("notes", &Report::notes).Lines());

}  // namespace shardplan
