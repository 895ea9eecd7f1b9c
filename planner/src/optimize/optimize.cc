// The answer: the best plan found, verified and measured, its bound and what the decisions are worth.
#include "shardplan/planner/optimize.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <utility>

#include "optimize/evaluator.h"
#include "optimize/moves.h"
#include "optimize/prices.h"
#include "optimize/search.h"
#include "shardplan/schemas/io.h"
#include "shardplan/simulator/lower_bound.h"

namespace shardplan {
namespace {

using optimize::Choice;
using optimize::Evaluation;
using optimize::Found;

constexpr int kRefusals = 32;  // plans that do not verify, or do so with a fault

std::int64_t Ppm(std::int64_t part, std::int64_t whole) {
  __extension__ using Int128 = __int128;
  return static_cast<std::int64_t>(Int128{part} * 1'000'000 / whole);
}

// Knobs that only one policy has, and that change what is computed.
bool NeedsItsPolicy(const Strategy& strategy) {
  const Fsdp2Knobs& knobs = strategy.fsdp2;
  return strategy.data_parallel || knobs.gradient_divide_factor || knobs.force_sum_reduction ||
         !knobs.shard_dims.empty() || !knobs.extensions.empty() || !knobs.all_reduce_hooks.empty() ||
         !knobs.shard_root || strategy.fsdp1.comm_hook != Fsdp1CommHook::kNone ||
         strategy.fsdp1.size_based_wrap || !strategy.fsdp1.ignored_modules.empty() || !strategy.setup.empty();
}

// Units that say what is computed, or that something else names.
bool NeedsItsUnits(const Strategy& strategy) {
  const auto says_more = [](const UnitRule& rule) {
    return rule.mixed_precision || rule.cpu_offload || rule.data_parallel;
  };
  return std::ranges::any_of(strategy.units, says_more) || !strategy.fsdp2.shard_root ||
         !strategy.setup.empty() || !strategy.fsdp2.shared_comm_contexts.empty();
}

class OptimizeRun {
 public:
  OptimizeRun(const Trace& trace, const Strategy& strategy, const Cluster& cluster, OptimizeOptions options)
      : trace_(trace),
        cluster_(cluster),
        options_(Bound(strategy, std::move(options))),
        job_(JobOf(trace, strategy, cluster, options_)),
        evaluator_(trace_, job_, cluster_, options_) {}

  Result<OptimizeOutput> Run() {
    if (Status found = FindPlan(); !found) return std::unexpected(std::move(found.error()));
    AddBound();
    AddDecisions();
    AddBaselines();
    if (options_.whole_grid) AddGrid();
    AddCurve();
    Finish();
    return std::move(output_);
  }

 private:
  static OptimizeOptions Bound(const Strategy& strategy, OptimizeOptions options) {
    if (NeedsItsPolicy(strategy)) options.fixed.insert("policy");
    if (NeedsItsUnits(strategy)) options.fixed.insert("units");
    return options;
  }
  static optimize::Job JobOf(const Trace& trace, const Strategy& strategy, const Cluster& cluster,
                             const OptimizeOptions& options) {
    optimize::Job job = optimize::MakeJob(trace, strategy, cluster.ranks);
    job.keeps_units = options.fixed.contains("units");
    job.keeps_reshard = options.fixed.contains("reshard");
    job.keeps_prefetch = options.fixed.contains("prefetch");
    job.keeps_accumulation = options.fixed.contains("accumulation");
    job.keeps_layout = options.fixed.contains("layout") || !strategy.fsdp2.shard_dims.empty();
    job.keeps_checkpoint = options.fixed.contains("checkpoint") || !options.may_checkpoint;
    return job;
  }

  Status FindPlan() {
    optimize::Search search(evaluator_, job_, options_);
    std::set<Choice> refused;
    while (std::cmp_less(refused.size(), kRefusals)) {
      const std::optional<Found> found = search.Run(refused);
      if (!found) return std::unexpected(WhyNothing());
      if (!search.Fits(*found)) return NothingFits(*found);
      Result<PlannerOutput> planned = MakePlan(trace_, optimize::StrategyOf(job_, found->choice), cluster_);
      // What PyTorch does wrong with a setting is no reason to train wrongly with it.
      if (!planned || !planned->faults.empty()) {
        refused.insert(found->choice);
        continue;
      }
      choice_ = found->choice;
      output_.strategy = optimize::StrategyOf(job_, choice_);
      output_.plan = std::move(planned->plan);
      output_.report.peak_reserved_bytes = evaluator_.Reserved(choice_);
      complete_ = !evaluator_.Ended();
      return {};
    }
    return MakeError(ErrorCode::kNegative, "none of the best plans that were found verifies");
  }

