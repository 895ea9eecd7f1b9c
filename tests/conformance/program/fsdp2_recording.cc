// SPDX-License-Identifier: Apache-2.0
// Case of a fully_shard recording -> trace, strategy, cluster.
#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <map>
#include <set>
#include <string_view>
#include <utility>

#include "checked_json.h"
#include "recording.h"

namespace shardplan::conformance {
namespace {

using Json = CheckedJson;

class Fsdp2Converter {
 public:
  explicit Fsdp2Converter(Json json) : json_(std::move(json)) {}

  Result<Recording> Run() {
    recording_.policy = recording_.strategy.policy = "fsdp2";
    recording_.trace.recorded_with = "torch " + json_.Value<std::string>("torch", "");
    ConvertModel();
    ConvertMesh();
    ConvertUnits();
    ConvertSetup();
    for (const auto& [name, trace] : json_["forward_traces"].Members()) ConvertForward(name, trace);
    ConvertProgram();
    recording_.strategy.optimizer.kind = OptimizerKind::kSgd;
    return std::move(recording_);
  }

 private:
  static constexpr std::string_view kModule = "a module of the recording";
  static constexpr const char* kOneRank = "cut1";  // a dimension of one rank
  static constexpr std::string_view kParameter = "a parameter of the recording";

  static DType ToDType(const Json& name) {
    const std::optional<DType> dtype = DTypeFromName(name.Get<std::string>());
    if (!dtype) name.Fail("the name of a dtype");
    return *dtype;
  }

  void ConvertModel() {
    Trace& trace = recording_.trace;
    trace.model = json_["model"].Get<std::string>();
    for (const Json& p : json_["parameters"].Elements()) {
      parameter_id_[p["fqn"]] = static_cast<ParameterId>(trace.parameters.size());
      trace.parameters.push_back({.fqn = p["fqn"],
                                  .shape = p["shape"].List<std::int64_t>(),
                                  .dtype = ToDType(p["dtype"]),
                                  .requires_grad = p["requires_grad"],
                                  .shared_with = p["shared_with"].List<std::string>()});
    }
    if (json_.Has("model_args") && json_["model_args"].Has("grad_dtype")) {
      for (const auto& [prefix, dtype] : json_["model_args"]["grad_dtype"].Members()) {
        for (Parameter& parameter : trace.parameters) {
          if (parameter.fqn.starts_with(prefix)) parameter.grad_dtype = ToDType(dtype);
        }
      }
    }
    for (const Json& m : json_["modules"].Elements()) {
      module_id_[m["fqn"]] = static_cast<ModuleId>(trace.modules.size());
      Module module{.fqn = m["fqn"],
                    .class_name = m["class"],
                    .children = m["children"].List<std::string>(),
                    .same_module_as = m.Value<std::string>("same_module_as", "")};
      for (const Json& p : m["params"].Elements()) {
        module.parameters.push_back({p["name"], p["param"].In(parameter_id_, kParameter)});
      }
      trace.modules.push_back(std::move(module));
    }
  }

  void ConvertMesh() {
    const Json mesh = json_["mesh"];
    mesh.Has("extra") ? ConvertMeshes(mesh) : AddMeshDims(mesh);
    recording_.cluster.ranks = json_["world_size"];
    recording_.cluster.ranks_per_node = json_["world_size"];
  }

  void AddMeshDims(const Json& mesh) {
    for (std::size_t d = 0; d < mesh["dims"].size(); ++d) {
      recording_.strategy.mesh.push_back({mesh["dims"][d], mesh["shape"][d]});
    }
  }

