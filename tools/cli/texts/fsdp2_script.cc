// SPDX-License-Identifier: Apache-2.0
#include "texts/fsdp2_script.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <set>
#include <string_view>
#include <utility>
#include <variant>

#include "shardplan/planner/fsdp2_settings.h"
#include "shardplan/schemas/precision.h"
#include "shardplan/schemas/printable.h"
#include "texts/fsdp2_helpers.h"
#include "texts/python_literals.h"

namespace shardplan::cli {
namespace {

bool IsPattern(const std::string& entry) {
  return entry.starts_with("class:") || entry.find_first_of("*?") != std::string::npos;
}

// One fully_shard, or one for each of several names.
struct Call {
  std::vector<std::string> entries;  // names, or patterns
  bool group = false;
  std::string arguments;
};

class Script {
 public:
  Script(const Plan& plan, const Strategy& settings) : plan_(plan), strategy_(settings) {
    for (const Unit& unit : plan.units) {
      for (const UnitParameter& parameter : unit.parameters) parameters_.push_back(parameter.fqn);
    }
  }

  Result<std::string> Make(const std::vector<std::string>& about) {
    if (Status written = CheckWritten(); !written) return std::unexpected(written.error());
    MakeBody();
    const std::string loop = Loop();
    std::string text = "\"\"\"Plain FSDP2 calls that set a model up as a plan of shardplan has it.\n\n";
    for (const std::string& line : about) text += DocLine(line);
    text += "\"\"\"\n\nfrom __future__ import annotations\n\n" + Imports() + Settings() + Helpers();
    text += "\n\ndef apply_plan(model: nn.Module, mesh: DeviceMesh) -> nn.Module:\n";
    text += fmt::format("    \"\"\"Before the optimizer is made. `mesh`: {}.\"\"\"\n", MeshText());
    text += body_ + "    return model\n";
    return text + loop;
  }

 private:
  static std::string DocLine(const std::string& line) {
    std::string shown = Printable(line);
    std::string text;
    for (const char c : shown) {
      if (c == '\\') text += '\\';
      text += c == '"' ? '\'' : c;
    }
    return text + "\n";
  }

  Status CheckWritten() const {
    const auto refuse = [](std::string pointer, std::string what) {
      return MakeInputError(std::move(pointer), "export does not write " + what);
    };
    for (std::size_t r = 0; r < strategy_.units.size(); ++r) {
      const UnitRule& rule = strategy_.units[r];
      const std::string at = fmt::format("/strategy/units/{}", r);
      const auto& own = rule.data_parallel ? rule.data_parallel : strategy_.data_parallel;
      for (std::size_t m = 0; m < rule.parameter_meshes.size(); ++m) {
        if (rule.parameter_meshes[m].data_parallel == own) {
          return refuse(
              fmt::format("{}/parameter_meshes/{}/data_parallel", at, m),
              "a parameter group of its own over the unit's ranks: it has process groups of its own");
        }
      }
      if (rule.mixed_precision && !rule.mixed_precision->keep_param_dtype.empty())
        return refuse(at + "/mixed_precision/keep_param_dtype", "param_dtype_override_fn");
    }
    if (strategy_.mixed_precision && !strategy_.mixed_precision->keep_param_dtype.empty())
      return refuse("/strategy/mixed_precision/keep_param_dtype", "param_dtype_override_fn");
    if (!strategy_.fsdp2.all_reduce_hooks.empty())
      return refuse("/strategy/fsdp2/all_reduce_hooks", "hooks: they are the job's own code");
    return {};
  }

  // ---- lines ----
  void Say(std::string_view line, int indent = 1) {
    body_ += std::string(static_cast<std::size_t>(indent) * 4, ' ') + std::string(line) + "\n";
  }
  void Comment(std::string_view text) { Say("# " + std::string(text)); }

  // ---- units ----
  // Arguments of fully_shard that say over which ranks. A strategy that names FSDP's dimensions has a
  // variable for each choice of them.
  std::string RanksOf(const std::optional<DataParallelDims>& given) {
    if (given) return fmt::format("**{}", VariableOf(*given));
    std::vector<std::string> all, dims;
    for (const StrategyMeshDim& dim : plan_.mesh) all.push_back(dim.name);
    for (const char* name : {"replicate", "shard"}) {
      if (std::ranges::find(all, name) != all.end()) dims.push_back(Literal(std::string(name)));
    }
    return dims.size() == all.size() ? "mesh=mesh" : fmt::format("mesh=mesh[{}]", fmt::join(dims, ", "));
  }

