// SPDX-License-Identifier: Apache-2.0
// Random combinations of fsdp2's knobs on the golden traces: every plan verifies, or has only faults that the
// policy knows PyTorch to have; or the strategy is refused for a reason that PyTorch has, too. A plan that
// verifies does so in other orders that its schedule graph allows.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <map>
#include <random>

#include "planner/src/units/mesh.h"
#include "shardplan/planner/planner.h"
#include "shardplan/schemas/io.h"
#include "shardplan/verifier/verifier.h"
#include "tests/planner/random_orders.h"

namespace shardplan {
namespace {

using ::testing::AnyOf;
using ::testing::HasSubstr;

Trace GoldenTrace(const std::string& name) {
  Result<Trace> trace = ReadTrace(SHARDPLAN_SOURCE_DIR "/tests/planner/goldens/traces/" + name + ".json");
  EXPECT_TRUE(trace) << ToString(trace.error());
  return trace ? *trace : Trace{};
}

class KnobRandom {
 public:
  explicit KnobRandom(std::uint64_t seed) : engine_(seed) {}
  std::int64_t Below(std::int64_t count) {
    return static_cast<std::int64_t>(engine_() % static_cast<std::uint64_t>(count));
  }
  bool Chance(int percent) { return Below(100) < percent; }
  template <typename T>
  T Pick(std::initializer_list<T> values) {
    return values.begin()[Below(static_cast<std::int64_t>(values.size()))];
  }