  // If the ranks are cut in other ways, too, there is one mesh with the cuts of all. A dimension of each is
  // one or several of its dimensions.
  void ConvertMeshes(const Json& mesh) {
    std::set<std::int64_t> cuts = {1};  // ranks in what is inside of a cut
    const auto add_cuts = [&](const Json& shape) {
      std::int64_t ranks = 1;
      for (std::size_t d = shape.size(); d-- > 0;) cuts.insert(ranks *= shape[d].Get<std::int64_t>());
    };
    add_cuts(mesh["shape"]);
    for (const auto& [name, extra] : mesh["extra"].Members()) add_cuts(extra["shape"]);
    const std::vector<std::int64_t> sorted(cuts.begin(), cuts.end());
    for (std::size_t c = sorted.size(); c-- > 1;) {
      if (sorted[c] % sorted[c - 1] != 0) mesh["extra"].Fail("meshes that cut the ranks alike");
      recording_.strategy.mesh.push_back({fmt::format("cut{}", sorted[c]), sorted[c] / sorted[c - 1]});
    }
    // The dimensions of ours that are dimension `d` of `shape`.
    const auto within = [&](const Json& shape, std::size_t d) {
      std::int64_t inside = 1;
      for (std::size_t i = shape.size(); i-- > d + 1;) inside *= shape[i].Get<std::int64_t>();
      const std::int64_t around = inside * shape[d].Get<std::int64_t>();
      std::vector<std::string> names;
      for (std::size_t c = sorted.size(); c-- > 1;) {
        if (sorted[c] > inside && sorted[c] <= around) names.push_back(fmt::format("cut{}", sorted[c]));
      }
      return names;
    };
    DataParallelDims own{.shard = {}, .replicate = {}};
    for (std::size_t d = 0; d < mesh["dims"].size(); ++d) {
      const bool replicates = mesh["dims"][d].Get<std::string>() == "replicate";
      const std::vector<std::string> names = within(mesh["shape"], d);
      std::vector<std::string>& dims = replicates ? own.replicate : own.shard;
      dims.insert(dims.end(), names.begin(), names.end());
    }
    recording_.strategy.data_parallel = own;
    for (const auto& [name, extra] : mesh["extra"].Members()) {
      const auto dims = extra["dims"].List<std::string>();
      const auto use = extra["use"].List<std::string>();  // one: shard; two: replicate, shard
      DataParallelDims& over = extra_[name] = {.shard = {}, .replicate = {}};
      for (std::size_t u = 0; u < use.size(); ++u) {
        const auto d = static_cast<std::size_t>(std::ranges::find(dims, use[u]) - dims.begin());
        if (d == dims.size()) extra["use"].Fail("names of its dimensions");
        std::vector<std::string> names = within(extra["shape"], d);
        if (names.empty()) names = {kOneRank};  // a mesh that replicates alone has one of one shard
        (u + 1 < use.size() ? over.replicate : over.shard) = std::move(names);
      }
    }
    const auto has_one = [](const auto& extra) {
      return std::ranges::find(extra.second.shard, kOneRank) != extra.second.shard.end() ||
             std::ranges::find(extra.second.replicate, kOneRank) != extra.second.replicate.end();
    };
    if (std::ranges::any_of(extra_, has_one)) recording_.strategy.mesh.push_back({std::string(kOneRank), 1});
  }

  void ConvertUnits() {
    for (const Json& call : json_["fully_shard_calls"].Elements()) {
      UnitRule rule{.modules = call["modules"].List<std::string>()};
      rule.group = rule.modules.size() > 1;
      const Json reshard = call["reshard_after_forward"];
      if (reshard.IsBool()) rule.reshard_after_forward = reshard.Get<bool>();
      if (reshard.IsNumber()) rule.reshard_after_forward = reshard.Get<std::int64_t>();
      if (const Json mp = call["mp_policy"]; mp.IsObject()) {
        MixedPrecision mixed;
        if (mp.Has("param_dtype") && !mp["param_dtype"].IsNull())
          mixed.param_dtype = ToDType(mp["param_dtype"]);
        if (mp.Has("reduce_dtype") && !mp["reduce_dtype"].IsNull()) {
          mixed.reduce_dtype = ToDType(mp["reduce_dtype"]);
        }
        if (mp.Has("keep_param_dtype")) {
          for (const std::string& prefix : mp["keep_param_dtype"].List<std::string>()) {
            const auto under = StartingWith(prefix);
            mixed.keep_param_dtype.insert(mixed.keep_param_dtype.end(), under.begin(), under.end());
          }
        }
        rule.mixed_precision = mixed;
      }
      rule.cpu_offload = call["cpu_offload"].Get<bool>();
      if (call.Has("dp_mesh_dims")) {
        const Json dims = call["dp_mesh_dims"];
        DataParallelDims over;
        if (dims.Has("shard")) over.shard = dims["shard"].List<std::string>();
        if (dims.Has("replicate")) over.replicate = dims["replicate"].List<std::string>();
        rule.data_parallel = over;
      }
      if (call.Has("param_meshes")) {
        for (const Json& own : call["param_meshes"].Elements()) {
          ParameterMeshRule mesh{.parameters = {}, .data_parallel = own["mesh"].In(extra_, "an extra mesh")};
          for (const std::string& prefix : own["params"].List<std::string>()) {
            const auto under = StartingWith(prefix);
            mesh.parameters.insert(mesh.parameters.end(), under.begin(), under.end());
          }
          rule.parameter_meshes.push_back(std::move(mesh));
        }
      }
      for (const std::string& module : rule.modules) unit_modules_.insert(module);
      recording_.strategy.units.push_back(std::move(rule));
    }
  }

