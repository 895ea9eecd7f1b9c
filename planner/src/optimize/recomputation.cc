// SPDX-License-Identifier: Apache-2.0
#include "optimize/recomputation.h"

#include <algorithm>
#include <map>
#include <set>
#include <string>
#include <utility>

#include "optimize/moves.h"

namespace shardplan::optimize {
namespace {

__extension__ using Int128 = __int128;

// A mix of two neighbouring levels that should be within the budget.
struct Mix {
  Choice choice;
  std::int64_t cost_ns = 0;
  std::int64_t bytes_of_a_block = 1;
  // Blocks of the second level, the first not enough and the second enough as far as is known.
  std::int32_t too_few = -1, enough = 0;
  // Reserved memory beyond pooled memory.
  std::int64_t margin_bytes = 0;
  Nanoseconds step_ns;  // with enough
  bool fits = false;    // with enough, by what is reserved
};

bool AnyOf(const std::set<std::string>& operators, const std::map<std::string, std::int64_t>& saved) {
  return std::ranges::any_of(operators, [&](const std::string& name) { return saved.contains(name); });
}

}  // namespace

Choice WithoutRecomputation(Choice choice) {
  choice.recomputed = 0;
  choice.children.clear();
  choice.rest.clear();
  choice.saved.clear();
  return choice;
}

// Each module recomputed in all blocks, and the blocks as a whole, with every list of operators whose results
// are kept. A list with nothing that the module runs is as none.
void RecomputationPrices::Measure(Evaluator& evaluator, const Job& job, const Choice& from) {
  if (std::exchange(measured_, true)) return;
  const Choice none = WithoutRecomputation(from);
  std::vector<Choice> choices = {none};
  for (const Saved& saved : SavedOperators(job)) {
    for (std::size_t child = 0; child <= job.chain.children.size(); ++child) {
      Choice next = none;
      next.recomputed = job.chain.blocks;
      next.saved = saved;
      if (child < job.chain.children.size()) {
        const std::string& name = job.chain.children[child];
        const auto operators = job.chain.operators_of.find(name);
        if (!saved.empty() && (operators == job.chain.operators_of.end() || !AnyOf(operators->second, saved)))
          continue;
        next.children = {name};
      }
      choices.push_back(std::move(next));
    }
  }
  const std::vector<Evaluation> evaluations = evaluator.Evaluate(choices);
  std::map<std::string, Level> without;  // anything saved, by module
  for (std::size_t i = 1; i < choices.size(); ++i) {
    const Evaluation& e = evaluations[i];
    if (!e.planned || !evaluations.front().planned) continue;
    Level level{.children = choices[i].children, .whole = choices[i].children.empty()};
    level.freed_bytes = evaluations.front().pooled_bytes.value - e.pooled_bytes.value;
    level.cost_ns = std::max<std::int64_t>(e.step_ns.value - evaluations.front().step_ns.value, 0);
    if (choices[i].saved.empty() && !level.whole) without[level.children.front()] = level;
    levels_[choices[i].saved].push_back(std::move(level));
  }
  for (auto& [saved, levels] : levels_) {
    for (const auto& [child, level] : without) {
      const bool known = std::ranges::any_of(
          levels, [&](const Level& other) { return other.children == std::vector{child}; });
      if (!known) levels.push_back(level);
    }
    std::erase_if(levels, [](const Level& level) { return level.freed_bytes <= 0; });
  }
}

namespace {

class RecomputationFit {
 public:
  using Saved = RecomputationPrices::Saved;
  using Level = RecomputationPrices::Level;

  RecomputationFit(Evaluator& evaluator, const Job& job, const OptimizeOptions& options, const Choice& from,
                   Nanoseconds limit)
      : evaluator_(evaluator),
        job_(job),
        options_(options),
        none_(WithoutRecomputation(from)),
        limit_ns_(limit) {}

