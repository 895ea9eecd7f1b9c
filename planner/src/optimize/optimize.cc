// SPDX-License-Identifier: Apache-2.0
// The answer: the best plan found, verified and measured, its bound and what the decisions are worth.
#include "shardplan/planner/optimize.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <utility>

#include "optimize/evaluator.h"
#include "optimize/moves.h"
#include "optimize/outlook.h"
#include "optimize/prices.h"
#include "optimize/robust.h"
#include "optimize/search.h"
#include "pipeline.h"
#include "shardplan/schemas/assert.h"
#include "shardplan/schemas/io.h"
#include "shardplan/schemas/pytorch_rules.h"
#include "shardplan/simulator/cost_model.h"
#include "shardplan/simulator/lower_bound.h"
#include "shardplan/simulator/memory_profile.h"
#include "shardplan/simulator/reserved_memory.h"

namespace shardplan {
namespace {

using optimize::Choice;
using optimize::Evaluation;
using optimize::Found;

constexpr int kRefusals = 32;  // so many plans that do not verify, or do so with a fault
const std::string kExpandable = "expandable_segments:True";

std::int64_t Ppm(std::int64_t part, std::int64_t whole) {
  __extension__ using Int128 = __int128;
  return static_cast<std::int64_t>(Int128{part} * 1'000'000 / whole);
}

// Knobs that only one policy has, and that change what is computed.
bool NeedsItsPolicy(const Strategy& strategy) {
  const Fsdp2Knobs& knobs = strategy.fsdp2;
  return strategy.optimizer.muon || strategy.data_parallel || knobs.gradient_divide_factor ||
         knobs.force_sum_reduction || !knobs.shard_dims.empty() || !knobs.extensions.empty() ||
         !knobs.all_reduce_hooks.empty() || !knobs.shard_root ||
         strategy.fsdp1.comm_hook != Fsdp1CommHook::kNone || strategy.fsdp1.size_based_wrap ||
         !strategy.fsdp1.ignored_modules.empty() || !strategy.setup.empty();
}

// Units that say what is computed, or that something else names.
bool NeedsItsUnits(const Strategy& strategy) {
  const auto says_more = [](const UnitRule& rule) {
    return rule.mixed_precision || rule.cpu_offload || rule.data_parallel;
  };
  return std::ranges::any_of(strategy.units, says_more) || !strategy.fsdp2.shard_root ||
         !strategy.setup.empty() || !strategy.fsdp2.shared_comm_contexts.empty();
}

// With the mesh of the trace's parameters and Muon's matrices, where the job has none of its own: the search
// has to know who is on which. A trace that has none to make is an error of every plan.
Strategy WithMesh(const Trace& trace, const Strategy& job, std::int64_t ranks) {
  const Result<Strategy> completed = CompleteStrategy(job, trace, ranks);
  return completed && (completed->mesh != job.mesh || job.optimizer.muon) ? *completed : job;
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
    if (options_.robust_ppm > 0) FindRobustPlan();
    AddBound();
    AddDecisions();
    AddBaselines();
    if (options_.whole_grid) AddGrid();
    AddCurve();
    Finish();
    return std::move(output_);
  }

  Result<optimize::Outlook> Look() {
    std::vector<Choice> choices = optimize::Frugal(job_, options_);
    for (const optimize::NamedChoice& usual : optimize::Baselines(job_, options_))
      choices.push_back(usual.choice);
    const std::vector<Evaluation> evaluations = evaluator_.Evaluate(choices, true);
    const auto made = std::ranges::find(evaluations, true, &Evaluation::planned);
    if (made == evaluations.end()) return std::unexpected(WhyNothing());
    optimize::Outlook outlook{.step_ns = kLongestStep, .budget = LargestBudget()};
    for (const Evaluation& e : evaluations) {
      if (e.planned && !e.over) outlook.step_ns = std::min(outlook.step_ns, e.step_ns);
    }
    const Strategy strategy =
        optimize::StrategyOf(job_, choices[static_cast<std::size_t>(made - evaluations.begin())]);
    const Result<PlannerOutput> planned = MakePlan(trace_, strategy, cluster_, {.verify = false});
    // Plans with shards in host memory are outside of the class, and the search may choose one.
    if (!planned || options_.may_offload || !CheckPlanClass(planned->plan)) return outlook;
    outlook.layouts = LayoutsOf(planned->plan);
    if (Result<StepWork> work = WorkOf(planned->plan); work) outlook.work = std::move(*work);
    return outlook;
  }