  // FQNs of the parameters that a prefix of the recording means.
  std::vector<std::string> StartingWith(const std::string& prefix) const {
    std::vector<std::string> fqns;
    for (const Parameter& parameter : recording_.trace.parameters) {
      if (parameter.fqn.starts_with(prefix)) fqns.push_back(parameter.fqn);
    }
    return fqns;
  }

  void ConvertSetup() {
    for (const Json& call : json_["setup"].Elements())
      recording_.strategy.setup.push_back(ToModuleCall(call));
  }

  static ModuleCall ToModuleCall(const Json& call) {
    ModuleCall converted{.method = call["op"], .module = call.Value<std::string>("module", "")};
    if (converted.method == "wait_gradient_reduction") converted.method = "wait_for_gradient_reduction";
    if (call.Has("value") && call["value"].IsBool()) converted.value = call["value"].Get<bool>();
    if (call.Has("value") && call["value"].IsNumber()) converted.number = call["value"].Get<double>();
    if (call.Has("async_op")) converted.value = call["async_op"].Get<bool>();
    if (call.Has("targets")) converted.modules = call["targets"].List<std::string>();
    if (call.Has("recurse")) converted.recurse = call["recurse"].Get<bool>();
    return converted;
  }

  void ConvertForward(const std::string& name, const Json& traced) {
    Pass pass{.name = name, .grad_enabled = true};
    for (const Json& f : json_["forward_of"].Elements()) {
      if (f["trace"] == name && f["op"] == "eval_forward") pass.grad_enabled = false;
    }
    std::map<std::int64_t, TensorId> tensor_id;
    for (const Json& t : traced["tensors"].Elements()) {
      tensor_id[t["id"]] = static_cast<TensorId>(pass.tensors.size());
      pass.tensors.push_back({.shape = t["shape"].List<std::int64_t>(),
                              .dtype = ToDType(t["dtype"]),
                              .requires_grad = t["requires_grad"]});
    }
    const auto tensors = [&](const Json& ids) {
      std::vector<TensorId> converted;
      for (const Json& id : ids.Elements()) converted.push_back(id.In(tensor_id, "a tensor of the forward"));
      return converted;
    };
    for (const Json& e : traced["events"].Elements()) {
      if (e.Has("enter")) {
        pass.events.push_back(EnterEvent{e["enter"].In(module_id_, kModule), tensors(e["in"])});
      } else {
        pass.events.push_back(ExitEvent{e["exit"].In(module_id_, kModule), tensors(e["out"])});
      }
    }
    const auto count = [&](const auto& is_kind) { return std::ranges::count_if(pass.events, is_kind); };
    pass.abandoned = count([](const TraceEvent& e) { return std::holds_alternative<EnterEvent>(e); }) >
                     count([](const TraceEvent& e) { return std::holds_alternative<ExitEvent>(e); });
    forward_id_[name] = static_cast<std::int32_t>(recording_.trace.forwards.size());
    recording_.trace.forwards.push_back(std::move(pass));
  }

  // The unit that manages a module: the nearest one above it.
  std::string UnitOf(std::string module) const {
    while (!unit_modules_.contains(module) && !module.empty()) {
      const std::size_t dot = module.rfind('.');
      module = dot == std::string::npos ? "" : module.substr(0, dot);
    }
    return module;
  }

