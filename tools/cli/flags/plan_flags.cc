// SPDX-License-Identifier: Apache-2.0
#include "flags/plan_flags.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <charconv>
#include <iterator>
#include <string_view>
#include <utility>

#include "flags/memory_budget.h"
#include "flags/mesh_flag.h"
#include "shardplan/planner/planner.h"
#include "shardplan/schemas/checks.h"
#include "shardplan/schemas/io.h"
#include "shardplan/schemas/optimizers.h"
#include "shardplan/schemas/printable.h"
#include "shardplan/schemas/program.h"
#include "shardplan/schemas/pytorch_rules.h"
#include "shardplan/simulator/caching_allocator.h"

namespace shardplan::cli {
namespace {

std::optional<std::int64_t> ToInteger(std::string_view text) {
  std::int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc{} || end != text.data() + text.size()) return std::nullopt;
  return value;
}

Status ApplyMesh(const std::vector<std::string>& mesh, Strategy& strategy) {
  if (mesh.empty()) return {};
  Result<std::vector<StrategyMeshDim>> dims = ParseMesh(mesh);
  if (!dims) return std::unexpected(dims.error());
  strategy.mesh = std::move(*dims);
  return {};
}

Status ApplyDType(const std::optional<std::string>& text, std::string_view flag,
                  std::optional<DType>& dtype) {
  if (!text) return {};
  dtype = DTypeFromName(*text);
  if (!dtype) return BadFlag(flag, *text, "a floating-point dtype as torch names it, say bfloat16");
  return {};
}

Status ApplyReshardAfterForward(const std::optional<std::string>& text, Strategy& strategy) {
  if (!text) return {};
  if (*text == "none") {
    strategy.reshard_after_forward.reset();
  } else if (*text == "true" || *text == "false") {
    strategy.reshard_after_forward = ReshardAfterForward(*text == "true");
  } else if (const auto size = ToInteger(*text); size && *size > 1) {
    strategy.reshard_after_forward = ReshardAfterForward(*size);
  } else {
    return BadFlag("--reshard-after-forward", *text, "none, true, false, or a mesh size above 1");
  }
  return {};
}

Status ApplyPrefetch(const PlanFlags& flags, Strategy& strategy) {
  const bool fsdp1 = strategy.policy == "fsdp1";
  if (const auto& text = flags.backward_prefetch) {
    const auto count = ToInteger(*text);
    if (fsdp1 && (*text == "pre" || *text == "post" || *text == "none")) {
      strategy.fsdp1.backward_prefetch = *text == "pre"    ? Fsdp1BackwardPrefetch::kPre
                                         : *text == "post" ? Fsdp1BackwardPrefetch::kPost
                                                           : Fsdp1BackwardPrefetch::kNone;
    } else if (!fsdp1 && (*text == "implicit" || (count && *count >= 0 && *count <= 1000))) {
      strategy.fsdp2.backward_prefetch = *text == "implicit" ? -1 : static_cast<std::int32_t>(*count);
    } else {
      return BadFlag("--backward-prefetch", *text,
                     fsdp1 ? "pre, post or none (fsdp1)" : "implicit, or how many units (fsdp2)");
    }
  }
  if (const auto& text = flags.forward_prefetch) {
    const auto count = ToInteger(*text);
    if (fsdp1 && (*text == "true" || *text == "false")) {
      strategy.fsdp1.forward_prefetch = *text == "true";
    } else if (!fsdp1 && count && *count >= 0 && *count <= 1000) {
      strategy.fsdp2.forward_prefetch = static_cast<std::int32_t>(*count);
    } else {
      return BadFlag("--forward-prefetch", *text, fsdp1 ? "true or false (fsdp1)" : "how many units (fsdp2)");
    }
  }
  return {};
}

Status ApplySharding(const std::optional<std::string>& text, Strategy& strategy) {
  if (!text) return {};
  static constexpr std::pair<std::string_view, Fsdp1Sharding> kNames[] = {
      {"full_shard", Fsdp1Sharding::kFullShard},
      {"shard_grad_op", Fsdp1Sharding::kShardGradOp},
      {"no_shard", Fsdp1Sharding::kNoShard},
      {"hybrid_shard", Fsdp1Sharding::kHybridShard},
      {"hybrid_shard_zero2", Fsdp1Sharding::kHybridShardZero2}};
  for (const auto& [name, sharding] : kNames) {
    if (name == *text) {
      strategy.fsdp1.sharding = sharding;
      return {};
    }
  }
  return BadFlag("--sharding", *text,
                 "full_shard, shard_grad_op, no_shard, hybrid_shard or hybrid_shard_zero2");
}

// The words that --optimizer takes: of sgd, momentum is in its own (sgdm).
std::string OptimizerWords() {
  std::vector<std::string_view> words;
  for (const OptimizerDescription& is : kOptimizers) {
    if (is.kind == OptimizerKind::kNone) continue;
    words.push_back(is.name);
    if (is.kind == OptimizerKind::kSgd) words.push_back("sgdm");
  }
  return fmt::format("{} or {}", fmt::join(words, ", "), DescriptionOf(OptimizerKind::kNone).name);
}
std::string ImplementationWords(std::string_view last) {
  std::string words;
  for (std::size_t k = 0; k < optimizers::kImplementations.size(); ++k) {
    const bool is_last = k + 1 == optimizers::kImplementations.size();
    words += fmt::format("{}-{}", k == 0 ? "" : is_last ? last : ", ", optimizers::kImplementations[k].flag);
  }
  return words;
}
std::string ArgumentWords() {
  std::vector<std::string> words;
  for (const OptimizerArgument& argument : optimizers::kArguments) {
    if (!argument.flag.empty()) words.push_back(fmt::format("-{}", argument.flag));
  }
  return fmt::format("{}", fmt::join(words, ", "));
}

Status ApplyOptimizer(const std::optional<std::string>& text, Strategy& strategy) {
  if (!text) return {};
  const auto bad = [&] {
    return BadFlag("--optimizer", *text,
                   fmt::format("{}; then perhaps {}, and {}", OptimizerWords(), ImplementationWords(" or "),
                               ArgumentWords()));
  };
  std::size_t dash = text->find('-');
  std::string kind = text->substr(0, dash);
  const bool momentum = kind == "sgdm";
  if (momentum) kind = "sgd";
  const auto* is = std::ranges::find(kOptimizers, kind, &OptimizerDescription::name);
  if (is == kOptimizers.end()) return bad();
  Optimizer optimizer{.kind = is->kind, .momentum = momentum};
  if (is->kind == OptimizerKind::kMuon) {
    optimizer.kind = OptimizerKind::kAdamW;
    optimizer.muon = strategy.optimizer.muon.value_or(Muon());
  }
  while (dash != std::string::npos) {
    const std::size_t next = text->find('-', dash + 1);
    const std::string word = text->substr(dash + 1, next == std::string::npos ? next : next - dash - 1);
    dash = next;
    using optimizers::kArguments, optimizers::kImplementations;
    if (const auto* how = std::ranges::find(kImplementations, word, &optimizers::Implementation::flag);
        how != kImplementations.end()) {
      optimizer.implementation = how->implementation;
    } else if (const auto* argument = std::ranges::find(kArguments, word, &OptimizerArgument::flag);
               argument != kArguments.end() && !word.empty()) {
      optimizer.*argument->argument = true;
    } else {
      return bad();
    }
  }
  strategy.optimizer = optimizer;
  return {};
}

// The words of --muon-owners.
constexpr std::string_view kNoOwners = "none", kOverShards = "shards", kOverReplicas = "replicas",
                           kDistMuon = "dist_muon";

Status ApplyMuon(const PlanFlags& flags, Strategy& strategy) {
  if (flags.muon_matrices.empty() && !flags.muon_owners && flags.muon_bucket.empty() &&
      !flags.muon_in_backward)
    return {};
  if (!strategy.optimizer.muon) {
    return BadFlag(flags.muon_owners              ? "--muon-owners"
                   : !flags.muon_matrices.empty() ? "--muon-matrices"
                   : !flags.muon_bucket.empty()   ? "--muon-bucket"
                                                  : "--muon-in-backward",
                   "an optimizer without Muon", "--optimizer muon");
  }
  Muon& muon = *strategy.optimizer.muon;
  if (!flags.muon_matrices.empty()) muon.matrices = flags.muon_matrices;
  if (flags.muon_owners) {
    const std::string& owners = *flags.muon_owners;
    if (owners != kNoOwners && owners != kOverShards && owners != kOverReplicas && owners != kDistMuon) {
      return BadFlag("--muon-owners", owners,
                     fmt::format("{}, {}, {} or {}", kNoOwners, kOverShards, kOverReplicas, kDistMuon));
    }
    muon.compute.clear();
    if (owners != kNoOwners) muon.compute = {{.parameters = {}, .over_replicas = owners == kOverReplicas}};
    muon.dist_muon = owners == kDistMuon;
  }
  muon.begin_in_backward = muon.begin_in_backward || flags.muon_in_backward;
  if (!flags.muon_bucket.empty()) muon.buckets.clear();
  for (const std::string& bucket : flags.muon_bucket) {
    std::vector<std::string>& patterns = muon.buckets.emplace_back();
    for (std::size_t begin = 0; begin <= bucket.size();) {
      const std::size_t end = std::min(bucket.find(',', begin), bucket.size());
      patterns.push_back(bucket.substr(begin, end - begin));
      begin = end + 1;
    }
  }
  return {};
}

// Gradient accumulation: n forwards and backwards a step; without sync all but the last reduce nothing.
void ApplyAccumulation(const PlanFlags& flags, const Trace& trace, Strategy& strategy) {
  if (!flags.accumulate) return;
  StepProgram step;
  for (std::int32_t microbatch = 0; microbatch < *flags.accumulate; ++microbatch) {
    const bool last = microbatch + 1 == *flags.accumulate;
    if (flags.accumulate_without_sync) {
      step.push_back(ModuleCall{.method = "set_requires_gradient_sync", .value = last});
    }
    AddMicrobatch(trace, microbatch, step);
  }
  AddStepEnd(strategy.optimizer, step);
  strategy.program = {step};
}

Status ApplyCheckpointFlags(const PlanFlags& flags, Strategy& strategy) {
  if (!flags.checkpoint.empty()) strategy.checkpoint = CheckpointRule{.modules = flags.checkpoint};
  const bool more = flags.checkpoint_every || !flags.checkpoint_save.empty();
  if (!more) return {};
  if (!strategy.checkpoint)
    return MakeError(ErrorCode::kUsage,
                     "--checkpoint-every and --checkpoint-save are of --checkpoint MODULES");
  strategy.checkpoint->every = flags.checkpoint_every.value_or(strategy.checkpoint->every);
  if (!flags.checkpoint_save.empty()) strategy.checkpoint->save.clear();
  for (const std::string& text : flags.checkpoint_save) {
    if (text == "torchtitan") {
      const CheckpointRule& rule = TorchtitanSelectiveCheckpointing();
      std::ranges::copy(rule.save, std::back_inserter(strategy.checkpoint->save));
      strategy.checkpoint->early_stop = rule.early_stop;
      continue;
    }
    const std::size_t colon = text.rfind(':');
    SavedOperator saved{.name = text.substr(0, colon)};
    if (colon != std::string::npos) {
      const std::string number = text.substr(colon + 1);
      const auto [end, error] =
          std::from_chars(number.data(), number.data() + number.size(), saved.recompute_every);
      if (error != std::errc() || end != number.data() + number.size() || saved.recompute_every < 1) {
        return std::unexpected(Error{.code = ErrorCode::kUsage,
                                     .message = "--checkpoint-save names an operator",
                                     .found = text,
                                     .expected = "NAME, or NAME:N with N of 1 or more, as aten.mm:2"});
      }
    }
    strategy.checkpoint->save.push_back(std::move(saved));
  }
  return {};
}

Status ApplyOffloadFlags(const PlanFlags& flags, Strategy& strategy) {
  if (!flags.offload_activations.empty())
    strategy.activation_offload = ActivationOffload{.modules = flags.offload_activations};
  if (!flags.offload_every) return {};
  if (!strategy.activation_offload)
    return MakeError(ErrorCode::kUsage, "--offload-every is of --offload-activations MODULES");
  strategy.activation_offload->every = *flags.offload_every;
  return {};
}

}  // namespace