  std::string VariableOf(const DataParallelDims& dims) {
    const auto found = std::ranges::find(ranks_, dims);
    const auto number = found - ranks_.begin();
    if (found == ranks_.end()) {
      ranks_.push_back(dims);
      std::string arguments = "model, mesh, shard=" + Tuple(dims.shard);
      if (!dims.replicate.empty()) arguments += ", replicate=" + Tuple(dims.replicate);
      ranks_lines_.push_back(fmt::format("{} = data_parallel({})", RanksName(number), arguments));
    }
    return RanksName(number);
  }

  static std::string RanksName(std::ptrdiff_t number) {
    return number == 0 ? "ranks" : fmt::format("ranks_{}", number);
  }

  // ---- parameters ----
  // Names of parameters as patterns with '*' for numbers, where no other parameter of the plan matches.
  std::vector<std::string> PatternsOf(const std::vector<std::string>& names) const {
    std::vector<std::string> patterns;
    const std::set<std::string> named(names.begin(), names.end());
    for (const std::string& name : names) {
      std::string entry = AnyNumber(name);
      const auto is_other = [&](const std::string& other) {
        return Matches(entry, other) && !named.contains(other);
      };
      if (IsPattern(name) || std::ranges::any_of(parameters_, is_other)) entry = name;
      if (std::ranges::find(patterns, entry) == patterns.end()) patterns.push_back(entry);
    }
    return patterns;
  }

  static std::string AnyNumber(const std::string& name) {
    std::string text;
    for (std::size_t at = 0; at <= name.size();) {
      const std::size_t end = std::min(name.find('.', at), name.size());
      const std::string_view part = std::string_view(name).substr(at, end - at);
      const bool number = !part.empty() && part.find_first_not_of("0123456789") == std::string_view::npos;
      text += number ? "*" : part;
      if (end < name.size()) text += '.';
      at = end + 1;
    }
    return text;
  }

  // The argument shard_placement_fn; "": the call has none.
  std::string PlacementOf(const UnitRule& rule) {
    std::vector<std::string> meshes;
    for (const ParameterMeshRule& mesh : rule.parameter_meshes) {
      const std::string ranks = VariableOf(mesh.data_parallel);
      meshes.push_back(fmt::format("({}, {})", List(PatternsOf(mesh.parameters)), ranks));
    }
    const bool has_dims = !strategy_.fsdp2.shard_dims.empty();
    uses_placements_ = uses_placements_ || has_dims;
    if (meshes.empty()) return has_dims ? "placement" : "";
    const std::string placed =
        fmt::format("on_meshes(model, [{}]{})", fmt::join(meshes, ", "), has_dims ? ", placement" : "");
    const auto found = std::ranges::find(on_meshes_, placed);
    const auto number = found - on_meshes_.begin();
    if (found == on_meshes_.end()) on_meshes_.push_back(placed);
    return number == 0 ? "on_their_meshes" : fmt::format("on_their_meshes_{}", number);
  }

  std::string PrecisionOf(const MixedPrecision& given) {
    std::vector<std::string> fields;
    if (given.param_dtype) fields.push_back("param_dtype=" + Literal(*given.param_dtype));
    if (given.reduce_dtype) fields.push_back("reduce_dtype=" + Literal(*given.reduce_dtype));
    if (given.output_dtype) fields.push_back("output_dtype=" + Literal(*given.output_dtype));
    if (!given.cast_forward_inputs.value_or(true)) fields.push_back("cast_forward_inputs=False");
    return fmt::format("MixedPrecisionPolicy({})", fmt::join(fields, ", "));
  }