  // Trainable parameters by unit, of the modules that ran in the forwards.
  std::map<std::string, std::vector<ParameterId>> Trainable(const std::vector<std::int32_t>& forwards) const {
    std::map<std::string, std::vector<ParameterId>> by_unit;
    std::set<ParameterId> seen;
    const auto reads = [&](const Module& module) {
      for (const NamedParameter& named : module.parameters) {
        const Parameter& parameter = recording_.trace.parameters[named.parameter];
        if (!parameter.requires_grad || !seen.insert(named.parameter).second) continue;
        const std::size_t dot = parameter.fqn.rfind('.');
        by_unit[UnitOf(dot == std::string::npos ? "" : parameter.fqn.substr(0, dot))].push_back(
            named.parameter);
      }
    };
    for (const std::int32_t forward : forwards) {
      for (const TraceEvent& event : recording_.trace.forwards[forward].events) {
        const auto* enter = std::get_if<EnterEvent>(&event);
        if (enter == nullptr) continue;
        const Module& module = recording_.trace.modules[enter->module];
        reads(module);
        // torch's reads the parameters of its out_proj, which it does not call.
        if (module.class_name != "MultiheadAttention") continue;
        for (const std::string& child : module.children) {
          const auto found = module_id_.find(module.fqn.empty() ? child : module.fqn + "." + child);
          if (found != module_id_.end()) reads(recording_.trace.modules[found->second]);
        }
      }
    }
    return by_unit;
  }

  // The recorded backward names units only; which parameters get gradients follows from what ran: those of a
  // unit just before its last inputs_grad_done, the others at the end.
  std::int32_t ConvertBackward(const std::string& name, const std::vector<std::int32_t>& microbatches,
                               const std::vector<std::int32_t>& forwards, bool abandoned) {
    const Json traced = json_["backward_traces"][name];
    Pass pass{.name = name, .abandoned = abandoned, .forwards = forwards};
    std::map<std::string, std::vector<ParameterId>> grads = Trainable(forwards);
    std::map<std::string, std::size_t> last_done;
    std::set<std::string> used;
    for (std::size_t i = 0; i < traced.size(); ++i) {
      const std::string unit = traced[i][1];
      if (traced[i][0] == "inputs_grad_done") last_done[unit] = i;
      used.insert(unit);
    }
    std::map<std::pair<std::string, std::int32_t>, std::int32_t> calls, remaining_inputs, remaining_outputs;
    for (std::size_t f = 0; f < forwards.size(); ++f) {
      for (const TraceEvent& event : recording_.trace.forwards[forwards[f]].events) {
        const auto* enter = std::get_if<EnterEvent>(&event);
        if (enter == nullptr) continue;
        ++calls[{recording_.trace.modules[enter->module].fqn, static_cast<std::int32_t>(f)}];
      }
    }
    remaining_inputs = remaining_outputs = calls;
    const auto give = [&](const std::string& unit) {
      for (const ParameterId parameter : grads[unit])
        pass.events.push_back(ParameterGradEvent{parameter, -1});
      grads.erase(unit);
    };
    for (std::size_t i = 0; i < traced.size(); ++i) {
      const std::string what = traced[i][0];
      const std::string unit = traced[i][1];
      const std::string module = unit.substr(unit.rfind(',') + 1);  // a group's hooks sit on one module
      std::int32_t forward = LastThatCalls(what == "inputs_grad_done" ? remaining_inputs : remaining_outputs,
                                           module, forwards.size());
      if (traced[i].size() > 2) {
        for (std::size_t m = 0; m < microbatches.size(); ++m) {
          if (microbatches[m] == traced[i][2].Get<std::int32_t>()) forward = static_cast<std::int32_t>(m);
        }
      }
      if (what.starts_with("recompute")) {
        Recompute(traced[i], pass.events);
        continue;
      }
      EndRecompute(pass.events);
      if (what == "inputs_grad_done") {
        if (last_done[unit] == i) give(unit);
        const std::string first = unit.substr(0, unit.find(','));
        pass.events.push_back(InputsGradDoneEvent{ModuleOf(first, traced[i][1]),
                                                  --remaining_inputs[{first, forward}], forward});
      } else {
        const std::int32_t index = OutputIndex(traced[i][0]);
        std::int32_t& left = remaining_outputs[{module, forward}];
        if (index == 0 || left == calls[{module, forward}]) --left;
        pass.events.push_back(OutputGradReadyEvent{ModuleOf(module, traced[i][1]), index, left, forward});
      }
    }
    EndRecompute(pass.events);
    std::vector<std::string> rest;
    for (const auto& [unit, parameters] : grads) rest.push_back(unit);
    if (abandoned) rest.clear();
    for (const std::string& unit : rest) {
      // A unit that ran but whose output the loss does not use gets none.
      if (unit.empty() || used.contains(unit) || Group(unit)) give(unit);
    }
    recording_.trace.backwards.push_back(std::move(pass));
    return static_cast<std::int32_t>(recording_.trace.backwards.size()) - 1;
  }

