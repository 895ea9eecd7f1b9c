// SPDX-License-Identifier: Apache-2.0
// Case of a FullyShardedDataParallel recording -> trace, strategy, cluster.
#include <algorithm>
#include <map>
#include <set>
#include <string_view>
#include <tuple>
#include <utility>

#include "checked_json.h"
#include "recording.h"
#include "shardplan/schemas/plan.h"

namespace shardplan::conformance {
namespace {

using Json = CheckedJson;

std::string Fqn(const std::string& name) { return name == DisplayName("") ? "" : name; }

DType ToDType(const Json& name) {
  const std::optional<DType> dtype = DTypeFromName(name.Get<std::string>());
  if (!dtype) name.Fail("the name of a dtype");
  return *dtype;
}

// One call of a module in a forward: the tensors that went in and out.
struct CallTensors {
  std::int32_t occurrence = 0;
  std::vector<std::int64_t> inputs, outputs;  // ids; inputs that require a gradient only
};
using Calls = std::map<std::string, std::vector<CallTensors>>;  // by module

// The recorded gradients are of tensors of the plain model; a trace's are of calls of modules, as identities
// around their inputs show them. The hooks on a tensor fire together, in the order of their registration:
// producer first, consumers in the order in which they ran. A trace has the inputs of the last consumer done
// first, and the producer's output ready last. A consumer that returns the tensor has its output ready before
// its inputs are done:
//
//   hooks on t:  a returned it | b got it | b returned it | c got it
//   trace:       c's inputs done, b's output ready, b's inputs done, a's output ready
class BackwardOrder {
 public:
  BackwardOrder(const Calls& calls, std::vector<TraceEvent>& events) : calls_(calls), events_(events) {}

  void OnParameter(ParameterId parameter) {
    events_.push_back(ParameterGradEvent{parameter, -1});
    first_of_.clear();
    done_at_.clear();
  }

  // A tensor that a call returns twice, or that several calls return, has a hook for each.
  void OnOutput(const std::string& fqn, ModuleId module, std::int64_t tensor) {
    for (const CallTensors& call : CallsOf(fqn)) {
      for (std::size_t i = 0; i < call.outputs.size(); ++i) {
        if (call.outputs[i] != tensor || !ready_.emplace(fqn, call.occurrence, i).second) continue;
        const auto done = done_at_.find({fqn, call.occurrence});
        const std::size_t at = done == done_at_.end() ? events_.size() : done->second;
        Insert(at, OutputGradReadyEvent{module, static_cast<std::int32_t>(i), call.occurrence, 0});
        Begins(tensor, at);
        return;
      }
    }
  }

  void OnInput(const std::string& fqn, ModuleId module, std::int64_t tensor) {
    reached_.emplace(fqn, tensor);
    for (const CallTensors& call : CallsOf(fqn)) {
      const bool got = std::ranges::find(call.inputs, tensor) != call.inputs.end();
      const bool all = std::ranges::all_of(call.inputs, [&](std::int64_t input) {
        return reached_.contains({fqn, input});
      });
      if (!got || !all || !done_.emplace(fqn, call.occurrence).second) continue;
      std::size_t at = events_.size();
      for (const std::int64_t input : call.inputs) {
        if (const auto first = first_of_.find(input); first != first_of_.end()) {
          at = std::min(at, first->second);
        }
      }
      Insert(at, InputsGradDoneEvent{module, call.occurrence, 0});
      Begins(tensor, at);
      done_at_[{fqn, call.occurrence}] = at;
    }
  }

 private:
  const std::vector<CallTensors>& CallsOf(const std::string& fqn) const {
    static const std::vector<CallTensors> kNone;
    const auto found = calls_.find(fqn);
    return found == calls_.end() ? kNone : found->second;
  }

  void Insert(std::size_t at, const TraceEvent& event) {
    events_.insert(events_.begin() + static_cast<std::ptrdiff_t>(at), event);
    for (auto& [tensor, position] : first_of_) position += position >= at ? 1 : 0;
    for (auto& [call, position] : done_at_) position += position >= at ? 1 : 0;
  }

  void Begins(std::int64_t tensor, std::size_t at) {
    const auto [first, added] = first_of_.try_emplace(tensor, at);
    first->second = std::min(first->second, at);
  }

  using Call = std::pair<std::string, std::int32_t>;  // module, occurrence