void AddPlanFlags(CLI::App& command, PlanFlags& flags) {
  FlagGroup group(command, "Knobs (over those of --strategy)");
  const std::vector<std::string> policies = PlannerPolicies();
  group.Option("--policy", flags.policy, fmt::format("{}", fmt::join(policies, " or ")))
      ->check(CLI::IsMember(policies));
  AddPolicyFlags(group, flags.own_policy);
  group
      .Option(
          "--pytorch", flags.pytorch,
          fmt::format("The release of PyTorch whose FSDP is planned: {} (default: the one that recorded the "
                      "trace, else {})",
                      fmt::join(PyTorchVersions(), " or "), Name(kNewestPyTorch)))
      ->check(CLI::IsMember(PyTorchVersions()));
  group.Option("--mesh", flags.mesh,
               "Mesh dimensions, outermost first: --mesh replicate=2 shard=8 (default: all ranks shard)");
  group.Option(
      "--unit", flags.units,
      "A unit rule: an FQN, a pattern (layers.*), or class:NAME; repeat it; the root is added (default: each "
      "repeated "
      "block)");
  const std::span<const std::string_view> frameworks = FrameworksWithUnits();
  group
      .Option("--units-of", flags.units_of,
              fmt::format("The units that a framework makes of this model: {}", fmt::join(frameworks, ", ")))
      ->check(CLI::IsMember(std::vector<std::string>(frameworks.begin(), frameworks.end())));
  group.Option("--reshard-after-forward", flags.reshard_after_forward,
               "none (PyTorch's default), true, false, or a mesh size");
  group.Option("--backward-prefetch", flags.backward_prefetch,
               "fsdp2: implicit or a number of units; fsdp1: pre, post, none");
  group.Option("--forward-prefetch", flags.forward_prefetch,
               "fsdp2: a number of units; fsdp1: true or false");
  group.Option("--param-dtype", flags.param_dtype, "Dtype that parameters are gathered and computed in");
  group.Option("--reduce-dtype", flags.reduce_dtype, "Dtype that gradients are reduced in");
  group.Option("--sharding", flags.sharding,
               "fsdp1: full_shard, shard_grad_op, no_shard, hybrid_shard, hybrid_shard_zero2");
  group.Option("--limit-all-gathers", flags.limit_all_gathers, "fsdp1: the rate limiter, true or false");
  group.Flag("--use-orig-params", flags.use_orig_params, "fsdp1: original parameters as views");
  group.Option("--checkpoint", flags.checkpoint,
               "Activation checkpointing of these modules (rules as for --unit)");
  group
      .Option("--checkpoint-every", flags.checkpoint_every,
              "Of those modules only every so many-th (torchtitan's selective checkpointing by layer)")
      ->check(CLI::Range(1, 1000000));
  group.Option(
      "--checkpoint-save", flags.checkpoint_save,
      fmt::format(
          "Operators that are not run again: NAME, or NAME:N where every N-th of a module's is; torchtitan: "
          "those of the selective checkpointing by operator of its release {}, without an early stop",
          kTorchtitanVersion));
  group.Option("--offload-activations", flags.offload_activations,
               "Activations of the units of these modules are in host memory between forward and backward");
  group
      .Option("--offload-every", flags.offload_every,
              "Of those units only every so many-th, in the order of their forwards")
      ->check(CLI::Range(1, 1000000));
  group.Flag("--compile", flags.compile, "Elementwise operators fused, as torch.compile does");
  group.Option("--optimizer", flags.optimizer,
               fmt::format("{}; then any of {} (default: PyTorch's), {}", OptimizerWords(),
                           ImplementationWords(", "), ArgumentWords()));
  group.Option(
      "--muon-matrices", flags.muon_matrices,
      "With --optimizer muon: parameters that Muon steps, FQNs or patterns (default: those that the trace "
      "marks)");
  group.Option("--muon-owners", flags.muon_owners,
               fmt::format("The ranks that may have a matrix whole: {} (default: torch.optim.Muon on "
                           "DTensors), {}, {} (of HSDP) or {} (torchtitan's)",
                           kNoOwners, kOverShards, kOverReplicas, kDistMuon));
  group.Option("--muon-bucket", flags.muon_bucket,
               "Matrices that are exchanged together, patterns joined by commas; once for each bucket "
               "(default: one of all)");
  group.Flag(
      "--muon-in-backward", flags.muon_in_backward,
      "Matrices go to their owners in the backward, a bucket as soon as its gradients are reduced; for "
      "loops that do not clip");
  group.Option("--alloc-conf", flags.alloc_conf, kAllocConfWords);
  group.Option("--accumulate", flags.accumulate, "Micro-batches a step")->check(CLI::Range(1, 100000));
  group.Flag("--no-sync", flags.accumulate_without_sync,
             "With --accumulate: only the last one reduces gradients");
  AddFsdp1Flags(group, flags.fsdp1);
  AddFsdp2Flags(group, flags.fsdp2);
}

