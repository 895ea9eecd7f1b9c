// SPDX-License-Identifier: Apache-2.0
#include "tests/support/random_documents.h"

#include <algorithm>
#include <array>
#include <map>
#include <random>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <variant>
#include <vector>

#include "schemas/src/diff/field_diff.h"
#include "schemas/src/documents/plan_fields.h"
#include "schemas/src/documents/recording_fields.h"
#include "schemas/src/documents/report_fields.h"
#include "schemas/src/documents/reshard_fields.h"
#include "schemas/src/names/enum_names.h"

namespace shardplan::test {
namespace {

// Fills values by the field lists that reader and writer work from, so that no field is forgotten.
class RandomFill {
 public:
  explicit RandomFill(std::uint64_t seed) : engine_(seed) { sizes_.fill(0); }

  template <typename T>
  void Fill(T& value) {
    Fields(value);
  }
  std::int64_t Uniform(std::int64_t low, std::int64_t high) {
    // Not std::uniform_int_distribution: its values differ between standard libraries.
    const std::uint64_t range = static_cast<std::uint64_t>(high) - static_cast<std::uint64_t>(low) + 1;
    const std::uint64_t offset = range == 0 ? engine_() : engine_() % range;
    return static_cast<std::int64_t>(static_cast<std::uint64_t>(low) + offset);
  }
  bool Chance(int percent) { return Uniform(0, 99) < percent; }
  void SetSize(RefKind kind, std::int64_t size) { sizes_[static_cast<std::size_t>(kind)] = size; }

 private:
  template <typename T>
  void Fields(T& value) {
    // Lists that are referred to get their length before anything refers to them.
    ForEachField<T>([&](const auto& field) {
      if constexpr (requires {
                      (value.*field.member).resize(1);
                      (value.*field.member).front();
                    }) {
        if (field.defines != RefKind::kNone) {
          (value.*field.member).resize(static_cast<std::size_t>(Uniform(1, 5)));
          SetSize(field.defines, static_cast<std::int64_t>((value.*field.member).size()));
        }
      }
      return true;
    });
    ForEachField<T>([&](const auto& field) {
      if (!field.required && field.defines == RefKind::kNone && Chance(40)) return true;
      Value(value.*field.member, field.spec, field.defines != RefKind::kNone);
      return true;
    });
  }

  template <typename T>
  void Value(T& value, const Spec& spec, bool has_size = false) {
    if constexpr (std::is_same_v<T, bool>) {
      value = Chance(50);
    } else if constexpr (std::is_same_v<T, std::string>) {
      value = Text();
    } else if constexpr (std::is_same_v<T, SharedText>) {
      value = Text();
    } else if constexpr (std::is_same_v<T, double>) {
      constexpr std::array<double, 7> kReals = {1.0, 2.0, 0.1, 1e300, 5e-324, 12345678.875, 1.0 / 3};
      value = kReals[static_cast<std::size_t>(Uniform(0, 6))];
    } else if constexpr (std::is_integral_v<T>) {
      value = static_cast<T>(Integer(spec, std::numeric_limits<T>::max()));
    } else if constexpr (std::is_enum_v<T>) {
      value = static_cast<T>(Uniform(0, static_cast<std::int64_t>(kEnumNames<T>.size()) - 1));
    } else if constexpr (requires { value.value += 1; }) {
      value.value = Integer(spec, kMaxExact);
    } else {
      Compound(value, spec, has_size);
    }
  }
  std::int64_t Integer(const Spec& spec, std::int64_t type_max) {
    if (spec.ref != RefKind::kNone) {
      const std::int64_t size = sizes_[static_cast<std::size_t>(spec.ref)];
      return size == 0 ? spec.min : Uniform(std::min(spec.min, size - 1), size - 1);
    }
    const std::int64_t max = std::min(spec.max, type_max);
    const std::int64_t small = std::min<std::int64_t>(max, 10);
    return Chance(10) ? (Chance(50) ? max : spec.min) : Uniform(std::max<std::int64_t>(spec.min, -3), small);
  }
  std::string Text() {
    constexpr std::array<std::string_view, 14> kTexts = {
        "",          "layers.0",        "layers.1.weight", "all_gather",     "forward layers.0", "on",
        "->",        "\"quoted\" \\ /", "a,b#3",           "zwölf λ 🙂", "line\nbreak\ttab", "(root)",
        "key=value", "via \x01"};
    std::string text(kTexts[static_cast<std::size_t>(Uniform(0, kTexts.size() - 1))]);
    if (Chance(50)) text += std::to_string(Uniform(0, 99));
    return text;
  }