  const Calls& calls_;
  std::vector<TraceEvent>& events_;
  std::set<std::pair<std::string, std::int64_t>> reached_;              // gradients of inputs: module, tensor
  std::set<std::tuple<std::string, std::int32_t, std::size_t>> ready_;  // outputs: module, occurrence, index
  std::set<Call> done_;
  // Positions in `events_` since the last parameter.
  std::map<std::int64_t, std::size_t> first_of_;  // tensor -> its first event
  std::map<Call, std::size_t> done_at_;
};

class Fsdp1Converter {
 public:
  explicit Fsdp1Converter(Json json) : json_(std::move(json)) {}

  Result<Recording> Run() {
    recording_.policy = recording_.strategy.policy = "fsdp1";
    recording_.strategy.optimizer.kind = OptimizerKind::kSgd;
    recording_.trace.recorded_with = "torch " + json_.Value<std::string>("torch", "");
    ConvertModel();
    ConvertSettings();
    for (const Json& trace : json_["forward_traces"].Elements()) ConvertForward(trace);
    ConvertProgram();
    return std::move(recording_);
  }

 private:
  static constexpr std::string_view kModule = "a module of the recording";
  static constexpr std::string_view kForward = "the index of a forward";
  static constexpr std::string_view kParameter = "a parameter of the recording";

  ModuleId ModuleOf(const Json& name) const {
    const auto found = module_id_.find(Fqn(name));
    if (found == module_id_.end()) name.Fail(kModule);
    return found->second;
  }

  void ConvertModel() {
    const Json model = json_["model_description"];
    Trace& trace = recording_.trace;
    trace.model = json_["model"].Get<std::string>();
    for (const Json& p : model["parameters"].Elements()) {
      parameter_id_[p["fqn"]] = static_cast<ParameterId>(trace.parameters.size());
      trace.parameters.push_back({.fqn = p["fqn"],
                                  .shape = p["shape"].List<std::int64_t>(),
                                  .dtype = ToDType(p["dtype"]),
                                  .requires_grad = p["requires_grad"]});
    }
    std::map<std::string, ParameterId> shared;  // second names, in order
    for (const Json& tie : model["shared_parameters"].Elements()) {
      shared[tie["fqn"]] = tie["shares"].In(parameter_id_, kParameter);
    }
    for (const auto& [name, parameter] : shared) {
      parameter_id_[name] = parameter;
      trace.parameters[parameter].shared_with.push_back(name);
    }
    for (const Json& m : model["modules"].Elements()) {
      const std::string fqn = Fqn(m["fqn"]);
      module_id_[fqn] = static_cast<ModuleId>(trace.modules.size());
      Module module{.fqn = fqn, .class_name = m["class"], .children = m["children"].List<std::string>()};
      for (const Json& name : m["params"].Elements()) {
        const std::string parameter =
            fqn.empty() ? name.Get<std::string>() : fqn + "." + name.Get<std::string>();
        const auto found = parameter_id_.find(parameter);
        if (found != parameter_id_.end()) module.parameters.push_back({name, found->second});
      }
      trace.modules.push_back(std::move(module));
    }
    // named_modules() names a module that is registered twice once: drop children without an entry.
    for (Module& module : trace.modules) {
      std::erase_if(module.children, [&](const std::string& child) {
        return !module_id_.contains(module.fqn.empty() ? child : module.fqn + "." + child);
      });
    }
  }