 private:
  std::mt19937_64 engine_;
};

struct Case {
  std::string trace;
  Strategy strategy;
  std::int64_t ranks = 1;
};

std::vector<StrategyMeshDim> RandomMesh(KnobRandom& random, bool tensor) {
  std::vector<StrategyMeshDim> mesh;
  if (random.Chance(30)) mesh.push_back({"replicate", 2});
  mesh.push_back({"shard", random.Pick<std::int64_t>({1, 2, 3, 4})});
  if (random.Chance(20)) mesh.push_back({"context", 2});
  if (tensor) mesh.insert(mesh.begin() + random.Below(std::ssize(mesh) + 1), {"tensor", 2});
  return mesh;
}

std::vector<UnitRule> RandomUnits(KnobRandom& random, bool two_parts) {
  if (two_parts) {
    if (random.Chance(50)) return {{.modules = {"encoder"}}, {.modules = {"decoder"}}};
    return {{.modules = {"encoder.*"}},
            {.modules = {"encoder"}},
            {.modules = {"decoder.*"}},
            {.modules = {"decoder"}}};
  }
  std::vector<UnitRule> units;
  if (random.Chance(30)) units.push_back({.modules = {"layers.*.up"}});
  units.push_back({.modules = {"layers.*"}});
  if (random.Chance(30)) units.push_back({.modules = {"stem"}});
  units.push_back({.modules = {""}});
  for (UnitRule& unit : units) {
    if (random.Chance(15)) unit.reshard_after_forward = ReshardAfterForward(random.Chance(50));
    if (random.Chance(10)) unit.cpu_offload = true;
  }
  return units;
}

StepProgram RandomProgram(KnobRandom& random, const std::string& module) {
  StepProgram step;
  const auto call = [&](std::string method, bool value) {
    step.push_back(ModuleCall{.method = std::move(method), .module = module, .value = value});
  };
  if (random.Chance(15)) step.push_back(ForwardCall{.microbatch = 5, .trace = 1});  // no_grad
  if (random.Chance(15)) {
    step.insert(step.end(), {ForwardCall{0, 0}, ForwardCall{1, 0}, BackwardCall{{0, 1}, 1}});
  } else {
    const std::string setter = random.Pick<std::string>(
        {"set_requires_gradient_sync", "set_requires_all_reduce", "set_is_last_backward",
         "set_reshard_after_backward", "set_reshard_after_forward", "_set_unshard_async_op"});
    const bool accumulate = random.Chance(40);
    if (accumulate) {
      call(setter, false);
      step.insert(step.end(), {ForwardCall{0, 0}, BackwardCall{{0}, 0}});
      call(setter, true);
    }
    step.insert(step.end(), {ForwardCall{1, 0}, BackwardCall{{1}, 0}});
  }
  step.insert(step.end(), {OptimizerStepCall{}, ZeroGradCall{}});
  return step;
}

// Micro-batches that use all blocks, or all but one; of HSDP the last one alone may all-reduce.
StepProgram SkippingProgram(KnobRandom& random) {
  StepProgram step;
  const auto setter = random.Pick<std::string>({"set_requires_gradient_sync", "set_requires_all_reduce"});
  const auto count = static_cast<std::int32_t>(1 + random.Below(3));
  for (std::int32_t m = 0; m < count; ++m) {
    const bool last = m + 1 == count;
    step.push_back(ModuleCall{.method = setter, .module = "", .value = last || random.Chance(40)});
    const auto trace = static_cast<std::int32_t>(random.Below(2));
    step.insert(step.end(), {ForwardCall{m, trace}, BackwardCall{{m}, trace}});
  }
  step.insert(step.end(), {OptimizerStepCall{}, ZeroGradCall{}});
  return step;
}

void RandomKnobsOf215(KnobRandom& random, Strategy& strategy, bool has_root) {
  if (has_root && random.Chance(30)) {
    strategy.setup.push_back({.method = "set_reduce_scatter_unused_params", .module = "", .value = true});
  }
  if (!strategy.data_parallel) return;
  for (UnitRule& rule : strategy.units) {
    if (rule.modules.front().empty() || random.Chance(50)) continue;
    rule.parameter_meshes = {{{"*.*.down.*"}, {.shard = {random.Pick<std::string>({"shard", "context"})}}}};
  }
}

void RandomKnobs(KnobRandom& random, Case& c) {
  Fsdp2Knobs& knobs = c.strategy.fsdp2;
  knobs.forward_prefetch = random.Chance(30) ? static_cast<std::int32_t>(random.Below(3)) : 0;
  knobs.backward_prefetch = random.Chance(30) ? static_cast<std::int32_t>(random.Below(3)) : -1;
  knobs.unshard_async_op = random.Chance(15);
  knobs.force_sum_reduction = random.Chance(20);
  if (random.Chance(20)) knobs.gradient_divide_factor = random.Pick({1.0, 2.0, 3.0});
  if (random.Chance(20)) knobs.shard_dims = {{{"*.*.*.weight"}, random.Pick({1, -1, 0})}};
  if (random.Chance(20)) {
    knobs.extensions = {
        {{"*.*.down.weight"}, {{.dtype = DType::kFloat8E4M3FN}, {.dtype = DType::kFloat32, .numel = 1}}, {}}};
    if (random.Chance(50)) knobs.extensions[0].unsharded = {{.dtype = DType::kBFloat16}};
  }
  knobs.separate_reduce_scatter_communicator = random.Chance(20);
  knobs.reduce_scatter_inputs_in_flight =
      random.Chance(30) ? 1 + static_cast<std::int32_t>(random.Below(3)) : 1;
  knobs.allocate_memory_from_process_group = random.Chance(20);
  knobs.post_optim_event = random.Chance(20);
  knobs.part_after_backward = random.Chance(20);
  if (random.Chance(20)) {
    AllReduceHook hook{.reduce_op = random.Pick({ReduceOp::kSum, ReduceOp::kAverage})};
    for (const StrategyMeshDim& dim : c.strategy.mesh) {
      if (dim.name == "context") hook.mesh_dim = "context";
    }
    if (random.Chance(30)) hook.divide = 2.0;
    hook.own_stream = random.Chance(30);
    if (random.Chance(30)) hook.modules = {c.trace == "two_parts" ? "encoder" : "layers.*"};
    knobs.all_reduce_hooks = {hook};
  }
  if (random.Chance(25)) knobs.inner_reduce_ranks = 2;
}

Case RandomCase(std::uint64_t seed) {
  KnobRandom random(seed);
  Case c;
  c.trace = random.Pick<std::string>({"small", "small", "frozen", "frozen_prefix", "quantised", "reused",
                                      "two_parts", "tensor_parallel", "skipping"});
  Strategy& strategy = c.strategy;
  strategy.mesh = RandomMesh(random, c.trace == "tensor_parallel");
  for (const StrategyMeshDim& dim : strategy.mesh) c.ranks *= dim.size;
  const bool has_context =
      std::ranges::any_of(strategy.mesh, [](const StrategyMeshDim& dim) { return dim.name == "context"; });
  if (has_context && random.Chance(50)) {
    strategy.data_parallel = DataParallelDims{.shard = {"shard", "context"}};
    if (strategy.mesh.front().name == "replicate") strategy.data_parallel->replicate = {"replicate"};
  }
  strategy.units = RandomUnits(random, c.trace == "two_parts");
  strategy.pytorch = random.Pick({PyTorchVersion::k2_11, PyTorchVersion::k2_15, PyTorchVersion::k2_15});
  if (strategy.pytorch == PyTorchVersion::k2_15) RandomKnobsOf215(random, strategy, c.trace != "two_parts");
  strategy.fsdp2.shard_root = c.trace != "two_parts" || random.Chance(50);
  RandomKnobs(random, c);
  if (!strategy.fsdp2.shard_root && random.Chance(50)) {
    strategy.fsdp2.shared_comm_contexts = {{"encoder", "decoder"}};
  }
  if (random.Chance(30)) {
    MixedPrecision mixed;
    if (random.Chance(80)) mixed.param_dtype = random.Pick({DType::kBFloat16, DType::kFloat16});
    if (random.Chance(50)) mixed.reduce_dtype = DType::kFloat32;
    strategy.mixed_precision = mixed;
  }
  if (random.Chance(20)) strategy.reshard_after_forward = ReshardAfterForward(random.Chance(50));
  if (random.Chance(10)) strategy.reshard_after_forward = ReshardAfterForward(std::int64_t{2});
  strategy.cpu_offload = random.Chance(15);
  strategy.pin_memory = random.Chance(70);
  if (random.Chance(20)) strategy.checkpoint = CheckpointRule{.modules = {"class:Block"}};
  if (random.Chance(10)) strategy.optimizer.kind = OptimizerKind::kSgd;
  if (random.Chance(50)) {
    const std::string module = strategy.fsdp2.shard_root ? "" : "encoder";
    strategy.program = {c.trace == "skipping" ? SkippingProgram(random) : RandomProgram(random, module)};
  }
  return c;
}

TEST(Fsdp2KnobsTest, RandomCombinationsVerifyOrHaveFaultsOfPyTorch) {
  const char* given = std::getenv("SHARDPLAN_SEED");
  const std::uint64_t first = given == nullptr ? 0 : std::strtoull(given, nullptr, 10);
  const std::uint64_t last = given == nullptr ? 600 : first + 1;
  int planned_cases = 0, faulty = 0, refused = 0;
  std::map<std::string, Trace> traces;
  for (std::uint64_t seed = first; seed < last; ++seed) {
    const Case c = RandomCase(seed);
    if (!traces.contains(c.trace)) traces[c.trace] = GoldenTrace(c.trace);
    const Cluster cluster{.name = "any", .ranks = c.ranks};
    SCOPED_TRACE(fmt::format("seed {} trace {} ranks {}\n{}", seed, c.trace, c.ranks, ToJson(c.strategy)));
    const Result<PlannerOutput> planned = MakePlan(traces[c.trace], c.strategy, cluster);
    if (!planned) {
      ++refused;
      ASSERT_EQ(planned.error().code, ErrorCode::kBadInput) << ToString(planned.error());
      EXPECT_THAT(
          planned.error().message,
          AnyOf(HasSubstr("divisor of the shard"), HasSubstr("smaller mesh with"),
                HasSubstr("has to divide evenly"), HasSubstr("first tensor of an extension"),
                HasSubstr("stream of its own"), HasSubstr("PyTorch fails here"), HasSubstr("do not group so"),
                HasSubstr("reduces over itself"), HasSubstr("the first level of reductions")));
      continue;
    }
    ++planned_cases;
    faulty += planned->faults.empty() ? 0 : 1;
    const Result<Plan> again = ParsePlan(ToJson(planned->plan));
    ASSERT_TRUE(again);
    EXPECT_EQ(*again, planned->plan);
    Remarks(planned->plan);
    if (!planned->faults.empty()) continue;  // other orders have them otherwise
    const std::vector<ScheduleGraph> graphs = BuildScheduleGraphs(planned->plan);
    for (const std::uint64_t order : {seed, seed + 1}) {
      const Plan reordered = testing::Reordered(planned->plan, graphs, static_cast<std::uint32_t>(order));
      const std::vector<Violation> violations = Verify(reordered);
      ASSERT_TRUE(violations.empty()) << "order " << order << ": " << Explain(reordered, violations.front());
    }
  }
  if (given != nullptr) return;
  EXPECT_GT(planned_cases, 360);
  EXPECT_GT(faulty, 2);
  EXPECT_GT(refused, 20);
}

// The zeros of an unused parameter are what its reduction reads, and a parameter has a mesh that it can have.
TEST(Fsdp2KnobsTest, WithoutItsZerosAPlanDoesNotVerify) {
  Strategy strategy{.policy = "fsdp2",
                    .pytorch = PyTorchVersion::k2_15,
                    .units = {{.modules = {"layers.*"}}, {.modules = {""}}},
                    .setup = {{.method = "set_reduce_scatter_unused_params", .module = "", .value = true}}};
  strategy.program = {{ForwardCall{0, 0}, BackwardCall{{0}, 0}, ForwardCall{1, 1}, BackwardCall{{1}, 1},
                       OptimizerStepCall{}, ZeroGradCall{}}};
  const Result<PlannerOutput> planned =
      MakePlan(GoldenTrace("skipping"), strategy, {.name = "any", .ranks = 2});
  ASSERT_TRUE(planned) << ToString(planned.error());
  int zeros = 0;
  for (std::size_t t = 0; t < planned->plan.steps[0].triggers.size(); ++t) {
    const auto& instructions = planned->plan.steps[0].triggers[t].instructions;
    for (std::size_t k = 0; k < instructions.size(); ++k) {
      if (instructions[k].kind != InstructionKind::kGradZero) continue;
      ++zeros;
      Plan without = planned->plan;
      auto& edited = without.steps[0].triggers[t].instructions.Edit();
      edited.erase(edited.begin() + static_cast<std::ptrdiff_t>(k));
      const std::vector<Violation> violations = Verify(without);
      ASSERT_FALSE(violations.empty());
      EXPECT_EQ(violations.front().rule, Rule::kReadBeforeWrite);
    }
  }
  EXPECT_EQ(zeros, 1);
}

TEST(Fsdp2KnobsTest, MeshesOfParametersAreRefusedWhereTheyCannotBe) {
  Strategy strategy{.policy = "fsdp2",
                    .pytorch = PyTorchVersion::k2_15,
                    .mesh = {{"outer", 2}, {"inner", 2}},
                    .data_parallel = DataParallelDims{.shard = {"outer", "inner"}},
                    .units = {{.modules = {"layers.*"}}, {.modules = {""}}}};
  strategy.units[0].parameter_meshes = {{{"layers.*.down.*"}, {.shard = {"inner"}}}};
  const auto error = [](const Strategy& s) {
    const Result<PlannerOutput> planned = MakePlan(GoldenTrace("small"), s, {.name = "any", .ranks = 4});
    return planned ? std::string() : ToString(planned.error());
  };
  EXPECT_EQ(error(strategy), "");
  Strategy old = strategy;
  old.pytorch = PyTorchVersion::k2_11;
  EXPECT_THAT(error(old),
              HasSubstr("/units/0/parameter_meshes: the release of PyTorch that is planned has no "
                        "ShardPlacementResult (found 2.11, expected pytorch: \"2.15\" or later)"));
  Strategy group = strategy;
  group.units[0] = {.modules = {"layers.0", "layers.1"},
                    .group = true,
                    .parameter_meshes = strategy.units[0].parameter_meshes};
  EXPECT_THAT(error(group), HasSubstr("/units/0/parameter_meshes"));
  Strategy nothing = strategy;
  nothing.units[0].parameter_meshes[0].parameters = {"layers.*.sideways"};
  EXPECT_THAT(error(nothing),
              HasSubstr("/units/0/parameter_meshes/0/parameters/0: no parameter has this name"));
  Strategy unknown = strategy;
  unknown.units[0].parameter_meshes[0].data_parallel.shard = {"expert"};
  EXPECT_THAT(error(unknown), HasSubstr("the mesh has no such dimension"));
}

// Issued with async_op, an all-gather runs on the process group's own stream between its copy-in and the wait
// at its copy-out; nothing of it is on the runtime's all-gather streams.
TEST(Fsdp2KnobsTest, ARuleNamesEveryCopyOfATiedParameter) {
  const Trace trace = GoldenTrace("tied");
  const auto tied =
      std::ranges::find_if(trace.parameters, [](const Parameter& p) { return !p.shared_with.empty(); });
  ASSERT_NE(tied, trace.parameters.end());
  Strategy strategy{.policy = "fsdp2", .units = {{.modules = {"layers.*"}}}};
  strategy.fsdp2.shard_dims = {{.parameters = {tied->fqn}, .dim = 1}};
  const Result<PlannerOutput> planned = MakePlan(trace, strategy, {.name = "any", .ranks = 2});
  ASSERT_TRUE(planned) << ToString(planned.error());
  int cut = 0;
  for (const Unit& unit : planned->plan.units) {
    cut += static_cast<int>(std::ranges::count(unit.parameters, 1, &UnitParameter::shard_dim));
  }
  EXPECT_EQ(cut, 2);
}

TEST(Fsdp2KnobsTest, AUnitThatNeverRanCannotWaitForItsReduction) {
  Trace trace = GoldenTrace("small");
  trace.modules[0].children.push_back("unused");
  trace.modules.push_back({.fqn = "unused", .class_name = "Linear"});
  trace.modules.back().parameters.push_back({"weight", static_cast<ParameterId>(trace.parameters.size())});
  trace.parameters.push_back({.fqn = "unused.weight", .shape = {4, 4}});
  Strategy strategy{.policy = "fsdp2", .units = {{.modules = {"unused"}}}};
  const Cluster cluster{.name = "any", .ranks = 2};
  strategy.setup = {{.method = "set_requires_gradient_sync", .value = false}};
  strategy.mixed_precision = MixedPrecision{.param_dtype = DType::kBFloat16};
  EXPECT_TRUE(MakePlan(trace, strategy, cluster, {.verify = false}));  // steps unreduced gradients
  strategy.mixed_precision->reduce_dtype = DType::kFloat32;
  const Result<PlannerOutput> planned = MakePlan(trace, strategy, cluster, {.verify = false});
  ASSERT_FALSE(planned);
  EXPECT_THAT(ToString(planned.error()), HasSubstr("_unsharded_param"));
}

TEST(Fsdp2KnobsTest, AsynchronousAllGathersRunOnTheCommunicatorsStream) {
  Strategy strategy{.units = {{.modules = {"layers.*"}}, {.modules = {""}}}};
  strategy.fsdp2.unshard_async_op = true;
  const Result<PlannerOutput> planned =
      MakePlan(GoldenTrace("small"), strategy, Cluster{.name = "any", .ranks = 2});
  ASSERT_TRUE(planned) << ToString(planned.error());
  const Plan& plan = planned->plan;
  const auto name = [&](const Instruction& i) { return plan.streams[i.stream].name; };
  std::map<EventId, std::string> recorded_on;
  std::map<UnitId, bool> arrived;  // by unit: the compute stream has waited for its gather
  int gathers = 0, copies = 0;
  for (const Trigger& trigger : plan.steps.front().triggers) {
    for (const Instruction& i : trigger.instructions) {
      if (i.kind == InstructionKind::kRecord) recorded_on[i.event] = name(i);
      if (i.kind == InstructionKind::kCopyIn) {
        EXPECT_EQ(name(i), "compute");
      }
      if (i.kind == InstructionKind::kAllGather) {
        EXPECT_EQ(name(i), "nccl.shard");
        arrived[i.unit] = false;
        ++gathers;
      } else if (i.kind == InstructionKind::kWait && name(i) == "compute") {
        if (recorded_on[i.event] == "nccl.shard") arrived[i.unit] = true;
      } else if (i.kind == InstructionKind::kCopyOut) {
        EXPECT_TRUE(arrived[i.unit]) << i.unit;
        ++copies;
      }
    }
  }
  EXPECT_EQ(gathers, copies);
  EXPECT_EQ(gathers, 7);  // three layers twice, the root once
}

TEST(MeshTest, FlattensToAsFewDigitsAsCanBe) {
  const Result<Mesh> mesh = Mesh::Make({{"a", 2}, {"b", 3}, {"one", 1}, {"c", 2}}, 12);
  ASSERT_TRUE(mesh);
  EXPECT_EQ(mesh->Flatten({"a", "b", "c"}), (MeshDigits{{12, 1}}));
  EXPECT_EQ(mesh->Flatten({"b", "c"}), (MeshDigits{{6, 1}}));
  EXPECT_EQ(mesh->Flatten({"c", "a"}), (MeshDigits{{2, 6}, {2, 1}}));
  EXPECT_EQ(mesh->Flatten({"b", "one"}), (MeshDigits{{3, 2}}));
  EXPECT_TRUE(mesh->Flatten({"one"}).empty());
  EXPECT_FALSE(Mesh::Make({{"a", 2}}, 4));
}

TEST(MeshTest, InnermostRanksAreAdjacentInTheFlattenedDimension) {
  const MeshDigits apart = {{4, 8}, {2, 1}};
  EXPECT_EQ(Innermost(apart, 2), (MeshDigits{{2, 1}}));
  EXPECT_EQ(Innermost(apart, 4), (MeshDigits{{2, 8}, {2, 1}}));
  EXPECT_EQ(Innermost({{3, 2}, {2, 1}}, 3), std::nullopt);
  EXPECT_EQ(Innermost(apart, 16), std::nullopt);
}

TEST(RemarksTest, TellWhatIsGatheredForNothingStaysOrIsStale) {
  const auto remarks = [](const std::string& trace, const Strategy& strategy) {
    const Result<PlannerOutput> planned =
        MakePlan(GoldenTrace(trace), strategy, Cluster{.name = "any", .ranks = 2});
    EXPECT_TRUE(planned) << ToString(planned.error());
    std::vector<std::string> names;
    for (const Remark& remark : planned ? Remarks(planned->plan) : std::vector<Remark>{}) {
      names.push_back(fmt::format("{} {}", Name(remark.kind), planned->plan.units[remark.unit].fqn));
    }
    return names;
  };
  Strategy strategy{.units = {{.modules = {"stem"}}, {.modules = {"layers.*"}}, {.modules = {""}}}};
  EXPECT_THAT(remarks("small", strategy), ::testing::ElementsAre("gather_for_nothing stem"));
  EXPECT_THAT(remarks("frozen_prefix", strategy), ::testing::ElementsAre("gather_for_nothing layers.0"));
  strategy.setup = {{.method = "set_unshard_in_backward", .module = "stem", .value = false}};
  EXPECT_TRUE(remarks("small", strategy).empty());
  strategy.setup = {{.method = "set_reshard_after_backward", .module = "layers.1", .value = false}};
  strategy.units.erase(strategy.units.begin());
  EXPECT_THAT(remarks("small", strategy),
              ::testing::ElementsAre("stale_parameters layers.1", "stays_unsharded layers.1"));
}

}  // namespace
}  // namespace shardplan
