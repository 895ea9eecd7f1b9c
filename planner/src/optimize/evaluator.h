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

namespace shardplan::optimize {

struct Evaluation {
  bool planned = false;  // false: there is no such plan
  Nanoseconds step_ns;
  Bytes pooled_bytes;
  Bytes allocated_bytes;
  // The step is no shorter with the same work in another order: what Lemma 1 of docs/optimize.md says of it.
  Nanoseconds work_ns;
  Error error;  // why there is none
};

class Evaluator {
 public:
  Evaluator(const Trace& trace, const Job& job, const Cluster& cluster, const OptimizeOptions& options);

  // Of each choice. Once the search has to end, what is not known yet is not planned.
  // `even_late`: only a signal keeps it from that.
  std::vector<Evaluation> Evaluate(const std::vector<Choice>& choices, bool even_late = false);
  // What the allocator's model reserves for a choice that was planned.
  Bytes Reserved(const Choice& choice);
  // Cuts of the chain that should be good with everything else as `from`, found without planning.
  std::vector<Choice> PromisingUnits(const Choice& from, std::size_t most = 12);
  // Of choices that differ in how the chain is cut: those that should be fastest, without planning.
  std::vector<Choice> Fastest(std::vector<Choice> choices, std::size_t most);
  // The search has to end: the time is over, or somebody said so.
  bool Ended();
  std::int64_t evaluations() const { return std::ssize(made_); }
  const std::map<Choice, Evaluation>& known() const { return known_; }

 private:
  const UnitModel* ModelOfUnits();
  bool Stopped() const { return options_.stop != nullptr && options_.stop->load(); }
  Evaluation EvaluateOne(const Choice& choice) const;

  const PlanSeries series_;
  const Trace& trace_;
  const Job& job_;
  const OptimizeOptions& options_;
  std::optional<UnitModel> unit_model_;
  bool asked_for_unit_model_ = false;
  const std::chrono::steady_clock::time_point begin_ = std::chrono::steady_clock::now();
  std::map<Choice, Evaluation> known_;  // whatever was asked
  std::map<Choice, Evaluation> made_;   // of effective choices
  std::map<Choice, Bytes> reserved_;    // likewise
  std::atomic<bool> ended_ = false;
};

// Of a plan that was made already.
Result<Evaluation> Measure(const Plan& plan);
Bytes ReservedBy(const Plan& plan);

}  // namespace shardplan::optimize
