// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <set>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "shardplan/schemas/checks.h"
#include "shardplan/schemas/cluster.h"
#include "shardplan/schemas/optimizers.h"
#include "shardplan/schemas/policy_knobs.h"
#include "shardplan/schemas/pytorch_rules.h"

namespace shardplan {
namespace {

bool HasFlag(const ModuleCall& call, std::string_view flag) {
  return std::ranges::find(call.flags, flag) != call.flags.end();
}

class StrategyCheck {
 public:
  explicit StrategyCheck(const Strategy& strategy) : strategy_(strategy) {}

  Status Run() {
    if (Status s = CheckPolicy(); !s) return s;
    if (Status s = CheckMesh(); !s) return s;
    if (Status s = CheckDataParallel(); !s) return s;
    if (Status s = CheckUnits(); !s) return s;
    if (Status s = CheckActivationOffload(); !s) return s;
    if (Status s = CheckOptimizer(); !s) return s;
    for (std::size_t c = 0; c < strategy_.setup.size(); ++c) {
      if (Status s = CheckCall(strategy_.setup[c], fmt::format("/setup/{}", c), /*in_setup=*/true); !s)
        return s;
    }
    return CheckProgram();
  }

 private:
  bool IsFsdp1() const { return strategy_.policy == "fsdp1"; }

  // Which policies there are beside those that are built in, and their knobs, a library says.
  Status CheckPolicy() const {
    if (strategy_.policy.empty()) {
      return MakeInputError("/policy", "a policy has a name", "\"\"", "fsdp2, fsdp1 or that of a library's");
    }
    if (!IsBuiltIn(strategy_.policy) || strategy_.policy_knobs.empty()) return {};
    return MakeInputError(
        "/policy_knobs", fmt::format("{} is built in and has a block of its own", strategy_.policy),
        strategy_.policy_knobs.begin()->first, fmt::format("its knobs in \"{}\"", strategy_.policy));
  }

  // ---- ranks ----

  Status CheckMesh() const {
    std::int64_t ranks = 1;
    const std::vector<StrategyMeshDim>& mesh = strategy_.mesh;
    for (std::size_t d = 0; d < mesh.size(); ++d) {
      const std::string pointer = fmt::format("/mesh/{}", d);
      if (mesh[d].size < 1) {
        return MakeInputError(pointer + "/size", "a mesh dimension needs a rank",
                              fmt::format("{}", mesh[d].size), "1 or more");
      }
      if (mesh[d].size > kMostRanks / ranks) {
        return MakeInputError(pointer + "/size", "the mesh has too many ranks",
                              fmt::format("{}", mesh[d].size),
                              fmt::format("at most {} ranks in all", kMostRanks));
      }
      ranks *= mesh[d].size;
      const auto before = mesh.begin() + static_cast<std::ptrdiff_t>(d);
      if (std::find_if(mesh.begin(), before, [&](const auto& dim) { return dim.name == mesh[d].name; }) !=
          before) {
        return MakeInputError(pointer + "/name", "two dimensions of the mesh have this name", mesh[d].name);
      }
      if (IsFsdp1() && mesh[d].name != "shard" && mesh[d].name != "replicate") {
        return MakeInputError(pointer + "/name", "unknown mesh dimension", mesh[d].name,
                              "shard or replicate");
      }
    }
    if (IsFsdp1() && mesh.size() == 2 && mesh[0].name == "shard") {
      return MakeInputError("/mesh", "a mesh is {shard} or {replicate, shard}, outermost first",
                            "shard before replicate", "replicate before shard");
    }
    return {};
  }

  Status CheckDataParallel() const {
    if (!strategy_.data_parallel || IsFsdp1()) return {};
    return CheckDims(*strategy_.data_parallel, "/data_parallel");
  }

  Status CheckDims(const DataParallelDims& dims, const std::string& pointer) const {
    std::set<std::string_view> seen;
    for (const std::vector<std::string>* names : {&dims.shard, &dims.replicate}) {
      const std::string list = pointer + (names == &dims.shard ? "/shard" : "/replicate");
      for (std::size_t n = 0; n < names->size(); ++n) {
        const std::string& name = (*names)[n];
        const std::string here = fmt::format("{}/{}", list, n);
        // Without a mesh it is made of the trace.
        const bool known =
            strategy_.mesh.empty() ||
            std::ranges::find(strategy_.mesh, name, &StrategyMeshDim::name) != strategy_.mesh.end();
        if (!known) return MakeInputError(here, "the mesh has no such dimension", name);
        if (!seen.insert(name).second) return MakeInputError(here, "a mesh dimension is named twice", name);
      }
    }
    return {};
  }

