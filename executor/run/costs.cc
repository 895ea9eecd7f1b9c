// SPDX-License-Identifier: Apache-2.0
#include "costs.h"

#include <algorithm>
#include <cmath>

namespace shardplan::run {
namespace {

double Efficiency(const ComputeRate& rate, double flops) {
  const std::vector<EfficiencyPoint>& points = rate.efficiency;
  if (points.empty()) return 1.0;
  const auto upper = std::ranges::find_if(
      points, [&](const EfficiencyPoint& p) { return static_cast<double>(p.flops) >= flops; });
  if (upper == points.begin()) return static_cast<double>(points.front().efficiency_ppm) / 1e6;
  if (upper == points.end()) return static_cast<double>(points.back().efficiency_ppm) / 1e6;
  const EfficiencyPoint& a = *(upper - 1);
  const EfficiencyPoint& b = *upper;
  const double from = std::log(std::max<double>(1, static_cast<double>(a.flops)));
  const double to = std::log(static_cast<double>(b.flops));
  const double t = to > from ? (std::log(flops) - from) / (to - from) : 0.0;
  return (static_cast<double>(a.efficiency_ppm) * (1 - t) + static_cast<double>(b.efficiency_ppm) * t) / 1e6;
}

double OperatorSeconds(const OperatorEvent& op, const Cluster& cluster) {
  if (op.duration_ns.value >= 0) return static_cast<double>(op.duration_ns.value) * 1e-9;
  const Device& device = cluster.device;
  double arithmetic = 0;
  const auto rate =
      std::ranges::find_if(device.matmul, [&](const ComputeRate& r) { return r.dtype == op.dtype; });
  if (rate != device.matmul.end() && rate->flops_per_second > 0 && op.flops > 0) {
    const auto flops = static_cast<double>(op.flops);
    arithmetic = flops / (static_cast<double>(rate->flops_per_second) * Efficiency(*rate, flops));
  }
  double memory = 0;
  if (device.memory_bytes_per_second > 0) {
    memory = static_cast<double>(op.bytes_read.value + op.bytes_written.value) /
             (static_cast<double>(device.memory_bytes_per_second) *
              static_cast<double>(device.memory_efficiency_ppm) / 1e6);
  }
  return std::max(arithmetic, memory);
}

}  // namespace

Nanoseconds SegmentCost(const Segment& segment, const Cluster& cluster) {
  double seconds = 0;
  for (const SegmentEntry& entry : segment.entries) {
    const auto* op = std::get_if<OperatorEvent>(&entry);
    if (op != nullptr && !op->collective) seconds += OperatorSeconds(*op, cluster);
  }
  return {static_cast<std::int64_t>(seconds * 1e9)};
}

}  // namespace shardplan::run
