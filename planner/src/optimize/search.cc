#include "optimize/search.h"

#include <algorithm>

#include "optimize/recomputation.h"

namespace shardplan::optimize {
namespace {

// How many of the best beginnings are climbed from.
constexpr int kClimbs = 4;
// After so many choices that reserve more than the budget, what pools as much as one of them is passed over.
constexpr int kMostOver = 8;
// How many of the grid are made to fit by recomputing.
constexpr std::size_t kFitted = 4;

}  // namespace

bool Search::Fits(const Found& found) {
  return found.evaluation.pooled_bytes <= options_.budget &&
         evaluator_.Reserved(found.choice) <= options_.budget;
}

// The fastest that fits, and is faster than the best; while nothing fits, the one that pools least.
void Search::Consider(const std::vector<Choice>& choices, bool even_late) {
  const std::vector<Evaluation> evaluations = evaluator_.Evaluate(choices, even_late);
  std::vector<Found> made;
  for (std::size_t i = 0; i < choices.size(); ++i) {
    if (evaluations[i].planned && !refused_.contains(choices[i]))
      made.push_back({choices[i], evaluations[i]});
  }
  const auto order = [](const Found& found) {
    return std::pair(found.evaluation.step_ns, found.evaluation.pooled_bytes);
  };
  std::ranges::stable_sort(made, {}, order);
  int over = 0;  // choices that reserve too much
  Bytes least_over;
  for (const Found& found : made) {
    if (fits_ && order(found) >= order(*best_)) return;
    const Bytes pooled = found.evaluation.pooled_bytes;
    if (pooled > options_.budget || (over >= kMostOver && pooled >= least_over)) continue;
    if (!Fits(found)) {
      least_over = ++over == 1 ? pooled : std::min(least_over, pooled);
      continue;
    }
    best_ = found;
    fits_ = true;
    Tell();
    return;
  }
  if (fits_) return;
  for (const Found& found : made) {
    if (best_ && found.evaluation.pooled_bytes >= best_->evaluation.pooled_bytes) continue;
    best_ = found;
    Tell();
  }
}

// A climb begins at what is worse than the best that was told.
void Search::Tell() {
  const Evaluation& e = best_->evaluation;
  const std::pair told{!fits_, fits_ ? e.step_ns.value : e.pooled_bytes.value};
  if (!options_.on_progress || (told_ && *told_ <= told)) return;
  told_ = told;
  options_.on_progress({.step_ns = fits_ ? best_->evaluation.step_ns : Nanoseconds{},
                        .pooled_bytes = best_->evaluation.pooled_bytes,
                        .evaluations = evaluator_.evaluations()});
}

// The order of the same work cannot make a step shorter than the work is. What is left out here is no better
// than what was found.
void Search::TryOrders(const std::vector<Choice>& grid) {
  std::vector<std::pair<Nanoseconds, const Choice*>> works;
  for (const Choice& work : grid) {
    const auto known = evaluator_.known().find(work);
    if (known == evaluator_.known().end() || !known->second.planned) continue;
    if (known->second.pooled_bytes <= options_.budget) works.emplace_back(known->second.work_ns, &work);
  }
  std::ranges::stable_sort(works, {}, [](const auto& work) { return work.first; });
  for (const auto& [work_ns, work] : works) {
    if (!fits_ || work_ns < best_->evaluation.step_ns) Consider(Orders(job_, *work));
  }
}

// One class of decisions after the other, until none of them has anything better.
void Search::Climb() {
  for (int still = 0, move_class = 0; best_ && still < kMoveClasses && !evaluator_.Ended();
       move_class = (move_class + 1) % kMoveClasses) {
    const Choice from = best_->choice;
    Consider(Moves(job_, options_, from, move_class));
    if (move_class == kUnitMoves && !job_.keeps_units && !best_->choice.fsdp1)
      Consider(evaluator_.PromisingUnits(best_->choice));
    if (move_class == kRecomputationMoves)
      Consider(FitRecomputation(evaluator_, job_, options_, best_->choice));
    still = best_->choice == from ? still + 1 : 0;
  }
}

// The fastest that recompute nothing are made to fit.
void Search::TryRecomputation(const std::vector<Choice>& grid) {
  std::vector<std::pair<Nanoseconds, const Choice*>> steps;
  for (const Choice& choice : grid) {
    const auto known = evaluator_.known().find(choice);
    if (known == evaluator_.known().end() || !known->second.planned || choice.recomputed > 0) continue;
    if (known->second.pooled_bytes > options_.budget) steps.emplace_back(known->second.step_ns, &choice);
  }
  std::ranges::stable_sort(steps, {}, [](const auto& step) { return step.first; });
  if (steps.size() > kFitted) steps.resize(kFitted);
  for (const auto& [step_ns, choice] : steps) {
    if (!fits_ || step_ns < best_->evaluation.step_ns)
      Consider(FitRecomputation(evaluator_, job_, options_, *choice));
  }
}

// The most promising that is known and was not climbed from: the fastest that pools no more than the budget.
std::optional<Found> Search::Next(const std::set<Choice>& tried) const {
  std::optional<Found> next;
  const auto order = [&](const Evaluation& e) {
    const bool over = e.pooled_bytes > options_.budget;
    return std::tuple(over, over ? e.pooled_bytes.value : e.step_ns.value, e.pooled_bytes);
  };
  for (const auto& [choice, evaluation] : evaluator_.known()) {
    if (!evaluation.planned || tried.contains(choice) || refused_.contains(choice)) continue;
    if (!next || order(evaluation) < order(next->evaluation)) next = Found{choice, evaluation};
  }
  return next;
}

std::optional<Found> Search::Run(const std::set<Choice>& refused) {
  refused_ = refused;
  best_.reset();
  fits_ = false;
  std::vector<Choice> beginnings;
  for (const NamedChoice& baseline : Baselines(job_, options_)) beginnings.push_back(baseline.choice);
  const std::vector<Choice> grid = Grid(job_, options_);
  beginnings.insert(beginnings.end(), grid.begin(), grid.end());
  const std::vector<Choice> frugal = Frugal(job_, options_);
  beginnings.insert(beginnings.end(), frugal.begin(), frugal.end());
  Consider(beginnings);
  TryRecomputation(grid);
  std::set<Choice> tried;
  for (int climb = 0; climb < kClimbs && best_ && !evaluator_.Ended(); ++climb) {
    const std::optional<Found> begin = climb == 0 ? best_ : Next(tried);
    if (!begin) break;
    const std::optional<Found> before = best_;
    const bool before_fits = fits_;
    best_ = begin;
    fits_ = Fits(*begin);
    tried.insert(begin->choice);
    Climb();
    tried.insert(best_->choice);
    const auto order = [](const Found& found, bool fits) {
      const Evaluation& e = found.evaluation;
      return std::tuple(!fits, fits ? e.step_ns.value : e.pooled_bytes.value, e.pooled_bytes);
    };
    if (order(*before, before_fits) <= order(*best_, fits_)) {
      best_ = before;
      fits_ = before_fits;
    }
    if (climb == 0) TryOrders(grid);
  }
  Climb();
  // A baseline is never faster, not even where the time was over before it was tried.
  for (const Choice& work : options_.whole_grid ? grid : std::vector<Choice>{}) {
    Consider({work}, true);
    Consider(Orders(job_, work), true);
  }
  return best_;
}

}  // namespace shardplan::optimize
