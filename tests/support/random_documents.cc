#include "tests/support/random_documents.h"

#include <algorithm>
#include <array>
#include <random>
#include <set>
#include <string>

#include "schemas/src/diff/field_diff.h"
#include "schemas/src/documents/enum_names.h"
#include "schemas/src/documents/plan_fields.h"
#include "schemas/src/documents/report_fields.h"

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

// Events without a tensor, parameter or module to refer to, or beyond the pass's forwards, are dropped.
void RepairPass(Pass& pass, bool backward, const Trace& trace, std::set<StorageId>& used) {
  if (!backward) pass.forwards.clear();
  const auto tensors = static_cast<TensorId>(pass.tensors.size());
  const auto forwards = static_cast<std::int32_t>(pass.forwards.size());
  const auto outside = [&](const std::vector<TensorId>& ids) {
    return std::ranges::any_of(ids, [&](TensorId id) { return id >= tensors; });
  };
  std::erase_if(pass.events, [&](const TraceEvent& event) {
    if (const auto* enter = std::get_if<EnterEvent>(&event)) return outside(enter->inputs);
    if (const auto* exit = std::get_if<ExitEvent>(&event)) return outside(exit->outputs);
    if (const auto* ready = std::get_if<OutputGradReadyEvent>(&event)) return ready->forward >= forwards;
    if (const auto* done = std::get_if<InputsGradDoneEvent>(&event)) return done->forward >= forwards;
    return false;
  });
  std::erase_if(pass.forwards,
                [&](std::int32_t id) { return id >= static_cast<std::int32_t>(trace.forwards.size()); });
  for (const Tensor& tensor : pass.tensors) used.insert(tensor.storage);
  for (const TraceEvent& event : pass.events) {
    if (const auto* op = std::get_if<OperatorEvent>(&event)) {
      used.insert(op->reads.begin(), op->reads.end());
      used.insert(op->writes.begin(), op->writes.end());
    } else if (const auto* free = std::get_if<FreeEvent>(&event)) {
      used.insert(free->storage);
    } else if (const auto* grad = std::get_if<ParameterGradEvent>(&event)) {
      used.insert(grad->storage);
    }
  }
}

// Points of a table ascend.
void RepairCluster(Cluster& cluster) {
  const auto ascending = [](auto& points, auto place) {
    std::ranges::sort(points, {}, place);
    const auto again = std::ranges::unique(points, {}, place);
    points.erase(again.begin(), again.end());
  };
  for (ComputeRate& rate : cluster.device.matmul) ascending(rate.efficiency, &EfficiencyPoint::flops);
  for (CollectiveTable& table : cluster.collectives) {
    ascending(table.points, &CollectivePoint::full_tensor_bytes);
  }
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
  std::set<std::string> modules, parameters;
  for (Module& module : trace.modules) MakeUnique(module.fqn, modules);
  for (Parameter& parameter : trace.parameters) MakeUnique(parameter.fqn, parameters);
  std::set<StorageId> used;
  for (Pass& pass : trace.forwards) RepairPass(pass, false, trace, used);
  for (Pass& pass : trace.backwards) RepairPass(pass, true, trace, used);
  used.erase(-1);
  // Whatever is used is born in the first forward.
  for (const StorageId storage : used) {
    trace.forwards.front().events.insert(trace.forwards.front().events.begin(),
                                         AllocateEvent{.storage = storage, .size_bytes = Bytes{512}});
  }
  return trace;
}

Cluster RandomCluster(std::uint64_t seed) {
  Cluster cluster = Random<Cluster>(seed);
  RepairCluster(cluster);
  return cluster;
}
Strategy RandomStrategy(std::uint64_t seed) {
  Strategy strategy = Random<Strategy>(seed);
  std::set<std::int32_t> ran;  // a backward is of what ran forward
  for (StepProgram& step : strategy.program) {
    for (ProgramCall& call : step) {
      if (const auto* forward = std::get_if<ForwardCall>(&call)) ran.insert(forward->microbatch);
      if (auto* backward = std::get_if<BackwardCall>(&call))
        backward->microbatches.assign(ran.begin(), ran.end());
    }
  }
  return strategy;
}
Report RandomReport(std::uint64_t seed) { return Random<Report>(seed); }

Plan RandomPlan(std::uint64_t seed) {
  Plan plan = Random<Plan>(seed);
  RepairCluster(plan.cluster);
  if (plan.steps.empty()) plan.steps.push_back({.name = "steady"});
  plan.steady_step = static_cast<std::int32_t>(plan.steps.size()) - 1;
  for (Unit& unit : plan.units) {
    for (UnitParameter& parameter : unit.parameters) {
      if (parameter.shape.empty()) parameter.shape = {1};
      parameter.shard_dim %= static_cast<std::int32_t>(parameter.shape.size());
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
