// SPDX-License-Identifier: Apache-2.0
// A measured step beside the predicted one: where they differ.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "shardplan/schemas/error.h"
#include "shardplan/schemas/plan.h"
#include "shardplan/schemas/quantity.h"
#include "shardplan/schemas/report.h"
#include "shardplan/simulator/simulate.h"

namespace shardplan {

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