  std::string Arguments(const UnitRule& rule) {
    std::string text = RanksOf(rule.data_parallel ? rule.data_parallel : strategy_.data_parallel);
    const auto& reshard =
        rule.reshard_after_forward ? rule.reshard_after_forward : strategy_.reshard_after_forward;
    if (reshard) text += ", reshard_after_forward=" + Literal(*reshard);
    const auto& precision = rule.mixed_precision ? rule.mixed_precision : strategy_.mixed_precision;
    if (precision) {
      uses_precision_ = true;
      const bool shared = strategy_.mixed_precision && precision == strategy_.mixed_precision;
      text += ", mp_policy=" + (shared ? std::string("PRECISION") : PrecisionOf(*precision));
    }
    if (rule.cpu_offload.value_or(strategy_.cpu_offload)) {
      uses_offload_ = true;
      text += strategy_.pin_memory ? ", offload_policy=CPUOffloadPolicy()"
                                   : ", offload_policy=CPUOffloadPolicy(pin_memory=False)";
    }
    if (!strategy_.ignored_parameters.empty()) text += ", ignored_params=ignored";
    if (const std::string placement = PlacementOf(rule); !placement.empty())
      text += ", shard_placement_fn=" + placement;
    return text;
  }

  // The rule's modules by name, as far as the plan knows them: a class is one of the model's.
  std::vector<std::string> Named(const UnitRule& rule) const {
    std::vector<std::string> names;
    for (const std::string& entry : rule.modules) {
      const std::size_t before = names.size();
      for (const Unit& unit : plan_.units) {
        if (!IsPattern(entry) || unit.parameter_group > 0) continue;
        for (const std::string& module : unit.modules) {
          if (Matches(entry, module)) names.push_back(module);
        }
      }
      if (names.size() == before) names.push_back(entry);
    }
    return names;
  }

  // Neighbours with equal arguments are one loop.
  std::vector<Call> Calls() {
    std::vector<Call> calls;
    bool has_root = false;
    for (const UnitRule& rule : strategy_.units.empty() ? UnitRulesOf(plan_.units) : strategy_.units) {
      has_root = has_root || std::ranges::find(rule.modules, "") != rule.modules.end();
      const std::string arguments = Arguments(rule);
      const std::vector<std::string> modules = Named(rule);
      const bool joins = !rule.group && !calls.empty() && !calls.back().group &&
                         calls.back().arguments == arguments && !IsPattern(calls.back().entries.back()) &&
                         std::ranges::none_of(modules, IsPattern) && modules.front() != "";
      if (joins) {
        calls.back().entries.insert(calls.back().entries.end(), modules.begin(), modules.end());
      } else {
        calls.push_back({modules, rule.group, arguments});
      }
    }
    if (!has_root && strategy_.fsdp2.shard_root) calls.push_back({{""}, false, Arguments({})});
    return calls;
  }

  std::string ModulesExpression(const std::vector<std::string>& entries) {
    if (std::ranges::any_of(entries, IsPattern)) {
      uses_patterns_ = true;
      return fmt::format("matching(model, {})", List(entries));
    }
    if (entries.size() == 1) return fmt::format("[{}]", ModuleExpression(entries.front()));
    return fmt::format("[model.get_submodule(name) for name in {}]", NamesExpression(entries));
  }

  void SayCalls() {
    const std::vector<Call> calls = Calls();
    if (!ranks_lines_.empty()) Comment("The ranks that FSDP shards and replicates over.");
    for (const std::string& line : ranks_lines_) Say(line);
    if (uses_placements_) Say("placement = placements(model)");
    for (std::size_t i = 0; i < on_meshes_.size(); ++i)
      Say(fmt::format("on_their_meshes{} = {}", i == 0 ? "" : fmt::format("_{}", i), on_meshes_[i]));
    Comment("Units, in the order in which FSDP2 takes them.");
    for (const Call& call : calls) {
      if (call.group) {
        Say(fmt::format("fully_shard({}, {})", ModulesExpression(call.entries), call.arguments));
      } else if (call.entries == std::vector<std::string>{""}) {
        Say(fmt::format("fully_shard(model, {})", call.arguments));
      } else if (call.entries.size() == 1 && !IsPattern(call.entries.front())) {
        Say(fmt::format("fully_shard(model.get_submodule({}), {})", Literal(call.entries.front()),
                        call.arguments));
      } else if (std::ranges::any_of(call.entries, IsPattern)) {
        Say(fmt::format("for module in {}:", ModulesExpression(call.entries)));
        Say(fmt::format("fully_shard(module, {})", call.arguments), 2);
      } else {
        Say(fmt::format("for name in {}:", NamesExpression(call.entries)));
        Say(fmt::format("fully_shard(model.get_submodule(name), {})", call.arguments), 2);
      }
    }
  }