 private:
  static OptimizeOptions Bound(const Strategy& strategy, OptimizeOptions options) {
    if (NeedsItsPolicy(strategy) || options.of_pytorch) options.may_change_policy = false;
    if (NeedsItsUnits(strategy)) options.fixed.insert("units");
    if (options.robust_ppm > 0)
      options.time_limit_ns.value = (options.time_limit_ns.value + 1) / 2;  // two searches
    return options;
  }
  static optimize::Job JobOf(const Trace& trace, const Strategy& strategy, const Cluster& cluster,
                             const OptimizeOptions& options) {
    optimize::Job job = optimize::MakeJob(trace, strategy, cluster.ranks, options.fixed.contains("owners"));
    job.node_ranks = cluster.ranks_per_node;
    if (options.of_pytorch) job.strategy.pytorch = PlannedPyTorch(strategy, trace);
    job.of_pytorch = options.of_pytorch;
    if (options.of_pytorch)  // torch has no optimizer with owners
      std::erase_if(job.muon.owners, [](auto owners) { return owners != optimize::MuonOwners::kNone; });
    job.keeps_units = options.fixed.contains("units");
    job.keeps_reshard = options.fixed.contains("reshard");
    job.keeps_prefetch = options.fixed.contains("prefetch");
    job.keeps_accumulation = options.fixed.contains("accumulation");
    job.keeps_reduction = options.fixed.contains("reduction");
    job.keeps_layout = options.fixed.contains("layout") || !strategy.fsdp2.shard_dims.empty();
    job.keeps_activations = !options.may_offload_activations || options.of_pytorch;
    job.keeps_checkpoint = options.fixed.contains("checkpoint") || !options.may_checkpoint;
    return job;
  }

  Status FindPlan() {
    optimize::Search search(evaluator_, job_, options_);
    while (std::cmp_less(refused_.size(), kRefusals)) {
      const std::optional<Found> found = search.Run(refused_);
      if (!found) return std::unexpected(WhyNothing());
      if (!search.Fits(*found)) return NothingFits(*found);
      if (!Take(found->choice)) continue;
      complete_ = !evaluator_.WasCutShort();
      return {};
    }
    return MakeError(ErrorCode::kNegative, "none of the best plans that were found verifies");
  }

  // A setting with which PyTorch computes wrongly is not taken.
  bool Take(const Choice& choice) {
    Result<PlannerOutput> planned = MakePlan(trace_, optimize::StrategyOf(job_, choice), cluster_);
    if (!planned || !planned->faults.empty()) {
      refused_.insert(choice);
      return false;
    }
    choice_ = choice;
    output_.strategy = optimize::StrategyOf(job_, choice_);
    output_.plan = std::move(planned->plan);
    const DeviceFit fit = evaluator_.FitOf(choice_);
    SHARDPLAN_ASSERT(fit.Fits(options_.may_release_cache), "the search asked the same of this plan");
    output_.report.peak_reserved_bytes = fit.reserved_bytes;
    output_.report.cache_releases = fit.cache_releases;
    return true;
  }

  // In the place of the fastest one, which is among what it is chosen from. A search at other costs may come
  // by a plan that is faster at the nominal ones, too.
  void FindRobustPlan() {
    Choice plain = choice_;
    optimize::Robust robust(trace_, job_, cluster_, options_, evaluator_);
    if (options_.on_variant) options_.on_variant("the same with all costs at their highest");
    robust.Search(refused_);
    while (const std::optional<Choice> best = robust.Best(plain, refused_)) {
      if (Take(*best)) break;
    }
    if (evaluator_.known().at(choice_).step_ns < evaluator_.known().at(plain).step_ns) plain = choice_;
    output_.report.robust = robust.ReportOf(choice_, plain);
    complete_ = complete_ && !robust.Ended();
    more_evaluations_ = robust.evaluations();
  }

  Error WhyNothing() {
    for (const auto& [choice, evaluation] : evaluator_.known()) {
      if (!evaluation.planned) return evaluation.error;
    }
    if (!refused_.empty())
      return {.code = ErrorCode::kNegative,
              .message = "no plan that was found verifies without PyTorch's faults"};
    return {.code = ErrorCode::kNegative, .message = "no plan was found in the time limit"};
  }

