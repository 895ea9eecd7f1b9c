// SPDX-License-Identifier: Apache-2.0
// Each knob of the strategy on a small model.
#include <fmt/format.h>

#include <functional>
#include <utility>

#include "tests/executor/virtual/plan_cases.h"
#include "tests/planner/synthetic.h"

namespace shardplan::test {
namespace {

using testing::TreeModule;

constexpr auto kBf16 = DType::kBFloat16;
constexpr auto kFp16 = DType::kFloat16;
constexpr auto kFp32 = DType::kFloat32;

// Rows that no number of ranks divides, fewer rows than ranks, units in units, a root with its own
// parameters, a frozen block.
TreeModule Model() {
  TreeModule layers{.name = "layers", .class_name = "ModuleList"};
  for (int i = 0; i < 3; ++i) {
    TreeModule block{.name = std::to_string(i), .class_name = "Block", .parameters = {{3}}};
    block.children.push_back({.name = "attn", .class_name = "Attention", .parameters = {{5, 3}, {4}}});
    block.children.push_back({.name = "mlp", .class_name = "Mlp", .parameters = {{4, 4}, {1, 2}, {7}}});
    layers.children.push_back(std::move(block));
  }
  TreeModule root{.class_name = "Model", .parameters = {{2, 2}}};
  root.children.push_back({.name = "embed", .parameters = {{7, 3}}});
  root.children.push_back(std::move(layers));
  root.children.push_back({.name = "norm", .parameters = {{3}}});
  root.children.push_back({.name = "head", .parameters = {{6, 3}}});
  return root;
}

Trace FrozenTrace(int block) {
  TreeModule root = Model();
  TreeModule& frozen = root.children[1].children[static_cast<std::size_t>(block)];
  frozen.trainable = false;
  for (TreeModule& child : frozen.children) child.trainable = false;
  return testing::TraceOf(root);
}

class Cases {
 public:
  using Change = std::function<void(PlanCase&)>;

  void Add(const std::string& policy, const std::string& name, std::int64_t ranks, const Change& change) {
    PlanCase c = {fmt::format("knob/{}/{}", policy, name), testing::TraceOf(Model()), {}, {}, 3};
    c.strategy.policy = policy;
    c.strategy.units = {{.modules = {"layers.*"}}, {.modules = {""}}};
    c.strategy.optimizer.kind = OptimizerKind::kSgd;
    c.cluster = testing::ClusterOf(ranks);
    change(c);
    cases_.push_back(std::move(c));
  }

  std::vector<PlanCase> Take() { return std::move(cases_); }