  void ConvertSettings() {
    const Json settings = json_["settings"];
    Strategy& strategy = recording_.strategy;
    Fsdp1Knobs& knobs = strategy.fsdp1;
    recording_.cluster.ranks = recording_.cluster.ranks_per_node = json_["world_size"];
    static const std::map<std::string, Fsdp1Sharding> kShardings = {
        {"FULL_SHARD", Fsdp1Sharding::kFullShard},
        {"SHARD_GRAD_OP", Fsdp1Sharding::kShardGradOp},
        {"NO_SHARD", Fsdp1Sharding::kNoShard},
        {"HYBRID_SHARD", Fsdp1Sharding::kHybridShard},
        {"_HYBRID_SHARD_ZERO2", Fsdp1Sharding::kHybridShardZero2}};
    knobs.sharding = settings["strategy"].In(kShardings, "a ShardingStrategy");
    const Json backward = settings["backward_prefetch"];
    knobs.backward_prefetch = backward.IsNull()            ? Fsdp1BackwardPrefetch::kNone
                              : backward == "BACKWARD_PRE" ? Fsdp1BackwardPrefetch::kPre
                                                           : Fsdp1BackwardPrefetch::kPost;
    knobs.forward_prefetch = settings["forward_prefetch"];
    knobs.limit_all_gathers = settings["limit_all_gathers"];
    knobs.use_orig_params = settings["use_orig_params"];
    strategy.cpu_offload = settings["cpu_offload"];
    const Json mesh = json_["mesh"];
    if (mesh["shape"].size() == 2) {
      strategy.mesh = {{"replicate", mesh["shape"][0]}, {"shard", mesh["shape"][1]}};
    }
    if (const Json mp = settings["mixed_precision"]; mp.IsObject()) {
      MixedPrecision mixed;
      if (!mp["param_dtype"].IsNull()) mixed.param_dtype = ToDType(mp["param_dtype"]);
      if (!mp["reduce_dtype"].IsNull()) mixed.reduce_dtype = ToDType(mp["reduce_dtype"]);
      mixed.keep_low_precision_grads = mp["keep_low_precision_grads"];
      strategy.mixed_precision = mixed;
    }
    const Json checkpointing = settings["activation_checkpointing"];
    const bool recomputes =
        checkpointing.IsString() && checkpointing.Get<std::string>().find("reentrant") == std::string::npos;
    for (const Json& unit : json_["units"].Elements()) {
      strategy.units.push_back({.modules = {Fqn(unit["fqn"])}});
      if (recomputes && unit.Value("checkpointed", false)) {
        checkpointed_.emplace_back(Fqn(unit["fqn"]), ModuleOf(unit["fqn"]));
      }
    }
    knobs.ignored_modules = settings["ignored_modules"].List<std::string>();
    strategy.optimizer.in_backward = settings.Value("optim_in_backward", false);
  }

  void ConvertForward(const Json& traced) {
    Pass pass;
    std::map<std::int64_t, TensorId> tensor_id;
    Calls runs;
    const auto add = [&](const Json& tensors, std::vector<std::int64_t>& ids, bool only_differentiable) {
      std::vector<TensorId> converted;
      for (const Json& t : tensors.Elements()) {
        const std::int64_t id = t["tensor"];
        const auto [entry, added] = tensor_id.try_emplace(id, static_cast<TensorId>(pass.tensors.size()));
        if (added) {
          pass.tensors.push_back(
              {.shape = t["shape"].List<std::int64_t>(), .requires_grad = t["requires_grad"]});
        }
        converted.push_back(entry->second);
        if (!only_differentiable || t["requires_grad"].Get<bool>()) ids.push_back(id);
      }
      return converted;
    };
    for (const Json& e : traced.Elements()) {
      const std::string fqn = Fqn(e["module"]);
      const ModuleId module = ModuleOf(e["module"]);
      if (e["ev"] == "enter") {
        CallTensors run{.occurrence = static_cast<std::int32_t>(runs[fqn].size())};
        EnterEvent enter{.module = module};
        if (e.Has("inputs")) enter.inputs = add(e["inputs"], run.inputs, true);
        runs[fqn].push_back(run);
        pass.events.push_back(enter);
      } else {
        if (runs[fqn].empty()) e.Fail("the exit of a module that was entered");
        ExitEvent exit{.module = module};
        if (e.Has("outputs")) exit.outputs = add(e["outputs"], runs[fqn].back().outputs, false);
        pass.events.push_back(exit);
      }
    }
    recording_.trace.forwards.push_back(std::move(pass));
    runs_.push_back(std::move(runs));
  }

  std::int32_t ConvertBackward(std::int32_t backward, std::int32_t forward) {
    Pass pass{.forwards = {forward}};
    BackwardOrder order(runs_[forward], pass.events);
    for (const Json& e : json_["backward_traces"][static_cast<std::size_t>(backward)].Elements()) {
      if (e["ev"] == "param_grad") {
        order.OnParameter(e["param"].In(parameter_id_, kParameter));
      } else if (e["ev"] == "output_grad") {
        order.OnOutput(Fqn(e["module"]), ModuleOf(e["module"]), e["tensor"]);
      } else {
        order.OnInput(Fqn(e["module"]), ModuleOf(e["module"]), e["tensor"]);
      }
    }
    for (const auto& [fqn, module] : checkpointed_) {
      InsertRecomputation(fqn, module, forward, pass.events);
    }
    recording_.trace.backwards.push_back(std::move(pass));
    return static_cast<std::int32_t>(recording_.trace.backwards.size()) - 1;
  }

