#include "optimize/search.h"

#include <algorithm>

namespace shardplan::optimize {
namespace {

// How many of the best beginnings are climbed from.
constexpr int kClimbs = 4;

}  // namespace

// In the budget before out of it; then the faster, or the smaller.
bool Search::Better(const Evaluation& a, const Evaluation& b) const {
  if (!a.planned || !b.planned) return a.planned && !b.planned;
  const bool a_fits = a.pooled_bytes <= budget_, b_fits = b.pooled_bytes <= budget_;
  if (a_fits != b_fits) return a_fits;
  if (!a_fits) return a.pooled_bytes < b.pooled_bytes;
  if (a.step_ns != b.step_ns) return a.step_ns < b.step_ns;
  return a.pooled_bytes < b.pooled_bytes;
}

void Search::Consider(const std::vector<Choice>& choices) {
  const std::vector<Evaluation> evaluations = evaluator_.Evaluate(choices);
  for (std::size_t i = 0; i < choices.size(); ++i) {
    if (!evaluations[i].planned || refused_.contains(choices[i])) continue;
    if (best_ && !Better(evaluations[i], best_->evaluation)) continue;
    best_ = Found{choices[i], evaluations[i]};
    if (!options_.on_progress) continue;
    const bool fits = evaluations[i].pooled_bytes <= budget_;
    options_.on_progress({.step_ns = fits ? evaluations[i].step_ns : Nanoseconds{},
                          .pooled_bytes = evaluations[i].pooled_bytes,
                          .evaluations = evaluator_.evaluations()});
  }
}

// The order of the same work cannot make a step shorter than the work is. What is left out here is no better
// than what was found.
void Search::TryOrders(const std::vector<Choice>& grid) {
  for (const Choice& work : grid) {
    const auto known = evaluator_.known().find(work);
    if (known == evaluator_.known().end() || !known->second.planned) continue;
    if (known->second.pooled_bytes > budget_ || !best_ || best_->evaluation.pooled_bytes > budget_) continue;
    if (known->second.work_ns < best_->evaluation.step_ns) Consider(Orders(job_, work));
  }
}

// One class of decisions after the other, until none of them has anything better.
void Search::Climb() {
  for (int still = 0, move_class = 0; best_ && still < kMoveClasses && !evaluator_.Ended();
       move_class = (move_class + 1) % kMoveClasses) {
    const Choice from = best_->choice;
    Consider(Moves(job_, options_, from, move_class));
    still = best_->choice == from ? still + 1 : 0;
  }
}

// The best that is known and was not climbed from.
std::optional<Found> Search::Next(const std::set<Choice>& tried) const {
  std::optional<Found> next;
  for (const auto& [choice, evaluation] : evaluator_.known()) {
    if (!evaluation.planned || tried.contains(choice) || refused_.contains(choice)) continue;
    if (!next || Better(evaluation, next->evaluation)) next = Found{choice, evaluation};
  }
  return next;
}

std::optional<Found> Search::Run(Bytes budget, const std::set<Choice>& refused) {
  budget_ = budget;
  refused_ = refused;
  best_.reset();
  std::vector<Choice> beginnings;
  for (const NamedChoice& baseline : Baselines(job_, options_)) beginnings.push_back(baseline.choice);
  const std::vector<Choice> grid = Grid(job_, options_);
  beginnings.insert(beginnings.end(), grid.begin(), grid.end());
  const std::vector<Choice> frugal = Frugal(job_, options_);
  beginnings.insert(beginnings.end(), frugal.begin(), frugal.end());
  Consider(beginnings);
  // The climbs begin at the best of each policy and each way to accumulate, then at the best of the rest.
  std::set<Choice> tried;
  for (int climb = 0; climb < kClimbs && !evaluator_.Ended(); ++climb) {
    const std::optional<Found> begin = Next(tried);
    if (!begin) break;
    tried.insert(begin->choice);
    const std::optional<Found> before = best_;
    best_ = begin;
    Climb();
    tried.insert(best_->choice);
    if (before && Better(before->evaluation, best_->evaluation)) best_ = before;
  }
  TryOrders(grid);
  Climb();
  return best_;
}

}  // namespace shardplan::optimize
