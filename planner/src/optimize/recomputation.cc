#include "optimize/recomputation.h"

#include <algorithm>
#include <map>
#include <string>
#include <utility>

#include "optimize/moves.h"

namespace shardplan::optimize {
namespace {

__extension__ using Int128 = __int128;

// What is recomputed of a block: modules, or the block as a whole.
struct Level {
  std::vector<std::string> children;
  bool whole = false;
  // Of all blocks.
  std::int64_t freed_bytes = 0;
  std::int64_t cost_ns = 0;
};

// A mix of two neighbouring levels that should be within the budget.
struct Mix {
  Choice choice;
  std::int64_t cost_ns = 0;
  std::int64_t bytes_of_a_block = 1;
  // Blocks of the second level, the first not enough and the second enough as far as is known.
  std::int32_t too_few = -1, enough = 0;
};

Choice WithoutRecomputation(Choice choice) {
  choice.recomputed = 0;
  choice.children.clear();
  choice.rest.clear();
  choice.saved.clear();
  return choice;
}

class RecomputationFit {
 public:
  RecomputationFit(Evaluator& evaluator, const Job& job, const OptimizeOptions& options, const Choice& from)
      : evaluator_(evaluator), job_(job), options_(options), none_(WithoutRecomputation(from)) {}

  std::vector<Choice> Run() {
    Measure();
    if (!of_none_.planned) return {};
    tried_.push_back(none_);
    if (of_none_.pooled_bytes <= options_.budget) return tried_;
    std::vector<Mix> mixes;
    for (const auto& [saved, measured] : measured_) AddMix(saved, HullOf(LevelsOf(measured)), mixes);
    std::ranges::stable_sort(mixes, {}, &Mix::cost_ns);
    if (mixes.size() > kMixes) mixes.resize(kMixes);
    Fit(mixes);
    return tried_;
  }

 private:
  using Saved = std::map<std::string, std::int64_t>;

  static constexpr std::size_t kMixes = 3;
  static constexpr int kRounds = 6;

  // Of every list of operators whose results are kept: each module in all blocks, and the blocks as a whole.
  void Measure() {
    const std::vector<Saved> lists = SavedOperators(job_);
    std::vector<Choice> choices = {none_};
    std::vector<Level> levels;
    for (const std::string& child : job_.chain.children) levels.push_back({.children = {child}});
    levels.push_back({.whole = true});
    for (const Saved& saved : lists) {
      for (const Level& level : levels) {
        Choice next = none_;
        next.recomputed = job_.chain.blocks;
        next.children = level.children;
        next.saved = saved;
        choices.push_back(std::move(next));
      }
    }
    const std::vector<Evaluation> evaluations = evaluator_.Evaluate(choices);
    of_none_ = evaluations.front();
    for (std::size_t i = 1; i < choices.size(); ++i) {
      const Evaluation& e = evaluations[i];
      Level level = levels[(i - 1) % levels.size()];
      level.freed_bytes = of_none_.pooled_bytes.value - e.pooled_bytes.value;
      level.cost_ns = std::max<std::int64_t>(e.step_ns.value - of_none_.step_ns.value, 0);
      if (e.planned && level.freed_bytes > 0) measured_[choices[i].saved].push_back(std::move(level));
    }
  }

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

  // Those that no mix of others is better than.
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
    const std::int64_t wanted = of_none_.pooled_bytes.value - options_.budget.value;
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
    mix.choice.recomputed =
        static_cast<std::int32_t>((Int128{missing} * blocks + bytes - 1) / bytes);
    mix.bytes_of_a_block = std::max<std::int64_t>(bytes / std::max(blocks, 1), 1);
    mix.cost_ns =
        less.cost_ns + static_cast<std::int64_t>(Int128{more.cost_ns - less.cost_ns} * missing / bytes);
    mixes.push_back(std::move(mix));
  }

  // How many blocks each needs: a guess, mended by what it turns out to need.
  void Fit(std::vector<Mix>& mixes) {
    const std::int32_t blocks = job_.chain.blocks;
    for (int round = 0; round < kRounds; ++round) {
      std::vector<Choice> choices;
      std::vector<Mix*> of;
      for (Mix& mix : mixes) {
        const std::int32_t guess = std::clamp(mix.choice.recomputed, mix.too_few + 1, mix.enough - 1);
        if (mix.too_few + 1 >= mix.enough || guess > blocks) continue;
        mix.choice.recomputed = guess;
        choices.push_back(mix.choice);
        of.push_back(&mix);
      }
      const std::vector<Evaluation> evaluations = evaluator_.Evaluate(choices);
      for (std::size_t i = 0; i < choices.size(); ++i) {
        Mix& mix = *of[i];
        const std::int32_t count = choices[i].recomputed;
        tried_.push_back(choices[i]);
        const std::int64_t over = evaluations[i].pooled_bytes.value - options_.budget.value;
        const std::int64_t by = std::abs(over) / mix.bytes_of_a_block;
        const auto step = static_cast<std::int32_t>(std::min<std::int64_t>(by, blocks));
        const bool fits = evaluations[i].planned && over <= 0;
        (fits ? mix.enough : mix.too_few) = count;
        mix.choice.recomputed = fits ? count - std::max(step, 1) : count + step + 1;
      }
    }
    // What is reserved is more than what is pooled.
    for (const Mix& mix : mixes) {
      for (std::int32_t more = 1; more <= 3 && mix.enough + more <= blocks; ++more) {
        tried_.push_back(mix.choice);
        tried_.back().recomputed = mix.enough + more;
      }
    }
  }

  Evaluator& evaluator_;
  const Job& job_;
  const OptimizeOptions& options_;
  const Choice none_;
  Evaluation of_none_;
  std::map<Saved, std::vector<Level>> measured_;
  std::vector<Choice> tried_;
};

}  // namespace

std::vector<Choice> FitRecomputation(Evaluator& evaluator, const Job& job, const OptimizeOptions& options,
                                     const Choice& from) {
  if (job.keeps_checkpoint || !options.may_checkpoint || job.chain.blocks == 0) return {};
  return RecomputationFit(evaluator, job, options, from).Run();
}

}  // namespace shardplan::optimize
