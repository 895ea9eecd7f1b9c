// SPDX-License-Identifier: Apache-2.0
// The lower bound where plans recompute: the choices are all that are consistent, and no plan that recomputes
// parts of random models is below the bound. SHARDPLAN_SEED=n: that model alone.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <map>
#include <set>

#include "bound/recomputation_choices.h"
#include "optimize/prices.h"
#include "shardplan/planner/planner.h"
#include "shardplan/simulator/lower_bound.h"
#include "shardplan/simulator/memory_profile.h"
#include "shardplan/verifier/verifier.h"
#include "tests/planner/bound_cases.h"

namespace shardplan {
namespace {

using internal::MadeTensor;
using internal::RecomputationChoice;
using internal::RecomputationGraph;
using testing::Random;

RecomputationGraph RandomGraph(Random& random) {
  RecomputationGraph graph;
  const int operators = 1 + random.Below(9);
  for (int o = 0; o < operators; ++o) {
    graph.operators_ns.push_back(random.Chance(15) ? 0 : 1 + random.Below(40));
    for (int outputs = 1 + random.Below(10) / 8; outputs > 0; --outputs) {
      MadeTensor tensor{.bytes = 1 + random.Below(50), .used_later = random.Chance(50), .maker = o};
      for (int reader = o + 1; reader < operators; ++reader) {
        if (random.Chance(35)) tensor.readers.push_back(reader);
      }
      graph.tensors.push_back(std::move(tensor));
    }
  }
  return graph;
}

// All sets of operators that run again: what has to be kept.
std::vector<RecomputationChoice> AllChoices(const RecomputationGraph& graph) {
  std::vector<RecomputationChoice> all;
  for (std::uint32_t again = 0; again < 1U << graph.operators_ns.size(); ++again) {
    const auto runs = [&](std::int32_t o) { return (again >> o & 1U) != 0; };
    RecomputationChoice& choice = all.emplace_back();
    for (std::size_t o = 0; o < graph.operators_ns.size(); ++o) {
      if (runs(static_cast<std::int32_t>(o))) choice.again_ns += graph.operators_ns[o];
    }
    for (const MadeTensor& tensor : graph.tensors) {
      const bool needed = tensor.used_later || std::ranges::any_of(tensor.readers, runs);
      if (needed && !runs(tensor.maker)) choice.kept_bytes += tensor.bytes;
    }
  }
  return all;
}

TEST(RecomputationChoices, AreTheCheapestConsistentOnesAtAllPrices) {
  for (std::uint32_t seed = 1; seed <= 300; ++seed) {
    SCOPED_TRACE(::testing::Message() << "seed " << seed);
    Random random(seed);
    const RecomputationGraph graph = RandomGraph(random);
    const std::vector<RecomputationChoice> all = AllChoices(graph), hull = CheapestChoices(graph);
    for (int price = 0; price < 40; ++price) {
      const std::int64_t of_ns = random.Below(60), of_byte = random.Below(60);
      const auto cost = [&](const RecomputationChoice& c) {
        return of_ns * c.again_ns + of_byte * c.kept_bytes;
      };
      const auto least = [&](const std::vector<RecomputationChoice>& of) {
        std::int64_t least = cost(of.front());
        for (const RecomputationChoice& choice : of) least = std::min(least, cost(choice));
        return least;
      };
      ASSERT_EQ(least(hull), least(all)) << of_ns << " for a nanosecond, " << of_byte << " for a byte";
    }
    for (std::size_t i = 1; i < hull.size(); ++i) {
      EXPECT_LT(hull[i - 1].again_ns, hull[i].again_ns + (i + 1 == hull.size() ? 1 : 0));
      EXPECT_GT(hull[i - 1].kept_bytes, hull[i].kept_bytes);
    }
  }
}

// Blocks of two modules with several operators each. An operator reads some of what its block has, adds the
// block's input now and then, writes in place now and then; the backward reads some of both.
class BlockTrace {
 public:
  explicit BlockTrace(Random& random) : random_(random) {
    trace_.forwards.push_back({.name = "f0"});
    trace_.backwards.push_back({.name = "b0", .forwards = {0}});
    trace_.model = "blocks";
    trace_.tokens_per_batch = 8;
  }

  Trace Build() {
    const int blocks = 1 + random_.Below(12);
    children_ = 1 + random_.Below(2);
    operators_ = 2 + random_.Below(5);
    if (random_.Chance(60)) activation_ = std::int64_t{1} << 20;
    trace_.inputs.push_back({.name = "x", .shape = {8}, .storage = next_++});
    Declare(blocks);
    StorageId block_input = trace_.inputs[0].storage;
    Enter(0, block_input);
    Enter(1, block_input);
    for (int b = 0; b < blocks; ++b) block_input = Block(2 + b * (children_ + 1), block_input);
    Exit(1, block_input);
    Exit(0, block_input);
    FreeTemporaries();
    for (auto undo = undo_.rbegin(); undo != undo_.rend(); ++undo) Backward(*undo);
    FreeGradients();
    return std::move(trace_);
  }