  Error WhyNothing() {
    for (const auto& [choice, evaluation] : evaluator_.known()) {
      if (!evaluation.planned) return evaluation.error;
    }
    return {.code = ErrorCode::kNegative, .message = "no plan was found in the time limit"};
  }

  Status NothingFits(const Found& least) {
    std::string text = fmt::format(
        "no plan that was found is within {} bytes: the least needs {} (pooled) and reserves {} by the "
        "allocator's model",
        options_.budget.value, least.evaluation.pooled_bytes.value, evaluator_.Reserved(least.choice).value);
    const Result<PlannerOutput> planned =
        MakePlan(trace_, optimize::StrategyOf(job_, least.choice), cluster_, {.verify = false});
    if (planned && CheckPlanClass(planned->plan)) {
      if (const auto work = StepWork::Make(trace_, planned->plan, Recomputes(planned->plan)); work)
        text +=
            fmt::format("; none of the class {} needs less than {}", kPlanClass, work->LeastMemory().value);
    }
    text += WouldHelp("checkpoint", &OptimizeOptions::may_checkpoint);
    text += WouldHelp("offload", &OptimizeOptions::may_offload);
    return MakeError(ErrorCode::kNegative, std::move(text));
  }

  // What the most frugal choices need with one thing more allowed.
  std::string WouldHelp(std::string_view what, bool OptimizeOptions::*allowed) {
    if (options_.*allowed) return {};
    OptimizeOptions more = options_;
    more.*allowed = true;
    const optimize::Job job = JobOf(trace_, job_.strategy, cluster_, more);
    optimize::Evaluator evaluator(trace_, job, cluster_, more);
    std::optional<Bytes> least;
    for (const Evaluation& e : evaluator.Evaluate(optimize::Frugal(job, more))) {
      if (e.planned && (!least || e.pooled_bytes < *least)) least = e.pooled_bytes;
    }
    if (!least) return {};
    return fmt::format("; with --allow {} there is one of {}", what, least->value);
  }

  bool Recomputes(const Plan& plan) const {
    return options_.may_checkpoint || std::ranges::any_of(plan.segments, [](const Segment& s) {
             return s.phase == SegmentPhase::kRecompute;
           });
  }

  // A plan that is outside of the class has a bound of its own work only, which proves nothing of others.
  void AddBound() {
    const Plan& plan = output_.plan;
    if (const Status in_class = CheckPlanClass(plan); !in_class) {
      output_.report.notes.push_back("no bound: " + in_class.error().message);
      return;
    }
    const bool recomputation = Recomputes(plan);
    const Result<StepWork> work = StepWork::Make(trace_, plan, recomputation);
    if (!work) {
      output_.report.notes.push_back("no bound: " + work.error().message);
      return;
    }
    Certificate certificate{.digests = plan.digests,
                            .plan_digest = DigestOfJson(plan),
                            .plan_class = std::string(kPlanClass),
                            .recomputation = recomputation,
                            .budget_bytes = options_.budget,
                            .cuts = optimize::ChooseCuts(*work)};
    for (const LayoutKind layout : {LayoutKind::kPerParameter, LayoutKind::kFlat}) {
      const bool fsdp1 = layout == LayoutKind::kFlat;
      if (options_.fixed.contains("policy") && fsdp1 != (plan.policy == "fsdp1")) continue;
      certificate.layouts.push_back(layout);
      certificate.branches.push_back(optimize::FindPrices(*work, certificate.cuts, layout, options_.budget,
                                                          evaluator_.known().at(choice_).step_ns));
    }
    const auto least = std::ranges::min_element(certificate.branches, {}, &CertificateBranch::lower_bound_ns);
    certificate.lower_bound_ns = least->lower_bound_ns;
    output_.certificate = std::move(certificate);
  }

  void AddDecisions() {
    const Choice usual = optimize::Baselines(job_, options_).front().choice;
    const Nanoseconds step_ns = evaluator_.known().at(choice_).step_ns;
    for (const std::string& decision : optimize::DecisionNames()) {
      DecisionReport report{.decision = decision, .chosen = optimize::DecisionText(job_, choice_, decision)};
      const Choice without = optimize::WithDecision(choice_, decision, usual);
      if (without == choice_) {
        report.without_bytes = evaluator_.known().at(choice_).pooled_bytes;
      } else if (const Evaluation e = evaluator_.Evaluate({without}, true).front(); e.planned) {
        report.worth_ns = e.step_ns - step_ns;
        report.without_bytes = e.pooled_bytes;
        report.fits_without = e.pooled_bytes <= options_.budget;
      } else {
        continue;  // there is no such plan, or no time to make it
      }
      output_.report.decisions.push_back(std::move(report));
    }
  }