  // ---- prefetches and setters ----
  // Modules of units with parameters, but for the root, as the first forward enters them.
  std::vector<std::string> ForwardOrder() const {
    std::vector<std::string> names;
    for (const PlanStep& step : plan_.steps) {
      for (const Trigger& trigger : step.triggers) {
        if (trigger.kind != TriggerKind::kPreForward || trigger.unit < 0) continue;
        const Unit& unit = plan_.units[static_cast<std::size_t>(trigger.unit)];
        if (unit.parameters.empty() || std::ranges::find(unit.modules, "") != unit.modules.end()) continue;
        if (std::ranges::find(names, unit.modules.front()) == names.end())
          names.push_back(unit.modules.front());
      }
      break;
    }
    return names;
  }

  void SayPrefetches() {
    const Fsdp2Knobs& knobs = strategy_.fsdp2;
    const std::int32_t behind = std::max(knobs.backward_prefetch, 0);
    if (knobs.forward_prefetch > 0 || behind > 0) {
      Comment("Prefetches. Units in the order of the forward; the root prefetches nothing.");
      Say(fmt::format("units = [model.get_submodule(name) for name in {}]", NamesExpression(ForwardOrder())));
      Say("for i, unit in enumerate(units):");
      if (knobs.forward_prefetch > 0) {
        Say(fmt::format("unit.set_modules_to_forward_prefetch(units[i + 1 : i + {}])",
                        knobs.forward_prefetch + 1),
            2);
      }
      if (behind > 0) {
        Say(fmt::format("unit.set_modules_to_backward_prefetch(units[max(0, i - {}) : i][::-1])", behind), 2);
      }
    }
    for (const auto& [lists, setter] :
         {std::pair(&knobs.forward_prefetch_lists, "set_modules_to_forward_prefetch"),
          std::pair(&knobs.backward_prefetch_lists, "set_modules_to_backward_prefetch")}) {
      for (const PrefetchList& list : *lists) {
        std::vector<std::string> targets;
        for (const std::string& target : list.prefetch) targets.push_back(FirstOf(target));
        Say(fmt::format("{}.{}({})", ModuleExpression(FirstOf(list.unit)), setter,
                        ModulesExpression(targets)));
      }
    }
  }

  static std::string FirstOf(const std::string& unit) { return unit.substr(0, unit.find(',')); }

  static std::string ModuleExpression(const std::string& fqn) {
    return fqn.empty() ? "model" : fmt::format("model.get_submodule({})", Literal(fqn));
  }

  void SaySetters() {
    const Fsdp2Knobs& knobs = strategy_.fsdp2;
    std::vector<std::string> each;
    const auto of_all = [&](const std::string& setter) {
      if (knobs.shard_root) {
        Say("model." + setter);
      } else {
        each.push_back("unit." + setter);
      }
    };
    if (knobs.reduce_scatter_inputs_in_flight != 1)
      of_all(fmt::format("set_reduce_scatter_max_input_buffers({})", knobs.reduce_scatter_inputs_in_flight));
    if (knobs.separate_reduce_scatter_communicator) of_all("set_separate_reduce_scatter_group()");
    if (knobs.unshard_async_op) each.emplace_back("unit._set_unshard_async_op(True)");
    if (knobs.force_sum_reduction) each.emplace_back("unit.set_force_sum_reduction_for_comms(True)");
    if (knobs.gradient_divide_factor)
      each.push_back(
          fmt::format("unit.set_gradient_divide_factor({})", Literal(*knobs.gradient_divide_factor)));
    if (knobs.allocate_memory_from_process_group)
      each.emplace_back("unit.set_allocate_memory_from_process_group_for_comm(True)");
    if (!each.empty()) {
      uses_fsdp_module_ = true;
      Say(kEachUnit, 0);
      for (const std::string& setter : each) Say(setter, 2);
    }
    for (const std::vector<std::string>& roots : knobs.shared_comm_contexts) {
      uses_shared_context_ = true;
      std::vector<std::string> names;
      for (const std::string& root : Named({.modules = roots})) names.push_back(FirstOf(root));
      Say(fmt::format("share_comm_ctx({})", ModulesExpression(names)));
    }
    for (const ModuleCall& call : strategy_.setup) {
      if (const std::string line = CallText(call); !line.empty()) Say(line);
    }
  }