  // Chunks of a head run backward in the order in which they are not given: the last first.
  static std::int32_t LastThatCalls(
      const std::map<std::pair<std::string, std::int32_t>, std::int32_t>& remaining,
      const std::string& module, std::size_t forwards) {
    for (auto f = static_cast<std::int32_t>(forwards) - 1; f > 0; --f) {
      const auto found = remaining.find({module, f});
      if (found != remaining.end() && found->second > 0) return f;
    }
    return 0;
  }

  // Forward hooks of a unit that is called inside a checkpoint run again ("recompute_enter",
  // "recompute_exit"; an early stop leaves out the exits). The first and the last event of a recomputation
  // are of the module around that unit that is checkpointed. A case names it, unless the model calls the
  // checkpoint itself: then of the module that the unit is in.
  void Recompute(const Json& event, std::vector<TraceEvent>& events) {
    const std::string what = event[0];
    const std::string unit = event[1];
    const std::string fqn = unit.substr(0, unit.find(','));
    const ModuleId module = ModuleOf(fqn, event[1]);
    if (recomputing_ < 0) {
      recomputing_ = ModuleAround(fqn);
      std::size_t longest = 0;
      for (const Json& wrapped : json_["checkpoint"]["checkpoint_wrapper_on"].Elements()) {
        const std::string around = wrapped;
        if (!IsInside(fqn, around) || around.size() < longest) continue;
        longest = around.size();
        recomputing_ = wrapped.In(module_id_, kModule);
      }
      events.push_back(RecomputeEnterEvent{recomputing_});
    }
    if (module == recomputing_) return;  // the root: there is nothing around it
    if (what.find("enter") != std::string::npos) {
      events.push_back(RecomputeEnterEvent{module});
    } else {
      events.push_back(RecomputeExitEvent{module});
    }
  }

  static bool IsInside(const std::string& fqn, const std::string& around) {
    return around.empty() ? !fqn.empty() : fqn.starts_with(around + ".");
  }

  // The root for a module that is in it, and for itself.
  ModuleId ModuleAround(std::string fqn) const {
    do {
      const std::size_t dot = fqn.rfind('.');
      fqn = dot == std::string::npos ? "" : fqn.substr(0, dot);
    } while (!module_id_.contains(fqn) && !fqn.empty());
    const auto found = module_id_.find(fqn);
    return found == module_id_.end() ? 0 : found->second;
  }

  // `at`: where the recording names it.
  ModuleId ModuleOf(const std::string& fqn, const Json& at) const {
    const auto found = module_id_.find(fqn);
    if (found == module_id_.end()) at.Fail(kModule);
    return found->second;
  }

  // Parses "output_grad:2".
  static std::int32_t OutputIndex(const Json& event) {
    const std::string what = event;
    const char* end = what.data() + what.size();
    std::int32_t index = 0;
    const auto [parsed, error] = std::from_chars(what.data() + what.find(':') + 1, end, index);
    if (error != std::errc() || parsed != end || index < 0) event.Fail("an event, and the output's index");
    return index;
  }

  void EndRecompute(std::vector<TraceEvent>& events) {
    if (recomputing_ >= 0) events.push_back(RecomputeExitEvent{recomputing_});
    recomputing_ = -1;
  }

  bool Group(const std::string& module) const {
    for (const UnitRule& rule : recording_.strategy.units) {
      if (!rule.group) continue;
      for (const std::string& member : rule.modules) {
        if (member == module) return true;
      }
    }
    return false;
  }

