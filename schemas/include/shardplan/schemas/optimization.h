// SPDX-License-Identifier: Apache-2.0
// The optimising planner's documents: the report, and the certificate of the lower bound
// (docs/reference/optimize.md).
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "shardplan/schemas/plan.h"
#include "shardplan/schemas/quantity.h"

namespace shardplan {

// Dual prices of one window of the step: the price of a nanosecond of work, in parts of kPriceScale.
inline constexpr std::int64_t kPriceScale = std::int64_t{1} << 20;
struct WindowPrices {
  std::int64_t kernels = 0;
  std::vector<std::int64_t> links;  // as Cluster::links
  bool operator==(const WindowPrices&) const = default;
};

// The dual price of a byte at one cut, in nanoseconds / kBytePriceScale.
inline constexpr std::int64_t kBytePriceScale = std::int64_t{1} << 40;

// The prices that prove the bound for the plans of one layout.
struct CertificateBranch {
  LayoutKind layout = LayoutKind::kPerParameter;
  std::vector<WindowPrices> windows;  // one more than cuts
  std::vector<std::int64_t> bytes;    // one for each cut
  Nanoseconds lower_bound_ns;
  bool operator==(const CertificateBranch&) const = default;
};

// No plan of the class has a shorter step than lower_bound_ns within the budget.
struct Certificate {
  Digests digests;                  // of the trace, the strategy and the cluster of the plan
  std::string plan_digest;          // "sha256:..." of the plan's document
  std::string plan_class;           // which plans it is about (docs/reference/optimize.md)
  bool activation_offload = false;  // plans that move activations to host memory are among them
  bool recomputation = false;       // plans that run parts of the forward again are among them
  bool shared_pools = false;        // plans that gather into pools of the model's own memory are among them
  // Ranks that parameters are cut over, by mesh. Each parameter is kept or gathered again whatever the others
  // of its unit are: so experts may be kept apart from the dense part.
  std::vector<std::int64_t> meshes;
  Nanoseconds model_wait_ns;  // what each plan waits for collectives of the model at once
  std::vector<LayoutKind> layouts;
  Bytes budget_bytes;
  Bytes peak_pooled_bytes;
  Nanoseconds step_ns;
  Nanoseconds lower_bound_ns;
  std::vector<std::int64_t> cuts;  // operators of the step before which a window ends, ascending
  std::vector<CertificateBranch> branches;
  bool operator==(const Certificate&) const = default;
};

// A class of decisions: what was chosen, and the plan with everything else as chosen and this one left as
// FSDP2 has it by default.
struct DecisionReport {
  std::string decision;
  std::string chosen;
  Nanoseconds worth_ns;  // how much longer the step is without it
  Bytes without_bytes;   // reserved, without it and without a budget
  bool fits_without = true;
  bool operator==(const DecisionReport&) const = default;
};

// A strategy that people use, planned and simulated for the same job.
struct BaselineReport {
  std::string name;
  Nanoseconds step_ns;
  Bytes peak_reserved_bytes;        // within the budget; where it runs out of memory: without one
  std::int64_t cache_releases = 0;  // within the budget
  bool fits = false;                // as plans of the search have to: without releases where none are allowed
  bool operator==(const BaselineReport&) const = default;
};

// A plan of the price curve: none that was found is both smaller and no slower.
struct CurvePoint {
  Bytes peak_reserved_bytes;  // without a budget
  Nanoseconds step_ns;
  bool operator==(const CurvePoint&) const = default;
};

// The outcome of a mesh and a micro-batch that the job may have.
enum class VariantOutcome : std::uint8_t {
  kChosen,
  kSlower,      // searched; its best plan is no faster
  kDoesNotFit,  // searched; no plan that was found fits the budget
  kCannotFit,   // passed over: it is proven that no plan of the class fits
  kCannotWin,   // passed over: it is proven that no plan of the class is faster
  kRefused,     // the planner makes no plan of it
  kNotTried,    // the search ended before
};

struct VariantReport {
  std::string trace;                 // its path
  std::string mesh;                  // "replicate=2,shard=4", outermost first
  std::int64_t microbatch_size = 0;  // samples of a rank's micro-batch; 0: not decided
  std::int64_t microbatches = 0;     // of a step; 0: not decided
  VariantOutcome outcome = VariantOutcome::kNotTried;
  Nanoseconds step_ns;         // of its best plan; 0: none was found
  Nanoseconds lower_bound_ns;  // of its plans of the class; 0: not known
  std::string says;            // why it was not chosen; "": it was
  bool operator==(const VariantReport&) const = default;
};

// Costs at an end of their intervals: factors of the times.
struct CornerReport {
  std::int64_t compute_ppm = 0, links_ppm = 0, overlap_ppm = 0;
  Nanoseconds step_ns;        // of the plan
  Nanoseconds plain_step_ns;  // of the plan that is fastest at the nominal costs
  bool operator==(const CornerReport&) const = default;
};

// The plan is the best at the worst of the costs. Nominal costs are among them.
struct RobustReport {
  std::int64_t off_ppm = 0;    // how far each cost may be off
  Nanoseconds worst_ns;        // the plan's longest step
  Nanoseconds plain_step_ns;   // of the plan that is fastest at the nominal costs
  Nanoseconds plain_worst_ns;  // its longest
  std::vector<CornerReport> corners;
  bool operator==(const RobustReport&) const = default;
};

struct Optimization {
  std::string model;
  std::string policy;
  std::string cluster;
  std::string plan_digest;
  Nanoseconds step_ns;
  Nanoseconds lower_bound_ns;
  std::int64_t gap_ppm = 0;  // (step - bound) / bound
  Bytes peak_allocated_bytes;
  Bytes peak_pooled_bytes;
  Bytes peak_reserved_bytes;
  std::int64_t cache_releases = 0;  // within the budget
  Bytes budget_bytes;
  Nanoseconds planning_ns;
  std::int64_t evaluations = 0;  // plans that were made and simulated
  std::int64_t evaluations_per_second = 0;
  bool complete = true;  // false: a limit or a signal ended the search
  std::vector<DecisionReport> decisions;
  std::vector<BaselineReport> baselines;
  std::vector<CurvePoint> curve;       // ascending bytes
  std::optional<RobustReport> robust;  // what was asked for: not the fastest, but the best at the worst
  // The meshes and micro-batches that were tried, in their order. Everything else is about the chosen one.
  std::vector<VariantReport> variants;
  Nanoseconds variants_lower_bound_ns;  // of plans of the class of all variants; 0: not known of one
  std::vector<std::string> notes;
  bool operator==(const Optimization&) const = default;
};

}  // namespace shardplan