  // The bytes that are needed, and the flags that would have to allow more. `least` pools least.
  Status NothingFits(const Found& least) {
    const Bytes budget = least.evaluation.budget_bytes;
    std::string text = fmt::format("no plan that was found fits {} bytes", budget.value);
    if (!options_.may_release_cache && !evaluator_.FitOf(least.choice).out_of_memory)
      text += " without releases of the allocator's cache (--allow cache-release)";
    if (const std::optional<Bytes> needed = LeastBudget(evaluator_); needed)
      text += fmt::format("; the least budget of one is {}", needed->value);
    const Result<PlannerOutput> planned =
        MakePlan(trace_, optimize::StrategyOf(job_, least.choice), cluster_, {.verify = false});
    if (planned && CheckPlanClass(planned->plan)) {
      if (const auto work = WorkOf(planned->plan); work)
        text +=
            fmt::format("; none of the class {} needs less than {}", kPlanClass, work->LeastMemory().value);
    }
    text += WouldHelp("--allow checkpoint", [](OptimizeOptions& more, Strategy&) {
      return !std::exchange(more.may_checkpoint, true);
    });
    text += WouldHelp("--allow activations", [](OptimizeOptions& more, Strategy&) {
      return !std::exchange(more.may_offload_activations, true);
    });
    text += WouldHelp("--allow offload", [](OptimizeOptions& more, Strategy&) {
      return !std::exchange(more.may_offload, true);
    });
    text += WouldHelp("--alloc-conf expandable_segments:True", [](OptimizeOptions&, Strategy& strategy) {
      const bool has = strategy.alloc_conf.contains("expandable_segments");
      if (!has) strategy.alloc_conf += strategy.alloc_conf.empty() ? kExpandable : "," + kExpandable;
      return !has;
    });
    if (planned) text += OtherWays(planned->plan);
    return MakeError(ErrorCode::kNegative, std::move(text));
  }

  // The least budget that one of the plans which were simulated fits without a release of the cache. Pooled
  // memory is a lower bound.
  static std::optional<Bytes> LeastBudget(optimize::Evaluator& evaluator) {
    std::vector<std::pair<Bytes, const Choice*>> order;
    for (const auto& [choice, evaluation] : evaluator.known()) {
      // The model has no least budget if memory waits for other streams: it depends on the device's speed.
      if (evaluation.planned && !choice.fsdp1) order.emplace_back(evaluation.pooled_bytes, &choice);
    }
    std::ranges::sort(order, {}, [](const auto& entry) { return std::pair(entry.first, *entry.second); });
    constexpr std::size_t kMost = 64;
    if (order.size() > kMost) order.resize(kMost);
    std::optional<Bytes> least;
    for (const auto& [pooled, choice] : order) {
      if (least && pooled >= *least) break;
      const Bytes reserved = evaluator.Reserved(*choice);
      least = least ? std::min(*least, reserved) : reserved;
    }
    return least;
  }

  // The needs of the most frugal choices with one thing changed. `change`: false where it is so already.
  template <typename Change>
  std::string WouldHelp(std::string_view what, const Change& change) {
    OptimizeOptions more = options_;
    Strategy strategy = job_.strategy;
    if (!change(more, strategy)) return {};
    const optimize::Job job = JobOf(trace_, strategy, cluster_, more);
    optimize::Evaluator evaluator(trace_, job, cluster_, more);
    (void)evaluator.Evaluate(optimize::Frugal(job, more));
    const std::optional<Bytes> least = LeastBudget(evaluator);
    return least ? fmt::format("; with {} there is one of {}", what, least->value) : std::string();
  }

  // Reasons that no flag of the search changes.
  std::string OtherWays(const Plan& plan) const {
    if (const std::string why = WhyNoRanksFit(plan, {.budget_bytes = options_.budget}); !why.empty())
      return "; with these decisions no number of ranks would do: " + why;
    const MemoryProfile profile = ProfileMemory(plan, MemoryOptions{});
    Bytes loss;
    for (std::size_t c = 0; c < MemoryCategories().size(); ++c) {
      const std::string& name = MemoryCategories()[c];
      if (name == "output" || name == "loss_saved" || name == "loss_temp")
        loss += profile.peak_by_category[c];
    }
    if (loss.value * 10 < profile.peak_bytes.value) return "; more ranks shard more";
    return fmt::format(
        "; more ranks shard more, and a loss in chunks holds less than the {} bytes of outputs and "
        "loss at the peak",
        loss.value);
  }

  // Offloading and recomputation that the bound has to allow.
  bool Offloads(const Plan& plan) const {
    return options_.may_offload_activations || OffloadsActivations(plan);
  }
  bool Recomputes(const Plan& plan) const {
    return options_.may_checkpoint || std::ranges::any_of(plan.segments, [](const Segment& s) {
             return s.phase == SegmentPhase::kRecompute;
           });
  }

