// SPDX-License-Identifier: Apache-2.0
#include "texts/fsdp2_script.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <charconv>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <string_view>
#include <utility>
#include <variant>

#include "shardplan/planner/fsdp2_settings.h"
#include "shardplan/schemas/precision.h"
#include "shardplan/schemas/printable.h"

namespace shardplan::cli {
namespace {

using Json = nlohmann::ordered_json;

// The code point at `at` of UTF-8, which moves behind it.
std::uint32_t CodePoint(const std::string& text, std::size_t& at) {
  const auto byte = [&](std::size_t index) { return static_cast<unsigned char>(text[index]); };
  const unsigned char first = byte(at++);
  const int more = first < 0x80 ? 0 : first < 0xe0 ? 1 : first < 0xf0 ? 2 : 3;
  std::uint32_t point = more == 0 ? first : first & (0x3fU >> more);
  for (int i = 0; i < more && at < text.size(); ++i) point = point << 6 | (byte(at++) & 0x3fU);
  return point;
}

// A Python string literal in ASCII: JSON's escapes are Python's, but for what is beyond 16 bits.
std::string Literal(const std::string& text) {
  const std::string json = Json(text).dump();
  std::string literal;
  for (std::size_t at = 0; at < json.size();) {
    const std::uint32_t point = CodePoint(json, at);
    if (point < 0x7f) {
      literal += static_cast<char>(point);
    } else {
      literal += point <= 0xffff ? fmt::format("\\u{:04x}", point) : fmt::format("\\U{:08x}", point);
    }
  }
  return literal;
}
std::string Literal(bool value) { return value ? "True" : "False"; }
std::string Literal(double value) { return Json(value).dump(); }
std::string Literal(const ReshardAfterForward& value) {
  return std::holds_alternative<bool>(value) ? Literal(std::get<bool>(value))
                                             : fmt::format("{}", std::get<std::int64_t>(value));
}
std::string Literal(DType dtype) { return fmt::format("torch.{}", Name(dtype)); }

std::string List(const std::vector<std::string>& texts) {
  std::vector<std::string> literals;
  for (const std::string& text : texts) literals.push_back(Literal(text));
  return fmt::format("[{}]", fmt::join(literals, ", "));
}

bool IsPattern(const std::string& entry) {
  return entry.starts_with("class:") || entry.find_first_of("*?") != std::string::npos;
}

// "layers.12" is number 12 of "layers.".
std::optional<std::pair<std::string, std::int64_t>> Numbered(const std::string& name) {
  const std::size_t dot = name.rfind('.');
  if (dot == std::string::npos || dot + 1 == name.size()) return std::nullopt;
  std::int64_t number = 0;
  const char* end = name.data() + name.size();
  const auto [read, error] = std::from_chars(name.data() + dot + 1, end, number);
  if (error != std::errc{} || read != end || fmt::format("{}", number) != name.substr(dot + 1))
    return std::nullopt;
  return std::pair(name.substr(0, dot + 1), number);
}

// An f-string of `prefix` and the loop's number.
std::string NumberedLiteral(const std::string& prefix) {
  std::string text = Literal(prefix);
  std::string doubled;
  for (const char c : text.substr(1, text.size() - 2)) {
    if (c == '{' || c == '}') doubled += c;
    doubled += c;
  }
  return "f\"" + doubled + "{i}\"";
}

// A Python expression for a list of names, runs of numbers as ranges.
std::string NamesExpression(const std::vector<std::string>& names) {
  std::vector<std::string> parts;
  bool only_names = true;
  for (std::size_t at = 0; at < names.size();) {
    const auto first = Numbered(names[at]);
    std::size_t end = at + 1;
    while (first && end < names.size()) {
      const auto next = Numbered(names[end]);
      if (!next || next->first != first->first ||
          next->second != first->second + static_cast<std::int64_t>(end - at))
        break;
      ++end;
    }
    if (end - at < 3) {
      parts.push_back(Literal(names[at]));
      ++at;
      continue;
    }
    only_names = false;
    const std::int64_t count = static_cast<std::int64_t>(end - at);
    const std::string range = first->second == 0
                                  ? fmt::format("range({})", count)
                                  : fmt::format("range({}, {})", first->second, first->second + count);
    parts.push_back(fmt::format("{} for i in {}", NumberedLiteral(first->first), range));
    at = end;
  }
  if (parts.size() == 1 && !only_names) return "[" + parts.front() + "]";
  for (std::string& part : parts) {
    if (part.starts_with("f\"")) part = "*(" + part + ")";
  }
  return fmt::format("[{}]", fmt::join(parts, ", "));
}

// One fully_shard, or one for each of several names.
struct Call {
  std::vector<std::string> entries;  // names, or patterns
  bool group = false;
  std::string arguments;
};

class Script {
 public:
  Script(const Plan& plan, const Strategy& settings) : plan_(plan), strategy_(settings) {}