  static std::int32_t LargestMicrobatch(const Json& step) {
    std::int32_t largest = 0;
    for (const Json& call : step.Elements()) {
      if (call.Has("mb")) largest = std::max(largest, call["mb"].Get<std::int32_t>());
    }
    return largest;
  }

  void ConvertProgram() {
    std::size_t forward_call = 0, backward_call = 0;
    std::map<std::string, std::int32_t> converted;  // backward trace and forwards -> id
    for (const Json& step : json_["program"].Elements()) {
      StepProgram program;
      std::map<std::int32_t, std::int32_t> forward_of_microbatch;
      std::map<std::pair<std::int32_t, std::int32_t>, std::int32_t> head_microbatches;  // by chunk
      std::map<std::int32_t, std::vector<std::int32_t>> attached;  // chunks, by the micro-batch of the whole
      const std::int32_t first_head = 1 + LargestMicrobatch(step);
      const auto forward = [&](std::int32_t microbatch) {
        const std::int32_t trace =
            json_["forward_of"][forward_call++]["trace"].In(forward_id_, "a forward of the recording");
        forward_of_microbatch[microbatch] = trace;
        program.push_back(ForwardCall{microbatch, trace});
      };
      const auto backward = [&](const std::vector<std::int32_t>& microbatches, const Json& call) {
        const std::string name = json_["backward_of"][backward_call++]["trace"];
        std::vector<std::int32_t> forwards;
        std::string key = name;
        for (const std::int32_t microbatch : microbatches) {
          const auto found = forward_of_microbatch.find(microbatch);
          if (found == forward_of_microbatch.end()) call.Fail("micro-batches whose forward ran");
          forwards.push_back(found->second);
          key += "," + std::to_string(forwards.back());
        }
        if (!converted.contains(key)) {
          converted[key] = ConvertBackward(name, microbatches, forwards, call.Has("raise_in"));
        }
        program.push_back(BackwardCall{microbatches, converted[key]});
      };
      for (const Json& call : step.Elements()) {
        const std::string op = call["op"];
        if (op == "forward" || op == "eval_forward") {
          forward(call["mb"]);
        } else if (op == "head_forward") {
          // A chunk is a micro-batch of its own, whose backward is the whole one's unless it is detached.
          const auto microbatch = first_head + static_cast<std::int32_t>(head_microbatches.size());
          forward(microbatch);
          if (!call["detach"].Get<bool>()) attached[call["mb"]].push_back(microbatch);
          head_microbatches[{call["mb"], call["chunk"]}] = microbatch;
        } else if (op == "head_backward") {
          backward({head_microbatches[{call["mb"], call["chunk"]}]}, call);
        } else if (op == "backward") {
          auto microbatches = call["mbs"].List<std::int32_t>();
          for (const Json& microbatch : call["mbs"].Elements()) {
            const std::vector<std::int32_t> heads = std::exchange(attached[microbatch], {});
            microbatches.insert(microbatches.end(), heads.begin(), heads.end());
          }
          backward(microbatches, call);
        } else if (op == "optim_step") {
          program.push_back(OptimizerStepCall{});
        } else if (op == "zero_grad") {
          program.push_back(ZeroGradCall{});
        } else {
          program.push_back(ToModuleCall(call));
        }
      }
      recording_.strategy.program.push_back(std::move(program));
    }
    recording_.steps = static_cast<std::int32_t>(recording_.strategy.program.size());
  }

  const Json json_;
  Recording recording_;
  std::map<std::string, ModuleId> module_id_;
  std::map<std::string, ParameterId> parameter_id_;
  std::map<std::string, std::int32_t> forward_id_;
  std::set<std::string> unit_modules_;
  std::map<std::string, DataParallelDims> extra_;  // meshes of parameters, by name
  ModuleId recomputing_ = -1;                      // the checkpointed module whose forward is being run again
};

}  // namespace

Result<Recording> ConvertFsdp2(const std::string& json_text) {
  return ConvertJson<Recording>(json_text,
                                [](const CheckedJson& json) { return Fsdp2Converter(json).Run(); });
}

}  // namespace shardplan::conformance
