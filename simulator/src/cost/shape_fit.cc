// SPDX-License-Identifier: Apache-2.0
// Products of matrices fitted to measurements, by their shapes.
#include <cmath>
#include <map>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "cost/fixed_log.h"
#include "cost/median.h"
#include "shardplan/simulator/measurements.h"

namespace shardplan {
namespace {

// The grid of shapes: measured cells, and a guess for the others from those around them.
class ShapeGrid {
 public:
  explicit ShapeGrid(std::span<const MatmulMeasurement> rows) {
    std::map<std::pair<std::int64_t, std::int64_t>, std::vector<std::int64_t>> cells;
    for (const MatmulMeasurement& row : rows) {
      cells[{row.batch * row.m * row.n, row.k}].push_back(row.duration_ns.value);
    }
    for (const auto& [place, samples] : cells) {
      rows_[place.first][place.second] = internal::Median(samples);
      columns_[place.second][place.first] = internal::Median(samples);
    }
  }

  std::vector<MatmulRow> Rows() const {
    std::vector<MatmulRow> made;
    for (const auto& [output_elements, row] : rows_) {
      MatmulRow one{.output_elements = output_elements};
      for (const auto& [inner, column] : columns_) {
        if (const std::optional<std::int64_t> duration = At(output_elements, inner))
          one.points.push_back({inner, {*duration}});
      }
      made.push_back(std::move(one));
    }
    return made;
  }

 private:
  using Line = std::map<std::int64_t, std::int64_t>;  // duration by place

  // On the line through the neighbours; only between two, unless `beyond`.
  static std::optional<std::int64_t> Guess(const Line& line, std::int64_t place, bool beyond) {
    if (line.size() < 2) return std::nullopt;
    auto high = line.upper_bound(place);
    if (!beyond && (high == line.end() || high == line.begin())) return std::nullopt;
    if (high == line.end()) --high;
    if (high == line.begin()) ++high;
    const auto low = std::prev(high);
    const std::int64_t guess = low->second + internal::MulDiv(high->second - low->second, place - low->first,
                                                              high->first - low->first);
    // A line through two points that are near can miss by far: not below half of the nearest.
    return std::max(guess, std::min(low->second, high->second) / 2);
  }

  std::optional<std::int64_t> At(std::int64_t output_elements, std::int64_t inner) const {
    const Line& row = rows_.at(output_elements);
    const Line& column = columns_.at(inner);
    if (const auto measured = row.find(inner); measured != row.end()) return measured->second;
    const auto in_row = Guess(row, inner, false);
    const auto in_column = Guess(column, output_elements, false);
    if (in_row && in_column) {  // the geometric mean
      return std::llround(std::sqrt(static_cast<double>(*in_row) * static_cast<double>(*in_column)));
    }
    if (in_row) return in_row;
    if (in_column) return in_column;
    if (const auto beyond = Guess(row, inner, true)) return beyond;
    return Guess(column, output_elements, true);
  }

  std::map<std::int64_t, Line> rows_;     // by output elements
  std::map<std::int64_t, Line> columns_;  // by inner dimension
};

}  // namespace

std::vector<MatmulRow> FitMatmulShapes(std::span<const MatmulMeasurement> rows) {
  std::vector<MatmulRow> shapes = ShapeGrid(rows).Rows();
  std::erase_if(shapes, [](const MatmulRow& row) { return row.points.empty(); });
  return shapes;
}

}  // namespace shardplan