  Result<std::string> Make(const std::vector<std::string>& about) {
    if (Status written = CheckWritten(); !written) return std::unexpected(written.error());
    MakeBody();
    std::string text = "\"\"\"Plain FSDP2 calls that set a model up as a plan of shardplan has it.\n\n";
    for (const std::string& line : about) text += DocLine(line);
    text += "\"\"\"\n\nfrom __future__ import annotations\n\n" + Imports() + Settings() + Helpers();
    text += "\n\ndef apply_plan(model: nn.Module, mesh: DeviceMesh) -> nn.Module:\n";
    text += fmt::format("    \"\"\"Before the optimizer is made. `mesh`: {}.\"\"\"\n", MeshText());
    text += body_ + "    return model\n";
    return text + Loop();
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
      if (!rule.parameter_meshes.empty())
        return refuse(at + "/parameter_meshes", "ShardPlacementResult, which is private to PyTorch");
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
  std::string MeshOf(const std::optional<DataParallelDims>& given) {
    std::vector<std::string> all;
    for (const StrategyMeshDim& dim : plan_.mesh) all.push_back(dim.name);
    std::vector<std::string> dims;
    const auto add = [&](const std::vector<std::string>& of) {
      if (of.empty()) return;
      if (of.size() == 1) {
        dims.push_back(of.front());
        return;
      }
      const std::string name = fmt::format("{}", fmt::join(of, "_"));
      if (flattened_.insert(name).second) {
        std::vector<std::string> literals;
        for (const std::string& dim : of) literals.push_back(Literal(dim));
        Say(fmt::format("mesh[{}]._flatten({})", fmt::join(literals, ", "), Literal(name)));
      }
      dims.push_back(name);
    };
    if (given) {
      add(given->replicate);
      add(given->shard);
    } else {
      for (const char* name : {"replicate", "shard"}) {
        if (std::ranges::find(all, name) != all.end()) dims.push_back(name);
      }
    }
    if (dims == all) return "mesh";
    std::vector<std::string> literals;
    for (const std::string& dim : dims) literals.push_back(Literal(dim));
    return fmt::format("mesh[{}]", fmt::join(literals, ", "));
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
    const auto& dims = rule.data_parallel ? rule.data_parallel : strategy_.data_parallel;
    std::string text = "mesh=" + MeshOf(dims);
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
    if (!strategy_.fsdp2.shard_dims.empty()) text += ", shard_placement_fn=placement";
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
    return fmt::format("[model.get_submodule(name) for name in {}]", NamesExpression(entries));
  }

  void SayCalls() {
    for (const Call& call : Calls()) {
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
      Say("for unit in (module for module in model.modules() if isinstance(module, FSDPModule)):");
      for (const std::string& setter : each) Say(setter, 2);
    }
    for (const std::vector<std::string>& roots : knobs.shared_comm_contexts) {
      uses_shared_context_ = true;
      std::vector<std::string> names;
      for (const std::string& root : Named({.modules = roots})) names.push_back(FirstOf(root));
      Say(fmt::format("share_comm_ctx({})", ModulesExpression(names)));
    }
    for (const ModuleCall& call : strategy_.setup) Say(CallText(call));
  }

  // A setter, as the loop calls it.
  std::string CallText(const ModuleCall& call) {
    std::vector<std::string> arguments;
    if (!call.modules.empty()) {
      std::vector<std::string> names;
      for (const std::string& name : call.modules) names.push_back(FirstOf(name));
      arguments.push_back(ModulesExpression(names));
    } else if (call.number) {
      arguments.push_back(Literal(*call.number));
    } else if (call.value) {
      arguments.push_back((call.method == "unshard" ? "async_op=" : "") + Literal(*call.value));
    }
    if (!call.recurse) arguments.emplace_back("recurse=False");
    return fmt::format("{}.{}({})", ModuleExpression(call.module), call.method, fmt::join(arguments, ", "));
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
    if (!strategy_.fsdp2.shard_dims.empty()) {
      Say("placement = placements(model)");
      uses_placements_ = true;
    }
    Comment("Units, in the order in which FSDP2 takes them.");
    SayCalls();
    SayPrefetches();
    SaySetters();
  }

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
    if (uses_patterns_ || uses_placements_) text += "import re\n";
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
    if (uses_patterns_ || uses_placements_) text += kMatches;
    if (uses_patterns_) text += kMatching;
    if (uses_placements_) {
      std::vector<std::string> rules;
      for (const ShardDimRule& rule : strategy_.fsdp2.shard_dims)
        rules.push_back(fmt::format("({}, {})", List(rule.parameters), rule.dim));
      text += fmt::format(kPlacements, fmt::join(rules, ", "));
    }
    if (uses_saved_) {
      std::vector<std::string> rules;
      for (const SavedOperator& saved : strategy_.checkpoint->save)
        rules.push_back(fmt::format("{}: {}", Literal(saved.name), saved.recompute_every));
      text += fmt::format(kSelective, fmt::join(rules, ", "));
    }
    return text;
  }