  Status CheckUnits() const {
    for (std::size_t u = 0; u < strategy_.units.size(); ++u) {
      const UnitRule& rule = strategy_.units[u];
      const std::string pointer = fmt::format("/units/{}", u);
      if (rule.modules.empty()) {
        return MakeInputError(pointer + "/modules", "a unit has a module", "an empty list",
                              "FQNs or patterns");
      }
      if (IsFsdp1() && rule.group) {
        return MakeInputError(pointer + "/group", "FSDP1 wraps one module, a unit has no others", "true",
                              "false");
      }
      if (IsFsdp1()) continue;
      if (rule.data_parallel) {
        if (Status s = CheckDims(*rule.data_parallel, pointer + "/data_parallel"); !s) return s;
      }
      if (Status s = CheckParameterMeshes(rule, pointer + "/parameter_meshes"); !s) return s;
    }
    return {};
  }

  Status CheckParameterMeshes(const UnitRule& rule, const std::string& pointer) const {
    if (rule.parameter_meshes.empty()) return {};
    if (strategy_.pytorch && *strategy_.pytorch < PyTorchVersion::k2_15) {
      return MakeInputError(pointer, "the release of PyTorch that is planned has no ShardPlacementResult",
                            std::string(Name(*strategy_.pytorch)),
                            fmt::format("pytorch: \"{}\" or later", Name(PyTorchVersion::k2_15)));
    }
    if (rule.group) {
      return MakeInputError(pointer, "the parameters of a group of modules on several meshes are not planned",
                            "group: true");
    }
    for (std::size_t m = 0; m < rule.parameter_meshes.size(); ++m) {
      const std::string here = fmt::format("{}/{}/data_parallel", pointer, m);
      if (Status s = CheckDims(rule.parameter_meshes[m].data_parallel, here); !s) return s;
      if (rule.parameter_meshes[m].data_parallel.shard.empty()) {
        return MakeInputError(here + "/shard", "PyTorch fails here: a parameter's own mesh shards it", "[]");
      }
    }
    return {};
  }

  Status CheckActivationOffload() const {
    if (!strategy_.activation_offload || !strategy_.activation_offload->modules.empty()) return {};
    return MakeInputError("/activation_offload/modules", "activations of no module are offloaded",
                          "an empty list", "FQNs or patterns");
  }

  // ---- the optimizer ----

  Status CheckOptimizer() const {
    const Optimizer& optimizer = strategy_.optimizer;
    const OptimizerDescription& is = DescriptionOf(optimizer.kind);
    const auto refuse = [](std::string_view field, std::string_view why, std::string_view expected) {
      return MakeInputError(fmt::format("/optimizer/{}", field), std::string(why), "true",
                            std::string(expected));
    };
    if (optimizer.kind == OptimizerKind::kMuon) {
      return MakeInputError("/optimizer/kind", "Muon steps matrices beside an optimizer of the rest",
                            std::string(is.name), "\"muon\" of the optimizer, and the kind of the rest");
    }
    if (optimizer.muon) {
      if (Status s = CheckMuon(*optimizer.muon); !s) return s;
    }
    for (const OptimizerArgument& argument : optimizers::kArguments) {
      if (!(optimizer.*argument.argument) || Has(argument.takes, optimizer.kind)) continue;
      if (argument.argument == &Optimizer::nesterov) break;  // says what it requires below
      const std::string takers = NamesOf(argument.takes, "and");
      const bool several = std::popcount(argument.takes) > 1;
      return refuse(argument.name, fmt::format("only {} {} this argument", takers, several ? "have" : "has"),
                    "kind " + NamesOf(argument.takes, "or"));
    }
    if (optimizer.nesterov && !optimizer.momentum) {
      return refuse("nesterov", "Nesterov momentum requires a momentum", "kind sgd with momentum true");
    }
    if (!is.has_fused && optimizer.implementation == OptimizerImplementation::kFused) {
      return MakeInputError("/optimizer/implementation",
                            fmt::format("{} has no fused implementation", is.pytorch), "fused",
                            "for_loop or foreach");
    }
    if (IsFsdp1() && optimizer.in_backward && !strategy_.fsdp1.use_orig_params) {
      return refuse("in_backward", "FSDP1 steps in the backward with use_orig_params only",
                    "fsdp1.use_orig_params true");
    }
    return {};
  }