 private:
  std::vector<PlanCase> cases_;
};

ModuleCall Setter(std::string method, bool value, std::string module = "") {
  return {.method = std::move(method), .module = std::move(module), .value = value};
}

// A step of micro-batches, with calls before the first and before the last one.
StepProgram Accumulation(int microbatches, const std::vector<ModuleCall>& first,
                         const std::vector<ModuleCall>& last) {
  StepProgram step;
  for (int m = 0; m < microbatches; ++m) {
    if (m == 0) step.insert(step.end(), first.begin(), first.end());
    if (m + 1 == microbatches) step.insert(step.end(), last.begin(), last.end());
    step.emplace_back(ForwardCall{m, 0});
    step.emplace_back(BackwardCall{{m}, 0});
  }
  step.emplace_back(OptimizerStepCall{});
  step.emplace_back(ZeroGradCall{});
  return step;
}

void AddEval(PlanCase& c) {
  c.trace.forwards.push_back(c.trace.forwards[0]);
  c.trace.forwards[1].grad_enabled = false;
  c.strategy.program = {
      {ForwardCall{0, 0}, BackwardCall{}, OptimizerStepCall{}, ZeroGradCall{}},
      {ForwardCall{0, 1}},
      {ForwardCall{0, 1}, ForwardCall{0, 0}, BackwardCall{}, OptimizerStepCall{}, ZeroGradCall{}}};
  c.steps = 4;
}

// Activations that blocks save are in host memory between forward and backward.
void AddActivationOffload(Cases& cases, const std::string& p) {
  const auto add = [&](const std::string& name, std::vector<std::string> modules, std::int64_t every,
                       const Cases::Change& change) {
    cases.Add(p, "offload_activations" + name, 2, [&](PlanCase& c) {
      c.strategy.activation_offload = ActivationOffload{std::move(modules), every, {0}};
      change(c);
    });
  };
  add("", {"layers.*"}, 1, [](PlanCase&) {});
  add("_every_2", {"layers.*"}, 2, [](PlanCase&) {});
  add("_of_modules", {"layers.*.mlp"}, 1, [](PlanCase&) {});
  add("_accumulation", {"layers.*"}, 1, [](PlanCase& c) { c.strategy.program = {Accumulation(3, {}, {})}; });
  add("_recomputed", {"layers.0", "layers.2.attn"}, 1, [](PlanCase& c) {
    c.strategy.checkpoint = CheckpointRule{.modules = {"layers.1", "layers.2.mlp"}};
  });
  add("_nested", {"layers.*"}, 1, [](PlanCase& c) {
    c.strategy.units = {
        {.modules = {"layers.*.attn", "layers.*.mlp"}}, {.modules = {"layers.*"}}, {.modules = {""}}};
  });
}

void AddFsdp2Units(Cases& cases) {
  const std::string p = "fsdp2";
  for (const int ranks : {1, 2, 3, 4}) cases.Add(p, fmt::format("ranks{}", ranks), ranks, [](PlanCase&) {});
  cases.Add(p, "root_only", 2, [](PlanCase& c) { c.strategy.units = {{.modules = {""}}}; });
  cases.Add(p, "nested_units", 2, [](PlanCase& c) {
    c.strategy.units = {
        {.modules = {"layers.*.attn", "layers.*.mlp"}}, {.modules = {"layers.*"}}, {.modules = {""}}};
  });
  cases.Add(p, "group", 3, [](PlanCase& c) {
    c.strategy.units = {
        {.modules = {"layers.*"}}, {.modules = {"norm", "head"}, .group = true}, {.modules = {""}}};
  });
  cases.Add(p, "root_without_parameters", 2, [](PlanCase& c) {
    c.strategy.units = {{.modules = {"embed"}},
                        {.modules = {"layers.*"}},
                        {.modules = {"norm"}},
                        {.modules = {"head"}},
                        {.modules = {""}}};
    c.strategy.ignored_parameters = {"weight0"};
  });
  cases.Add(p, "ignored", 2, [](PlanCase& c) { c.strategy.ignored_parameters = {"layers.1.mlp.weight0"}; });
  for (const int block : {0, 1}) {
    cases.Add(p, fmt::format("frozen_block{}", block), 2,
              [block](PlanCase& c) { c.trace = FrozenTrace(block); });
    cases.Add(p, fmt::format("partly_frozen{}", block), 2, [block](PlanCase& c) {
      c.trace = FrozenTrace(block);
      c.strategy.units = {{.modules = {""}}};
    });
  }
}

void AddFsdp2Knobs(Cases& cases) {
  const std::string p = "fsdp2";
  cases.Add(p, "reshard_false", 2, [](PlanCase& c) { c.strategy.reshard_after_forward = false; });
  cases.Add(p, "reshard_true", 2, [](PlanCase& c) { c.strategy.reshard_after_forward = true; });
  for (const bool low : {false, true}) {
    cases.Add(p, low ? "reshard_2_bf16" : "reshard_2", 4, [low](PlanCase& c) {
      c.strategy.reshard_after_forward = std::int64_t{2};
      if (low) c.strategy.mixed_precision = MixedPrecision{.param_dtype = kBf16};
    });
  }
  const std::pair<const char*, std::pair<DType, DType>> kPrecisions[] = {{"bf16", {kBf16, kFp32}},
                                                                         {"bf16_reduce_bf16", {kBf16, kBf16}},
                                                                         {"fp16_reduce_fp16", {kFp16, kFp16}},
                                                                         {"reduce_bf16", {kFp32, kBf16}}};
  for (const auto& [name, dtypes] : kPrecisions) {
    for (const int replicas : {1, 2}) {
      cases.Add(p, fmt::format("{}{}", name, replicas > 1 ? "_hsdp" : ""), 2 * replicas,
                [&, replicas](PlanCase& c) {
                  c.strategy.mixed_precision =
                      MixedPrecision{.param_dtype = dtypes.first, .reduce_dtype = dtypes.second};
                  if (replicas > 1) c.strategy.mesh = {{"replicate", replicas}, {"shard", 2}};
                });
    }
  }
  cases.Add(p, "hsdp", 4, [](PlanCase& c) { c.strategy.mesh = {{"replicate", 2}, {"shard", 2}}; });
  cases.Add(p, "replicate_only", 2, [](PlanCase& c) { c.strategy.mesh = {{"replicate", 2}, {"shard", 1}}; });
  for (const int distance : {1, 2}) {
    cases.Add(p, fmt::format("prefetch{}", distance), 2, [distance](PlanCase& c) {
      c.strategy.fsdp2.forward_prefetch = c.strategy.fsdp2.backward_prefetch = distance;
    });
  }
  cases.Add(p, "no_backward_prefetch", 2, [](PlanCase& c) { c.strategy.fsdp2.backward_prefetch = 0; });
  cases.Add(p, "unshard_async_op", 2, [](PlanCase& c) { c.strategy.fsdp2.unshard_async_op = true; });
  for (const double factor : {4.0, 3.0, 2.5, 2.0}) {
    cases.Add(p, fmt::format("divide_by_{}", factor), 2,
              [factor](PlanCase& c) { c.strategy.fsdp2.gradient_divide_factor = factor; });
  }
  cases.Add(p, "force_sum", 3, [](PlanCase& c) { c.strategy.fsdp2.force_sum_reduction = true; });
  for (const auto implementation : {OptimizerImplementation::kForeach, OptimizerImplementation::kForLoop,
                                    OptimizerImplementation::kFused}) {
    cases.Add(p, fmt::format("adamw{}", static_cast<int>(implementation)), 2, [implementation](PlanCase& c) {
      c.strategy.optimizer = {.kind = OptimizerKind::kAdamW, .implementation = implementation};
    });
  }
  for (const bool early_stop : {true, false}) {
    cases.Add(p, early_stop ? "checkpoint" : "checkpoint_no_early_stop", 2, [early_stop](PlanCase& c) {
      c.strategy.checkpoint = CheckpointRule{.modules = {"layers.*"}, .early_stop = early_stop};
    });
  }
  cases.Add(p, "checkpoint_around_units", 2, [](PlanCase& c) {
    c.strategy.units = {{.modules = {"layers.*.attn", "layers.*.mlp"}}, {.modules = {""}}};
    c.strategy.checkpoint = CheckpointRule{.modules = {"layers.*"}};
  });
  AddActivationOffload(cases, p);
  cases.Add(p, "eval", 2, AddEval);
  for (const bool pinned : {true, false}) {
    cases.Add(p, pinned ? "offload" : "offload_unpinned", 2, [pinned](PlanCase& c) {
      c.strategy.cpu_offload = true;
      c.strategy.pin_memory = pinned;
      c.strategy.mixed_precision = MixedPrecision{.param_dtype = kBf16, .reduce_dtype = kFp32};
    });
    cases.Add(p, pinned ? "offload_accumulation" : "offload_accumulation_unpinned", 2, [pinned](PlanCase& c) {
      c.strategy.cpu_offload = true;
      c.strategy.pin_memory = pinned;
      c.strategy.program = {Accumulation(2, {}, {})};
    });
  }
  cases.Add(p, "offload_hsdp_bf16", 4, [](PlanCase& c) {
    c.strategy.cpu_offload = true;
    c.strategy.mesh = {{"replicate", 2}, {"shard", 2}};
    c.strategy.mixed_precision = MixedPrecision{.param_dtype = kBf16, .reduce_dtype = kBf16};
  });
}

void AddFsdp2Accumulation(Cases& cases) {
  const std::string p = "fsdp2";
  const ModuleCall no_sync = Setter("set_requires_gradient_sync", false);
  const ModuleCall sync = Setter("set_requires_gradient_sync", true);
  cases.Add(p, "accumulate", 2, [](PlanCase& c) { c.strategy.program = {Accumulation(3, {}, {})}; });
  cases.Add(p, "accumulate_no_sync", 2,
            [=](PlanCase& c) { c.strategy.program = {Accumulation(3, {no_sync}, {sync})}; });
  cases.Add(p, "accumulate_no_sync_bf16", 3, [=](PlanCase& c) {
    c.strategy.program = {Accumulation(3, {no_sync}, {sync})};
    c.strategy.mixed_precision = MixedPrecision{.param_dtype = kBf16, .reduce_dtype = kFp32};
  });
  cases.Add(p, "accumulate_no_sync_of_a_block", 2, [](PlanCase& c) {
    c.strategy.program = {Accumulation(2, {Setter("set_requires_gradient_sync", false, "layers.1")},
                                       {Setter("set_requires_gradient_sync", true, "layers.1")})};
  });
  cases.Add(p, "accumulate_not_last", 2, [](PlanCase& c) {
    c.strategy.program = {
        Accumulation(2, {Setter("set_is_last_backward", false)}, {Setter("set_is_last_backward", true)})};
  });
  cases.Add(p, "accumulate_no_reshard_after_backward", 2, [=](PlanCase& c) {
    c.strategy.program = {Accumulation(2, {no_sync, Setter("set_reshard_after_backward", false)},
                                       {sync, Setter("set_reshard_after_backward", true)})};
  });
  for (const bool synced : {false, true}) {
    cases.Add(p, fmt::format("accumulate_part_after_backward{}", synced ? "_sync" : ""), 4, [=](PlanCase& c) {
      const ModuleCall keep = Setter("set_reshard_after_backward", false);
      c.strategy.reshard_after_forward = std::int64_t{2};
      c.strategy.fsdp2.part_after_backward = true;
      c.strategy.mixed_precision = MixedPrecision{.param_dtype = kBf16, .reduce_dtype = kFp32};
      c.strategy.program = {Accumulation(3, synced ? std::vector{keep} : std::vector{no_sync, keep},
                                         {sync, Setter("set_reshard_after_backward", true)})};
    });
  }
  for (const DType reduce : {kFp32, kBf16}) {
    cases.Add(p, fmt::format("hsdp_accumulate_no_all_reduce_{}", Name(reduce)), 4, [reduce](PlanCase& c) {
      c.strategy.mesh = {{"replicate", 2}, {"shard", 2}};
      c.strategy.mixed_precision = MixedPrecision{.param_dtype = kBf16, .reduce_dtype = reduce};
      c.strategy.program = {Accumulation(2, {Setter("set_requires_all_reduce", false)},
                                         {Setter("set_requires_all_reduce", true)})};
    });
  }
  cases.Add(p, "hsdp_accumulate", 4, [](PlanCase& c) {
    c.strategy.mesh = {{"replicate", 2}, {"shard", 2}};
    c.strategy.program = {Accumulation(2, {}, {})};
  });
  // Left unsharded over the optimizer step: the next forward computes with the old parameters, as in PyTorch.
  cases.Add(p, "never_reshard_after_backward", 2,
            [](PlanCase& c) { c.strategy.setup = {Setter("set_reshard_after_backward", false)}; });
  cases.Add(p, "no_unshard_in_backward", 2, [](PlanCase& c) {
    c.strategy.setup = {
        {.method = "set_unshard_in_backward", .module = "layers.1", .value = false, .recurse = false}};
    c.strategy.units = {{.modules = {"layers.1"}, .reshard_after_forward = false},
                        {.modules = {"layers.0", "layers.2"}},
                        {.modules = {""}}};
  });
}

// Rows that the ranks pad, in pieces that the first level puts in another order.
void AddTwoLevels(Cases& cases) {
  const auto add = [&](const std::string& name, std::int64_t ranks, const Cases::Change& change) {
    cases.Add("fsdp2", "two_levels_" + name, ranks, [&](PlanCase& c) {
      c.strategy.fsdp2.inner_reduce_ranks = 2;
      c.strategy.mixed_precision = MixedPrecision{.param_dtype = kBf16, .reduce_dtype = kFp32};
      change(c);
    });
  };
  const auto accumulate = [](PlanCase& c) {
    c.strategy.program = {Accumulation(3, {Setter("set_requires_all_reduce", false)},
                                       {Setter("set_requires_all_reduce", true)})};
  };
  add("plain", 4, [](PlanCase&) {});
  add("of_one_group", 2, [](PlanCase&) {});  // in one level
  add("four_outer", 8, accumulate);
  add("inner_four", 8, [](PlanCase& c) { c.strategy.fsdp2.inner_reduce_ranks = 4; });
  add("each", 4, [](PlanCase& c) { c.strategy.program = {Accumulation(2, {}, {})}; });
  add("accumulate", 4, accumulate);
  add("accumulate_kept", 4, [&](PlanCase& c) {
    c.strategy.reshard_after_forward = std::int64_t{2};
    c.strategy.fsdp2.part_after_backward = true;
    c.strategy.program = {Accumulation(
        3, {Setter("set_requires_all_reduce", false), Setter("set_reshard_after_backward", false)},
        {Setter("set_requires_all_reduce", true), Setter("set_reshard_after_backward", true)})};
  });
  add("replicas", 8, [&](PlanCase& c) {
    c.strategy.mesh = {{"replicate", 2}, {"shard", 4}};
    accumulate(c);
  });
  add("columns", 4, [&](PlanCase& c) {
    c.strategy.fsdp2.shard_dims = {{{"layers.*.mlp.weight0"}, 1}};
    accumulate(c);
  });
  add("sums_in_flight", 4, [&](PlanCase& c) {
    c.strategy.fsdp2.force_sum_reduction = true;
    c.strategy.fsdp2.reduce_scatter_inputs_in_flight = 3;
    accumulate(c);
  });
  add("divided_fp16", 4, [&](PlanCase& c) {
    c.strategy.mixed_precision = MixedPrecision{.param_dtype = kFp16, .reduce_dtype = kFp16};
    c.strategy.fsdp2.gradient_divide_factor = 3.0;
    accumulate(c);
  });
  add("offload", 4, [&](PlanCase& c) {
    c.strategy.cpu_offload = true;
    accumulate(c);
  });
  add("frozen", 4, [&](PlanCase& c) {
    c.trace = FrozenTrace(1);
    accumulate(c);
  });
  add("optimizer_in_backward", 4, [](PlanCase& c) { c.strategy.optimizer.in_backward = true; });
}

void AddFsdp1(Cases& cases) {
  const std::string p = "fsdp1";
  const std::pair<const char*, Fsdp1Sharding> kShardings[] = {
      {"full_shard", Fsdp1Sharding::kFullShard},
      {"shard_grad_op", Fsdp1Sharding::kShardGradOp},
      {"no_shard", Fsdp1Sharding::kNoShard},
      {"hybrid_shard", Fsdp1Sharding::kHybridShard},
      {"hybrid_shard_zero2", Fsdp1Sharding::kHybridShardZero2}};
  for (const auto& [name, sharding] : kShardings) {
    const bool hybrid =
        sharding == Fsdp1Sharding::kHybridShard || sharding == Fsdp1Sharding::kHybridShardZero2;
    for (int variant = 0; variant < 4; ++variant) {
      cases.Add(
          p, fmt::format("{}{}", name, variant),
          hybrid         ? 4
          : variant == 1 ? 3
                         : 2,
          [&, variant](PlanCase& c) {
            Fsdp1Knobs& knobs = c.strategy.fsdp1;
            knobs.sharding = sharding;
            if (hybrid) c.strategy.mesh = {{"replicate", 2}, {"shard", 2}};
            knobs.use_orig_params = variant % 2 == 1;
            knobs.backward_prefetch = static_cast<Fsdp1BackwardPrefetch>(variant % 3);
            knobs.forward_prefetch = variant >= 2;
            knobs.limit_all_gathers = variant != 2;
            if (variant >= 1) c.strategy.mixed_precision = MixedPrecision{.param_dtype = kBf16};
            if (variant >= 2) c.strategy.mixed_precision->reduce_dtype = kFp32;
            if (variant == 3) {
              c.strategy.program = {Accumulation(3, {Setter("no_sync", true)}, {Setter("no_sync", false)})};
            }
          });
    }
  }
  cases.Add(p, "accumulate", 2, [](PlanCase& c) { c.strategy.program = {Accumulation(2, {}, {})}; });
  cases.Add(p, "nested_units", 2, [](PlanCase& c) {
    c.strategy.units = {
        {.modules = {"layers.*.attn", "layers.*.mlp"}}, {.modules = {"layers.*"}}, {.modules = {""}}};
  });
  cases.Add(p, "ignored", 2, [](PlanCase& c) { c.strategy.ignored_parameters = {"layers.1.mlp.weight0"}; });
  cases.Add(p, "frozen_block", 2, [](PlanCase& c) { c.trace = FrozenTrace(1); });
  cases.Add(p, "partly_frozen", 2, [](PlanCase& c) {
    c.trace = FrozenTrace(1);
    c.strategy.units = {{.modules = {""}}};
    c.strategy.fsdp1.use_orig_params = true;
  });
  AddActivationOffload(cases, p);
  cases.Add(p, "checkpoint", 2,
            [](PlanCase& c) { c.strategy.checkpoint = CheckpointRule{.modules = {"layers.*"}}; });
  cases.Add(p, "eval", 2, AddEval);
  cases.Add(p, "adamw", 2, [](PlanCase& c) { c.strategy.optimizer = {.kind = OptimizerKind::kAdamW}; });
}

// Matrices of odd rows, and of fewer rows than ranks, whose owners exchange them; vectors, the embedding and
// the head stay with AdamW.
void AddOwners(Cases& cases) {
  const auto add = [&](const std::string& name, std::int64_t ranks, Muon muon, const Cases::Change& change) {
    cases.Add("fsdp2", "owners_" + name, ranks, [&](PlanCase& c) {
      change(c);
      testing::AddMuon(c.trace, {});
      StorageId next = 1 << 21;
      c.trace.optimizer_steps.push_back(testing::MuonStepOf({2, 4}, 1, 1, next));
      muon.matrices = {"layers.*.*.weight0", "layers.*.mlp.weight1"};
      c.strategy.optimizer = {.kind = OptimizerKind::kAdamW, .muon = muon};
    });
  };
  const auto same = [](PlanCase&) {};
  const auto of_replicas = [](PlanCase& c) { c.strategy.mesh = {{"replicate", 2}, {"shard", 2}}; };
  const auto half = [](PlanCase& c) {
    c.strategy.mixed_precision = MixedPrecision{.param_dtype = kBf16, .reduce_dtype = kFp32};
  };
  const Muon owned = {.compute = {{}}};
  const Muon over_replicas = {.compute = {{.over_replicas = true}}};
  const std::vector<std::vector<std::string>> by_block = {{"layers.0.*.*"}, {"layers.1.*.*"}};
  add("2", 2, owned, same);
  add("3_bf16", 3, owned, half);
  add("buckets", 2, {.compute = {{}}, .buckets = by_block}, same);
  add("dist_muon", 2, {.compute = {{}}, .buckets = by_block, .dist_muon = true}, same);
  add("in_backward", 2, {.compute = {{}}, .buckets = by_block, .begin_in_backward = true}, same);
  add("hsdp_in_backward", 4,
      {.compute = {{.over_replicas = true}}, .buckets = by_block, .begin_in_backward = true}, of_replicas);
  add("accumulate_in_backward", 2, {.compute = {{}}, .buckets = by_block, .begin_in_backward = true},
      [](PlanCase& c) { c.strategy.program = {Accumulation(2, {}, {})}; });
  add("one_for_all", 2, {.compute = {{.owner = 1}}}, same);
  add("hsdp", 4, owned, of_replicas);
  add("hsdp_over_replicas", 4, over_replicas, of_replicas);
  add("hsdp_buckets", 4, {.compute = {{.over_replicas = true}}, .buckets = by_block}, of_replicas);
  add("blocks", 4, {.compute = {{.parameters = {"layers.*.mlp.weight0"}, .block_rows = 2}, {}}}, same);
  const auto batches = [](PlanCase& c) {
    for (Parameter& parameter : c.trace.parameters) {
      if (parameter.fqn.ends_with("mlp.weight0")) parameter.shape = {4, 2, 2};
    }
  };
  add("batches", 3, owned, batches);
  // torch.optim.Muon on DTensors.
  const auto add_sharded = [&](const std::string& name, std::int64_t replicas, const Cases::Change& change) {
    cases.Add("fsdp2", "muon_" + name, 2 * replicas, [&](PlanCase& c) {
      change(c);
      testing::AddMuon(c.trace, {{2, replicas}});
      c.strategy.optimizer = {.kind = OptimizerKind::kAdamW,
                              .muon = Muon{.matrices = {"layers.*.mlp.weight0"}}};
    });
  };
  add_sharded("2", 1, same);
  add_sharded("bf16", 1, half);
  add_sharded("hsdp", 2, of_replicas);
  add_sharded("accumulate", 1, [](PlanCase& c) { c.strategy.program = {Accumulation(2, {}, {})}; });
  const MatrixRule on_all = {.compute = MatrixCompute::kReplicated};
  add("all", 3, {.compute = {on_all}}, half);
  add("all_buckets", 3, {.compute = {on_all}, .buckets = by_block}, same);
  add("all_hsdp", 4, {.compute = {on_all}}, of_replicas);
  add("all_of_some", 2, {.compute = {{.parameters = {"layers.0.*.*"}, .compute = on_all.compute}, {}}}, same);
  add("all_in_blocks", 4,
      {.compute = {{.parameters = {"layers.*.mlp.weight0"}, .compute = on_all.compute, .block_rows = 2},
                   on_all}},
      same);
  add("all_batches", 3, {.compute = {on_all}}, batches);
  add("accumulate", 2, owned, [](PlanCase& c) { c.strategy.program = {Accumulation(2, {}, {})}; });
}

}  // namespace

std::vector<PlanCase> KnobCases() {
  Cases cases;
  AddFsdp2Units(cases);
  AddFsdp2Knobs(cases);
  AddFsdp2Accumulation(cases);
  AddTwoLevels(cases);
  AddOwners(cases);
  AddFsdp1(cases);
  return cases.Take();
}

}  // namespace shardplan::test