Status ApplyPlanFlags(const PlanFlags& flags, Strategy& strategy) {
  if (!flags.policy.empty()) strategy.policy = flags.policy;
  if (!flags.units.empty() && !flags.units_of.empty())
    return MakeError(ErrorCode::kUsage, "--units-of and --unit both say the units");
  if (!flags.units.empty()) {
    strategy.units.clear();
    for (const std::string& unit : flags.units) {
      if (!unit.empty()) strategy.units.push_back({.modules = {unit}});
    }
    strategy.units.push_back({.modules = {""}});
  }
  if (flags.param_dtype || flags.reduce_dtype) {
    if (!strategy.mixed_precision) strategy.mixed_precision = MixedPrecision{};
    if (Status s = ApplyDType(flags.param_dtype, "--param-dtype", strategy.mixed_precision->param_dtype); !s)
      return s;
    if (Status s = ApplyDType(flags.reduce_dtype, "--reduce-dtype", strategy.mixed_precision->reduce_dtype);
        !s)
      return s;
  }
  if (flags.pytorch) strategy.pytorch = PyTorchFromName(*flags.pytorch);
  if (flags.limit_all_gathers) strategy.fsdp1.limit_all_gathers = *flags.limit_all_gathers;
  if (flags.use_orig_params) strategy.fsdp1.use_orig_params = true;
  if (Status applied = ApplyCheckpointFlags(flags, strategy); !applied) return applied;
  if (Status applied = ApplyOffloadFlags(flags, strategy); !applied) return applied;
  if (flags.compile) strategy.compile = true;
  if (flags.alloc_conf) {
    if (Status checked = CheckAllocatorSettings(*flags.alloc_conf); !checked) return checked;
    strategy.alloc_conf = *flags.alloc_conf;
  }
  if (Status s = ApplyMesh(flags.mesh, strategy); !s) return s;
  if (Status s = ApplyReshardAfterForward(flags.reshard_after_forward, strategy); !s) return s;
  if (Status s = ApplyPrefetch(flags, strategy); !s) return s;
  if (Status s = ApplySharding(flags.sharding, strategy); !s) return s;
  if (Status s = ApplyFsdp2Flags(flags.fsdp2, strategy); !s) return s;
  if (Status s = ApplyOptimizer(flags.optimizer, strategy); !s) return s;
  if (Status s = ApplyMuon(flags, strategy); !s) return s;
  return ApplyFsdp1Flags(flags.fsdp1, strategy);
}