  std::vector<Choice> Run(RecomputationPrices& prices) {
    of_none_ = evaluator_.Evaluate({none_}).front();
    if (!of_none_.planned) return {};
    tried_.push_back(none_);
    if (Fits(none_, of_none_)) return tried_;
    prices.Measure(evaluator_, job_, none_);
    std::vector<Mix> mixes;
    for (const auto& [saved, levels] : prices.levels()) AddMix(saved, HullOf(LevelsOf(levels)), mixes);
    std::ranges::stable_sort(mixes, {}, &Mix::cost_ns);
    if (mixes.size() > kMixes) mixes.resize(kMixes);
    Fit(mixes);
    const std::int32_t blocks = job_.chain.blocks;
    // Modules free less together than each alone, and what is reserved is another matter.
    if (std::ranges::any_of(mixes, [&](const Mix& mix) { return mix.fits; })) return tried_;
    std::vector<Mix> whole;
    for (const auto& [saved, levels] : prices.levels()) {
      Mix& mix = whole.emplace_back(Mix{.choice = none_, .enough = blocks + 1});
      mix.choice.saved = saved;
      mix.choice.recomputed = blocks;
      const auto level = std::ranges::find_if(levels, &Level::whole);
      if (level != levels.end())
        mix.bytes_of_a_block = std::max<std::int64_t>(level->freed_bytes / blocks, 1);
    }
    Fit(whole);
    return tried_;
  }

 private:
  bool Fits(const Choice& choice, const Evaluation& evaluation) {
    if (evaluation.over) return false;
    return evaluation.step_ns >= limit_ns_ || evaluator_.Fits(choice);
  }

  static constexpr std::size_t kMixes = 2;
  static constexpr int kRounds = 6, kAgain = 6;

  static bool Cheaper(const Level& a, const Level& b) {
    return Int128{a.cost_ns} * b.freed_bytes < Int128{b.cost_ns} * a.freed_bytes;
  }

  // Nothing, the cheapest module, the two cheapest, ..., the whole blocks.
  static std::vector<Level> LevelsOf(std::vector<Level> measured) {
    std::ranges::stable_sort(measured, Cheaper);
    std::vector<Level> levels = {{}};
    for (const Level& one : measured) {
      if (one.whole) continue;
      Level next = levels.back();
      next.children.insert(next.children.end(), one.children.begin(), one.children.end());
      std::ranges::sort(next.children);
      next.freed_bytes += one.freed_bytes;
      next.cost_ns += one.cost_ns;
      levels.push_back(std::move(next));
    }
    const auto whole = std::ranges::find_if(measured, &Level::whole);
    if (whole != measured.end()) levels.push_back(*whole);
    std::ranges::stable_sort(levels, {}, &Level::freed_bytes);
    return levels;
  }

  // Lower convex hull of (freed bytes, cost).
  static std::vector<Level> HullOf(const std::vector<Level>& levels) {
    std::vector<Level> hull;
    for (const Level& level : levels) {
      const auto above = [&] {
        const Level &a = hull[hull.size() - 2], &b = hull.back();
        return Int128{b.cost_ns - a.cost_ns} * (level.freed_bytes - a.freed_bytes) >=
               Int128{level.cost_ns - a.cost_ns} * (b.freed_bytes - a.freed_bytes);
      };
      while (hull.size() > 1 && above()) hull.pop_back();
      hull.push_back(level);
    }
    return hull;
  }

  void AddMix(const Saved& saved, const std::vector<Level>& hull, std::vector<Mix>& mixes) const {
    if (hull.size() < 2) return;
    const std::int64_t wanted =
        std::max<std::int64_t>(of_none_.pooled_bytes.value - of_none_.budget_bytes.value, 1);
    std::size_t upper = 1;
    while (upper + 1 < hull.size() && hull[upper].freed_bytes < wanted) ++upper;
    const Level &less = hull[upper - 1], &more = hull[upper];
    const std::int64_t bytes = std::max<std::int64_t>(more.freed_bytes - less.freed_bytes, 1);
    const std::int64_t missing = std::clamp<std::int64_t>(wanted - less.freed_bytes, 0, bytes);
    const std::int32_t blocks = job_.chain.blocks;
    Mix mix{.choice = none_, .enough = blocks + 1};
    mix.choice.saved = saved;
    mix.choice.rest = less.children;
    mix.choice.children = more.children;
    mix.choice.recomputed = static_cast<std::int32_t>((Int128{missing} * blocks + bytes - 1) / bytes);
    mix.bytes_of_a_block = std::max<std::int64_t>(bytes / std::max(blocks, 1), 1);
    mix.cost_ns =
        less.cost_ns + static_cast<std::int64_t>(Int128{more.cost_ns - less.cost_ns} * missing / bytes);
    mixes.push_back(std::move(mix));
  }