  Status CheckMuon(const Muon& muon) const {
    if (IsFsdp1()) {
      return MakeInputError("/optimizer/muon", "Muon needs matrices, and FSDP1's shards have one dimension",
                            "policy fsdp1", "policy fsdp2");
    }
    if (strategy_.optimizer.in_backward) {
      return MakeInputError("/optimizer/in_backward", "Muon steps when the backward is over", "true",
                            "false");
    }
    if (strategy_.optimizer.maximize) {
      return MakeInputError("/optimizer/maximize", "torch.optim.Muon does not have it", "true", "false");
    }
    if (muon.dist_muon && muon.compute.empty()) {
      return MakeInputError("/optimizer/muon/dist_muon", "DistMuon gives every matrix an owner", "no rules",
                            "rules in compute");
    }
    if (muon.begin_in_backward && muon.dist_muon) {
      return MakeInputError("/optimizer/muon/begin_in_backward",
                            "DistMuon exchanges when the optimizer steps", "true", "false");
    }
    constexpr std::int32_t kTooManySteps = 100;  // torch.optim.Muon's own limit
    if (muon.ns_steps >= kTooManySteps) {
      return MakeInputError("/optimizer/muon/ns_steps", "torch.optim.Muon refuses so many iterations",
                            fmt::format("{}", muon.ns_steps), fmt::format("less than {}", kTooManySteps));
    }
    for (std::size_t r = 0; r < muon.compute.size(); ++r) {
      const MatrixRule& rule = muon.compute[r];
      const std::string pointer = fmt::format("/optimizer/muon/compute/{}", r);
      const bool owned = rule.compute == MatrixCompute::kOwned;
      const bool whole_nowhere = rule.compute == MatrixCompute::kSharded;
      const std::string_view field = rule.over_replicas                     ? "over_replicas"
                                     : rule.owner                           ? "owner"
                                     : whole_nowhere && rule.block_rows > 0 ? "block_rows"
                                                                            : "";
      if (muon.dist_muon && rule.compute == MatrixCompute::kReplicated)
        return MakeInputError(pointer + "/compute", "DistMuon gives every matrix an owner",
                              std::string(Name(rule.compute)), "compute: \"owned\"");
      if (!owned && !field.empty())
        return MakeInputError(fmt::format("{}/{}", pointer, field),
                              "a matrix without an owner has none of it", std::string(Name(rule.compute)),
                              "compute: \"owned\"");
    }
    return {};
  }

  // ---- the training loop ----

  Status CheckProgram() {
    for (std::size_t s = 0; s < strategy_.program.size(); ++s) {
      for (std::size_t c = 0; c < strategy_.program[s].size(); ++c) {
        const ProgramCall& call = strategy_.program[s][c];
        const std::string pointer = fmt::format("/program/{}/{}", s, c);
        Status status;
        if (const auto* forward = std::get_if<ForwardCall>(&call)) {
          ran_.insert(forward->microbatch);
        } else if (const auto* backward = std::get_if<BackwardCall>(&call)) {
          status = CheckBackward(*backward, pointer + "/microbatches");
        } else if (const auto* module = std::get_if<ModuleCall>(&call)) {
          status = CheckCall(*module, pointer, /*in_setup=*/false);
        }
        if (!status) return status;
      }
    }
    return {};
  }

  Status CheckBackward(const BackwardCall& call, const std::string& pointer) const {
    if (call.microbatches.empty()) {
      return MakeInputError(pointer, "a backward covers at least one micro-batch", "an empty list",
                            "its micro-batches");
    }
    std::set<std::int32_t> covered;
    for (std::size_t m = 0; m < call.microbatches.size(); ++m) {
      const std::int32_t microbatch = call.microbatches[m];
      const std::string here = fmt::format("{}/{}", pointer, m);
      if (!covered.insert(microbatch).second) {
        return MakeInputError(here, "a backward covers a micro-batch once", fmt::format("{}", microbatch));
      }
      if (!ran_.contains(microbatch)) {
        return MakeInputError(here, "a backward of a micro-batch that has had no forward",
                              fmt::format("{}", microbatch), "a forward of it before");
      }
    }
    return {};
  }

