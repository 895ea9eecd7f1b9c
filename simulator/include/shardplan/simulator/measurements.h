// SPDX-License-Identifier: Apache-2.0
// Tables of measurements, and what is fitted to them for a cluster document (docs/reference/cost.md).
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "shardplan/schemas/cluster.h"
#include "shardplan/schemas/error.h"
#include "shardplan/schemas/plan.h"
#include "shardplan/schemas/quantity.h"
#include "shardplan/schemas/report.h"
#include "shardplan/schemas/trace.h"
#include "shardplan/simulator/cost_model.h"
#include "shardplan/simulator/simulate.h"

namespace shardplan {

// By the name of nccl-tests' program without _perf: "all_gather", "alltoall".
std::optional<CollectiveKind> CollectiveOfProgram(std::string_view program);

// One collective on `ranks` ranks, while `concurrent_groups` such groups run at once. A send: each rank sends
// to the next one and receives from the one before.
struct CollectiveMeasurement {
  std::string device;
  CollectiveKind kind = CollectiveKind::kAllGather;
  std::int64_t concurrent_groups = 1;
  std::int64_t ranks = 0;
  Bytes full_tensor_bytes;  // as CollectivePoint has it
  Nanoseconds duration_ns;
  std::int64_t nodes = 0;  // that a group spans; 0: as the cluster's nodes are filled (PlaceTable)
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

// Facts that a text of nccl-tests does not say itself.
struct ReadOptions {
  std::optional<CollectiveKind> kind;  // nothing: the text names the program, or the file's name does
  std::string file_name;
  bool in_place = false;  // the columns "in-place" instead of "out-of-place"
};

// Comma-separated values whose first line names the columns: device, collective, concurrent_groups,
// ranks_per_group, full_tensor_bytes, duration_ns, and `nodes` if it is there; or device, dtype, batch, m, n,
// k, duration_ns. In any order; further columns are not read. Or what a program of nccl-tests prints
// (nccl_tests.h). kBadInput says the line as "/line/N".
Result<Measurements> ParseMeasurements(std::string_view text, const ReadOptions& options = {});

// Whether tables call the device so, or its driver does ("NVIDIA H100 80GB HBM3").
bool IsDevice(std::string_view name_in_table, const Device& device);

// A table for each kind, number of ranks, of groups and of nodes, in order of the measurements' first rows,
// under the link where the cost model looks for such groups (PlaceTable). Rows of links that the cluster
// lacks give none; a cluster without any link has tables without one.
// Below 16 MiB durations are made non-decreasing (pool adjacent violators with medians, so that one outlier
// moves nothing but itself), and `scatter_ppm` says how far the measurements are from that; from there on
// each size has the median of its measurements, raised to the one before.
std::vector<CollectiveTable> FitCollectiveTables(std::span<const CollectiveMeasurement> rows,
                                                 const Cluster& cluster, const std::string& source);

// A row for each number of output elements, with a point for each inner dimension of any of them: the median
// of the measurements, or where there is none what lies between the nearest ones of the row and of the
// column.
std::vector<MatmulRow> FitMatmulShapes(std::span<const MatmulMeasurement> rows);

// The operator that a measurement is of, for CostModel::Operator.
OperatorEvent OperatorOf(const MatmulMeasurement& row);

// A cluster fitted to measurements, and what that did to it, in lines for people.
struct ClusterFit {
  Cluster cluster;
  std::vector<std::string> changed, stayed;
  std::vector<std::string> passed_over;  // rows, and why
};

// `base` with the tables, the link inside a node and the matrix rates that the measurements of its device
// give. `device` names the rows that are taken; "": those that IsDevice() says. A row's table goes where the
// cost model looks for it (PlaceTable). Figures without measurements stay. kBadInput: no row is of the
// device.
Result<ClusterFit> FitCluster(Cluster base, const Measurements& measurements, const std::string& source,
                              const std::string& device = "");

// The duration of a row by the cluster: the simulator's cost of such a group. kBadInput: nothing says it.
Result<CollectiveCost> PredictCollective(const Cluster& cluster, const CollectiveMeasurement& row);

// A measured step beside the predicted one: where they differ.

// One thing that takes time, predicted and measured.
struct TimePair {
  std::string what;
  Nanoseconds predicted_ns, measured_ns;
};
struct BytesPair {
  std::string what;
  Bytes predicted_bytes, measured_bytes;
};
// Kernels of one class in one pass.
struct KernelPair {
  std::string kind, phase;  // as in OperatorReport
  std::int64_t predicted_count = 0, measured_count = 0;
  Nanoseconds predicted_ns, measured_ns;
};
// One kind of collective on one communicator.
struct CollectivePair {
  std::string kind, communicator;
  std::int64_t predicted_count = 0, measured_count = 0;
  Bytes predicted_bytes, measured_bytes;  // of all; 0 where a profile does not say them
  Nanoseconds predicted_ns, measured_ns;  // busy
  Nanoseconds predicted_exposed_ns, measured_exposed_ns;
};

struct MeasuredComparison {
  Nanoseconds predicted_ns, measured_ns;  // the step
  std::vector<TimePair> activities;       // either side adds up to its step
  std::vector<KernelPair> kernels;        // by kind, then phase
  std::vector<CollectivePair> collectives;
  std::vector<TimePair> units;    // "forward layers.3", in the plan's order
  std::vector<BytesPair> memory;  // either side adds up to its peak of allocated memory; empty: not measured
  BytesPair reserved;
  std::vector<std::string> remarks;  // what makes the two no pair: another plan, other ranks, ...
};

// kBadInput where `measured` is a simulated report, or one without activities.
Result<MeasuredComparison> CompareMeasured(const Report& predicted, const Report& measured);

// A page like ReportHtml's with both steps on one timeline, each stream's two rows below each other, and each
// of them for itself. The simulation has a timeline.
std::string MeasuredHtml(const Plan& plan, const Simulation& simulation, const Report& measured);

}  // namespace shardplan