  // Holds for all plans of the class: each has the communicators of its shards and its replicas at least.
  Bytes LargestBudget() const {
    if (options_.budget) return *options_.budget;
    Bytes nccl;
    for (const std::int64_t ranks : {job_.shards, job_.replicas})
      nccl += NcclBufferBytes(Communicator{.size = static_cast<std::int32_t>(ranks)});
    return cluster_.device.memory_bytes - cluster_.device.context_bytes - nccl;
  }

  Result<StepWork> WorkOf(const Plan& plan) const {
    return StepWork::Make(trace_, plan, Recomputes(plan), Offloads(plan), SharesPools(plan));
  }

  // Layouts of the units of plans that the search may choose.
  std::vector<LayoutKind> LayoutsOf(const Plan& plan) const {
    if (options_.may_change_policy) return {LayoutKind::kPerParameter, LayoutKind::kFlat};
    return {plan.policy == "fsdp1" ? LayoutKind::kFlat : LayoutKind::kPerParameter};
  }

  // A plan that is outside of the class has a bound of its own work only, which proves nothing of others.
  void AddBound() {
    const Plan& plan = output_.plan;
    if (const Status in_class = CheckPlanClass(plan); !in_class) {
      output_.report.notes.push_back("no bound: " + in_class.error().message);
      return;
    }
    const Result<StepWork> work = WorkOf(plan);
    if (!work) {
      output_.report.notes.push_back("no bound: " + work.error().message);
      return;
    }
    Certificate certificate{.digests = plan.digests,
                            .plan_digest = DigestOfJson(plan),
                            .plan_class = std::string(kPlanClass),
                            .activation_offload = Offloads(plan),
                            .recomputation = Recomputes(plan),
                            .shared_pools = SharesPools(plan),
                            .meshes = work->Meshes(),
                            .model_wait_ns = work->ModelWait(),
                            .budget_bytes = LargestBudget(),
                            .cuts = optimize::ChooseCuts(*work)};
    certificate.layouts = LayoutsOf(plan);
    certificate.branches =
        optimize::FindBranches(*work, certificate.cuts, certificate.layouts, certificate.budget_bytes);
    certificate.lower_bound_ns = optimize::LeastOf(certificate.branches);
    output_.certificate = std::move(certificate);
  }

  // The first of the common settings that there is a plan of: a loop may name modules that have to be units.
  Choice UsualChoice() {
    const std::vector<optimize::NamedChoice> baselines = optimize::Baselines(job_, options_);
    for (const optimize::NamedChoice& usual : baselines) {
      if (evaluator_.Evaluate({usual.choice}, true).front().planned) return usual.choice;
    }
    return baselines.front().choice;
  }

  void AddDecisions() {
    const Choice usual = UsualChoice();
    const Nanoseconds step_ns = evaluator_.known().at(choice_).step_ns;
    for (const std::string& decision : optimize::DecisionNames()) {
      if (decision == "apart" && job_.other_meshes.empty()) continue;
      if (decision == "owners" && job_.muon.owners.empty()) continue;
      DecisionReport report{.decision = decision, .chosen = optimize::DecisionText(job_, choice_, decision)};
      const Choice without = optimize::WithDecision(choice_, decision, usual);
      if (without == choice_) {
        report.without_bytes = evaluator_.Reserved(choice_);
      } else if (const Evaluation e = evaluator_.Evaluate({without}, true).front(); e.planned) {
        report.worth_ns = e.step_ns - step_ns;
        const DeviceFit fit = evaluator_.FitOf(without);
        report.without_bytes = fit.reserved_bytes;
        report.fits_without = fit.Fits(options_.may_release_cache);
      } else {
        continue;  // there is no such plan, or no time to make it
      }
      output_.report.decisions.push_back(std::move(report));
    }
  }

  // One that fits is no faster than the answer: the search has considered it.
  void AddBaseline(const std::string& name, const Choice& choice, const Evaluation& e) {
    if (refused_.contains(choice)) {
      output_.report.notes.push_back(
          fmt::format("{}: does not verify, or carries a fault of PyTorch's", name));
      return;
    }
    const DeviceFit fit = evaluator_.FitOf(choice);
    const bool fits = fit.Fits(options_.may_release_cache);
    SHARDPLAN_ASSERT(options_.robust_ppm > 0 || !fits || e.step_ns >= evaluator_.known().at(choice_).step_ns,
                     "a plan is no slower than a baseline that fits");
    output_.report.baselines.push_back({name, e.step_ns, fit.reserved_bytes, fit.cache_releases, fits});
  }