  Status CheckCall(const ModuleCall& call, const std::string& pointer, bool in_setup) const {
    const std::vector<CallForm>& calls = KnobsOf(strategy_.policy).calls;
    const auto form = std::ranges::find(calls, call.method, &CallForm::method);
    if (form == calls.end()) {
      std::vector<std::string_view> methods;
      for (const CallForm& known : calls) methods.push_back(known.method);
      return MakeInputError(pointer + "/method", fmt::format("{} does not know this call", strategy_.policy),
                            call.method, fmt::format("{}", fmt::join(methods, ", ")));
    }
    if (strategy_.pytorch && *strategy_.pytorch < form->since) {
      return MakeInputError(
          pointer + "/method",
          fmt::format("{} of PyTorch {} does not have this call", strategy_.policy, Name(*strategy_.pytorch)),
          call.method, fmt::format("pytorch: \"{}\" or later", Name(form->since)));
    }
    if (in_setup && !form->in_setup) {
      return MakeInputError(pointer + "/method", "this call has its place in a step", call.method,
                            "in program");
    }
    if (!in_setup && !form->in_program) {
      return MakeInputError(pointer + "/method", "this call has its place before the first step", call.method,
                            "in setup");
    }
    for (std::size_t f = 0; f < call.flags.size(); ++f) {
      if (std::ranges::find(form->flags, call.flags[f]) != form->flags.end()) continue;
      return MakeInputError(fmt::format("{}/flags/{}", pointer, f),
                            fmt::format("{} does not know this flag", call.method), call.flags[f],
                            form->flags.empty() ? "none" : fmt::format("{}", fmt::join(form->flags, ", ")));
    }
    if (Status s = CheckArgument(call, form->argument, pointer); !s) return s;
    return call.method == "summon_full_params" ? CheckSummon(call, pointer) : Status{};
  }

  static Status CheckArgument(const ModuleCall& call, CallArgument argument, const std::string& pointer) {
    const bool number = argument == CallArgument::kNumber || argument == CallArgument::kCount;
    if (number && !call.number) {
      return MakeInputError(pointer, "this call takes a number", call.method, "\"number\"");
    }
    constexpr double kMostInputs = 1 << 30;
    const bool counts = argument == CallArgument::kCount;
    if (counts &&
        (*call.number < 1 || *call.number > kMostInputs || std::trunc(*call.number) != *call.number)) {
      return MakeInputError(pointer + "/number", "so many reduce-scatter inputs cannot be in flight",
                            fmt::format("{}", *call.number), "a whole number from 1");
    }
    if (argument != CallArgument::kModules && !call.modules.empty()) {
      return MakeInputError(pointer + "/modules", "this call takes no modules", call.method,
                            "no \"modules\"");
    }
    return {};
  }

  // _validate_unshard_params_args of FSDP1, as far as the arguments alone say. Flags are the arguments that
  // are not at their defaults: `writeback` is true by default, the others are false.
  Status CheckSummon(const ModuleCall& call, const std::string& pointer) const {
    const auto refuse = [&](const char* why) {
      return MakeInputError(pointer + "/flags", std::string("FSDP1 refuses ") + why);
    };
    if (HasFlag(call, "with_grads") &&
        (HasFlag(call, "offload_to_cpu") || !strategy_.fsdp1.use_orig_params)) {
      return refuse("summon_full_params(with_grads) with offload_to_cpu, or without use_orig_params");
    }
    if (HasFlag(call, "rank0_only") && !HasFlag(call, "writeback")) {
      return refuse(
          "summon_full_params(rank0_only) with writeback, the default: name the flag writeback, too");
    }
    return {};
  }

  const Strategy& strategy_;
  std::set<std::int32_t> ran_;  // micro-batches, in this step or an earlier one
};

}  // namespace

Status CheckStrategy(const Strategy& strategy) { return StrategyCheck(strategy).Run(); }

}  // namespace shardplan