  template <typename T>
  void Compound(std::optional<T>& value, const Spec& spec, bool /*has_size*/) {
    Value(value.emplace(), spec);
  }
  template <typename T>
  void Compound(std::vector<T>& value, const Spec& spec, bool has_size) {
    if (!has_size) value.resize(static_cast<std::size_t>(Chance(15) ? 0 : Uniform(1, 4)));
    if (spec.ref != RefKind::kNone && sizes_[static_cast<std::size_t>(spec.ref)] == 0) value.clear();
    for (T& element : value) Value(element, spec);
    if constexpr (std::is_same_v<T, std::int64_t>) {
      for (T& dimension : value) dimension = spec.shape ? dimension % 1000 : dimension;
    }
  }
  template <typename T>
  requires requires(T list) { list.Edit(); }
  void Compound(T& value, const Spec& spec, bool has_size) {
    std::vector<typename T::value_type> values = value;
    Compound(values, spec, has_size);
    value = std::move(values);
  }
  void Compound(std::map<std::string, KnobValue>& value, const Spec& /*spec*/, bool /*has_size*/) {
    while (Chance(50)) {
      const std::array<KnobValue, 5> kinds = {Chance(50), Uniform(-9, kMaxExact), 0.1, 1e300, Text()};
      value[Text()] = kinds[static_cast<std::size_t>(Uniform(0, 4))];
    }
  }
  void Compound(std::variant<bool, std::int64_t>& value, const Spec& /*spec*/, bool /*has_size*/) {
    value = Chance(50) ? std::variant<bool, std::int64_t>(Chance(50)) : Uniform(1, 64);
  }
  template <typename... T>
  void Compound(std::variant<T...>& value, const Spec& /*spec*/, bool /*has_size*/) {
    const std::int64_t which = Uniform(0, static_cast<std::int64_t>(sizeof...(T)) - 1);
    std::int64_t at = 0;
    ((at++ == which ? Fields(value.template emplace<T>()) : void()), ...);
  }
  template <typename T>
  void Compound(T& value, const Spec& /*spec*/, bool /*has_size*/) {
    Fields(value);
  }

  std::mt19937_64 engine_;
  std::array<std::int64_t, kRefKinds> sizes_;
};

void MakeUnique(std::string& name, std::set<std::string>& taken) {
  while (!taken.insert(name).second) name += "'";
}

// Modules of a tree of two levels: the root has all others.
void RepairModules(Trace& trace) {
  std::set<std::string> names = {""};
  for (std::size_t m = 0; m < trace.modules.size(); ++m) {
    Module& module = trace.modules[m];
    if (m == 0) {
      module.fqn.clear();
    } else {
      MakeUnique(module.fqn, names);
    }
    module.children.clear();
    module.same_module_as = m == 2 ? trace.modules[1].fqn : "";
    if (m == 0) module.compiled.clear();  // the others are events' modules
    if (m > 0) trace.modules[0].children.push_back(module.fqn);
    for (NamedParameter& named : module.parameters) {
      Parameter& parameter = trace.parameters[static_cast<std::size_t>(named.parameter)];
      const std::string fqn = module.fqn.empty() ? named.name : module.fqn + "." + named.name;
      if (parameter.fqn != fqn) parameter.shared_with.push_back(fqn);
    }
  }
}

// Groups of two or four of four ranks.
void RepairCommunicators(Trace& trace) {
  trace.world_size = 4;
  std::set<std::string> names;
  for (Communicator& communicator : trace.communicators) {
    MakeUnique(communicator.name, names);
    communicator.size = communicator.size % 2 == 0 ? 2 : 4;
    communicator.stride = communicator.size == 2 ? 1 + communicator.stride % 2 : 1;
    communicator.dims.clear();
  }
  trace.same_batch.resize(std::min(trace.same_batch.size(), names.size()));
  std::copy_n(names.begin(), trace.same_batch.size(), trace.same_batch.begin());
}

// Repairs a pass's account of its memory: whatever is used is there, and is born and dies once.
class MemoryRepair {
 public:
  explicit MemoryRepair(const Trace& trace) : communicates_(!trace.communicators.empty()) {
    for (const TraceInput& input : trace.inputs) outside_.insert(input.storage);
    for (const ModuleBuffer& buffer : trace.buffers) outside_.insert(buffer.storage);
    outside_.insert(-1);
    alive_ = outside_;
  }
  // False: the event cannot stand here.
  bool Keep(TraceEvent& event) {
    if (auto* op = std::get_if<OperatorEvent>(&event)) {
      const auto dead = [&](StorageId storage) { return !alive_.contains(storage); };
      std::erase_if(op->reads, dead);
      std::erase_if(op->writes, dead);
      if (op->collective && !communicates_) op->collective.reset();
      if (op->collective) {
        const CollectiveKind kind = op->collective->kind;
        const bool transfers = kind == CollectiveKind::kSend || kind == CollectiveKind::kReceive;
        op->collective->peer = transfers ? 1 : -1;
        op->collective->communicator = std::max(op->collective->communicator, 0);
        op->collective->busiest_ppm = 1 + op->collective->busiest_ppm % 1'000'000;
        works_.insert(op->collective->work);
      }
    } else if (const auto* wait = std::get_if<CollectiveWaitEvent>(&event)) {
      return wait->work >= 0 && works_.contains(wait->work);
    } else if (auto* allocate = std::get_if<AllocateEvent>(&event)) {
      while (outside_.contains(next_)) ++next_;
      allocate->storage = next_++;
      allocate->size_bytes.value %= 1 << 20;
      if (allocate->role == StorageRole::kParameterGrad) allocate->role = StorageRole::kSaved;
      alive_.insert(allocate->storage);
    } else if (const auto* free = std::get_if<FreeEvent>(&event)) {
      return !outside_.contains(free->storage) && alive_.erase(free->storage) > 0;
    }
    return true;
  }
  bool IsOutside(StorageId storage) const { return outside_.contains(storage); }