  // Whether the event belongs to something below the module.
  bool IsBelow(const TraceEvent& event, const std::string& module) const {
    const std::string* fqn = nullptr;
    if (const auto* ready = std::get_if<OutputGradReadyEvent>(&event)) {
      fqn = &recording_.trace.modules[ready->module].fqn;
    } else if (const auto* grad = std::get_if<ParameterGradEvent>(&event)) {
      fqn = &recording_.trace.parameters[grad->parameter].fqn;
    }
    return fqn != nullptr && fqn->starts_with(module + ".");
  }

  // The traces are of the plain model: a recomputation shows by the hooks of units below the checkpointed
  // one. It starts with the first of the module's operators that needs something saved: behind the hook of
  // the unit that the operator is in, if that is the first thing below the module. It stops in the last
  // module with parameters, whose operator saves the last tensor.
  void InsertRecomputation(const std::string& fqn, ModuleId checkpointed, std::int32_t forward,
                           std::vector<TraceEvent>& events) {
    const std::vector<TraceEvent>& run = recording_.trace.forwards[forward].events;
    std::vector<TraceEvent> again = {RecomputeEnterEvent{checkpointed}};
    std::size_t end = 1;  // of `again`, where the recomputation stops
    bool inside = false;
    for (const TraceEvent& event : run) {
      if (const auto* enter = std::get_if<EnterEvent>(&event)) {
        if (inside) again.emplace_back(RecomputeEnterEvent{enter->module});
        if (inside && !recording_.trace.modules[enter->module].parameters.empty()) end = again.size();
        inside = inside || enter->module == checkpointed;
      } else if (const auto* exit = std::get_if<ExitEvent>(&event); exit != nullptr && inside) {
        if (exit->module == checkpointed) break;
        again.emplace_back(RecomputeExitEvent{exit->module});
      }
    }
    again.resize(end);
    again.emplace_back(RecomputeExitEvent{checkpointed});
    auto first = std::find_if(events.begin(), events.end(),
                              [&](const TraceEvent& event) { return IsBelow(event, fqn); });
    if (first == events.end()) return;
    while (first != events.end() && std::holds_alternative<OutputGradReadyEvent>(*first)) ++first;
    events.insert(first, again.begin(), again.end());
  }

  void ConvertProgram() {
    std::map<std::pair<std::int32_t, std::int32_t>, std::int32_t> converted;
    for (const Json& step : json_["steps"].Elements()) {
      StepProgram program;
      std::map<std::int32_t, std::int32_t> forward_of_microbatch;
      bool no_sync = false;
      const auto enter = [&](const Json& call) {
        const bool wanted = call.Value("no_sync", false);
        if (wanted != no_sync) program.emplace_back(ModuleCall{.method = "no_sync", .value = wanted});
        no_sync = wanted;
      };
      for (const Json& call : step.Elements()) {
        const std::string name = call["call"];
        if (name == "forward") {
          enter(call);
          const std::int32_t trace = call["forward_trace"];
          const std::int32_t microbatch = call.Value("mb", 0);
          forward_of_microbatch[microbatch] = trace;
          call["forward_trace"].InList(recording_.trace.forwards, kForward).grad_enabled =
              call["mode"] == "train";
          program.emplace_back(ForwardCall{microbatch, trace});
        } else if (name == "backward") {
          enter(call);
          const std::int32_t microbatch = call.Value("mb", 0);
          const auto forward = forward_of_microbatch.find(microbatch);
          if (forward == forward_of_microbatch.end()) call.Fail("a micro-batch whose forward ran");
          const std::pair key = {call["backward_trace"].Get<std::int32_t>(), forward->second};
          if (!converted.contains(key)) converted[key] = ConvertBackward(key.first, key.second);
          program.emplace_back(BackwardCall{{microbatch}, converted[key]});
        } else if (name == "optim_step") {
          program.emplace_back(OptimizerStepCall{});
        } else {
          program.emplace_back(ZeroGradCall{});
        }
      }
      recording_.strategy.program.push_back(std::move(program));
    }
    recording_.steps = static_cast<std::int32_t>(recording_.strategy.program.size());
  }

  const Json json_;
  Recording recording_;
  std::vector<std::pair<std::string, ModuleId>> checkpointed_;  // units
  std::map<std::string, ModuleId> module_id_;
  std::map<std::string, ParameterId> parameter_id_;
  std::vector<Calls> runs_;  // by forward
};

}  // namespace

Result<Recording> ConvertFsdp1(const std::string& json_text) {
  return ConvertJson<Recording>(json_text,
                                [](const CheckedJson& json) { return Fsdp1Converter(json).Run(); });
}

}  // namespace shardplan::conformance
