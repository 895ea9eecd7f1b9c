// SPDX-License-Identifier: Apache-2.0
// The lower bound of docs/reference/optimize.md: no schedule has a shorter step. And the check of a
// certificate.
//
// [Note: positions]
// The operators of the step are counted in the order in which every plan of the class runs them on its
// compute stream, all micro-batches one after the other. Position 2 i + 1 is where operator i starts, 2 i + 2
// where it ends. A cut is a position; cuts divide the step into windows. Both positions of an operator are
// taken just inside of it: what it reads and what it writes is there.
//
//   operator     |  0  |  1  |  2  |  3  |
//   position     1    2,3   4,5   6,7    8
//   cuts               3           6
//   windows      |  0  |     1     |  2  |
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "shardplan/schemas/cluster.h"
#include "shardplan/schemas/error.h"
#include "shardplan/schemas/optimization.h"
#include "shardplan/schemas/plan.h"
#include "shardplan/schemas/trace.h"
#include "shardplan/simulator/cost_model.h"

namespace shardplan {

namespace internal {
struct RecomputationChoice;  // bound/recomputation_choices.h
}

// The name of the plan class (docs/reference/optimize.md).
inline constexpr std::string_view kPlanClass = "fully_sharded/4";

// No price of a byte is higher (1,024 ns).
inline constexpr std::int64_t kHighestBytePrice = std::int64_t{1} << 50;

// The highest allowed prices of a window in which kernels have this price, at most kPriceScale, and the links
// share what is left: `shares` add up to kPriceScale.
WindowPrices HighestPrices(const Cluster& cluster, std::int64_t kernels,
                           const std::vector<std::int64_t>& shares);

// Prices of a window in which the compute stream waits for collectives of the model, beside WindowPrices: of
// a nanosecond of kernels on other streams, and of one of such a collective. Parts of kPriceScale.
struct PricesBesideWaits {
  std::int64_t copies = 0;
  std::int64_t waits = 0;
};

// Whether the plan moves activations to host memory.
bool OffloadsActivations(const Plan& plan);

// Whether gathers, or reductions, share a pool with other memory.
bool SharesPools(const Plan& plan);

// Whether the plan is of the class. kNegative says what it does otherwise.
Status CheckPlanClass(const Plan& plan);

// The work that every plan of the class has in a step, read off the trace and the job (`job`: its cluster,
// mesh, dtypes, optimizer and training loop).
class StepWork {
 public:
  // `job` is of the class. `recomputation`: plans may run parts of the forward again. `activation_offload`:
  // activations may be in host memory between the pass that makes them and a later one, in no time.
  // `shared_pools`: gathers and reductions may be in pools with other memory.
  // kNegative: not every parameter is in one unit. kBadInput: the trace is not that of the plan.
  static Result<StepWork> Make(const Trace& trace, const Plan& job, bool recomputation,
                               bool activation_offload = false, bool shared_pools = false);

  std::int64_t operators() const;
  const std::vector<std::int64_t>& durations_ns() const;
  // The operators that are the first of a pass.
  const std::vector<std::int64_t>& pass_begins() const;
  // The first operator of the first pass behind that of `op`; operators() where there is none.
  std::int64_t PassBehind(std::int64_t op) const;
  // By pass: the operator while which most is there whatever the plan.
  std::vector<std::int64_t> PeakOperators() const;
  // Positions before which parameters are gathered first, or behind which gradients are reduced last, and the
  // bytes of these parameters.
  std::map<std::int64_t, std::int64_t> Deadlines() const;
  const Cluster& cluster() const;
  // Ranks that parameters are cut over, by mesh.
  std::vector<std::int64_t> Meshes() const;
  // Lower bound: time for which every plan waits at once for collectives of the model.
  Nanoseconds ModelWait() const;
  // No plan of the class needs less.
  Bytes LeastMemory() const;
  // The host alone takes that long.
  Nanoseconds HostBound() const;

 private:
  friend class StepWorkBuilder;
  friend class WindowedWork;

  struct Parts;  // bound/step_parts.h
  explicit StepWork(std::shared_ptr<const Parts> parts) : parts_(std::move(parts)) {}

  std::shared_ptr<const Parts> parts_;
};

// The subgradient of the bound: the work that the cheapest plan of the relaxation has in each window.
struct WindowUse {
  std::vector<std::int64_t> kernels_ns;             // by window
  std::vector<std::int64_t> copies_ns;              // ... of kernels that may be on other streams
  std::vector<std::vector<std::int64_t>> links_ns;  // by window and link
  std::vector<std::int64_t> bytes;                  // by cut: over the room that there is
};

// The same seen through cuts: what prices of the windows are put on.
class WindowedWork {
 public:
  // `cuts`: positions, ascending. `work` outlives it.
  WindowedWork(const StepWork& work, std::vector<std::int64_t> cuts, LayoutKind layout, Bytes budget);