  // A call on a module, as the loop writes it; "": it is the loop's own code (states of checkpoints).
  std::string CallText(const ModuleCall& call) {
    const std::string on = ModuleExpression(call.module);
    if (call.method == "state_dict" || call.method == "load_state_dict") return "";
    if (call.method == "wait_for_unshard" || call.method == "wait_for_gradient_reduction")
      return fmt::format("HANDLES.pop(({})).wait()", HandleOf(call));
    if (call.method == "set_post_optim_event") return on + kRecordsEvent;
    std::vector<std::string> arguments;
    const bool has_handle = call.method == "unshard" || call.method == "finalize_backward";
    if (!call.modules.empty()) {
      std::vector<std::string> names;
      for (const std::string& name : call.modules) names.push_back(FirstOf(name));
      arguments.push_back(ModulesExpression(names));
    } else if (call.number) {
      arguments.push_back(Literal(*call.number));
    } else if (call.value) {
      arguments.push_back((has_handle ? "async_op=" : "") + Literal(*call.value));
    }
    if (!call.recurse) arguments.emplace_back("recurse=False");
    const std::string text = fmt::format("{}.{}({})", on, call.method, fmt::join(arguments, ", "));
    return has_handle && IsWaitedFor(call) ? fmt::format("HANDLES[{}] = {}", HandleOf(call), text) : text;
  }

  static std::string WaitOf(const ModuleCall& call) {
    return call.method == "unshard" ? "wait_for_unshard" : "wait_for_gradient_reduction";
  }
  // A module has at most one handle of each kind.
  static std::string HandleOf(const ModuleCall& call) {
    const bool unshards = call.method == "unshard" || call.method == "wait_for_unshard";
    return fmt::format("\"{}\", {}", unshards ? "unshard" : "finalize_backward", Literal(call.module));
  }

  bool IsWaitedFor(const ModuleCall& call) {
    if (strategy_.program.empty()) return false;
    const bool waits = std::ranges::any_of(strategy_.program.back(), [&](const ProgramCall& other) {
      const auto* wait = std::get_if<ModuleCall>(&other);
      return wait != nullptr && wait->method == WaitOf(call) && wait->module == call.module;
    });
    uses_handles_ = uses_handles_ || waits;
    return waits;
  }

  // ---- checkpointing ----
  void SayCheckpoint() {
    if (!strategy_.checkpoint) return;
    const CheckpointRule& rule = *strategy_.checkpoint;
    std::string options;
    if (!rule.early_stop) options += ", early_stop=False";
    if (!rule.save.empty()) {
      uses_saved_ = true;
      options += ", context_fn=selective_contexts";
    }
    uses_checkpoint_ = true;
    Comment("Activations that are recomputed. Inner modules are wrapped first.");
    const bool patterns = std::ranges::any_of(rule.modules, IsPattern) || rule.every > 1;
    uses_patterns_ = uses_patterns_ || patterns;
    std::string names;
    if (patterns) {
      names = fmt::format("matching_names(model, {})", List(rule.modules));
      if (rule.every > 1) names += fmt::format("[{}::{}]", rule.every - 1, rule.every);
      names = fmt::format("reversed({})", names);
    } else {
      std::vector<std::string> inner_first = rule.modules;
      std::ranges::stable_sort(inner_first, std::greater<>(), [](const std::string& name) {
        return name.empty() ? -1 : std::ranges::count(name, '.');
      });
      if (std::ranges::find(inner_first, "") != inner_first.end()) {
        inner_first.pop_back();
        if (!inner_first.empty()) SayWrapping(NamesExpression(inner_first), options);
        Say(fmt::format("model = checkpoint_wrapper(model{})", options));
        return;
      }
      names = NamesExpression(inner_first);
    }
    SayWrapping(names, options);
  }

