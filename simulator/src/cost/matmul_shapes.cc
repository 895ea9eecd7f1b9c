// SPDX-License-Identifier: Apache-2.0
// Rates of matrix work, and how long products of matrices take by shape.
#include "cost/matmul_shapes.h"

#include <algorithm>
#include <array>
#include <string_view>

#include "cost/enclosing.h"
#include "cost/fixed_log.h"
#include "cost/operator_class.h"
#include "shardplan/simulator/cost_model.h"

namespace shardplan {
namespace {

constexpr std::int64_t kAll = 1'000'000;
// On the straight line through two measurements. Beyond them it does not fall, and nothing is below zero.
std::int64_t OnLine(std::int64_t at, std::int64_t low, std::int64_t low_ns, std::int64_t high,
                    std::int64_t high_ns) {
  std::int64_t rise = high_ns - low_ns;
  if (at < low || at > high) rise = std::max<std::int64_t>(0, rise);
  const std::int64_t start = at > high ? high_ns : low_ns;
  const std::int64_t from = at > high ? high : low;
  return std::max<std::int64_t>(0, internal::Limited(start + internal::MulDiv(rise, at - from, high - low)));
}

// The two neighbours of `at` in an ascending list of two or more: those around it, or the two at the end that
// it is beyond.
template <typename Item>
std::pair<const Item*, const Item*> Neighbours(const std::vector<Item>& items, std::int64_t at,
                                               std::int64_t Item::*place) {
  std::size_t upper = 1;
  while (upper + 1 < items.size() && items[upper].*place < at) ++upper;
  return {&items[upper - 1], &items[upper]};
}

std::int64_t InRow(const MatmulRow& row, std::int64_t inner) {
  if (row.points.size() == 1) {
    return internal::MulDivUp(row.points[0].duration_ns.value, std::max(inner, row.points[0].inner),
                              row.points[0].inner);
  }
  const auto [low, high] = Neighbours(row.points, inner, &MatmulPoint::inner);
  return OnLine(inner, low->inner, low->duration_ns.value, high->inner, high->duration_ns.value);
}

// A curve of one point or more: linear in the logarithm between points, clamped at both ends.
template <typename Point, typename PlaceOf>
std::int64_t InCurve(const std::vector<Point>& points, std::int64_t at, PlaceOf place_of) {
  if (at <= place_of(points.front())) return points.front().efficiency_ppm;
  if (at >= place_of(points.back())) return points.back().efficiency_ppm;
  const auto [low, high] = internal::Enclosing(points, at, place_of);
  const std::int64_t start = internal::Log2Fixed(place_of(*low));
  return low->efficiency_ppm + internal::MulDiv(high->efficiency_ppm - low->efficiency_ppm,
                                                internal::Log2Fixed(at) - start,
                                                internal::Log2Fixed(place_of(*high)) - start);
}

}  // namespace

std::int64_t EfficiencyPpm(const ComputeRate& rate, std::int64_t flops) {
  return rate.efficiency.empty()
             ? kAll
             : InCurve(rate.efficiency, flops, [](const EfficiencyPoint& p) { return p.flops; });
}

Nanoseconds MatmulDuration(const std::vector<MatmulRow>& shapes, std::int64_t output_elements,
                           std::int64_t inner) {
  if (shapes.size() == 1 || output_elements <= shapes.front().output_elements)
    return {InRow(shapes.front(), inner)};
  const auto [low, high] = Neighbours(shapes, output_elements, &MatmulRow::output_elements);
  return {OnLine(output_elements, low->output_elements, InRow(*low, inner), high->output_elements,
                 InRow(*high, inner))};
}

namespace internal {

const ComputeRate* RateOf(const Device& device, const OperatorEvent& event) {
  if (!IsMatmulOperator(event.name)) return nullptr;
  const auto find = [&](const std::vector<ComputeRate>& rates) -> const ComputeRate* {
    const auto found = std::ranges::find(rates, event.dtype, &ComputeRate::dtype);
    return found == rates.end() ? nullptr : &*found;
  };
  if (IsAttentionOperator(event.name)) {
    const ComputeRate* rate = nullptr;
    if (event.name.find("backward") != std::string::npos) rate = find(device.attention_backward);
    if (rate == nullptr) rate = find(device.attention);
    if (rate != nullptr) return rate;
  }
  return find(device.matmul);
}

std::int64_t SequenceOf(const OperatorEvent& event) {
  if (!IsAttentionOperator(event.name)) return 0;
  const std::int64_t written = std::max<std::int64_t>(1, event.bytes_written.value);
  const std::int64_t bytes = SizeBytes(event.dtype);
  const bool backward = event.name.find("backward") != std::string::npos;
  // 4 x rows x sequence x width FLOPs write rows x width elements; the backward 10 and 3 times as much.
  const std::int64_t sequence =
      backward ? MulDiv(event.flops, 3 * bytes, 10 * written) : MulDiv(event.flops, bytes, 4 * written);
  return std::max<std::int64_t>(1, sequence);
}

std::int64_t SlowestOf(std::int64_t ranks) {
  // Expected largest of 1, 2, 4, ... values of a standard normal distribution, in millionths (order
  // statistics, Harter 1961); straight lines between, and on beyond the last.
  static constexpr std::array<std::int64_t, 13> kLargest = {
      0,         564'190,   1'029'375, 1'423'600, 1'765'991, 2'069'669, 2'343'733,
      2'594'610, 2'826'790, 3'043'650, 3'247'690, 3'440'700, 3'624'300};
  std::size_t power = 0;
  while (power + 2 < kLargest.size() && (std::int64_t{2} << power) <= ranks) ++power;
  const std::int64_t start = std::int64_t{1} << power;
  return kLargest[power] +
         MulDiv(kLargest[power + 1] - kLargest[power], std::min(ranks, std::int64_t{1} << 20) - start, start);
}

std::int64_t MemoryPpm(const Device& device, Bytes moved) {
  if (device.memory_efficiency.empty()) return device.memory_efficiency_ppm;
  return InCurve(device.memory_efficiency, moved.value,
                 [](const BandwidthPoint& p) { return p.moved_bytes.value; });
}

std::optional<Nanoseconds> DurationOfShape(const ComputeRate& rate, const OperatorEvent& event) {
  if (rate.shapes.empty() || !IsMatrixProduct(event.name)) return std::nullopt;
  const std::int64_t output_elements = event.bytes_written.value / SizeBytes(event.dtype);
  if (output_elements < 1) return std::nullopt;
  const std::int64_t inner = MulDiv(event.flops, 1, 2 * output_elements);
  if (inner < 1) return std::nullopt;
  return MatmulDuration(rate.shapes, output_elements, inner);
}

}  // namespace internal
}  // namespace shardplan
