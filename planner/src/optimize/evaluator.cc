// SPDX-License-Identifier: Apache-2.0
#include "optimize/evaluator.h"

#include <algorithm>
#include <set>
#include <thread>
#include <utility>

#include "shardplan/simulator/cost_model.h"
#include "shardplan/simulator/engine.h"
#include "shardplan/simulator/lower_bound.h"
#include "shardplan/simulator/memory_profile.h"
#include "shardplan/simulator/reserved_memory.h"

namespace shardplan::optimize {
namespace {

constexpr Bytes kNoLimit{std::int64_t{1} << 53};

// Kernels and collectives of a step at the prices that are best for them, the same all the time. Nothing of
// the model's stream runs while it waits for a collective of the model: what the links' prices leave is the
// wait's price. Kernels of other streams have none then, and `kernels_ns` are those of the model's stream.
Nanoseconds WorkBound(const Cluster& cluster, std::int64_t kernels_ns, std::int64_t waits_ns,
                      const std::vector<std::int64_t>& links_ns) {
  __extension__ using Int128 = __int128;
  std::int64_t best_ns = kernels_ns + waits_ns;
  for (std::size_t l = 0; l < links_ns.size(); ++l) {
    std::vector<std::int64_t> shares(links_ns.size(), 0);
    shares[l] = kPriceScale;
    for (std::int64_t kernels = 0; kernels <= kPriceScale; kernels += kPriceScale / 32) {
      const WindowPrices prices = HighestPrices(cluster, kernels, shares);
      const Int128 worth = Int128{prices.kernels} * kernels_ns + Int128{prices.links[l]} * links_ns[l] +
                           Int128{kPriceScale - prices.links[l]} * waits_ns;
      best_ns = std::max(best_ns, static_cast<std::int64_t>(worth / kPriceScale));
    }
  }
  return {best_ns};
}

// Whether one stream waits at once for what the other was given: a record and the wait, from `at` on.
bool WaitsFor(const std::vector<EngineInstruction>& code, std::size_t at, std::int8_t waiting,
              std::int8_t given) {
  if (at + 1 >= code.size()) return false;
  const EngineInstruction &record = code[at], &wait = code[at + 1];
  return record.op == EngineOp::kRecord && record.stream == given && wait.op == EngineOp::kWait &&
         wait.stream == waiting && wait.operand == record.operand;
}

// Whether the collective starts behind all that the compute stream was given, which waits for it before it
// does anything else.
bool IsAwaited(const std::vector<EngineInstruction>& code, std::size_t collective) {
  const std::int8_t stream = code[collective].stream;
  return collective >= 2 && WaitsFor(code, collective - 2, stream, 0) &&
         WaitsFor(code, collective + 1, 0, stream);
}

void AddWork(const Cluster& cluster, const EngineProgram& program, Evaluation& evaluation) {
  __extension__ using Int128 = __int128;
  std::int64_t& kernels_ns = evaluation.kernels_ns.value;
  std::vector<std::int64_t>& links_ns = evaluation.links_ns;
  links_ns.assign(cluster.links.size(), 0);
  const std::vector<EngineInstruction>& code = program.steps.back().code;
  std::int64_t others_ns = 0;  // kernels of other streams
  for (std::size_t at = 0; at < code.size(); ++at) {
    const EngineInstruction& i = code[at];
    if (i.op == EngineOp::kSegment) {
      const EngineSegment& segment = program.segments[static_cast<std::size_t>(i.operand)];
      if (segment.count > 0)
        kernels_ns += program.operators[static_cast<std::size_t>(segment.first)].rest_ns.value;
    } else if (i.op == EngineOp::kWork && i.work == WorkClass::kCollective) {
      if (IsAwaited(code, at)) evaluation.waits_ns += i.duration_ns;
      if (i.loads < 0) continue;
      const LinkLoads& loads = program.loads[static_cast<std::size_t>(i.loads)];
      for (std::size_t l = 0; l < links_ns.size(); ++l)
        links_ns[l] += static_cast<std::int64_t>(Int128{i.duration_ns.value} * loads.ppm[l] / 1'000'000);
    } else if (i.op == EngineOp::kWork && (i.work == WorkClass::kCompute || i.work == WorkClass::kCopy)) {
      (i.stream == 0 ? kernels_ns : others_ns) += i.duration_ns.value;
    }
  }
  if (evaluation.waits_ns.value == 0) kernels_ns += others_ns;
  evaluation.work_ns = WorkBound(cluster, kernels_ns, evaluation.waits_ns.value, links_ns);
}

}  // namespace

Result<Evaluation> Measure(const Plan& plan, const FitOptions& fit) {
  const std::unique_ptr<CostModel> costs = MakeCostModel(plan.cluster);
  const Result<EngineProgram> program = LowerLastStep(plan, plan.cluster, *costs);
  if (!program) return std::unexpected(program.error());
  const Result<EngineResult> run = RunStep(*program, 0, nullptr);
  if (!run) return std::unexpected(run.error());
  const PooledMemory memory = PoolMemory(plan);
  Evaluation measured{.planned = true,
                      .step_ns = run->end_ns,
                      .pooled_bytes = memory.pooled_bytes,
                      .allocated_bytes = memory.allocated_bytes,
                      .budget_bytes = AllocatorBudget(plan, fit).value_or(kNoLimit)};
  AddWork(plan.cluster, *program, measured);
  measured.over = (fit.releases ? measured.allocated_bytes : measured.pooled_bytes) > measured.budget_bytes;
  return measured;
}

Evaluator::Evaluator(const Trace& trace, const Job& job, const Cluster& cluster,
                     const OptimizeOptions& options)
    : series_(trace, cluster),
      trace_(trace),
      job_(job),
      options_(options),
      cluster_(cluster),
      limit_(options.plan_limit) {}

const UnitModel* Evaluator::ModelOfUnits() {
  if (!std::exchange(asked_for_unit_model_, true)) {
    const Choice like{.units = UnitsOfBlocks(job_.chain, 1, Ends::kOwn)};
    if (const Result<Plan> plan = series_.Make(StrategyOf(job_, like)); plan)
      unit_model_ = UnitModel::Make(trace_, job_, *plan);
  }
  return unit_model_ ? &*unit_model_ : nullptr;
}

std::vector<Choice> Evaluator::PromisingUnits(const Choice& from, std::size_t most) {
  const UnitModel* model = ModelOfUnits();
  return model == nullptr ? std::vector<Choice>{} : model->BestCuts(from, most);
}

std::vector<Choice> Evaluator::Fastest(std::vector<Choice> choices, std::size_t most) {
  const UnitModel* model = ModelOfUnits();
  if (model == nullptr || choices.size() <= most) return choices;
  std::vector<std::pair<std::int64_t, std::size_t>> order;
  for (std::size_t i = 0; i < choices.size(); ++i)
    order.emplace_back(model->StepOf(choices[i].units, choices[i]), i);
  std::ranges::sort(order);
  std::vector<Choice> fastest;
  for (std::size_t i = 0; i < most; ++i) fastest.push_back(std::move(choices[order[i].second]));
  return fastest;
}

bool Evaluator::OutOfTime() {
  const std::int64_t limit_ns = options_.time_limit_ns.value;
  const bool late =
      limit_ns > 0 && std::chrono::steady_clock::now() - begin_ > std::chrono::nanoseconds(limit_ns);
  if (late || Stopped()) ended_ = true;
  return late || Stopped();
}

void Evaluator::GoOn() {
  cut_short_ = WasCutShort();
  if (limit_ > 0) limit_ = counted_ + options_.plan_limit;
  ended_ = false;  // unless it is for another reason
}

bool Evaluator::Ended() {
  if (limit_ > 0 && counted_ >= limit_) ended_ = true;
  return OutOfTime() || ended_;
}

FitOptions Evaluator::FitOptionsOf() const {
  return {.budget_bytes = options_.budget, .releases = options_.may_release_cache};
}

bool Evaluator::Fits(const Choice& choice) {
  const Choice effective = Effective(job_, choice);
  const auto [known, is_new] = fits_.emplace(effective, false);
  bool& fits = known->second;
  if (!is_new) return fits;
  const Result<Plan> plan = series_.Make(StrategyOf(job_, effective));
  if (!plan) return fits;
  const FitOptions options = FitOptionsOf();
  const Result<DeviceFit> fit = FitDevice(*plan, options);
  return fits = fit && fit->Fits(options.releases);
}

Nanoseconds Evaluator::WorkWith(const Evaluation& evaluation, Nanoseconds more) const {
  return WorkBound(cluster_, evaluation.kernels_ns.value + more.value, evaluation.waits_ns.value,
                   evaluation.links_ns);
}

DeviceFit Evaluator::FitOf(const Choice& choice) const {
  DeviceFit none{.out_of_memory = true};
  const Result<Plan> plan = series_.Make(StrategyOf(job_, Effective(job_, choice)));
  if (!plan) return none;
  FitOptions options = FitOptionsOf();
  options.releases = true;
  DeviceFit fit = FitDevice(*plan, options).value_or(none);
  fit.reserved_bytes = ReservedToShow(*plan, options, fit);
  return fit;
}

Bytes Evaluator::Reserved(const Choice& choice) {
  const Choice effective = Effective(job_, choice);
  if (const auto known = reserved_.find(effective); known != reserved_.end()) return known->second;
  const Result<Plan> plan = series_.Make(StrategyOf(job_, effective));
  return reserved_[effective] =
             plan ? ReservedWithoutBudget(*plan, FitOptionsOf()).value_or(kNoLimit) : kNoLimit;
}

Bytes Evaluator::Over(const Choice& choice) {
  if (Fits(choice)) return {};
  const Bytes budget = Evaluate({choice}).front().budget_bytes;
  return std::max(Reserved(choice) - budget, Bytes{1});
}

Evaluation Evaluator::EvaluateOne(const Choice& choice) const {
  const Result<Plan> plan = series_.Make(StrategyOf(job_, choice));
  if (!plan) return {.error = plan.error()};
  Result<Evaluation> measured = Measure(*plan, FitOptionsOf());
  return measured ? std::move(*measured) : Evaluation{.error = measured.error()};
}

std::vector<Evaluation> Evaluator::Evaluate(const std::vector<Choice>& choices, bool even_late) {
  std::vector<Choice> wanted;
  std::set<Choice> seen;
  for (const Choice& choice : choices) {
    Choice effective = Effective(job_, choice);
    if (!made_.contains(effective) && seen.insert(effective).second) wanted.push_back(std::move(effective));
  }
  if (!even_late && limit_ > 0) {
    const std::int64_t left = std::max(limit_ - counted_, std::int64_t{made_.empty() ? 1 : 0});
    if (std::ssize(wanted) > left) {
      wanted.resize(static_cast<std::size_t>(left));
      ended_ = true;
    }
  }
  std::vector<Evaluation> made(wanted.size());
  std::vector<char> done(wanted.size(), 0);
  std::atomic<std::size_t> next = 0;
  const auto work = [&] {
    for (std::size_t i = next++; i < wanted.size(); i = next++) {
      // The very first is always planned: there is an answer to give.
      const bool over = even_late ? Stopped() : OutOfTime();
      if (over && !(made_.empty() && i == 0)) return;
      made[i] = EvaluateOne(wanted[i]);
      done[i] = 1;
    }
  };
  std::vector<std::thread> threads;
  const auto helpers =
      std::min<std::size_t>(wanted.size(), static_cast<std::size_t>(std::max(options_.threads, 1)));
  for (std::size_t t = 1; t < helpers; ++t) threads.emplace_back(work);
  work();
  for (std::thread& thread : threads) thread.join();
  if (!even_late) counted_ += std::ssize(wanted);
  for (std::size_t i = 0; i < wanted.size(); ++i) {
    if (done[i] != 0) made_[wanted[i]] = std::move(made[i]);
  }
  std::vector<Evaluation> answers;
  for (const Choice& choice : choices) {
    const auto found = made_.find(Effective(job_, choice));
    answers.push_back(found == made_.end() ? Evaluation{} : found->second);
    if (found != made_.end()) known_.insert_or_assign(choice, found->second);
  }
  return answers;
}

}  // namespace shardplan::optimize