  void SayWrapping(const std::string& names, const std::string& options) {
    Say(fmt::format("for name in {}:", names));
    Say("parent, _, child = name.rpartition(\".\")", 2);
    Say(fmt::format("model.get_submodule(parent).register_module(child, "
                    "checkpoint_wrapper(model.get_submodule(name){}))",
                    options),
        2);
  }

  void MakeBody() {
    if (!strategy_.ignored_parameters.empty()) {
      Say(fmt::format(
          "ignored = {{dict(model.named_parameters(remove_duplicate=False))[name] for name in {}}}",
          NamesExpression(strategy_.ignored_parameters)));
    }
    SayCheckpoint();
    SayCalls();
    SayPrefetches();
    SaySetters();
  }

  bool PlacesParameters() const { return uses_placements_ || !on_meshes_.empty(); }

  // ---- around the function ----
  std::string MeshText() const {
    std::vector<std::string> sizes, names;
    for (const StrategyMeshDim& dim : plan_.mesh) {
      sizes.push_back(fmt::format("{}", dim.size));
      names.push_back(Literal(dim.name));
    }
    const char* comma = sizes.size() == 1 ? "," : "";
    return fmt::format("init_device_mesh(\"cuda\", ({}{}), mesh_dim_names=({}{}))", fmt::join(sizes, ", "),
                       comma, fmt::join(names, ", "), comma);
  }

  std::string Imports() const {
    std::string text;
    if (!strategy_.alloc_conf.empty()) text += "import os\n";
    if (uses_saved_) text += "import collections\n";
    if (uses_patterns_ || PlacesParameters()) text += "import re\n";
    if (!ranks_.empty()) text += "import sys\n";
    if (!text.empty()) text += "\n";
    text += "import torch\nfrom torch import nn\n";
    if (uses_checkpoint_)
      text += "from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper\n";
    std::vector<std::string> names;
    if (uses_offload_) names.emplace_back("CPUOffloadPolicy");
    if (uses_fsdp_module_) names.emplace_back("FSDPModule");
    if (uses_precision_) names.emplace_back("MixedPrecisionPolicy");
    names.emplace_back("fully_shard");
    if (uses_shared_context_) names.emplace_back("share_comm_ctx");
    text += "from torch.distributed.device_mesh import DeviceMesh\n";
    text += fmt::format("from torch.distributed.fsdp import {}\n", fmt::join(names, ", "));
    if (!on_meshes_.empty()) {
      text +=
          "from torch.distributed.fsdp._fully_shard._fsdp_common import ShardPlacementResult\n"
          "from torch.distributed.fsdp._fully_shard._fsdp_init import _get_mesh_info\n";
    }
    if (uses_placements_) text += "from torch.distributed.tensor import Shard\n";
    if (uses_saved_)
      text += "from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts\n";
    return text;
  }

  std::string Settings() {
    std::string text;
    if (strategy_.mixed_precision && uses_precision_)
      text += fmt::format("\nPRECISION = {}\n", PrecisionOf(*strategy_.mixed_precision));
    if (!strategy_.alloc_conf.empty()) {
      text += fmt::format(
          "\n# The caching allocator reads it at its first allocation: import this file before.\n"
          "os.environ.setdefault(\"PYTORCH_CUDA_ALLOC_CONF\", {})\n",
          Literal(strategy_.alloc_conf));
    }
    return text;
  }

  std::string Helpers() const {
    std::string text;
    if (uses_patterns_ || PlacesParameters()) text += fsdp2_helpers::kMatches;
    if (uses_patterns_) text += fsdp2_helpers::kMatching;
    if (PlacesParameters()) text += fsdp2_helpers::kNamed;
    if (!ranks_.empty()) text += fsdp2_helpers::kDataParallel;
    if (!on_meshes_.empty()) text += fsdp2_helpers::kOnMeshes;
    if (uses_placements_) {
      std::vector<std::string> rules;
      for (const ShardDimRule& rule : strategy_.fsdp2.shard_dims)
        rules.push_back(fmt::format("({}, {})", List(PatternsOf(rule.parameters)), rule.dim));
      text += fmt::format(fsdp2_helpers::kPlacements, fmt::join(rules, ", "));
    }
    if (uses_saved_) {
      std::vector<std::string> rules;
      for (const SavedOperator& saved : strategy_.checkpoint->save)
        rules.push_back(fmt::format("{}: {}", Literal(saved.name), saved.recompute_every));
      text += fmt::format(fsdp2_helpers::kSelective, fmt::join(rules, ", "));
    }
    return text;
  }

