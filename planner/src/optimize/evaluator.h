// SPDX-License-Identifier: Apache-2.0
// Plans and simulates choices: each once, several at a time.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <map>
#include <optional>
#include <vector>

#include "optimize/choice.h"
#include "optimize/unit_model.h"
#include "plan_series.h"
#include "shardplan/planner/optimize.h"
#include "shardplan/schemas/cluster.h"
#include "shardplan/schemas/trace.h"
#include "shardplan/simulator/reserved_memory.h"

namespace shardplan::optimize {

struct Evaluation {
  bool planned = false;  // false: there is no such plan
  Nanoseconds step_ns;
  Bytes pooled_bytes;
  Bytes allocated_bytes;
  Bytes budget_bytes;  // what the allocator may reserve for this plan
  // The step is no shorter with the same work in another order: what Lemma 1 of docs/reference/optimize.md
  // says of these kernels and collectives.
  Nanoseconds work_ns;
  Nanoseconds kernels_ns;
  Nanoseconds waits_ns;  // of collectives of the model that the compute stream waits for at once
  std::vector<std::int64_t> links_ns;  // by link of the cluster
  Error error;                         // why there is none
  // Pooled memory is reserved, too: the choice does not fit. (Where the cache is released, pools give to each
  // other.)
  bool over = false;
};

class Evaluator {
 public:
  Evaluator(const Trace& trace, const Job& job, const Cluster& cluster, const OptimizeOptions& options);

  // Evaluates each choice. Once the search has to end, choices that are not known yet are not planned.
  // `even_late`: only a signal keeps it from that, and it does not count for the limit.
  std::vector<Evaluation> Evaluate(const std::vector<Choice>& choices, bool even_late = false);
  // Whether a choice that was planned fits, by the allocator's model (reserved_memory.h). If OptimizeOptions
  // allow no release of the cache, a choice with one does not fit.
  bool Fits(const Choice& choice);
  // Evaluation::work_ns with so much more to compute.
  Nanoseconds WorkWith(const Evaluation& evaluation, Nanoseconds more) const;
  // How much more it needs than it may have; 0: it fits.
  Bytes Over(const Choice& choice);
  // With releases of the cache counted, whatever is allowed, and ReservedToShow.
  DeviceFit FitOf(const Choice& choice) const;
  // Bytes that the allocator would reserve without a budget: the least budget without a release.
  Bytes Reserved(const Choice& choice);
  // Cuts of the chain that should be good with everything else as `from`, found without planning.
  std::vector<Choice> PromisingUnits(const Choice& from, std::size_t most = 12);
  // The choices that should be fastest, without planning, among choices that differ in how the chain is cut.
  std::vector<Choice> Fastest(std::vector<Choice> choices, std::size_t most);
  // The search has to end: it has made its plans, the time is over, or somebody said so.
  bool Ended();
  // Another search follows, with as many plans again.
  void GoOn();
  // This search, or one before it, had to end.
  bool WasCutShort() { return cut_short_ || Ended(); }
  std::int64_t evaluations() const { return std::ssize(made_); }
  const std::map<Choice, Evaluation>& known() const { return known_; }

 private:
  const UnitModel* ModelOfUnits();
  bool OutOfTime();
  bool Stopped() const { return options_.stop != nullptr && options_.stop->load(); }
  Evaluation EvaluateOne(const Choice& choice) const;
  FitOptions FitOptionsOf() const;  // with releases where they are allowed

  const PlanSeries series_;
  const Trace& trace_;
  const Job& job_;
  const OptimizeOptions& options_;
  const Cluster& cluster_;
  std::optional<UnitModel> unit_model_;
  bool asked_for_unit_model_ = false;
  const std::chrono::steady_clock::time_point begin_ = std::chrono::steady_clock::now();
  std::map<Choice, Evaluation> known_;  // whatever was asked
  std::map<Choice, Evaluation> made_;   // of effective choices
  // Likewise:
  std::map<Choice, bool> fits_;
  std::map<Choice, Bytes> reserved_;
  std::int64_t counted_ = 0;  // evaluations that the limit is about
  std::int64_t limit_ = 0;    // 0: none
  bool cut_short_ = false;    // a search before this one had to end
  std::atomic<bool> ended_ = false;
};

// Measures a plan that was made already. `fit` says its budget, and whether it may release the cache.
Result<Evaluation> Measure(const Plan& plan, const FitOptions& fit = {});

}  // namespace shardplan::optimize
