// SPDX-License-Identifier: Apache-2.0
#include "optimize/search.h"

#include <algorithm>
#include <array>
#include <iterator>

#include "optimize/recomputation.h"
#include "shardplan/simulator/cost_model.h"

namespace shardplan::optimize {
namespace {

// Restarts of hill climbing: so many of the best beginnings.
constexpr int kClimbs = 4;
// After so many choices that reserve more than the budget, what pools as much as one of them is passed over.
constexpr int kMostOver = 8;
// So many of the cuts next to one are planned, and of so many what each may keep.
constexpr std::size_t kMostCuts = 16, kMostCutsThatKeep = 8;
// No further restart of hill climbing after so many plans.
constexpr std::int64_t kEnough = 300;

}  // namespace

bool Search::Fits(const Found& found) { return !found.evaluation.over && evaluator_.Fits(found.choice); }

// The fastest that fits, and is faster than the best; while nothing fits, the one that pools least.
void Search::Consider(const std::vector<Choice>& choices, Effort effort) {
  const bool all = effort == Effort::kAll;
  const std::vector<Evaluation> evaluations = evaluator_.Evaluate(choices, all);
  if (options_.on_progress)
    options_.on_progress({.evaluations = evaluator_.evaluations(), .is_better = false});
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
    if (found.evaluation.over || (!all && over >= kMostOver && pooled >= least_over)) continue;
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

// A restart of hill climbing may be worse than the best that was told: then nothing is told.
void Search::Tell() {
  const Evaluation& e = best_->evaluation;
  const std::pair told{!fits_, fits_ ? e.step_ns.value : e.pooled_bytes.value};
  if (!options_.on_progress || (told_ && *told_ <= told)) return;
  told_ = told;
  options_.on_progress({.step_ns = fits_ ? best_->evaluation.step_ns : Nanoseconds{},
                        .pooled_bytes = best_->evaluation.pooled_bytes,
                        .evaluations = evaluator_.evaluations()});
}

// The order of the same work cannot make a step shorter than the work is. Orders that are left out here are
// no better than what was found.
void Search::TryOrders(const std::vector<Choice>& grid, Effort effort) {
  std::vector<std::pair<Nanoseconds, const Choice*>> works;
  for (const Choice& work : grid) {
    const Evaluation* known = Known(work);
    if (known != nullptr && !known->over) works.emplace_back(known->work_ns, &work);
  }
  std::ranges::stable_sort(works, {}, [](const auto& work) { return work.first; });
  for (const auto& [work_ns, work] : works) {
    if (!fits_ || work_ns < best_->evaluation.step_ns) Consider(Orders(job_, *work), effort);
  }
}

const Evaluation* Search::Known(const Choice& choice) const {
  const auto known = evaluator_.known().find(choice);
  return known != evaluator_.known().end() && known->second.planned ? &known->second : nullptr;
}

// The recomputation of a setting of the grid is the same kernels in all of them.
void Search::NoteRecomputed(const Choice& choice) {
  if (choice.recomputed == 0) return;
  const Evaluation *with = Known(choice), *without = Known(WithoutRecomputation(choice));
  if (with == nullptr || without == nullptr) return;
  const Nanoseconds more = with->kernels_ns - without->kernels_ns;
  const auto [noted, is_new] = recomputed_ns_.emplace(std::pair(choice.recomputed, choice.saved), more);
  if (!is_new) noted->second = std::min(noted->second, more);
}

// Pruning by an admissible lower bound: in any order the setting's work alone takes as long as the best step.
bool Search::CannotWin(const Choice& work) const {
  if (!fits_) return false;
  if (const Evaluation* known = Known(work)) return known->work_ns >= best_->evaluation.step_ns;
  const Evaluation* without = Known(WithoutRecomputation(work));
  if (without == nullptr) return false;
  const auto more = recomputed_ns_.find(std::pair(work.recomputed, work.saved));
  const Nanoseconds more_ns = more == recomputed_ns_.end() ? Nanoseconds{} : more->second;
  return evaluator_.WorkWith(*without, more_ns) >= best_->evaluation.step_ns;
}

// FSDP2 gathers no later, and has no fewer inputs of reduce-scatters in flight, than by default. FSDP1 does.
bool Search::IsOverInAnyOrder(const Choice& work) const {
  const Evaluation* known = Known(work);
  return known != nullptr && known->over && !work.fsdp1;
}

// No setting of the grid is faster than the answer, wherever the limit ended the search.
void Search::TryWholeGrid(const std::vector<Choice>& grid) {
  for (const Choice& work : grid) NoteRecomputed(work);
  for (const Choice& work : grid) {
    if (!options_.whole_grid && CannotWin(work)) continue;
    Consider({work}, Effort::kAll);
    NoteRecomputed(work);
    if (!options_.whole_grid && (CannotWin(work) || IsOverInAnyOrder(work))) continue;
    Consider(Orders(job_, work), Effort::kAll);
  }
}

// Fewer units that are kept, or that wait, make room for more that wait, or are kept; and with another loop,
// or other reductions in flight, there is other room.
void Search::TryTrades(const Choice& best) {
  if (job_.keeps_units || best.fsdp1) return;
  std::vector<std::int32_t Choice::*> counts = {&Choice::kept};
  if (job_.microbatches > 1)
    counts = {&Choice::kept, &Choice::post_forward_units, &Choice::outer_reduced_last, &Choice::accumulated};
  if (!job_.other_meshes.empty()) counts.push_back(&Choice::kept_apart);
  const Choice from = Effective(job_, best);
  const auto units = static_cast<std::int32_t>(from.units.size());
  const std::vector<Choice> others = OtherRoom(job_, from);
  for (const auto take : counts) {
    std::vector<Choice> given = others;
    for (const auto give : counts) {
      const std::int32_t count = std::min(from.*give, units);
      if (give == take || count <= 0) continue;
      for (const std::int32_t less : {count, count - count / 2, 1}) {
        Choice next = from;
        next.*give = count - less;
        if (std::ranges::find(given, next) == given.end()) given.push_back(std::move(next));
      }
    }
    ConsiderMost(given, take);
  }
}

// One class of decisions after the other, until none of them has anything better.
void Search::Climb() {
  while (best_ && !best_->choice.as_given && !evaluator_.Ended()) {
    ClimbByMoves();
    const Choice from = best_->choice;
    if (fits_) TryTrades(from);
    if (best_->choice == from) return;
  }
}

void Search::ClimbByMoves() {
  for (int still = 0, move_class = 0; best_ && still < kMoveClasses && !evaluator_.Ended();
       move_class = (move_class + 1) % kMoveClasses) {
    const Choice from = best_->choice;
    std::vector<Choice> moves = Moves(job_, options_, from, move_class);
    if (!offloads_) std::erase_if(moves, [](const Choice& move) { return move.offloaded > 0; });
    if (move_class == kUnitMoves && !job_.keeps_units && !from.fsdp1) {
      // If memory is short, cuts count for the memory that they need, which the model does not know.
      const bool tight = best_->evaluation.pooled_bytes.value > best_->evaluation.budget_bytes.value / 10 * 9;
      if (!tight) moves = evaluator_.Fastest(std::move(moves), kMostCuts);
      const bool may_keep = tight && !job_.keeps_reshard;
      std::vector<Choice> cuts = evaluator_.PromisingUnits(from, may_keep ? kMostCutsThatKeep : kMostCuts);
      Consider(may_keep ? KeepingMost(std::move(cuts)) : std::move(cuts));
    }
    Consider(moves);
    if (move_class == kRecomputationMoves) TryRecomputationBeside(best_->choice);
    still = best_->choice == from ? still + 1 : 0;
  }
}

void Search::FitRecomputationOf(const Choice& from) {
  const Nanoseconds limit = fits_ ? best_->evaluation.step_ns : shardplan::kLongestStep;
  Consider(FitRecomputation(evaluator_, job_, options_, recomputation_, from, limit));
}

// The fastest that recomputes nothing, of reductions in one level and in two, and others that keep less after
// the forward, are made to fit.
void Search::TryRecomputation(const std::vector<Choice>& beginnings) {
  if (job_.keeps_checkpoint || !options_.may_checkpoint) return;
  const auto part = std::ranges::max_element(beginnings, {}, &Choice::part);
  const std::int64_t part_ranks = part == beginnings.end() ? 0 : part->part;
  std::array<std::optional<Found>, 2> fastest;  // by whether there are two levels
  for (const Choice& choice : beginnings) {
    const Evaluation* known = Known(choice);
    if (known == nullptr || choice.recomputed > 0) continue;
    std::optional<Found>& of_levels = fastest[choice.inner > 0 ? 1 : 0];
    if (!of_levels || known->step_ns < of_levels->evaluation.step_ns) of_levels = {choice, *known};
  }
  for (const std::optional<Found>& found : fastest) {
    if (found && !Fits(*found)) TryRecomputationOf(found->choice, part_ranks);
  }
}

void Search::TryRecomputationOf(const Choice& fastest, std::int64_t part) {
  const auto units = {fastest.units, UnitsOfBlocks(job_.chain, 1, Ends::kOwn)};
  for (const std::vector<std::int32_t>& cut : units) {
    Choice from = fastest;
    if (!job_.keeps_units) from.units = cut;
    FitRecomputationOf(from);
    if (job_.keeps_reshard || from.fsdp1) return;
    for (const std::int32_t share : {2, 0}) {
      from.kept = share == 0 ? 0 : static_cast<std::int32_t>(cut.size()) / share;
      FitRecomputationOf(from);
    }
    if (part <= 1 || from.cuts_divisible_dims) continue;
    from.part = part;
    FitRecomputationOf(from);
  }
}

// Offloaded activations need not be computed again: the more are in host memory, the less is recomputed.
void Search::TryOffloadBeside(const Choice& best) {
  if (!offloads_) return;
  const std::int32_t blocks = job_.chain.blocks;
  for (const std::int32_t step : {1, 2, blocks / 8 + 1}) {
    for (const std::int32_t count : {best.offloaded - step, best.offloaded + step}) {
      if (count < 0 || count > blocks) continue;
      Choice beside = best;
      beside.offloaded = count;
      FitRecomputationOf(beside);
    }
  }
}

// Kept and recomputed units share the budget: if one has less, the other has more.
void Search::TryRecomputationBeside(const Choice best) {
  FitRecomputationOf(best);
  TryOffloadBeside(best);
  if (job_.keeps_checkpoint || !options_.may_checkpoint || job_.keeps_reshard || best.fsdp1) return;
  const auto units = static_cast<std::int32_t>(best.units.size());
  const std::int32_t kept = std::min(best.kept, units);
  for (const std::int32_t parts : {4, 16}) {
    const std::int32_t step = std::max(units / parts, 1);
    for (const std::int32_t other : {kept - step, kept + step}) {
      if (other < 0 || other > units) continue;
      Choice beside = best;
      beside.kept = other;
      FitRecomputationOf(beside);
    }
  }
  for (const std::int32_t other : {best.accumulated - units / 8 - 1, best.accumulated + units / 8 + 1}) {
    Choice beside = best;
    beside.accumulated = std::clamp(other, 0, units);
    if (Effective(job_, beside) != Effective(job_, best)) FitRecomputationOf(beside);
  }
}

// Each choice with as many units as the budget allows by pooled memory. Returns the choices that were tried;
// `most`: the counts.
std::vector<Choice> Search::WithMost(std::vector<Choice> choices, std::int32_t Choice::*count,
                                     std::vector<std::int32_t>& most) {
  most.assign(choices.size(), -1);
  std::vector<std::int32_t> over;
  for (const Choice& choice : choices) over.push_back(static_cast<std::int32_t>(choice.units.size()) + 1);
  std::vector<Choice> tried;
  constexpr int kRounds = 7;
  for (int round = 0; round < kRounds; ++round) {
    std::vector<Choice> asked;
    std::vector<std::size_t> of;
    for (std::size_t i = 0; i < choices.size(); ++i) {
      if (most[i] + 1 >= over[i]) continue;
      // First what is there already.
      choices[i].*count =
          round == 0 ? std::clamp(choices[i].*count, 0, over[i] - 1) : (most[i] + over[i]) / 2;
      asked.push_back(choices[i]);
      of.push_back(i);
    }
    const std::vector<Evaluation> evaluations = evaluator_.Evaluate(asked);
    for (std::size_t i = 0; i < asked.size(); ++i) {
      const bool fits = evaluations[i].planned && !evaluations[i].over;
      (fits ? most : over)[of[i]] = asked[i].*count;
    }
    tried.insert(tried.end(), asked.begin(), asked.end());
  }
  return tried;
}

std::vector<Choice> Search::KeepingMost(std::vector<Choice> choices) {
  std::vector<std::int32_t> most;
  std::vector<Choice> tried = WithMost(choices, &Choice::kept, most);
  for (std::size_t i = 0; i < choices.size(); ++i) {
    // Reserved memory is more than pooled memory.
    for (const std::int32_t less : {1, 2}) {
      if (most[i] < less) continue;
      tried.push_back(choices[i]);
      tried.back().kept = most[i] - less;
    }
  }
  return tried;
}

// The same by what is reserved, where that may be faster than the best: more units should make a step
// shorter.
void Search::ConsiderMost(const std::vector<Choice>& choices, std::int32_t Choice::*count) {
  std::vector<std::int32_t> most;
  Consider(WithMost(choices, count, most));
  for (std::size_t i = 0; i < choices.size(); ++i) {
    Choice choice = choices[i];
    std::int32_t fits = -1, over = most[i] + 1;
    for (std::int32_t next = most[i]; fits + 1 < over; next = (fits + over) / 2) {
      choice.*count = next;
      const Evaluation e = evaluator_.Evaluate({choice}).front();
      const bool slower = fits_ && e.step_ns >= best_->evaluation.step_ns;
      if (!e.planned || (slower && next == most[i])) break;
      (slower || (!e.over && evaluator_.Fits(choice)) ? fits : over) = next;
      Consider({choice});
    }
  }
}

// Gradients that wait, and parameters that are kept, for the next micro-batch: in as many units as the budget
// allows, first the one and then the other.
void Search::TryWaiting() {
  // Modules that share a parameter are in one unit: those at the ends may have to be the root's.
  if (!TryWaitingOf(Waiting(job_, options_, Ends::kOwn))) TryWaitingOf(Waiting(job_, options_, Ends::kRoot));
}

// Whether any of them pools no more than the budget.
bool Search::TryWaitingOf(const std::vector<Choice>& waiting) {
  bool fits = false;
  for (const Choice& all : waiting) {
    using Count = std::int32_t Choice::*;
    const bool rest = Effective(job_, all).accumulation == Accumulation::kRestLastKept;
    const Count waits = rest ? &Choice::outer_reduced_last : &Choice::accumulated;
    for (const auto& [first, second] : {std::pair<Count, Count>(&Choice::post_forward_units, waits),
                                        {waits, &Choice::post_forward_units}}) {
      Choice none = all;
      none.*second = 0;
      std::vector<std::int32_t> most;
      Consider(WithMost({none}, first, most));
      if (most.front() < 0) continue;
      fits = true;
      none.*first = most.front();
      ConsiderMost({none}, second);
    }
  }
  return fits;
}

// The next restart of hill climbing: the fastest known choice that pools no more than the budget.
std::optional<Found> Search::Next(const std::set<Choice>& tried) const {
  std::optional<Found> next;
  const auto order = [&](const Evaluation& e) {
    return std::tuple(e.over, e.over ? e.pooled_bytes.value : e.step_ns.value, e.pooled_bytes);
  };
  for (const auto& [choice, evaluation] : evaluator_.known()) {
    if (!evaluation.planned || tried.contains(choice) || refused_.contains(choice)) continue;
    if (!next || order(evaluation) < order(next->evaluation)) next = Found{choice, evaluation};
  }
  return next;
}

// Grid settings that the lower bound does not exclude, and that do not fit without a recomputation.
std::vector<Choice> Search::RecomputingOf(const std::vector<Choice>& grid) {
  for (const Choice& choice : grid) NoteRecomputed(choice);
  std::vector<Choice> recomputing;
  for (const Choice& choice : grid) {
    if (choice.recomputed == 0 || CannotWin(choice)) continue;
    const Evaluation* known = Known(WithoutRecomputation(choice));
    if (known == nullptr || known->over) recomputing.push_back(choice);
  }
  return recomputing;
}

// From the best of a search that leaves activations where they are: so allowing more makes no step longer. A
// step that is less than a thousandth faster is not worth the host's memory.
void Search::ClimbOffloading() {
  if (job_.keeps_activations || !best_) return;
  const Found staying = *best_;
  const bool fitted = fits_;
  evaluator_.GoOn();
  offloads_ = true;
  Climb();
  offloads_ = false;
  const std::int64_t step_ns = staying.evaluation.step_ns.value;
  if (fitted && best_->evaluation.step_ns.value > step_ns - step_ns / 1000) best_ = staying;
}

std::optional<Found> Search::Run(const std::set<Choice>& refused) {
  refused_ = refused;
  best_.reset();
  fits_ = false;
  std::vector<Choice> baselines;
  for (const NamedChoice& baseline : Baselines(job_, options_)) baselines.push_back(baseline.choice);
  std::vector<Choice> beginnings = baselines;
  const std::vector<Choice> grid = Grid(job_, options_);
  // A recomputation makes a step longer: it is of use where nothing else fits.
  std::ranges::copy_if(grid, std::back_inserter(beginnings),
                       [](const Choice& choice) { return choice.recomputed == 0; });
  // If ranks would pad much, nothing of the grid may fit with its usual cuts.
  for (Choice choice : grid) {
    if (job_.divisible_dims.empty() || job_.keeps_layout) break;
    if (choice.recomputed > 0 || choice.part > 1 || choice.fsdp1) continue;
    choice.cuts_divisible_dims = true;
    beginnings.push_back(std::move(choice));
  }
  std::ranges::copy(TwoLevels(job_, grid), std::back_inserter(beginnings));
  Consider(beginnings, Effort::kAll);
  TryRecomputation(beginnings);
  Consider(RecomputingOf(grid));
  if (!fits_) Consider(Frugal(job_, options_));
  TryWaiting();
  std::set<Choice> tried = {{.as_given = true}};  // nothing is next to it
  for (int climb = 0; climb < kClimbs && best_ && !evaluator_.Ended(); ++climb) {
    if (climb > 0 && evaluator_.evaluations() >= kEnough) break;
    const bool goes_on = climb == 0 && !best_->choice.as_given;
    const std::optional<Found> begin = goes_on ? best_ : Next(tried);
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
  const std::vector<Choice> small = AllOfSmall(job_, options_);
  Consider(small, Effort::kAll);  // plans of a few modules are made in no time
  TryOrders(small, Effort::kAll);
  Climb();
  // A baseline is never faster, not even where the time was over before it was tried.
  Consider(baselines, Effort::kAll);
  TryWholeGrid(grid);
  ClimbOffloading();
  return best_;
}

}  // namespace shardplan::optimize