  void AddBaselines() {
    for (const auto& [name, choice] : optimize::Baselines(job_, options_)) {
      const Evaluation e = evaluator_.Evaluate({choice}, true).front();
      if (!e.planned) continue;
      output_.report.baselines.push_back(
          {name, e.step_ns, e.pooled_bytes, e.pooled_bytes <= options_.budget});
    }
  }

  // The best setting of the grid that is in the budget, of each policy.
  void AddGrid() {
    std::optional<Evaluation> best[2];
    for (const Choice& work : optimize::Grid(job_, options_)) {
      if (!optimize::IsOfPyTorch(work)) continue;
      std::vector<Choice> settings = optimize::Orders(job_, work);
      settings.push_back(work);
      for (Evaluation& e : evaluator_.Evaluate(settings, true)) {
        if (!e.planned || e.pooled_bytes > options_.budget) continue;
        std::optional<Evaluation>& of_policy = best[work.fsdp1 ? 1 : 0];
        if (!of_policy || e.step_ns < of_policy->step_ns) of_policy = std::move(e);
      }
    }
    for (const bool fsdp1 : {false, true}) {
      const std::optional<Evaluation>& e = best[fsdp1 ? 1 : 0];
      if (!e) continue;
      const char* name = fsdp1 ? "fsdp1, best of the grid" : "fsdp2, best of the grid";
      output_.report.baselines.push_back({name, e->step_ns, e->pooled_bytes, true});
    }
  }

  // Of everything that was simulated: from the smallest on, what is faster than all before it.
  void AddCurve() {
    std::vector<CurvePoint> points;
    for (const auto& [choice, e] : evaluator_.known()) {
      if (e.planned) points.push_back({e.pooled_bytes, e.step_ns});
    }
    std::ranges::sort(points, [](const CurvePoint& a, const CurvePoint& b) {
      return std::pair(a.peak_pooled_bytes, a.step_ns) < std::pair(b.peak_pooled_bytes, b.step_ns);
    });
    for (const CurvePoint& point : points) {
      std::vector<CurvePoint>& curve = output_.report.curve;
      if (curve.empty() || point.step_ns < curve.back().step_ns) curve.push_back(point);
    }
  }

  void Finish() {
    Optimization& report = output_.report;
    const Plan& plan = output_.plan;
    const Evaluation& e = evaluator_.known().at(choice_);
    report.model = plan.model;
    report.policy = plan.policy;
    report.cluster = plan.cluster.name;
    report.plan_digest = DigestOfJson(plan);
    report.step_ns = e.step_ns;
    report.peak_allocated_bytes = e.allocated_bytes;
    report.peak_pooled_bytes = e.pooled_bytes;
    report.budget_bytes = options_.budget;
    report.complete = complete_;
    report.evaluations = evaluator_.evaluations();
    if (output_.certificate) {
      Certificate& certificate = *output_.certificate;
      certificate.step_ns = e.step_ns;
      certificate.peak_pooled_bytes = e.pooled_bytes;
      report.lower_bound_ns = certificate.lower_bound_ns;
      const std::int64_t bound = std::max<std::int64_t>(1, report.lower_bound_ns.value);
      report.gap_ppm = Ppm(report.step_ns.value - bound, bound);
    }
    const auto wall = std::chrono::steady_clock::now() - begin_;
    report.planning_ns.value = std::chrono::duration_cast<std::chrono::nanoseconds>(wall).count();
    report.evaluations_per_second =
        report.evaluations * 1'000'000'000 / std::max<std::int64_t>(1, report.planning_ns.value);
  }

  const Trace& trace_;
  const Cluster& cluster_;
  const OptimizeOptions options_;
  const optimize::Job job_;
  optimize::Evaluator evaluator_;
  const std::chrono::steady_clock::time_point begin_ = std::chrono::steady_clock::now();
  Choice choice_;
  bool complete_ = true;
  OptimizeOutput output_;
};

}  // namespace

const std::set<std::string>& FixableDecisions() {
  static const std::set<std::string> names = {"accumulation", "checkpoint", "layout", "policy",
                                              "prefetch",     "reshard",    "units"};
  return names;
}

Result<OptimizeOutput> Optimize(const Trace& trace, const Strategy& job, const Cluster& cluster,
                                const OptimizeOptions& options) {
  return OptimizeRun(trace, job, cluster, options).Run();
}

}  // namespace shardplan