  const std::vector<std::int64_t>& cuts() const { return cuts_; }
  // How many links do anything at all.
  std::size_t links() const;
  // Prices of waits and copies that follow from those of window `window`.
  PricesBesideWaits PricesBeside(const WindowPrices& prices, std::size_t window) const;
  // By window: collectives of the model that the compute stream waits for at once.
  const std::vector<std::int64_t>& waits_ns() const { return waits_ns_; }
  // About the price of a byte at which gathering it again is as dear as keeping it.
  std::int64_t BytePriceOfGather() const;
  // The lower bound that the prices prove, 0 at least. kNegative: infeasible prices.
  Result<Nanoseconds> Value(const std::vector<WindowPrices>& windows,
                            const std::vector<std::int64_t>& bytes) const;
  // The same without the check of the prices. `use`, if not null, gets the subgradient.
  Nanoseconds ValueOf(const std::vector<WindowPrices>& windows, const std::vector<std::int64_t>& bytes,
                      WindowUse* use = nullptr) const;
  // kNegative: see Value.
  Status CheckPrices(const std::vector<WindowPrices>& windows, const std::vector<std::int64_t>& bytes) const;

 private:
  class Sum;
  // A parameter that is read twice, and what is between: cuts [from, to). It can be gathered again in windows
  // [from, to].
  using Gap = std::pair<std::int64_t, std::int64_t>;
  struct Reduction {
    std::int64_t window = 0;  // the first in which it can run
    std::int64_t cut = 0;     // the first at which the gradient is there
    std::int64_t next = -1;   // cuts before it pass until the next gradient of the parameter; -1: none comes
    std::int64_t later = -1;  // cuts before it pass until the next pass has begun
    auto operator<=>(const Reduction&) const = default;
  };

  std::int64_t CutsUpTo(std::int64_t position) const;
  bool ShardsCountAlways(LayoutKind layout) const;
  void UseRoom(std::int64_t bytes, std::int64_t first, std::int64_t last);
  void AddWindows();
  void AddCuts(LayoutKind layout, Bytes budget);
  void AddStretches();
  void AddParameters(LayoutKind layout);
  void SetCopiedPerShard(bool flat);

  const StepWork::Parts& work_;
  std::vector<std::int64_t> cuts_;
  std::vector<std::int64_t> kernels_ns_;  // by window
  std::vector<std::int64_t> waits_ns_;    // ... of collectives of the model that are waited for at once
  std::vector<std::int64_t> room_bytes_;  // by cut: the budget less what is there in any case
  // A collective of the model, alike in its windows [from, to] and its links: nanoseconds alone.
  struct MovedInWindows {
    std::int64_t from = 0, to = 0;
    LinkLoads loads;
    auto operator<=>(const MovedInWindows&) const = default;
  };
  std::map<MovedInWindows, std::int64_t> moved_;
  // Parameters that are gathered in a gap. Bytes kept on part of the ranks are a part of the padded bytes.
  struct Gathered {
    std::int64_t bytes = 0, padded_bytes = 0;
  };
  struct Reduced {
    std::int64_t numel = 0;
    std::int64_t gradient_bytes = 0;
    std::int64_t unsharded_bytes = 0;  // that wait, over what does in any case; in the pass that makes it
    std::int64_t kept_bytes = 0;       // ... in later ones
    std::int64_t reduced_bytes = 0;
  };
  // Parameters that are cut over the same ranks.
  struct OnMesh {
    std::map<std::int64_t, std::int64_t> first_gathers;  // by last window: bytes
    std::int64_t first_gathered = 0;  // all of them, where outputs have a pool of their own
    std::map<Gap, Gathered> gaps;
    std::map<Reduction, Reduced> reductions;
    std::int64_t last_window = -1;  // the last gradient's reduction begins no earlier; -1: none
    std::int64_t copied_per_shard =
        0;  // bytes that a kernel moves for each byte of the shard that is gathered
  };
  std::vector<OnMesh> on_meshes_;
  struct Stretch {
    const std::vector<internal::RecomputationChoice>* choices = nullptr;
    std::int64_t from = 0, to = 0;  // cuts [from, to)
    std::int64_t last = 0;          // window in which anything of it runs again
  };
  std::vector<Stretch> stretches_;
  std::int64_t largest_gathered_ =
      0;  // of the outputs of gathers that have a pool of their own; 0: none have
  std::int64_t copied_per_gathered_ = 0;  // bytes that a kernel moves for each byte gathered
  bool copies_in_order_ =
      false;  // kernels that copy out of gathers and into reductions: on the compute stream
  bool casts_gradients_ = false;
};

// The independent check: the plan verifies, is of the class and is what the certificate says it is, and the
// prices prove the bound. kNegative says what does not hold; kBadInput: documents that do not belong
// together.
Status CheckCertificate(const Trace& trace, const Plan& plan, const Certificate& certificate);

}  // namespace shardplan