  // How many blocks each needs by what is pooled, and then by what is reserved.
  void Fit(std::vector<Mix>& mixes) {
    const std::int32_t blocks = job_.chain.blocks;
    for (int again = 0; again < kAgain; ++again) {
      FitPooled(mixes);
      bool over = false;
      for (Mix& mix : mixes) {
        if (mix.fits || mix.enough > blocks) continue;
        if (mix.step_ns >= limit_ns_) {
          mix.fits = true;  // or not: it is no faster than what is known
          continue;
        }
        Choice choice = mix.choice;
        choice.recomputed = mix.enough;
        const std::int64_t bytes = evaluator_.Over(choice).value;
        mix.fits = bytes <= 0;
        if (mix.fits || mix.enough == blocks) continue;
        over = true;
        mix.margin_bytes += bytes;
        mix.too_few = std::exchange(mix.enough, blocks + 1);
        mix.choice.recomputed =
            mix.too_few + 1 +
            static_cast<std::int32_t>(std::min<std::int64_t>(bytes / mix.bytes_of_a_block, blocks));
      }
      if (!over) break;
    }
    for (const Mix& mix : mixes) {
      if (mix.enough + 1 > blocks) continue;
      tried_.push_back(mix.choice);
      tried_.back().recomputed = mix.enough + 1;
    }
  }

  // A guess, mended by what it turns out to need.
  void FitPooled(std::vector<Mix>& mixes) {
    const std::int32_t blocks = job_.chain.blocks;
    for (int round = 0; round < kRounds; ++round) {
      std::vector<Choice> choices;
      std::vector<Mix*> of;
      for (Mix& mix : mixes) {
        if (mix.too_few + 1 >= mix.enough) continue;
        mix.choice.recomputed = std::clamp(mix.choice.recomputed, mix.too_few + 1, mix.enough - 1);
        if (mix.choice.recomputed > blocks) continue;
        choices.push_back(mix.choice);
        of.push_back(&mix);
      }
      const std::vector<Evaluation> evaluations = evaluator_.Evaluate(choices);
      for (std::size_t i = 0; i < choices.size(); ++i) Mend(*of[i], choices[i], evaluations[i]);
    }
  }

  void Mend(Mix& mix, const Choice& choice, const Evaluation& evaluation) {
    tried_.push_back(choice);
    const std::int32_t count = choice.recomputed;
    const std::int64_t over =
        evaluation.pooled_bytes.value + mix.margin_bytes - evaluation.budget_bytes.value;
    const bool fits = evaluation.planned && over <= 0;
    if (fits) {
      mix.step_ns = evaluation.step_ns;
      mix.fits = false;  // what is reserved is asked again
    }
    (fits ? mix.enough : mix.too_few) = count;
    const auto step = static_cast<std::int32_t>(
        std::min<std::int64_t>(std::abs(over) / mix.bytes_of_a_block, job_.chain.blocks));
    mix.choice.recomputed = fits ? count - std::max(step, 1) : count + step + 1;
  }

  Evaluator& evaluator_;
  const Job& job_;
  const OptimizeOptions& options_;
  const Choice none_;
  const Nanoseconds limit_ns_;
  Evaluation of_none_;
  std::vector<Choice> tried_;
};

}  // namespace

std::vector<Choice> FitRecomputation(Evaluator& evaluator, const Job& job, const OptimizeOptions& options,
                                     RecomputationPrices& prices, const Choice& from, Nanoseconds limit) {
  if (job.keeps_checkpoint || !options.may_checkpoint || job.chain.blocks == 0) return {};
  return RecomputationFit(evaluator, job, options, from, limit).Run(prices);
}

}  // namespace shardplan::optimize
