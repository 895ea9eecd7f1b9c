// SPDX-License-Identifier: Apache-2.0
// Tables of measurements, and what is fitted to them for a cluster document (docs/reference/cost.md).
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "shardplan/schemas/cluster.h"
#include "shardplan/schemas/error.h"
#include "shardplan/schemas/trace.h"

namespace shardplan {

// One collective on `ranks` ranks, while `concurrent_groups` such groups run at once.
struct CollectiveMeasurement {
  std::string device;
  CollectiveKind kind = CollectiveKind::kAllGather;
  std::int64_t concurrent_groups = 1;
  std::int64_t ranks = 0;
  Bytes full_tensor_bytes;
  Nanoseconds duration_ns;
};

// batch x [m, k] x [k, n].
struct MatmulMeasurement {
  std::string device;
  DType dtype = DType::kBFloat16;
  std::int64_t batch = 1, m = 0, n = 0, k = 0;
  Nanoseconds duration_ns;
};

// One of the two has rows.
struct Measurements {
  std::vector<CollectiveMeasurement> collectives;
  std::vector<MatmulMeasurement> matmuls;
};

// Comma-separated values whose first line names the columns: device, collective, concurrent_groups,
// ranks_per_group, full_tensor_bytes, duration_ns; or device, dtype, batch, m, n, k, duration_ns. In any
// order; further columns are not read. kBadInput says the line as "/line/N".
Result<Measurements> ParseMeasurements(std::string_view text);

// A table for each kind, number of ranks and number of groups, in order of the measurements' first rows.
// Below 16 MiB durations are made non-decreasing (pool adjacent violators with medians, so that one outlier
// moves nothing but itself), and `scatter_ppm` says how far the measurements are from that; from there on
// each size has the median of its measurements, raised to the one before.
std::vector<CollectiveTable> FitCollectiveTables(std::span<const CollectiveMeasurement> rows,
                                                 const std::string& link, const std::string& source);

// A row for each number of output elements, with a point for each inner dimension of any of them: the median
// of the measurements, or where there is none what lies between the nearest ones of the row and of the
// column.
std::vector<MatmulRow> FitMatmulShapes(std::span<const MatmulMeasurement> rows);

// The operator that a measurement is of, for CostModel::Operator.
OperatorEvent OperatorOf(const MatmulMeasurement& row);

// `base` with the tables, the link inside a node and the matrix rates that the measurements of its device
// (Device::table_name) give. What there are no measurements of stays.
Cluster FitCluster(Cluster base, const Measurements& measurements, const std::string& source);

}  // namespace shardplan