 private:
  struct Step {
    enum Kind { kEnter, kExit, kOperator } kind = kEnter;
    ModuleId module = -1;
    std::vector<StorageId> uses;
    bool makes_gradient = false;
  };

  void Declare(int blocks) {
    Module root{.class_name = "Model", .children = {"layers"}};
    Module list{.fqn = "layers", .class_name = "ModuleList"};
    for (int b = 0; b < blocks; ++b) list.children.push_back(std::to_string(b));
    trace_.modules = {root, list};
    for (int b = 0; b < blocks; ++b) {
      Module block{.fqn = "layers." + std::to_string(b), .class_name = "Block"};
      const std::vector<std::string> names = {"a", "b"};
      for (int c = 0; c < children_; ++c) block.children.push_back(names[static_cast<std::size_t>(c)]);
      trace_.modules.push_back(block);
      for (int c = 0; c < children_; ++c) {
        const auto parameter = static_cast<ParameterId>(trace_.parameters.size());
        const std::string fqn = block.fqn + "." + block.children[static_cast<std::size_t>(c)];
        trace_.parameters.push_back({.fqn = fqn + ".weight", .shape = {8 * (1 + random_.Below(300)), 4}});
        trace_.modules.push_back({.fqn = fqn, .class_name = "Child", .parameters = {{"weight", parameter}}});
      }
    }
  }

  ParameterId ParameterOf(ModuleId module) const {
    return trace_.modules[static_cast<std::size_t>(module)].parameters.front().parameter;
  }
  TensorId NewTensor(StorageId storage) {
    std::vector<Tensor>& tensors = trace_.forwards[0].tensors;
    tensors.push_back(
        {.shape = {8}, .requires_grad = storage != trace_.inputs[0].storage, .storage = storage});
    return static_cast<TensorId>(tensors.size()) - 1;
  }
  void Enter(ModuleId module, StorageId input, StorageId also = -1) {
    std::vector<TensorId> inputs = {NewTensor(input)};
    if (also >= 0 && also != input) inputs.push_back(NewTensor(also));
    trace_.forwards[0].events.push_back(EnterEvent{module, std::move(inputs)});
    undo_.push_back({.kind = Step::kEnter, .module = module, .uses = {}, .makes_gradient = input != 0});
  }
  void Exit(ModuleId module, StorageId output) {
    trace_.forwards[0].events.push_back(ExitEvent{module, {NewTensor(output)}});
    undo_.push_back({.kind = Step::kExit, .module = module, .uses = {}, .makes_gradient = true});
  }

  StorageId Block(ModuleId module, StorageId input) {
    Enter(module, input);
    StorageId last = input;
    for (int c = 0; c < children_; ++c) {
      const ModuleId child = module + 1 + c;
      Enter(child, last, input);
      std::vector<StorageId> there = {last, input};
      for (int o = 0; o < operators_; ++o) {
        OperatorEvent op{.name = "aten.op" + std::to_string(random_.Below(3)), .module = child};
        op.duration_ns = Nanoseconds{random_.Below(30) * random_.Below(1000)};
        op.reads = {last};
        if (random_.Chance(40))
          op.reads.push_back(there[static_cast<std::size_t>(random_.Below(std::ssize(there)))]);
        if (o == 0) op.parameters = {ParameterOf(child)};
        const bool in_place = o > 1 && random_.Chance(10);
        const StorageId output = in_place ? last : next_++;
        if (!in_place)
          trace_.forwards[0].events.push_back(AllocateEvent{
              output, Bytes{activation_ * (1 + random_.Below(200))}, StorageRole::kForwardTemp, child, -1});
        op.writes = {output};
        std::vector<StorageId> saved;
        for (const StorageId used : op.reads) {
          if (random_.Chance(35)) saved.push_back(used);
        }
        if (random_.Chance(35)) saved.push_back(output);
        trace_.forwards[0].events.push_back(op);
        undo_.push_back({.kind = Step::kOperator, .module = child, .uses = saved, .makes_gradient = o == 0});
        last = output;
        there.push_back(output);
      }
      Exit(child, last);
    }
    Exit(module, last);
    return last;
  }

