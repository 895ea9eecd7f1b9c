// SPDX-License-Identifier: Apache-2.0
#include "optimize/choice.h"

#include <fmt/format.h>

#include <algorithm>

#include "policy/matrix_owners.h"
#include "shardplan/planner/planner.h"
#include "shardplan/schemas/optimizers.h"
#include "units/unit_parameters.h"

namespace shardplan::optimize {
namespace {

// Null: it is none of the chain's.
const ChainModule* FindModule(const ModelChain& chain, const std::string& fqn) {
  const auto module = std::ranges::find(chain.modules, fqn, &ChainModule::fqn);
  return module == chain.modules.end() ? nullptr : &*module;
}

std::int32_t UnitCount(const Choice& choice) {
  return static_cast<std::int32_t>(std::ranges::count_if(choice.units, [](auto size) { return size > 0; }));
}

// The meshes of the module's parameters that are on others than most, with `apart` of what is kept of them.
std::vector<ParameterMeshRule> MeshesOf(const Job& job, const std::string& module,
                                        std::optional<ReshardAfterForward> apart) {
  const auto found = job.other_meshes.find(module);
  if (found == job.other_meshes.end()) return {};
  std::vector<ParameterMeshRule> rules = found->second.rules;
  for (ParameterMeshRule& rule : rules) rule.reshard_after_forward = apart;
  return rules;
}

// PyTorch keeps on part of the ranks only parameters of the mesh of most: the others are freed.
std::optional<ReshardAfterForward> KeptApart(const Job& job, const Choice& choice, std::int32_t left,
                                             const std::optional<ReshardAfterForward>& unit) {
  if (job.keeps_reshard) return std::nullopt;
  const ReshardAfterForward apart(left > (choice.kept_apart == kAsTheUnit ? choice.kept : choice.kept_apart));
  return unit == apart ? std::nullopt : std::optional(apart);
}

// The parts of the blocks that a unit is of: inside of it, with the same knobs.
void AddParts(const Job& job, const Choice& choice, std::int32_t left, const UnitRule& unit,
              std::vector<UnitRule>& rules) {
  if (!choice.in_parts || choice.fsdp1) return;
  for (const std::string& module : unit.modules) {
    if (!FindModule(job.chain, module)->block) continue;
    for (const std::string& part : job.chain.parts) {
      rules.push_back({.modules = {module + "." + part}});
      rules.back().reshard_after_forward = unit.reshard_after_forward;
      rules.back().parameter_meshes =
          MeshesOf(job, module, KeptApart(job, choice, left, unit.reshard_after_forward));
    }
  }
}

// PyTorch has no group of modules whose parameters are on several meshes: those on others than most are in
// units of their own.
void AddMeshes(const Job& job, const Choice& choice, std::int32_t left, UnitRule& unit,
               std::vector<UnitRule>& rules) {
  if (choice.fsdp1 || job.other_meshes.empty()) return;
  const std::optional<ReshardAfterForward> apart = KeptApart(job, choice, left, unit.reshard_after_forward);
  if (!unit.group) {
    unit.parameter_meshes = MeshesOf(job, unit.modules.front(), apart);
    return;
  }
  for (const std::string& module : unit.modules) {
    const auto others = job.other_meshes.find(module);
    if (others == job.other_meshes.end()) continue;
    for (const std::string& own : others->second.modules) {
      const bool is_part = choice.in_parts && std::ranges::any_of(job.chain.parts, [&](const auto& part) {
                             return own == module + "." + part;
                           });
      if (is_part || own == module) continue;
      rules.push_back({.modules = {own}});
      rules.back().reshard_after_forward = unit.reshard_after_forward;
      rules.back().parameter_meshes = MeshesOf(job, module, apart);
    }
  }
}

// Meshes of the modules that are left to the root, and of parameters in no module of the chain.
std::vector<ParameterMeshRule> RootMeshes(const Job& job, const Choice& choice) {
  std::vector<ParameterMeshRule> rules = MeshesOf(job, "", std::nullopt);
  std::size_t at = 0;
  for (const std::int32_t size : choice.units) {
    const auto end = std::min(job.chain.modules.size(), at + static_cast<std::size_t>(std::abs(size)));
    for (; at < end; ++at) {
      if (size > 0) continue;
      std::ranges::copy(MeshesOf(job, job.chain.modules[at].fqn, std::nullopt), std::back_inserter(rules));
    }
  }
  for (; at < job.chain.modules.size(); ++at)
    std::ranges::copy(MeshesOf(job, job.chain.modules[at].fqn, std::nullopt), std::back_inserter(rules));
  return rules;
}

std::vector<UnitRule> RulesOf(const Job& job, const Choice& choice) {
  std::vector<UnitRule> rules;
  std::size_t at = 0;
  std::int32_t left = UnitCount(choice);
  for (const std::int32_t size : choice.units) {
    const auto end = std::min(job.chain.modules.size(), at + static_cast<std::size_t>(std::abs(size)));
    if (size > 0 && at < end) {
      UnitRule rule;
      for (; at < end; ++at) rule.modules.push_back(job.chain.modules[at].fqn);
      rule.group = rule.modules.size() > 1 && !choice.fsdp1;
      if (!job.keeps_reshard && !choice.fsdp1) {
        const bool kept = left <= choice.kept;
        const bool in_smaller_mesh = choice.part > 1 && left - choice.kept <= choice.post_forward_units;
        rule.reshard_after_forward = kept              ? ReshardAfterForward(false)
                                     : in_smaller_mesh ? ReshardAfterForward(choice.part)
                                                       : ReshardAfterForward(true);
      }
      AddMeshes(job, choice, left, rule, rules);
      AddParts(job, choice, left, rule, rules);
      --left;
      rules.push_back(std::move(rule));
    }
    at = end;
  }
  UnitRule root{.modules = {""}};
  if (choice.root_freed && !job.keeps_reshard && !choice.fsdp1) root.reshard_after_forward = true;
  if (!choice.fsdp1) root.parameter_meshes = RootMeshes(job, choice);
  rules.push_back(std::move(root));
  return rules;
}

ModuleCall Set(std::string method, bool value, std::string module = {}, bool recurse = true) {
  return {.method = std::move(method), .module = std::move(module), .value = value, .recurse = recurse};
}

bool ReducesOnce(const Choice& choice) {
  return choice.accumulation == Accumulation::kLast || choice.accumulation == Accumulation::kLastKept;
}
bool LeavesRest(const Choice& choice) {
  return choice.accumulation == Accumulation::kRestLast || choice.accumulation == Accumulation::kRestLastKept;
}
bool KeepsPartsOver(const Choice& choice) { return KeepsOver(choice) && choice.part > 1; }

// Keeps the units that are kept, whole or in part, over all micro-batches but the last.
void KeepUnits(const Strategy& strategy, const Choice& choice, bool reshard, StepProgram& step) {
  if (choice.kept >= UnitCount(choice) ||
      (KeepsPartsOver(choice) && choice.post_forward_units == kAllUnits)) {
    step.push_back(Set("set_reshard_after_backward", reshard));
    return;
  }
  for (const UnitRule& rule : strategy.units) {
    const auto keeps = [](const auto& of) { return of.reshard_after_forward == ReshardAfterForward(false); };
    const bool kept = rule.reshard_after_forward != ReshardAfterForward(true) ||
                      std::ranges::any_of(rule.parameter_meshes, keeps);
    if (!rule.modules.front().empty() && kept)
      step.push_back(Set("set_reshard_after_backward", reshard, rule.modules.front(), false));
  }
}

// Sets it on the last `count` units that are wrapped. Parts, and units of other meshes, stand before the unit
// that they are in.
void SetOfLast(const Job& job, const Strategy& strategy, const Choice& choice, std::int32_t count,
               const std::string& method, bool value, StepProgram& step) {
  std::int32_t left = UnitCount(choice);
  for (const UnitRule& rule : strategy.units) {
    if (left <= 0) return;
    if (left <= count) step.push_back(Set(method, value, rule.modules.front(), false));
    if (FindModule(job.chain, rule.modules.front()) != nullptr) --left;
  }
}

// The last units wait for the last micro-batch, whatever the others do.
void SetReductions(const Job& job, const Strategy& strategy, const Choice& choice, bool last,
                   StepProgram& step) {
  if (ReducesOnce(choice)) step.push_back(Set("set_requires_gradient_sync", last));
  SetOfLast(job, strategy, choice, choice.accumulated, "set_requires_gradient_sync", last, step);
  if (!LeavesRest(choice)) return;
  if (choice.outer_reduced_last == kAllUnits) {
    step.push_back(Set("set_requires_all_reduce", last));
  } else {
    SetOfLast(job, strategy, choice, choice.outer_reduced_last, "set_requires_all_reduce", last, step);
  }
}

void WriteLoop(const Job& job, const Choice& choice, Strategy& strategy) {
  if (!DecidesAccumulation(job)) return;
  StepProgram step;
  for (std::int32_t m = 0; m < job.microbatches; ++m) {
    const bool last = m + 1 == job.microbatches;
    const bool changes = m == 0 || last;
    if (changes) SetReductions(job, strategy, choice, last, step);
    if (KeepsOver(choice) && changes) KeepUnits(strategy, choice, last, step);
    step.push_back(ForwardCall{m, 0});
    step.push_back(BackwardCall{{m}, 0});
  }
  step.push_back(OptimizerStepCall{});
  step.push_back(ZeroGradCall{});
  strategy.program = {step};
}

void SetCheckpoint(const Job& job, const Choice& choice, Strategy& strategy) {
  if (job.keeps_checkpoint) return;
  strategy.checkpoint.reset();
  CheckpointRule rule;
  std::int32_t left = choice.recomputed, block = 0;
  for (const ChainModule& module : job.chain.modules) {
    if (!module.block || IsOffloaded(choice, block++, job.chain.blocks)) continue;
    const bool first = left-- > 0;
    if (first && choice.children.empty()) rule.modules.push_back(module.fqn);
    for (const std::string& child : first ? choice.children : choice.rest)
      rule.modules.push_back(module.fqn + "." + child);
  }
  for (const auto& [name, every] : choice.saved) rule.save.push_back({name, every});
  if (!rule.modules.empty()) strategy.checkpoint = std::move(rule);
}

void SetActivationOffload(const Job& job, const Choice& choice, Strategy& strategy) {
  if (job.keeps_activations) return;
  strategy.activation_offload.reset();
  ActivationOffload rule;
  std::int32_t block = 0;
  for (const ChainModule& module : job.chain.modules) {
    if (module.block && IsOffloaded(choice, block++, job.chain.blocks)) rule.modules.push_back(module.fqn);
  }
  if (!rule.modules.empty()) strategy.activation_offload = std::move(rule);
}

void SetFsdp1(const Job& job, const Choice& choice, Strategy& strategy) {
  strategy.fsdp1.use_orig_params = true;  // as the user's own optimizer expects them
  if (!job.keeps_reshard) {
    const bool hybrid = job.replicas > 1;
    strategy.fsdp1.sharding = choice.grad_op
                                  ? (hybrid ? Fsdp1Sharding::kHybridShardZero2 : Fsdp1Sharding::kShardGradOp)
                                  : (hybrid ? Fsdp1Sharding::kHybridShard : Fsdp1Sharding::kFullShard);
    strategy.reshard_after_forward.reset();
  }
  if (job.keeps_prefetch) return;
  strategy.fsdp1.backward_prefetch = choice.backward_prefetch;
  strategy.fsdp1.forward_prefetch = choice.prefetch > 0;
}

bool IsPlainLoop(const StepProgram& step, std::int32_t& microbatches) {
  microbatches = 0;
  bool forward = true, ended = false;
  for (const ProgramCall& call : step) {
    if (const auto* f = std::get_if<ForwardCall>(&call)) {
      if (!forward || ended || f->microbatch != microbatches || f->trace != 0 || f->training) return false;
      forward = false;
    } else if (const auto* b = std::get_if<BackwardCall>(&call)) {
      if (forward || ended || b->microbatches != std::vector<std::int32_t>{microbatches} || b->trace != 0)
        return false;
      forward = true;
      ++microbatches;
    } else if (const auto* m = std::get_if<ModuleCall>(&call)) {
      if (ended || m->method != "set_requires_gradient_sync" || !m->module.empty()) return false;
    } else {
      ended = true;
    }
  }
  return ended && forward;
}

std::string UnitsText(const Job& job, const Choice& choice) {
  if (job.keeps_units) return "as given";
  std::vector<std::string> sizes;
  for (std::size_t i = 0; i < choice.units.size();) {
    std::size_t same = i;
    while (same < choice.units.size() && choice.units[same] == choice.units[i]) ++same;
    const std::int32_t size = choice.units[i];
    const std::string one = size < 0 ? fmt::format("{} in the root", -size) : fmt::format("{}", size);
    sizes.push_back(same - i > 1 ? fmt::format("{} x {}", same - i, one) : one);
    i = same;
  }
  std::string text = fmt::format("modules of the chain in a unit: {}", fmt::join(sizes, ", "));
  if (Effective(job, choice).in_parts)
    text += fmt::format("; of each block, in units of their own: {}", fmt::join(job.chain.parts, ", "));
  return text;
}

std::string ReshardText(const Job& job, const Choice& choice) {
  if (job.keeps_reshard) return "as given";
  if (choice.fsdp1) return choice.grad_op ? "kept through the backward" : "freed after the forward";
  const std::int32_t units = UnitCount(choice);
  const Choice effective = Effective(job, choice);
  std::string others = "the others freed";
  if (effective.part > 1) {
    const std::string kept = fmt::format("kept on {} ranks", effective.part);
    others = effective.post_forward_units == kAllUnits
                 ? "the others " + kept
                 : fmt::format("{} {}, the others freed", effective.post_forward_units, kept);
  }
  return fmt::format("{} of {} units kept whole after the forward, {}, the root {}",
                     std::min(choice.kept, units), units, others, choice.root_freed ? "freed" : "kept");
}

std::string ApartText(const Job& job, const Choice& choice) {
  if (job.keeps_reshard) return "as given";
  const Choice effective = Effective(job, choice);
  if (effective.kept_apart == kAsTheUnit) return "parameters on other meshes are kept as their units are";
  return fmt::format("those of {} of {} units kept whole after the forward, apart from their units",
                     effective.kept_apart, UnitCount(choice));
}

std::string PrefetchText(const Job& job, const Choice& choice) {
  if (job.keeps_prefetch) return "as given";
  if (choice.fsdp1)
    return fmt::format("forward {}, backward {}", choice.prefetch > 0 ? "next" : "none",
                       choice.backward_prefetch == Fsdp1BackwardPrefetch::kPre    ? "pre"
                       : choice.backward_prefetch == Fsdp1BackwardPrefetch::kPost ? "post"
                                                                                  : "none");
  return fmt::format("{} ahead, {} inputs of reduce-scatters in flight, {}",
                     choice.prefetch == 0 ? "as PyTorch" : fmt::format("{} units", choice.prefetch),
                     choice.in_flight, choice.own_communicator ? "two communicators" : "one communicator");
}

std::string AccumulationText(const Job& job, const Choice& choice) {
  if (!DecidesAccumulation(job)) return "as given";
  if (const std::int32_t accumulated = Effective(job, choice).accumulated; accumulated > 0) {
    Choice others = choice;
    others.accumulated = 0;
    return fmt::format("{}; those of the last {} units in the last micro-batch",
                       AccumulationText(job, others), accumulated);
  }
  if (const std::int32_t last_units = Effective(job, choice).outer_reduced_last; last_units < kAllUnits) {
    Choice others = choice;
    others.outer_reduced_last = kAllUnits;
    return fmt::format("{}; those of all but the last {} units in every micro-batch",
                       AccumulationText(job, others), last_units);
  }
  switch (choice.accumulation) {
    case Accumulation::kEach:
      return "gradients are reduced in every micro-batch";
    case Accumulation::kEachKept:
      return "gradients are reduced in every micro-batch, what is kept stays until the next one";
    case Accumulation::kLast:
      return "gradients are reduced in the last micro-batch";
    case Accumulation::kLastKept:
      return "gradients are reduced in the last micro-batch, what is kept stays until then";
    case Accumulation::kRestLast:
      return "gradients are reduced the rest of the way in the last micro-batch";
    case Accumulation::kRestLastKept:
      return "gradients are reduced the rest of the way in the last micro-batch, what is kept stays until "
             "then";
  }
  return "";
}

std::string ReductionText(const Job& job, const Choice& choice) {
  if (job.keeps_reduction) return "as given";
  if (Effective(job, choice).inner == 0) return "over all shards at once";
  return fmt::format("over {} ranks, then between these groups", choice.inner);
}

std::string CheckpointText(const Job& job, const Choice& choice) {
  if (job.keeps_checkpoint) return "as given";
  const Choice effective = Effective(job, choice);
  if (effective.recomputed == 0) return "nothing is recomputed";
  const std::string what =
      effective.children.empty() ? "whole" : fmt::format("{}", fmt::join(effective.children, ", "));
  std::string text =
      fmt::format("{} of {} blocks are recomputed: {}", effective.recomputed, job.chain.blocks, what);
  if (!effective.rest.empty()) text += fmt::format("; of the others {}", fmt::join(effective.rest, ", "));
  std::vector<std::string> saved;
  for (const auto& [name, every] : effective.saved)
    saved.push_back(every == 0 ? name : fmt::format("{} but every {}.", name, every));
  if (!saved.empty()) text += fmt::format("; kept are the results of {}", fmt::join(saved, ", "));
  return text;
}

std::string ActivationsText(const Job& job, const Choice& choice) {
  if (job.keeps_activations) return "as given";
  const Choice effective = Effective(job, choice);
  if (effective.offloaded == 0) return "stay on the device";
  return fmt::format("those of {} of {} blocks are in host memory", effective.offloaded, job.chain.blocks);
}

}  // namespace

bool IsOffloaded(const Choice& choice, std::int32_t block, std::int32_t blocks) {
  const std::int64_t offloaded = std::min(choice.offloaded, blocks);
  return block * offloaded % blocks < offloaded;
}

namespace {

std::vector<ShardDimRule> EvenDims(const Trace& trace, std::int64_t shards) {
  std::vector<ShardDimRule> rules;
  for (const Parameter& parameter : trace.parameters) {
    if (parameter.shape.size() < 2 || !parameter.placements.empty()) continue;
    const std::int64_t rows = parameter.shape.front();
    const std::int64_t padded = (rows + shards - 1) / shards * shards;
    if (padded * 4 <= rows * 5) continue;
    const auto divided = std::ranges::find_if(parameter.shape.begin() + 1, parameter.shape.end(),
                                              [&](std::int64_t size) { return size % shards == 0; });
    if (divided == parameter.shape.end()) continue;
    rules.push_back({{parameter.fqn}, static_cast<std::int32_t>(divided - parameter.shape.begin())});
  }
  return rules;
}

std::string LayoutText(const Job& job, const Choice& choice) {
  if (job.keeps_layout) return "as given";
  if (!Effective(job, choice).cuts_divisible_dims) return "parameters are cut by rows";
  return fmt::format("{} parameters of few rows are cut along another dimension", job.divisible_dims.size());
}

}  // namespace

namespace {

// The module of the chain that a module is in; "": in none.
std::string ChainModuleOf(const ModelChain& chain, const std::string& fqn) {
  for (std::size_t end = fqn.find('.');; end = fqn.find('.', end + 1)) {
    const std::string outer = fqn.substr(0, end);
    if (FindModule(chain, outer) != nullptr) return outer;
    if (end == std::string::npos) return "";
  }
}

// Meshes that the strategy's rules give to parameters, by the modules of the chain that these are in.
void AddOtherMeshes(const Trace& trace, Job& job) {
  std::vector<ParameterMeshRule> given;
  for (const UnitRule& unit : job.strategy.units)
    given.insert(given.end(), unit.parameter_meshes.begin(), unit.parameter_meshes.end());
  for (const Module& module : trace.modules) {
    if (given.empty() || !module.same_module_as.empty()) continue;
    const std::string chain_module = ChainModuleOf(job.chain, module.fqn);
    bool all = !module.parameters.empty();
    for (const NamedParameter& named : module.parameters) {
      const Parameter& parameter = trace.parameters[named.parameter];
      const auto rule = std::ranges::find_if(given, [&](const ParameterMeshRule& r) {
        return MatchesAny(r.parameters, parameter.fqn, parameter.shared_with);
      });
      all = all && rule != given.end();
      if (rule == given.end()) continue;
      std::vector<ParameterMeshRule>& rules = job.other_meshes[chain_module].rules;
      auto same = std::ranges::find(rules, rule->data_parallel, &ParameterMeshRule::data_parallel);
      if (same == rules.end()) same = rules.insert(same, {.data_parallel = rule->data_parallel});
      same->parameters.push_back(parameter.fqn);
    }
    if (all) job.other_meshes[chain_module].modules.push_back(module.fqn);
  }
}

// Whether the rules say more than the search decides: other ways for some matrices, owners by number, blocks.
bool HasRulesOfItsOwn(const Muon& muon) {
  return muon.compute.size() > 1 || std::ranges::any_of(muon.compute, [](const MatrixRule& rule) {
           return !rule.parameters.empty() || rule.owner || rule.block_rows > 0;
         });
}

// Muon's matrices, and which owners the trace has every step for.
MuonMatrices MuonMatricesOf(const Trace& trace, const Job& job) {
  MuonMatrices found;
  const std::optional<Muon>& muon = job.strategy.optimizer.muon;
  if (!muon || HasRulesOfItsOwn(*muon)) return found;
  const auto traced = [&](std::int64_t ranks, std::int64_t replicas, const Parameter& parameter) {
    const std::vector<std::int64_t> matrix(parameter.shape.end() - 2, parameter.shape.end());
    return TracedMuonStep(trace, *muon, ranks, replicas, matrix, parameter.dtype) != nullptr;
  };
  bool sharded = true, owned = job.shards > 1;
  for (const Parameter& parameter : trace.parameters) {
    if (!parameter.requires_grad || !MuonSteps(job.strategy.optimizer, parameter.fqn, parameter.shared_with))
      continue;
    const std::int64_t rows = *(parameter.shape.end() - 2), columns = parameter.shape.back();
    sharded = sharded && rows >= job.shards && traced(job.shards, job.replicas, parameter);
    owned = owned && traced(1, 1, parameter);
    found.matrices.push_back({parameter.fqn, NewtonSchulzWork(rows, columns, muon->ns_steps)});
  }
  found.may_begin_in_backward = muon->begin_in_backward;
  if (sharded) found.owners.push_back(MuonOwners::kNone);
  if (owned) found.owners.insert(found.owners.end(), {MuonOwners::kShards, MuonOwners::kDistMuon});
  if (owned && job.replicas > 1) found.owners.push_back(MuonOwners::kReplicas);
  if (owned) found.owners.push_back(MuonOwners::kAll);
  return found;
}

// The matrices in their order, cut into so many exchanges of about equal work.
std::vector<std::vector<std::string>> BucketsOf(const MuonMatrices& muon, std::int32_t exchanges) {
  std::int64_t all = 0, done = 0;
  for (const MuonMatrices::Matrix& matrix : muon.matrices) all += matrix.work;
  std::vector<std::vector<std::string>> buckets(1);
  for (const MuonMatrices::Matrix& matrix : muon.matrices) {
    const auto next = static_cast<std::int64_t>(buckets.size());
    if (!buckets.back().empty() && next < exchanges && done >= all / exchanges * next) buckets.emplace_back();
    buckets.back().push_back(matrix.fqn);
    done += matrix.work;
  }
  return buckets;
}

void SetMuon(const Job& job, const Choice& choice, Strategy& strategy) {
  if (job.muon.owners.empty()) return;
  Muon& muon = *strategy.optimizer.muon;
  muon.begin_in_backward = choice.exchanged_in_backward;
  muon.compute.clear();
  muon.buckets.clear();
  muon.dist_muon = false;
  if (choice.owners == MuonOwners::kNone) return;
  const bool on_all = choice.owners == MuonOwners::kAll;
  muon.compute = {{.compute = on_all ? MatrixCompute::kReplicated : MatrixCompute::kOwned,
                   .over_replicas = choice.owners == MuonOwners::kReplicas}};
  muon.dist_muon = choice.owners == MuonOwners::kDistMuon;
  if (choice.exchanges > 1) muon.buckets = BucketsOf(job.muon, choice.exchanges);
}

std::string MuonText(const Job& job, const Choice& given) {
  if (job.muon.owners.empty()) return "as given";
  const Choice choice = Effective(job, given);
  const std::string in = fmt::format(
      "{}{}", choice.exchanges == 1 ? "one exchange" : fmt::format("{} exchanges", choice.exchanges),
      choice.exchanged_in_backward ? " from the backward on" : "");
  switch (choice.owners) {
    case MuonOwners::kNone:
      return "torch.optim.Muon on shards";
    case MuonOwners::kShards:
      return "owners among the shards, " + in;
    case MuonOwners::kReplicas:
      return "owners among all replicas, " + in;
    case MuonOwners::kDistMuon:
      return "as DistMuon, " + in;
    case MuonOwners::kAll:
      return "every matrix on every rank, " + in;
  }
  return "";
}

}  // namespace

bool DecidesAccumulation(const Job& job) {
  return job.microbatches > 1 && job.plain_loop && !job.keeps_accumulation;
}

bool KeepsOver(const Choice& choice) {
  return !choice.fsdp1 &&
         (choice.accumulation == Accumulation::kEachKept || choice.accumulation == Accumulation::kLastKept ||
          choice.accumulation == Accumulation::kRestLastKept);
}

bool MayBeInParts(const Job& job, const Choice& choice) {
  return !choice.fsdp1 && !job.keeps_units && !job.chain.parts.empty();
}

bool HasRest(const Job& job, const Choice& choice) {
  const std::int64_t inner = job.keeps_reduction ? job.strategy.fsdp2.inner_reduce_ranks : choice.inner;
  return job.replicas > 1 || inner > 1;
}

Job MakeJob(const Trace& trace, const Strategy& strategy, std::int64_t ranks, bool keeps_owners) {
  Job job{.strategy = strategy, .chain = MakeModelChain(trace)};
  job.shards = ranks;
  const std::vector<std::string> replicate =
      strategy.data_parallel ? strategy.data_parallel->replicate : std::vector<std::string>{"replicate"};
  for (const StrategyMeshDim& dim : strategy.mesh) {
    if (std::ranges::count(replicate, dim.name) > 0) job.replicas *= dim.size;
    if (strategy.data_parallel && std::ranges::count(strategy.data_parallel->shard, dim.name) == 0)
      job.shards /= std::max<std::int64_t>(dim.size, 1);
  }
  if (!strategy.data_parallel && job.replicas > 1) job.shards = ranks / job.replicas;
  AddOtherMeshes(trace, job);
  job.divisible_dims = EvenDims(trace, job.shards);
  job.plain_loop = strategy.program.size() == 1 && IsPlainLoop(strategy.program.front(), job.microbatches);
  if (!job.plain_loop) job.microbatches = 1;
  if (!keeps_owners) job.muon = MuonMatricesOf(trace, job);
  return job;
}

Strategy StrategyOf(const Job& job, const Choice& given) {
  if (given.as_given) return job.strategy;
  const Choice choice = job.of_pytorch ? Effective(job, given) : given;
  Strategy strategy = job.strategy;
  strategy.policy = choice.fsdp1 ? "fsdp1" : "fsdp2";
  if (!job.keeps_reshard) strategy.reshard_after_forward.reset();
  if (!job.keeps_units) {
    strategy.units = RulesOf(job, choice);
  } else if (!job.keeps_reshard && !choice.fsdp1) {
    strategy.reshard_after_forward = choice.kept > 0   ? ReshardAfterForward(false)
                                     : choice.part > 1 ? ReshardAfterForward(choice.part)
                                                       : ReshardAfterForward(true);
    for (UnitRule& rule : strategy.units) {
      rule.reshard_after_forward.reset();
      for (ParameterMeshRule& mesh : rule.parameter_meshes)
        mesh.reshard_after_forward = KeptApart(job, choice, 1, strategy.reshard_after_forward);
    }
  }
  SetCheckpoint(job, choice, strategy);
  SetActivationOffload(job, choice, strategy);
  WriteLoop(job, Effective(job, choice), strategy);
  if (job.microbatches > 1 && !job.keeps_accumulation)
    strategy.fsdp2.part_after_backward = KeepsPartsOver(choice);
  if (!job.keeps_reduction) strategy.fsdp2.inner_reduce_ranks = Effective(job, choice).inner;
  if (Effective(job, choice).cuts_divisible_dims) strategy.fsdp2.shard_dims = job.divisible_dims;
  SetMuon(job, Effective(job, choice), strategy);
  strategy.cpu_offload = job.strategy.cpu_offload || choice.offload;
  if (choice.fsdp1) {
    SetFsdp1(job, choice, strategy);
  } else if (!job.keeps_prefetch) {
    strategy.fsdp2.forward_prefetch = choice.prefetch;
    strategy.fsdp2.backward_prefetch = choice.prefetch == 0 ? -1 : choice.prefetch;
    strategy.fsdp2.forward_prefetch_lists.clear();
    strategy.fsdp2.backward_prefetch_lists.clear();
    strategy.fsdp2.reduce_scatter_inputs_in_flight = choice.in_flight;
    strategy.fsdp2.separate_reduce_scatter_communicator = choice.own_communicator;
  }
  return strategy;
}

bool IsOfPyTorch(const Choice& choice) {
  return !KeepsPartsOver(choice) && choice.inner == 0 && choice.offloaded == 0 &&
         choice.kept_apart == kAsTheUnit && !choice.as_given;
}

namespace {

Accumulation WithoutKept(Accumulation accumulation) {
  switch (accumulation) {
    case Accumulation::kEachKept:
      return Accumulation::kEach;
    case Accumulation::kLastKept:
      return Accumulation::kLast;
    case Accumulation::kRestLastKept:
      return Accumulation::kRestLast;
    default:
      return accumulation;
  }
}

void LeaveOutWhatFsdp2Lacks(const Job& job, Choice& choice) {
  choice.inner = 0;
  choice.offloaded = 0;
  choice.kept_apart = kAsTheUnit;
  if (KeepsPartsOver(choice)) choice.accumulation = WithoutKept(choice.accumulation);
  if (job.strategy.pytorch != PyTorchVersion::k2_11) return;
  choice.in_flight = Choice().in_flight;
  choice.own_communicator = Choice().own_communicator;
}

}  // namespace

Choice Effective(const Job& job, Choice choice) {
  const Choice none;
  if (choice.as_given) return {.as_given = true};
  choice.in_parts = choice.in_parts && MayBeInParts(job, choice);
  if (choice.fsdp1) {
    choice.kept = none.kept;
    choice.part = none.part;
    choice.post_forward_units = none.post_forward_units;
    choice.kept_apart = none.kept_apart;
    choice.root_freed = none.root_freed;
    choice.in_flight = none.in_flight;
    choice.own_communicator = none.own_communicator;
    choice.prefetch = std::min(choice.prefetch, 1);
  } else {
    choice.grad_op = none.grad_op;
    choice.backward_prefetch = none.backward_prefetch;
    const std::int32_t units = job.keeps_units ? 1 : UnitCount(choice);
    choice.kept = std::min(choice.kept, units);
    choice.post_forward_units = std::clamp(choice.post_forward_units, 0, units - choice.kept);
    if (choice.part <= 1 || choice.post_forward_units == 0) choice.part = none.part;
    if (choice.part == none.part || choice.post_forward_units == units - choice.kept)
      choice.post_forward_units = none.post_forward_units;
    choice.kept_apart = std::clamp(choice.kept_apart, kAsTheUnit, units);
    if (job.other_meshes.empty() || choice.kept_apart == choice.kept) choice.kept_apart = none.kept_apart;
  }
  if (choice.fsdp1 || choice.inner <= 1 || choice.inner >= job.shards || job.shards % choice.inner != 0)
    choice.inner = none.inner;
  if (job.of_pytorch) LeaveOutWhatFsdp2Lacks(job, choice);
  if (LeavesRest(choice) && (!HasRest(job, choice) || choice.outer_reduced_last <= 0))
    choice.accumulation = KeepsOver(choice) ? Accumulation::kEachKept : Accumulation::kEach;
  if (!LeavesRest(choice) || job.keeps_units || choice.outer_reduced_last >= UnitCount(choice))
    choice.outer_reduced_last = none.outer_reduced_last;
  choice.cuts_divisible_dims =
      choice.cuts_divisible_dims && !choice.fsdp1 && !job.divisible_dims.empty() && !job.keeps_layout;
  const bool may_accumulate =
      !choice.fsdp1 && DecidesAccumulation(job) && !job.keeps_units && !ReducesOnce(choice);
  choice.accumulated =
      may_accumulate ? std::clamp(choice.accumulated, 0, UnitCount(choice)) : none.accumulated;
  const std::vector<MuonOwners>& owners = job.muon.owners;
  if (std::ranges::find(owners, choice.owners) == owners.end())
    choice.owners = owners.empty() ? none.owners : owners.front();
  if (owners.empty() || choice.owners == none.owners) choice.exchanges = none.exchanges;
  if (!job.muon.may_begin_in_backward || choice.owners == none.owners ||
      choice.owners == MuonOwners::kDistMuon || choice.owners == MuonOwners::kAll)
    choice.exchanged_in_backward = none.exchanged_in_backward;
  choice.exchanges =
      std::clamp(choice.exchanges, 1, std::max(1, static_cast<std::int32_t>(job.muon.matrices.size())));
  choice.offloaded = job.keeps_activations ? 0 : std::clamp(choice.offloaded, 0, job.chain.blocks);
  const std::int32_t blocks = job.chain.blocks - choice.offloaded;  // that may be recomputed
  choice.recomputed = std::clamp(choice.recomputed, 0, blocks);
  if (choice.recomputed == 0) {
    choice.children = std::move(choice.rest);
    choice.recomputed = choice.children.empty() ? 0 : blocks;
  }
  if (choice.recomputed == blocks) choice.rest.clear();
  if (choice.recomputed == 0) choice.saved.clear();
  return choice;
}

const std::vector<std::string>& DecisionNames() {
  static const std::vector<std::string> names = {"policy",    "units",      "reshard",     "apart",
                                                 "layout",    "checkpoint", "activations", "accumulation",
                                                 "reduction", "owners",     "prefetch"};
  return names;
}

std::string DecisionText(const Job& job, const Choice& choice, const std::string& decision) {
  if (choice.as_given) return "as given";
  if (decision == "policy") return choice.fsdp1 ? "fsdp1" : "fsdp2";
  if (decision == "units") return UnitsText(job, choice);
  if (decision == "reshard") return ReshardText(job, choice);
  if (decision == "apart") return ApartText(job, choice);
  if (decision == "layout") return LayoutText(job, choice);
  if (decision == "checkpoint") return CheckpointText(job, choice);
  if (decision == "activations") return ActivationsText(job, choice);
  if (decision == "accumulation") return AccumulationText(job, choice);
  if (decision == "reduction") return ReductionText(job, choice);
  if (decision == "owners") return MuonText(job, choice);
  return PrefetchText(job, choice);
}

Choice WithDecision(Choice choice, const std::string& decision, const Choice& other) {
  if (decision == "policy") choice.fsdp1 = other.fsdp1;
  if (decision == "units") {
    choice.units = other.units;
    choice.in_parts = other.in_parts;
  }
  if (decision == "reshard") {
    choice.kept = other.kept;
    choice.part = other.part;
    choice.post_forward_units = other.post_forward_units;
    choice.root_freed = other.root_freed;
    choice.grad_op = other.grad_op;
  }
  if (decision == "apart") choice.kept_apart = other.kept_apart;
  if (decision == "layout") choice.cuts_divisible_dims = other.cuts_divisible_dims;
  if (decision == "checkpoint") {
    choice.recomputed = other.recomputed;
    choice.children = other.children;
    choice.rest = other.rest;
    choice.saved = other.saved;
  }
  if (decision == "activations") choice.offloaded = other.offloaded;
  if (decision == "accumulation") {
    choice.accumulation = other.accumulation;
    choice.accumulated = other.accumulated;
    choice.outer_reduced_last = other.outer_reduced_last;
  }
  if (decision == "reduction") choice.inner = other.inner;
  if (decision == "owners") {
    choice.owners = other.owners;
    choice.exchanges = other.exchanges;
    choice.exchanged_in_backward = other.exchanged_in_backward;
  }
  if (decision == "prefetch") {
    choice.prefetch = other.prefetch;
    choice.in_flight = other.in_flight;
    choice.own_communicator = other.own_communicator;
    choice.backward_prefetch = other.backward_prefetch;
  }
  return choice;
}

std::vector<std::int32_t> UnitsOfBlocks(const ModelChain& chain, std::int32_t size, Ends ends) {
  std::vector<std::int32_t> units;
  std::int32_t modules = 0, blocks = 0;  // in the unit that is being filled
  const auto close = [&] {
    if (modules > 0) units.push_back(modules);
    modules = blocks = 0;
  };
  for (const ChainModule& module : chain.modules) {
    const bool starts = module.block ? blocks >= size : ends != Ends::kJoined && blocks > 0;
    const bool left = module.block && ends != Ends::kJoined && modules > blocks;
    if (starts || left) close();
    if (!module.block && ends == Ends::kRoot) {
      units.push_back(-1);
      continue;
    }
    ++modules;
    blocks += module.block;
  }
  close();
  return units;
}

}  // namespace shardplan::optimize