  void AddBaselines() {
    for (const auto& [name, choice] : optimize::Baselines(job_, options_)) {
      const Evaluation e = evaluator_.Evaluate({choice}, true).front();
      if (e.planned) AddBaseline(name, choice, e);
    }
  }

  // The best setting of the grid that fits, of each policy.
  void AddGrid() {
    std::optional<Found> best[2];
    for (const Choice& work : optimize::Grid(job_, options_)) {
      if (!optimize::IsOfPyTorch(work)) continue;
      std::vector<Choice> settings = optimize::Orders(job_, work);
      settings.push_back(work);
      const std::vector<Evaluation> evaluations = evaluator_.Evaluate(settings, true);
      std::optional<Found>& of_policy = best[work.fsdp1 ? 1 : 0];
      for (std::size_t i = 0; i < settings.size(); ++i) {
        const Evaluation& e = evaluations[i];
        if (!e.planned || e.over || refused_.contains(settings[i])) continue;
        if (of_policy && e.step_ns >= of_policy->evaluation.step_ns) continue;
        if (evaluator_.Fits(settings[i])) of_policy = Found{settings[i], e};
      }
    }
    for (const bool fsdp1 : {false, true}) {
      const std::optional<Found>& found = best[fsdp1 ? 1 : 0];
      if (!found) continue;
      AddBaseline(fsdp1 ? "fsdp1, best of the grid" : "fsdp2, best of the grid", found->choice,
                  found->evaluation);
    }
  }

  // The Pareto front of pooled memory and time, over everything that was simulated, and of that the front of
  // reserved memory and time: reserved memory takes as long to know as the plan takes to make.
  void AddCurve() {
    std::vector<Found> found;
    for (const auto& [choice, e] : evaluator_.known()) {
      if (e.planned) found.push_back({choice, e});
    }
    std::ranges::stable_sort(
        found, {}, [](const Found& f) { return std::pair(f.evaluation.step_ns, f.evaluation.pooled_bytes); });
    std::vector<CurvePoint>& curve = output_.report.curve;
    std::optional<Bytes> least_pooled;
    for (const Found& f : found) {
      if (least_pooled && f.evaluation.pooled_bytes >= *least_pooled) continue;
      least_pooled = f.evaluation.pooled_bytes;
      if (!curve.empty() && f.evaluation.pooled_bytes >= curve.back().peak_reserved_bytes) continue;
      const CurvePoint point{evaluator_.Reserved(f.choice), f.evaluation.step_ns};
      if (!curve.empty() && point.peak_reserved_bytes >= curve.back().peak_reserved_bytes) continue;
      if (!curve.empty() && point.step_ns == curve.back().step_ns) curve.pop_back();
      curve.push_back(point);
    }
    std::ranges::reverse(curve);
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
    report.budget_bytes = e.budget_bytes;
    report.complete = complete_;
    report.evaluations = evaluator_.evaluations() + more_evaluations_;
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
  std::set<Choice> refused_;  // plans that do not verify, or do so with a fault
  Choice choice_;
  bool complete_ = true;
  std::int64_t more_evaluations_ = 0;  // at other costs
  OptimizeOutput output_;
};

}  // namespace

namespace optimize {

Result<Outlook> LookAt(const Trace& trace, const Strategy& job, const Cluster& cluster,
                       const OptimizeOptions& options) {
  return OptimizeRun(trace, WithMesh(trace, job, cluster.ranks), cluster, options).Look();
}

std::vector<CertificateBranch> FindBranches(const StepWork& work, const std::vector<std::int64_t>& cuts,
                                            const std::vector<LayoutKind>& layouts, Bytes budget) {
  std::vector<CertificateBranch> branches;
  for (const LayoutKind layout : layouts) branches.push_back(FindPrices(work, cuts, layout, budget));
  return branches;
}

Nanoseconds LeastOf(const std::vector<CertificateBranch>& branches) {
  return std::ranges::min_element(branches, {}, &CertificateBranch::lower_bound_ns)->lower_bound_ns;
}

}  // namespace optimize

const std::set<std::string>& FixableDecisions() {
  static const std::set<std::string> names = {"accumulation", "checkpoint", "layout",  "owners",
                                              "prefetch",     "reduction",  "reshard", "units"};
  return names;
}

Result<OptimizeOutput> Optimize(const Trace& trace, const Strategy& job, const Cluster& cluster,
                                const OptimizeOptions& options) {
  return OptimizeRun(trace, WithMesh(trace, job, cluster.ranks), cluster, options).Run();
}

}  // namespace shardplan