  // Tensors that no backward uses are freed where they are used last; the rest is saved.
  void FreeTemporaries() {
    std::set<StorageId> saved;
    for (const Step& step : undo_) saved.insert(step.uses.begin(), step.uses.end());
    saved.erase(trace_.inputs[0].storage);
    std::map<StorageId, std::size_t> last_use;
    std::vector<TraceEvent>& events = trace_.forwards[0].events;
    for (std::size_t e = 0; e < events.size(); ++e) {
      if (auto* allocate = std::get_if<AllocateEvent>(&events[e]); allocate != nullptr) {
        if (saved.contains(allocate->storage)) allocate->role = StorageRole::kSaved;
      } else if (const auto* op = std::get_if<OperatorEvent>(&events[e])) {
        for (const auto* uses : {&op->reads, &op->writes}) {
          for (const StorageId storage : *uses) last_use[storage] = e;
        }
      } else if (const auto* exit = std::get_if<ExitEvent>(&events[e])) {
        last_use[trace_.forwards[0].tensors[static_cast<std::size_t>(exit->outputs[0])].storage] = e;
      }
    }
    std::vector<TraceEvent> with_frees;
    for (std::size_t e = 0; e < events.size(); ++e) {
      with_frees.push_back(events[e]);
      for (const auto& [storage, last] : last_use) {
        if (last == e && storage != trace_.inputs[0].storage && !saved.contains(storage))
          with_frees.emplace_back(FreeEvent{storage});
      }
    }
    events = std::move(with_frees);
    // In the backward each goes behind its last use, which is that of the first operator that saves it.
    std::set<StorageId> seen;
    for (const Step& step : undo_) {
      for (const StorageId storage : step.uses) {
        if (saved.contains(storage) && seen.insert(storage).second) freed_behind_[&step].push_back(storage);
      }
    }
  }

  void Backward(const Step& step) {
    std::vector<TraceEvent>& events = trace_.backwards[0].events;
    if (step.kind == Step::kExit) {
      events.push_back(OutputGradReadyEvent{step.module, 0, 0, 0});
      return;
    }
    if (step.kind == Step::kEnter) {
      if (step.makes_gradient) events.push_back(InputsGradDoneEvent{step.module, 0, 0});
      return;
    }
    OperatorEvent op{.name = "aten.back", .module = step.module};
    op.duration_ns = Nanoseconds{random_.Below(30) * random_.Below(1000)};
    op.reads = step.uses;
    if (gradient_ >= 0) op.reads.push_back(gradient_);
    const StorageId made = next_++;
    events.push_back(AllocateEvent{made, Bytes{activation_ * (1 + random_.Below(20))},
                                   StorageRole::kBackwardTemp, step.module, -1});
    op.writes = {made};
    StorageId parameter_grad = -1;
    ParameterId parameter = -1;
    if (step.makes_gradient) {
      parameter = ParameterOf(step.module);
      op.parameters = {parameter};
      parameter_grad = next_++;
      const std::vector<std::int64_t>& shape = trace_.parameters[static_cast<std::size_t>(parameter)].shape;
      events.push_back(AllocateEvent{parameter_grad, Bytes{4 * shape[0] * shape[1]},
                                     StorageRole::kParameterGrad, step.module, parameter});
      op.writes.push_back(parameter_grad);
    }
    events.push_back(op);
    if (parameter >= 0) events.push_back(ParameterGradEvent{parameter, parameter_grad});
    for (const StorageId storage : freed_behind_[&step]) events.push_back(FreeEvent{storage});
    if (gradient_ >= 0) events.push_back(FreeEvent{gradient_});
    gradient_ = made;
  }
  void FreeGradients() {
    if (gradient_ >= 0) trace_.backwards[0].events.push_back(FreeEvent{gradient_});
  }