  // The setters of the step that repeats, where each stands before a forward.
  std::string Loop() {
    std::string text;
    if (!strategy_.program.empty()) text += BeforeForward(strategy_.program.back());
    if (strategy_.fsdp2.post_optim_event) {
      text +=
          "\n\ndef after_optimizer_step(model: nn.Module) -> None:\n"
          "    \"\"\"After every step of the optimizer.\"\"\"\n"
          "    "
          "model.set_post_optim_event(torch.get_device_module(next(model.parameters()).device).current_"
          "stream().record_event())\n";
    }
    return text;
  }

  std::string BeforeForward(const StepProgram& step) {
    std::vector<std::string> lines;
    std::vector<std::string> pending;
    std::int32_t forward = 0;
    for (const ProgramCall& call : step) {
      if (const auto* setter = std::get_if<ModuleCall>(&call)) pending.push_back(CallText(*setter));
      if (!std::holds_alternative<ForwardCall>(call)) continue;
      if (!pending.empty()) lines.push_back(fmt::format("    if forward == {}:", forward));
      for (const std::string& line : pending) lines.push_back("        " + line);
      pending.clear();
      ++forward;
    }
    if (lines.empty()) return {};
    return fmt::format(
        "\n\ndef before_forward(model: nn.Module, forward: int) -> None:\n"
        "    \"\"\"The setters of the training loop: before each forward of a step, counted from 0.\"\"\"\n"
        "{}\n",
        fmt::join(lines, "\n"));
  }

  static constexpr std::string_view kMatches = R"py(

def matches(pattern: str, name: str) -> bool:
    """`*` and `?` stand for what has no dot."""
    return re.fullmatch("".join({"*": "[^.]*", "?": "[^.]"}.get(c, re.escape(c)) for c in pattern), name) is not None
)py";
  static constexpr std::string_view kMatching = R"py(

WRAPPED = "_checkpoint_wrapped_module"


def matching_names(model: nn.Module, entries: list[str]) -> list[str]:
    """Of the modules that an entry matches: by name, or "class:NAME". Wrappers of checkpoints are in no name."""
    named: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        named.setdefault(".".join(part for part in name.split(".") if part != WRAPPED), module)
    kinds = {name: f"class:{type(getattr(module, WRAPPED, module)).__name__}" for name, module in named.items()}
    return [name for name in named for entry in entries if kinds[name] == entry or matches(entry, name)]


def matching(model: nn.Module, entries: list[str]) -> list[nn.Module]:
    return [model.get_submodule(name) for name in matching_names(model, entries)]
)py";
  static constexpr std::string_view kPlacements = R"py(

def placements(model: nn.Module):
    """Dimensions that parameters are cut along, where it is not the first one. The first rule that matches counts."""
    dims = {{}}
    for patterns, dim in [{}]:
        for name, parameter in model.named_parameters(remove_duplicate=False):
            if any(matches(pattern, name.replace("_checkpoint_wrapped_module.", "")) for pattern in patterns):
                dims.setdefault(parameter, dim)
    return lambda parameter: Shard(dims[parameter]) if parameter in dims else None
)py";
  static constexpr std::string_view kSelective = R"py(

def selective_contexts():
    """Operators whose results are kept in a recomputed module; of those with a number every so many-th is run again all the same."""
    kept = {{{}}}
    counts: collections.Counter = collections.Counter()

    def policy(context, operator, *_, **__) -> CheckpointPolicy:
        name = str(operator).rpartition(".")[0]
        if name not in kept:
            return CheckpointPolicy.PREFER_RECOMPUTE
        counts[context.is_recompute, name] += 1
        again = kept[name] > 0 and counts[context.is_recompute, name] % kept[name] == 0
        return CheckpointPolicy.PREFER_RECOMPUTE if again else CheckpointPolicy.MUST_SAVE

    return create_selective_checkpoint_contexts(policy)
)py";

  const Plan& plan_;
  const Strategy& strategy_;
  std::string body_;
  std::set<std::string> flattened_;
  bool uses_precision_ = false, uses_offload_ = false, uses_patterns_ = false, uses_checkpoint_ = false,
       uses_saved_ = false, uses_fsdp_module_ = false, uses_shared_context_ = false, uses_placements_ = false;
};

}  // namespace

Result<std::string> Fsdp2Script(const Plan& plan, const Strategy& settings,
                                const std::vector<std::string>& about) {
  return Script(plan, settings).Make(about);
}

}  // namespace shardplan::cli