  // The calls on modules of the step that repeats, by what they stand before.
  std::string Loop() {
    std::string text;
    if (!strategy_.program.empty()) text += CallsOfStep(strategy_.program.back());
    if (!strategy_.fsdp2.post_optim_event) return text;
    std::vector<std::string> lines = {fmt::format("    model{}", kRecordsEvent)};
    if (!strategy_.fsdp2.shard_root) {
      uses_fsdp_module_ = true;
      lines = {kEachUnit, fmt::format("        unit{}", kRecordsEvent)};
    }
    text += Function("after_optimizer_step(model: nn.Module)", "After every step of the optimizer.", lines);
    return text;
  }

  std::string CallsOfStep(const StepProgram& step) {
    std::vector<std::string> forwards, backwards, optimizer, end, pending;
    std::int32_t forward = 0, backward = 0;
    const auto numbered = [&](std::vector<std::string>& lines, const char* name, std::int32_t& number) {
      if (!pending.empty()) lines.push_back(fmt::format("    if {} == {}:", name, number));
      for (const std::string& line : pending) lines.push_back("        " + line);
      pending.clear();
      ++number;
    };
    const auto plain = [&](std::vector<std::string>& lines) {
      for (const std::string& line : pending) lines.push_back("    " + line);
      pending.clear();
    };
    for (const ProgramCall& call : step) {
      if (const auto* on_module = std::get_if<ModuleCall>(&call)) {
        if (const std::string line = CallText(*on_module); !line.empty()) pending.push_back(line);
      } else if (std::holds_alternative<ForwardCall>(call)) {
        numbered(forwards, "forward", forward);
      } else if (std::holds_alternative<BackwardCall>(call)) {
        numbered(backwards, "backward", backward);
      } else if (std::holds_alternative<OptimizerStepCall>(call)) {
        plain(optimizer);
      }
    }
    plain(end);
    std::string text = uses_handles_ ? "\n\nHANDLES: dict = {}\n" : "";
    text += Function("before_forward(model: nn.Module, forward: int)",
                     "Before each forward of a step, counted from 0: the loop's calls on FSDP's modules.",
                     forwards);
    text += Function("before_backward(model: nn.Module, backward: int)",
                     "Before each backward of a step, counted from 0.", backwards);
    text +=
        Function("before_optimizer_step(model: nn.Module)", "Before every step of the optimizer.", optimizer);
    return text + Function("after_step(model: nn.Module)", "At the end of every step of the loop.", end);
  }

  static std::string Function(std::string_view declaration, std::string_view about,
                              const std::vector<std::string>& lines) {
    if (lines.empty()) return "";
    return fmt::format("\n\ndef {} -> None:\n    \"\"\"{}\"\"\"\n{}\n", declaration, about,
                       fmt::join(lines, "\n"));
  }

  static constexpr const char* kEachUnit =
      "    for unit in (module for module in model.modules() if isinstance(module, FSDPModule)):";
  static constexpr const char* kRecordsEvent =
      ".set_post_optim_event(torch.get_device_module(next(model.parameters()).device).current_stream()"
      ".record_event())";

  const Plan& plan_;
  const Strategy& strategy_;
  std::string body_;
  std::vector<std::string> parameters_;  // of the plan, by FQN
  // Variables of apply_plan, by number: the ranks of units and parameters, functions that place these.
  std::vector<DataParallelDims> ranks_;
  std::vector<std::string> ranks_lines_, on_meshes_;
  bool uses_precision_ = false, uses_offload_ = false, uses_patterns_ = false, uses_checkpoint_ = false,
       uses_saved_ = false, uses_fsdp_module_ = false, uses_shared_context_ = false, uses_placements_ = false,
       uses_handles_ = false;
};

}  // namespace

Result<std::string> Fsdp2Script(const Plan& plan, const Strategy& settings,
                                const std::vector<std::string>& about) {
  return Script(plan, settings).Make(about);
}

}  // namespace shardplan::cli