  Random& random_;
  Trace trace_;
  int children_ = 1, operators_ = 2;
  std::int64_t activation_ = 1024;
  StorageId next_ = 0, gradient_ = -1;
  std::vector<Step> undo_;
  std::map<const Step*, std::vector<StorageId>> freed_behind_;
};

Strategy RandomRecomputation(Random& random, const Trace& trace) {
  Strategy strategy{.policy = "fsdp2"};
  CheckpointRule rule{.early_stop = random.Chance(70)};
  for (const Module& module : trace.modules) {
    if (module.class_name == "Block" && random.Chance(70))
      strategy.units.push_back({.modules = {module.fqn}});
    if (module.class_name == "Model" || module.class_name == "ModuleList" || !random.Chance(40)) continue;
    const bool inside = std::ranges::any_of(
        rule.modules, [&](const std::string& outer) { return module.fqn.starts_with(outer + "."); });
    if (!inside) rule.modules.push_back(module.fqn);
  }
  strategy.units.push_back({.modules = {""}});
  for (const char* name : {"aten.op0", "aten.op1"}) {
    if (random.Chance(25)) rule.save.push_back({.name = name, .recompute_every = 2 * random.Below(2)});
  }
  if (!rule.modules.empty()) strategy.checkpoint = rule;
  strategy.mixed_precision = MixedPrecision{.param_dtype = DType::kBFloat16, .reduce_dtype = DType::kFloat32};
  strategy.fsdp2.backward_prefetch = random.Below(3) - 1;
  if (random.Chance(30)) strategy.reshard_after_forward = random.Chance(50);
  const int microbatches = random.Chance(25) ? 2 : 1;
  strategy.program = {testing::MicrobatchStep(microbatches)};
  return strategy;
}

// If the model alone takes time, and its activations alone memory, the bound is near the step.
void LeaveTheModelAlone(Cluster& cluster) {
  cluster.device.memory_bytes_per_second = 1'000'000'000'000'000;
  cluster.device.kernel_overhead_ns = {};
  cluster.host = {};
  cluster.compute_rate_while_communicating_ppm = cluster.communication_rate_while_computing_ppm = 1'000'000;
  for (Link& link : cluster.links) link = {link.name, {}, 1'000'000'000'000'000};
  cluster.collectives.clear();
}

// In a budget that the plan just fits.
void CheckBound(Random& random, const Trace& trace, const Plan& plan, bool recomputation) {
  SCOPED_TRACE(::testing::Message() << "recomputation " << recomputation);
  const Result<StepWork> work = StepWork::Make(trace, plan, recomputation);
  ASSERT_TRUE(work.has_value()) << ToString(work.error());
  const Bytes pooled = PoolMemory(plan).pooled_bytes;
  const Nanoseconds step = testing::StepOf(plan);
  EXPECT_LE(work->LeastMemory(), pooled);
  std::vector<std::int64_t> cuts;
  const int percent = 1 + random.Below(30);
  for (std::int64_t position = 1; position <= 2 * work->operators(); ++position) {
    if (random.Chance(percent)) cuts.push_back(position);
  }
  const WindowedWork windowed(*work, cuts, LayoutKind::kPerParameter, pooled);
  const WindowPrices of_kernels{kPriceScale, std::vector<std::int64_t>(plan.cluster.links.size(), 0)};
  for (int i = 0; i < 200; ++i) {
    CertificateBranch prices = testing::RandomPrices(random, windowed, plan.cluster);
    // Kernels and bytes alone: what plans that recompute exchange.
    if (random.Chance(80)) std::ranges::fill(prices.windows, of_kernels);
    const Result<Nanoseconds> value = windowed.Value(prices.windows, prices.bytes);
    ASSERT_TRUE(value.has_value()) << ToString(value.error());
    ASSERT_LE(*value, step) << "prices " << i;
  }
  const CertificateBranch found =
      optimize::FindPrices(*work, optimize::ChooseCuts(*work), LayoutKind::kPerParameter, pooled);
  EXPECT_LE(found.lower_bound_ns, step);
}

TEST(BoundOfRecomputingPlans, IsNeverAboveTheStep) {
  std::uint32_t first = 1, plans = 20;  // more: tools/nightly --only optimizer
  if (const char* seed = std::getenv("SHARDPLAN_SEED"); seed != nullptr)
    first = static_cast<std::uint32_t>(std::atoi(seed)), plans = 1;
  if (const char* more = std::getenv("SHARDPLAN_RANDOM_PLANS"); more != nullptr) plans = std::atoi(more);
  int checked = 0, recompute = 0;
  for (std::uint32_t seed = first; seed < first + plans && !HasFailure(); ++seed) {
    SCOPED_TRACE(::testing::Message() << "seed " << seed);
    Random random(seed * 2654435761U + 11);
    const Trace trace = BlockTrace(random).Build();
    Cluster cluster = testing::RandomCluster(random, 4);
    if (random.Chance(60)) LeaveTheModelAlone(cluster);
    // Several plans of one trace, each in a budget that it just fits.
    for (int p = 0; p < 4; ++p) {
      Strategy strategy = RandomRecomputation(random, trace);
      if (p == 0) strategy.checkpoint.reset();
      const Result<PlannerOutput> planned = MakePlan(trace, strategy, cluster);
      // A plan that keeps results that others write into later is none.
      if (!planned || !planned->faults.empty() || !CheckPlanClass(planned->plan)) continue;
      const Plan& plan = planned->plan;
      ++checked;
      recompute += testing::Recomputes(plan) ? 1 : 0;
      CheckBound(random, trace, plan, true);
      if (!testing::Recomputes(plan)) CheckBound(random, trace, plan, false);
    }
  }
  if (plans < 20) return;
  EXPECT_GT(checked, static_cast<int>(2 * plans));
  EXPECT_GT(recompute, static_cast<int>(plans));
}

}  // namespace
}  // namespace shardplan