Result<GivenStrategy> StrategyOf(const std::string& path, const PlanFlags& flags) {
  Result<std::optional<PolicyLibrary>> library = LoadPolicy(flags.own_policy);
  if (!library) return std::unexpected(std::move(library.error()));
  GivenStrategy given{.library = std::move(*library), .strategy = {}};
  Strategy& strategy = given.strategy;
  if (!path.empty()) {
    Result<Strategy> read = ReadStrategy(path);
    if (!read) return std::unexpected(read.error());
    strategy = std::move(*read);
  }
  if (Status applied = ApplyPlanFlags(flags, strategy); !applied) return std::unexpected(applied.error());
  if (Status applied = ApplyPolicyFlags(flags.own_policy, given.policy(), strategy); !applied)
    return std::unexpected(applied.error());
  if (!IsUtf8(ToJson(strategy)))
    return MakeError(ErrorCode::kUsage, "a name on the command line is no UTF-8, which a strategy has to be");
  return given;
}

Status ApplyTraceFlags(const PlanFlags& flags, const Trace& trace, const std::string& trace_path,
                       Strategy& strategy) {
  ApplyAccumulation(flags, trace, strategy);
  if (flags.units_of.empty()) return {};
  Result<std::vector<UnitRule>> units = UnitsOfFramework(flags.units_of, trace, strategy);
  if (!units) {
    if (units.error().code == ErrorCode::kBadInput) units.error().file = trace_path;
    return std::unexpected(std::move(units.error()));
  }
  strategy.units = std::move(*units);
  return {};
}