 private:
  std::set<StorageId> outside_, alive_;
  std::set<std::int32_t> works_;
  const bool communicates_;
  StorageId next_ = 1000;
};

// Each forward enters and leaves its modules one by one; tensors are those of inputs and buffers.
void RepairForward(Pass& pass, const std::vector<ModuleId>& canonical, MemoryRepair& memory,
                   std::map<std::pair<ModuleId, std::int32_t>, std::int32_t>& outputs) {
  pass.forwards.clear();
  for (Tensor& tensor : pass.tensors) {
    if (!memory.IsOutside(tensor.storage)) tensor.storage = -1;
  }
  const auto tensors = static_cast<TensorId>(pass.tensors.size());
  const auto outside = [&](TensorId id) { return id >= tensors; };
  std::vector<TraceEvent> events;
  std::map<ModuleId, std::int32_t> calls;
  for (TraceEvent& event : pass.events) {
    if (auto* enter = std::get_if<EnterEvent>(&event)) {
      std::erase_if(enter->inputs, outside);
      ExitEvent exit{enter->module, enter->inputs};
      const ModuleId module = canonical[static_cast<std::size_t>(enter->module)];
      outputs[{module, calls[module]++}] = static_cast<std::int32_t>(exit.outputs.size());
      events.push_back(*enter);
      events.push_back(std::move(exit));
    } else if (std::holds_alternative<OperatorEvent>(event) || std::holds_alternative<AllocateEvent>(event) ||
               std::holds_alternative<FreeEvent>(event) ||
               std::holds_alternative<CollectiveWaitEvent>(event)) {
      if (memory.Keep(event)) events.push_back(std::move(event));
    }
  }
  pass.events = std::move(events);
}

// A backward of the first forward alone, with events of calls that it has.
void RepairBackward(Pass& pass, const Trace& trace, const std::vector<ModuleId>& canonical,
                    MemoryRepair memory,
                    const std::map<std::pair<ModuleId, std::int32_t>, std::int32_t>& outputs) {
  pass.forwards = {0};
  pass.tensors.clear();
  std::set<ParameterId> reduced;
  std::set<std::tuple<int, ModuleId, std::int32_t, std::int32_t>> seen;
  std::vector<TraceEvent> events;
  for (TraceEvent& event : pass.events) {
    bool keep = true;
    if (auto* ready = std::get_if<OutputGradReadyEvent>(&event)) {
      const ModuleId module = canonical[static_cast<std::size_t>(ready->module)];
      ready->forward = 0;
      const auto call = outputs.find({module, ready->occurrence});
      keep = call != outputs.end() && ready->index < call->second &&
             !seen.contains({1, module, ready->occurrence, 0}) &&
             seen.insert({0, module, ready->occurrence, ready->index}).second;
    } else if (auto* done = std::get_if<InputsGradDoneEvent>(&event)) {
      const ModuleId module = canonical[static_cast<std::size_t>(done->module)];
      done->forward = 0;
      keep = outputs.contains({module, done->occurrence}) &&
             seen.insert({1, module, done->occurrence, 0}).second;
    } else if (auto* grad = std::get_if<ParameterGradEvent>(&event)) {
      grad->storage = -1;
      keep = trace.parameters[static_cast<std::size_t>(grad->parameter)].requires_grad &&
             reduced.insert(grad->parameter).second;
    } else if (const auto* again = std::get_if<RecomputeEnterEvent>(&event)) {
      events.push_back(*again);
      event = RecomputeExitEvent{again->module};
    } else {
      const bool of_forward = std::holds_alternative<EnterEvent>(event) ||
                              std::holds_alternative<ExitEvent>(event) ||
                              std::holds_alternative<ReleaseEvent>(event);
      keep = !of_forward && !std::holds_alternative<RecomputeExitEvent>(event) &&
             !std::holds_alternative<BackwardEndEvent>(event) && memory.Keep(event);
    }
    if (keep) events.push_back(std::move(event));
  }
  events.push_back(BackwardEndEvent{});
  pass.events = std::move(events);
}

// Steps of matrices of different sizes, whose storages are born and die in them.
void RepairOptimizerSteps(Trace& trace) {
  constexpr StorageId kFirst = 1 << 20;
  StorageId next = kFirst;
  std::int64_t rows = 1;
  for (TracedOptimizerStep& step : trace.optimizer_steps) {
    step.optimizer = OptimizerKind::kMuon;
    step.ranks = step.ranks % 8 + 2;
    step.shape = {rows++, 5};
    std::set<StorageId> alive;
    std::set<std::int32_t> works;
    for (std::vector<SegmentEntry>* part : {&step.update, &step.orthogonalize, &step.apply}) {
      std::erase_if(*part, [&](SegmentEntry& entry) {
        if (auto* op = std::get_if<OperatorEvent>(&entry)) {
          const auto dead = [&](StorageId storage) { return !alive.contains(storage); };
          std::erase_if(op->reads, dead);
          std::erase_if(op->writes, dead);
          op->parameters.clear();
          if (!op->collective) return false;
          op->collective->communicator = op->flops % 2 == 0 ? kOfShards : kOfReplicas;
          works.insert(op->collective->work);
        } else if (auto* made = std::get_if<AllocateEvent>(&entry)) {
          made->storage = next++;
          made->role = StorageRole::kOptimizerTemp;
          alive.insert(made->storage);
        } else if (const auto* wait = std::get_if<CollectiveWaitEvent>(&entry)) {
          return wait->work < 0 || !works.contains(wait->work);
        } else {
          return true;  // a free, of what is not there
        }
        return false;
      });
    }
    for (const StorageId storage : alive) step.apply.emplace_back(FreeEvent{storage});
  }
}

// All forwards, then the backward: of several, a later one would use what the first has freed.
void RepairCalls(Trace& trace) {
  const bool has_calls = !trace.calls.empty() && trace.backwards.size() < 2;
  trace.calls.clear();
  if (!has_calls) return;
  for (std::int32_t f = 0; std::cmp_less(f, trace.forwards.size()); ++f)
    trace.calls.emplace_back(TracedForward{f});
  if (!trace.backwards.empty()) trace.calls.emplace_back(TracedBackward{0});
}

// Points of a table ascend.
void RepairCluster(Cluster& cluster) {
  const auto ascending = [](auto& points, auto place) {
    std::ranges::sort(points, {}, place);
    const auto again = std::ranges::unique(points, {}, place);
    points.erase(again.begin(), again.end());
  };
  Device& device = cluster.device;
  for (std::vector<ComputeRate>* rates : {&device.matmul, &device.attention, &device.attention_backward}) {
    for (ComputeRate& rate : *rates) {
      ascending(rate.efficiency, &EfficiencyPoint::flops);
      std::erase_if(rate.shapes, [](const MatmulRow& row) { return row.points.empty(); });
      for (MatmulRow& row : rate.shapes) ascending(row.points, &MatmulPoint::inner);
      ascending(rate.shapes, &MatmulRow::output_elements);
    }
  }
  ascending(device.memory_efficiency, &BandwidthPoint::moved_bytes);
  ascending(cluster.sources, &FigureSource::figure);
  for (CollectiveTable& table : cluster.collectives) {
    ascending(table.points, &CollectivePoint::full_tensor_bytes);
  }
}

// Dimensions of other names and sizes, of few ranks together.
void RepairMesh(Strategy& strategy) {
  std::set<std::string> names;
  for (StrategyMeshDim& dim : strategy.mesh) {
    MakeUnique(dim.name, names);
    dim.size = 1 + dim.size % 8;
  }
  if (!strategy.data_parallel) return;
  DataParallelDims& dims = *strategy.data_parallel;
  const std::vector<std::string> all(names.begin(), names.end());
  dims.shard.assign(all.begin(), all.begin() + static_cast<std::ptrdiff_t>(all.size() / 2));
  dims.replicate.assign(all.begin() + static_cast<std::ptrdiff_t>(all.size() / 2), all.end());
}

void RepairOptimizer(Optimizer& optimizer) {
  if (optimizer.kind == OptimizerKind::kMuon) optimizer.kind = OptimizerKind::kAdamW;
  if (optimizer.muon) {
    optimizer.in_backward = false;
    optimizer.maximize = false;
    optimizer.muon->ns_steps = 1 + optimizer.muon->ns_steps % 10;
    if (optimizer.muon->compute.empty()) optimizer.muon->dist_muon = false;
    if (optimizer.muon->dist_muon) optimizer.muon->begin_in_backward = false;
    for (MatrixRule& rule : optimizer.muon->compute) {
      if (optimizer.muon->dist_muon && rule.compute == MatrixCompute::kReplicated)
        rule.compute = MatrixCompute::kOwned;
      if (rule.compute != MatrixCompute::kOwned)
        rule = {.parameters = rule.parameters, .compute = rule.compute};
    }
  }
  const bool adam = optimizer.kind == OptimizerKind::kAdam || optimizer.kind == OptimizerKind::kAdamW;
  optimizer.momentum = optimizer.momentum && optimizer.kind == OptimizerKind::kSgd;
  optimizer.nesterov = optimizer.nesterov && optimizer.momentum;
  optimizer.amsgrad = optimizer.amsgrad && adam;
  optimizer.capturable = optimizer.capturable && adam;
  if (optimizer.kind == OptimizerKind::kAdafactor) optimizer.implementation.reset();
}

// A call that may stand anywhere.
void RepairCall(ModuleCall& call) {
  call.method = call.modules.empty() ? "set_requires_gradient_sync" : "set_modules_to_forward_prefetch";
  call.flags.clear();
}

template <typename T>
T Random(std::uint64_t seed) {
  T value;
  RandomFill(seed).Fill(value);
  return value;
}

}  // namespace

Trace RandomTrace(std::uint64_t seed) {
  Trace trace = Random<Trace>(seed);
  std::set<std::string> parameters;
  for (Parameter& parameter : trace.parameters) MakeUnique(parameter.fqn, parameters);
  RepairModules(trace);
  RepairCommunicators(trace);
  std::vector<ModuleId> canonical;
  for (std::size_t m = 0; m < trace.modules.size(); ++m)
    canonical.push_back(m == 2 ? 1 : static_cast<ModuleId>(m));
  MemoryRepair memory(trace);
  std::map<std::pair<ModuleId, std::int32_t>, std::int32_t> outputs;  // of the first forward
  for (std::size_t f = 0; f < trace.forwards.size(); ++f) {
    std::map<std::pair<ModuleId, std::int32_t>, std::int32_t> here;
    RepairForward(trace.forwards[f], canonical, memory, here);
    if (f == 0) outputs = std::move(here);
  }
  if (trace.forwards.empty()) trace.backwards.clear();
  for (Pass& pass : trace.backwards) RepairBackward(pass, trace, canonical, memory, outputs);
  RepairCalls(trace);
  RepairOptimizerSteps(trace);
  return trace;
}

Cluster RandomCluster(std::uint64_t seed) {
  Cluster cluster = Random<Cluster>(seed);
  RepairCluster(cluster);
  return cluster;
}
Strategy RandomStrategy(std::uint64_t seed) {
  Strategy strategy = Random<Strategy>(seed);
  // One that is built in has a block of its own; another one has few calls.
  const bool is_own = !strategy.policy_knobs.empty() && strategy.setup.empty();
  strategy.policy = is_own ? "own" : "fsdp2";
  if (!is_own) strategy.policy_knobs.clear();
  RepairMesh(strategy);
  RepairOptimizer(strategy.optimizer);
  for (UnitRule& rule : strategy.units) {
    rule.data_parallel.reset();
    const bool has_meshes = strategy.pytorch.value_or(kNewestPyTorch) >= PyTorchVersion::k2_15 && !rule.group;
    if (!has_meshes || strategy.mesh.empty()) rule.parameter_meshes.clear();
    for (ParameterMeshRule& own : rule.parameter_meshes) {
      own.data_parallel = {.shard = {strategy.mesh.front().name}, .replicate = {}};
    }
    if (rule.modules.empty()) rule.modules = {""};
  }
  if (strategy.activation_offload && strategy.activation_offload->modules.empty())
    strategy.activation_offload->modules = {"layers.*"};
  for (ModuleCall& call : strategy.setup) RepairCall(call);
  std::set<std::int32_t> ran;  // a backward is of what ran forward
  for (StepProgram& step : strategy.program) {
    for (ProgramCall& call : step) {
      if (const auto* forward = std::get_if<ForwardCall>(&call)) ran.insert(forward->microbatch);
      if (auto* backward = std::get_if<BackwardCall>(&call))
        backward->microbatches.assign(ran.begin(), ran.end());
      if (auto* module = std::get_if<ModuleCall>(&call)) RepairCall(*module);
    }
    std::erase_if(step, [&](const ProgramCall& call) {
      const auto* backward = std::get_if<BackwardCall>(&call);
      const bool is_call = std::holds_alternative<ModuleCall>(call);
      return (is_own && is_call) || (backward != nullptr && backward->microbatches.empty());
    });
  }
  return strategy;
}
Recording RandomRecording(std::uint64_t seed) {
  Recording recording = Random<Recording>(seed);
  recording.rank %= recording.world_size;
  for (std::size_t i = 0; i < recording.places.size(); ++i) {
    RecordedId& forward = recording.places[i].forward;
    forward = i == 0 || forward < 0 ? -1 : forward % static_cast<RecordedId>(i);
  }
  for (std::size_t i = 0; i < recording.threads.size(); ++i) {
    RecordedThread& thread = recording.threads[i];
    thread.works_for =
        i + 1 < recording.threads.size() && thread.works_for >= 0 ? static_cast<RecordedId>(i + 1) : -1;
  }
  for (RecordedCommunicator& communicator : recording.communicators) {
    communicator.rank %= communicator.size;
    communicator.ranks.clear();
    const bool is_world = communicator.size == recording.world_size && communicator.size < 100;
    for (std::int64_t rank = 0; is_world && rank < communicator.size; ++rank) {
      communicator.ranks.push_back(rank);
    }
    if (is_world) communicator.rank = recording.rank;
  }
  std::int64_t records = 0;
  for (RecordingEvent& any : recording.events) {
    std::visit(
        [&]<typename Event>(Event& event) {
          const auto repair = [](std::vector<MemoryRegion>& regions) {
            for (MemoryRegion& region : regions) {
              region.address %= 1 << 20;
              region.strides.resize(region.strides.empty() ? 0 : region.shape.size());
              for (std::int64_t& stride : region.strides) stride %= 100;
            }
          };
          if constexpr (requires { event.reads; }) repair(event.reads);
          if constexpr (requires { event.writes; }) repair(event.writes);
          if constexpr (std::is_same_v<Event, IssuedRecord>) event.event = records++;
          if constexpr (std::is_same_v<Event, PhaseEnded>) event.phase = event.step > 0 ? "forward" : "setup";
          if constexpr (std::is_same_v<Event, IssuedCollective>) {
            const std::int64_t size =
                recording.communicators[static_cast<std::size_t>(event.communicator)].size;
            const bool is_message =
                event.kind == CollectiveKind::kSend || event.kind == CollectiveKind::kReceive;
            event.peer = is_message ? static_cast<std::int32_t>((event.peer + 1) % size) : -1;
          }
        },
        any);
    const bool waits = std::visit(
        []<typename Event>(const Event& event) {
          return requires { event.event; }
          &&!std::is_same_v<Event, IssuedRecord>;
        },
        any);
    if (waits) any = PhaseEnded{"forward", 1};
    // One wait behind each record: the reader wants the number to be known.
  }
  if (records > 0) recording.events.emplace_back(IssuedWait{0, -1, 0, records - 1});
  return recording;
}
Report RandomReport(std::uint64_t seed) { return Random<Report>(seed); }
StateLayout RandomStateLayout(std::uint64_t seed) { return Random<StateLayout>(seed); }
ReshardPlan RandomReshard(std::uint64_t seed) { return Random<ReshardPlan>(seed); }

namespace {

// Each exchange is of one matrix, the first parameter of a unit of its own. Others are left out.
void RepairExchanges(Plan& plan) {
  std::size_t unit = 0;
  for (Exchange& exchange : plan.exchanges) {
    exchange.matrices.clear();
    for (; unit < plan.units.size() && exchange.matrices.empty(); ++unit) {
      Unit& of = plan.units[unit];
      if (of.parameters.empty() || of.shard_communicator < 0) continue;
      of.layout = LayoutKind::kPerParameter;
      UnitParameter& parameter = of.parameters.front();
      parameter.shape = {6, 5};
      parameter.shard_dim = 0;
      parameter.muon = parameter.requires_grad = true;
      exchange.communicator = of.shard_communicator;
      exchange.matrices = {{.unit = static_cast<UnitId>(unit),
                            .parameter = 0,
                            .owner = static_cast<std::int32_t>(unit % 2) - 1}};
    }
  }
  std::erase_if(plan.exchanges, [](const Exchange& exchange) { return exchange.matrices.empty(); });
  const auto last = static_cast<ExchangeId>(plan.exchanges.size()) - 1;
  const auto repair = [&](InstructionList& instructions) {
    for (Instruction& i : instructions.Edit()) i.exchange = std::min(i.exchange, last);
  };
  for (PlanStep& step : plan.steps) {
    for (Trigger& trigger : step.triggers) repair(trigger.instructions);
  }
  for (Procedure& procedure : plan.procedures) repair(procedure.instructions);
}

}  // namespace

Plan RandomPlan(std::uint64_t seed) {
  Plan plan = Random<Plan>(seed);
  RepairCluster(plan.cluster);
  if (plan.steps.empty()) plan.steps.push_back({.name = "steady"});
  plan.steady_step = static_cast<std::int32_t>(plan.steps.size()) - 1;
  InstructionSharing sharing;
  for (PlanStep& step : plan.steps) {
    for (Trigger& trigger : step.triggers) AfterReading(trigger, sharing);
  }
  for (Unit& unit : plan.units) {
    for (UnitParameter& parameter : unit.parameters) {
      if (parameter.shape.empty()) parameter.shape = {1};
      parameter.shard_dim %= static_cast<std::int32_t>(parameter.shape.size());
    }
  }
  RepairExchanges(plan);
  for (Segment& segment : plan.segments) {
    for (SegmentEntry& entry : segment.entries) {
      auto* op = std::get_if<OperatorEvent>(&entry);
      if (op == nullptr || !op->collective || op->collective->communicator >= 0) continue;
      op->collective.reset();
    }
  }
  const auto parameters_of = [&](UnitId unit) {
    return unit < 0 ? 0
                    : static_cast<std::int32_t>(plan.units[static_cast<std::size_t>(unit)].parameters.size());
  };
  for (Buffer& buffer : plan.buffers) {
    std::erase_if(buffer.parameters,
                  [&](std::int32_t parameter) { return parameter >= parameters_of(buffer.unit); });
  }
  for (Segment& segment : plan.segments) {
    std::erase_if(segment.grads,
                  [&](const SegmentGrad& grad) { return grad.parameter >= parameters_of(grad.unit); });
    if (!segment.grads.empty()) segment.phase = SegmentPhase::kBackward;
  }
  const auto place = [](const Procedure& procedure) { return std::pair(procedure.unit, procedure.kind); };
  std::ranges::stable_sort(plan.procedures, {}, place);
  const auto same = std::ranges::unique(plan.procedures, {}, place);
  plan.procedures.erase(same.begin(), same.end());
  return plan;
}

}  // namespace shardplan::test
