// SPDX-License-Identifier: Apache-2.0
// The report: what the simulator says of a plan, or what was measured of a training
// (docs/reference/report-format.md).
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "shardplan/schemas/quantity.h"

namespace shardplan {

// Allocated bytes of one category (a buffer role, a storage role, "cuda_context", "nccl_buffers",
// "unmanaged": parameters in no unit, with their gradients and optimizer states).
struct CategoryBytes {
  std::string category;
  Bytes size_bytes;
  bool operator==(const CategoryBytes&) const = default;
};

struct StreamReport {
  std::string stream;
  Nanoseconds busy_ns;
  std::int64_t operations = 0;
  bool operator==(const StreamReport&) const = default;
};

// One collective kind on one communicator over the steady step.
struct CollectiveReport {
  std::string kind;  // "all_gather"
  std::string communicator;
  std::int64_t count = 0;
  Bytes full_tensor_bytes;
  Nanoseconds busy_ns;      // sum of durations
  Nanoseconds exposed_ns;   // part during which no compute ran
  std::string cost_source;  // "measured 8 ranks nvlink", "alpha-beta network"
  bool operator==(const CollectiveReport&) const = default;
};

struct UnitReport {
  std::string unit;
  Bytes param_bytes;
  Nanoseconds forward_ns;
  Nanoseconds backward_ns;
  Nanoseconds exposed_ns;  // compute stream idle because of this unit's communication
  bool operator==(const UnitReport&) const = default;
};

struct MemoryReport {
  Bytes peak_bytes;     // allocated, rounded as the caching allocator does, without context
  std::string peak_at;  // "steady pre_backward layers.31"
  std::vector<CategoryBytes> peak_by_category;  // sorted by category name
  Bytes steady_bytes;                           // alive at the end of the steady step
  Bytes context_bytes;                          // CUDA context
  Bytes device_memory_bytes;                    // the device has
  // The caching allocator's model over steps until it reserves no more, within what the device has beside
  // context and NCCL's buffers (reserved_memory.h).
  Bytes reserved_bytes;             // its peak; out of memory: of a device without end
  std::int64_t cache_releases = 0;  // requests that released the cache first: each synchronises
  bool fits = true;                 // it never runs out of memory
  Bytes deferred_gradient_bytes;    // the most that gradients that wait for their reduction take
  // Host memory of this rank: what is offloaded. Zero and empty without.
  Bytes host_peak_bytes;  // pinned allocations as the next power of two
  std::string host_peak_at;
  std::vector<CategoryBytes> host_peak_by_category;  // sorted by category name
  Bytes host_steady_bytes;
  bool operator==(const MemoryReport&) const = default;
};

// The effect of one uncertain figure of the cluster on the step.
struct FigureReport {
  std::string figure;        // "network"
  std::string origin;        // "guess"
  std::int64_t off_ppm = 0;  // how far it may be off, two times in three
  Nanoseconds better_ns;     // the step when it is better by that
  Nanoseconds worse_ns;
  bool operator==(const FigureReport&) const = default;
};

// Activity of the device, moment by moment over the step. If it does several things at once, the first of
// this order counts: "forward", "backward", "optimizer", "copies" (kernels that move memory for FSDP),
// "all_gather", "reduce_scatter", "all_reduce", "host_link", "idle". The times add up to Report::step_ns.
struct ActivityReport {
  std::string activity;
  Nanoseconds time_ns;
  bool operator==(const ActivityReport&) const = default;
};

// Work on one stream without a gap that could be seen in a picture of the step.
struct TimelineSpan {
  std::string stream;
  std::string activity;  // as in ActivityReport
  std::string name;      // "forward layers.3", "all_gather layers.4"
  Nanoseconds begin_ns;  // of the step
  Nanoseconds duration_ns;
  bool operator==(const TimelineSpan&) const = default;
};

// Kernels of one class of operators in one part of the step.
struct OperatorReport {
  std::string kind;   // OperatorClass (simulator/src/cost/operator_class.h); "optimizer" in the optimizer
  std::string phase;  // "forward", "backward", "optimizer"
  std::int64_t count = 0;
  Nanoseconds busy_ns;  // simulated: what collectives slow is spread evenly over a pass
  bool operator==(const OperatorReport&) const = default;
};

// One instruction of the steady step as a plan's runtime measured it. Times are since the begin of the step.
struct InstructionReport {
  std::string trigger;  // "pre_forward layers.3"
  std::string kind;     // "all_gather"; "compute": the model's operators, up to the next trigger
  std::string unit;     // "": of none
  Nanoseconds host_begin_ns;
  Nanoseconds host_end_ns;
  std::string stream;  // where its work is done; "": it has none, and no begin and end
  Nanoseconds begin_ns;
  Nanoseconds end_ns;
  Bytes allocated_bytes;  // when the host has issued it
  bool operator==(const InstructionReport&) const = default;
};

// The part that measured reports alone have. Empty `device`: it is a simulated one.
struct MeasuredReport {
  std::string device;
  std::int64_t rank = 0;               // whose report it is
  std::int64_t ranks = 1;              // whose profiles were read
  std::vector<std::int64_t> steps_ns;  // each profiled step; Report::step_ns is their median
  // The part of communication in which this rank was there, and another one was not yet. Zero where one
  // profile was read.
  Nanoseconds waiting_ns;
  // Device work that belongs to no unit, optimizer or collective of the plan.
  std::int64_t unassigned_kernels = 0;
  Nanoseconds unassigned_ns;
  // Collectives that the plan has not, or has with other bytes; those of the plan that the profile has not.
  std::int64_t collectives_beside_plan = 0;
  std::int64_t collectives_missing = 0;
  // A plan that measured itself: the steps between the recorded ones, and what recording adds to a step (the
  // difference of the medians; 0 where it is negative).
  std::vector<std::int64_t> unrecorded_steps_ns;
  Nanoseconds recording_ns;
  bool operator==(const MeasuredReport&) const = default;
};

struct Report {
  std::string model;
  std::string policy;
  std::string cluster;
  std::string plan_digest;
  std::int64_t world_size = 1;
  Nanoseconds step_ns;
  // Two times in three the step is between these; 0: the cluster does not say how far its figures may be off.
  Nanoseconds step_low_ns;
  Nanoseconds step_high_ns;
  // Each pass timed alone, from an idle device (loss in the forward). The step can be shorter than their sum:
  // it does not synchronise between them.
  Nanoseconds forward_ns;
  Nanoseconds backward_ns;
  Nanoseconds optimizer_ns;
  Nanoseconds compute_ns;                // compute engine busy
  Nanoseconds communication_ns;          // any collective in flight
  Nanoseconds exposed_communication_ns;  // a collective in flight and no compute
  std::int64_t overlap_ppm = 0;          // 1 - exposed / communication
  Nanoseconds host_ns;                   // host not blocked: it issues or works
  Nanoseconds host_work_ns;              // ... of it: it computes itself, in host memory
  std::int64_t tokens_per_second_per_rank = 0;
  std::int64_t model_flops_utilization_ppm = 0;
  std::vector<StreamReport> streams;
  std::vector<CollectiveReport> collectives;
  std::vector<UnitReport> units;
  MemoryReport memory;
  std::vector<FigureReport> figures;            // the widest first
  std::vector<ActivityReport> activities;       // those that occur, in their order
  std::vector<OperatorReport> operators;        // by kind, then phase
  std::vector<TimelineSpan> timeline;           // of a measured report, by stream, then begin
  std::vector<InstructionReport> instructions;  // of a plan that measured itself, in the order of issue
  MeasuredReport measured;
  std::vector<std::string> notes;  // where figures came from, what was assumed
  bool operator==(const Report&) const = default;
};

}  // namespace shardplan