Error WithDocument(Error error, const std::string& trace_path, const std::string& strategy_path) {
  if (!error.file.empty() || error.code == ErrorCode::kUsage) return error;
  const bool of_trace = error.pointer.empty() ? strategy_path.empty() : IsPlaceInTrace(error.pointer);
  error.file = of_trace || strategy_path.empty() ? trace_path : strategy_path;
  if (!of_trace && strategy_path.empty()) {
    error.message = fmt::format("{} of the strategy that the flags make: {}",
                                std::exchange(error.pointer, {}), error.message);
  }
  return error;
}

Result<PlannerOutput> PlanTrace(const Trace& trace, const std::string& trace_path, const GivenStrategy& given,
                                const std::string& strategy_path, const Cluster& cluster,
                                PlanOptions options) {
  options.policy = given.policy();
  Result<PlannerOutput> planned = MakePlan(trace, given.strategy, cluster, options);
  if (!planned) return std::unexpected(WithDocument(std::move(planned.error()), trace_path, strategy_path));
  return planned;
}

Result<std::vector<StrategyMeshDim>> ParseMesh(const std::vector<std::string>& mesh) {
  std::vector<StrategyMeshDim> dims;
  for (const std::string& dim : mesh) {
    const std::size_t equals = dim.find('=');
    const auto size =
        equals == std::string::npos ? std::nullopt : ToInteger(std::string_view(dim).substr(equals + 1));
    if (!size || *size < 1) return BadFlag("--mesh", dim, "NAME=SIZE, say replicate=2 shard=8");
    dims.push_back({dim.substr(0, equals), *size});
  }
  return dims;
}

}  // namespace shardplan::cli
