// SPDX-License-Identifier: Apache-2.0
#include "training/binding/plan_binding.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>

#include "shardplan/executor/collectives.h"
#include "shardplan/schemas/instruction_set.h"
#include "shardplan/schemas/io.h"
#include "shardplan/schemas/plan.h"
#include "shardplan/schemas/pytorch_rules.h"
#include "shardplan/verifier/verifier.h"

namespace shardplan::python {
namespace {

namespace py = pybind11;

std::shared_ptr<Plan> ReadPlanOrThrow(const std::string& path) {
  Result<Plan> plan = ReadPlan(path);
  if (!plan) throw std::invalid_argument(ToString(plan.error()));
  return std::make_shared<Plan>(std::move(*plan));
}

// The verifier's explanations; empty: the plan verifies.
std::vector<std::string> VerifyPlan(const Plan& plan) {
  std::vector<std::string> explanations;
  for (const Violation& violation : Verify(plan)) explanations.push_back(Explain(plan, violation));
  return explanations;
}

// The release of PyTorch that the plan follows. Nothing: its policy is the same in all that are planned.
std::optional<std::string> ReleaseOf(const Plan& plan) {
  const auto is_of_policy = [&](const PyTorchRule& rule) { return rule.policy == plan.strategy.policy; };
  if (std::ranges::none_of(kPyTorchRules, is_of_policy)) return std::nullopt;
  return std::string(Name(PyTorchOfPlan(plan.strategy)));
}

// Warnings; ValueError when the plan is not to be used.
std::vector<std::string> CheckPlanForUse(const Plan& plan) {
  Result<std::vector<std::string>> warnings = CheckForUse(plan, "verify=False trains by it as it is");
  if (!warnings) throw std::invalid_argument(ToString(warnings.error()));
  return std::move(*warnings);
}

std::optional<std::string> OptionalName(const std::optional<DType>& dtype) {
  if (!dtype) return std::nullopt;
  return std::string(Name(*dtype));
}

void BindUnits(py::module_& module) {
  py::class_<ExtensionBuffer>(module, "ExtensionBuffer")
      .def_property_readonly("dtype", [](const ExtensionBuffer& b) { return std::string(Name(b.dtype)); })
      .def_readonly("numel", &ExtensionBuffer::numel);
  py::class_<UnitParameter>(module, "UnitParameter")
      .def_readonly("fqn", &UnitParameter::fqn)
      .def_readonly("shared_with", &UnitParameter::shared_with)
      .def_readonly("shape", &UnitParameter::shape)
      .def_property_readonly("dtype", [](const UnitParameter& p) { return std::string(Name(p.dtype)); })
      .def_readonly("requires_grad", &UnitParameter::requires_grad)
      .def_property_readonly("grad_dtype", [](const UnitParameter& p) { return OptionalName(p.grad_dtype); })
      .def_property_readonly("made_grad_dtype",
                             [](const UnitParameter& p) { return OptionalName(p.made_grad_dtype); })
      .def_property_readonly("placements",
                             [](const UnitParameter& p) {
                               py::list placements;
                               for (const ParameterPlacement& placement : p.placements) {
                                 py::dict fields(py::arg("mesh_dim") = placement.mesh_dim,
                                                 py::arg("size") = placement.size,
                                                 py::arg("dim") = placement.dim);
                                 if (placement.grad_partial) fields["grad_partial"] = true;
                                 placements.append(fields);
                               }
                               return placements;
                             })
      .def_readonly("shard_dim", &UnitParameter::shard_dim)
      .def_readonly("gathered", &UnitParameter::gathered)
      .def_readonly("unsharded", &UnitParameter::unsharded)
      .def_readonly("flat_offset", &UnitParameter::flat_offset);
  py::class_<Unit>(module, "Unit")
      .def_readonly("fqn", &Unit::fqn)
      .def_readonly("modules", &Unit::modules)
      .def_readonly("parameter_group", &Unit::parameter_group)
      .def_property_readonly("flat", [](const Unit& unit) { return unit.layout == LayoutKind::kFlat; })
      .def_readonly("parameters", &Unit::parameters)
      .def_property_readonly("param_dtype",
                             [](const Unit& unit) { return std::string(Name(unit.param_dtype)); })
      .def_property_readonly("reduce_dtype",
                             [](const Unit& unit) { return std::string(Name(unit.reduce_dtype)); })
      .def_readonly("shard_communicator", &Unit::shard_communicator)
      .def_readonly("replicate_communicator", &Unit::replicate_communicator)
      .def_readonly("flat_numel", &Unit::flat_numel);
}

void BindStrategy(py::module_& module) {
  py::class_<MixedPrecision>(module, "MixedPrecision")
      .def_property_readonly("param_dtype",
                             [](const MixedPrecision& mp) { return OptionalName(mp.param_dtype); })
      .def_property_readonly("reduce_dtype",
                             [](const MixedPrecision& mp) { return OptionalName(mp.reduce_dtype); })
      .def_property_readonly("output_dtype",
                             [](const MixedPrecision& mp) { return OptionalName(mp.output_dtype); })
      .def_property_readonly("buffer_dtype",
                             [](const MixedPrecision& mp) { return OptionalName(mp.buffer_dtype); })
      .def_readonly("keep_low_precision_grads", &MixedPrecision::keep_low_precision_grads)
      .def_readonly("cast_forward_inputs", &MixedPrecision::cast_forward_inputs)
      .def_readonly("cast_root_forward_inputs", &MixedPrecision::cast_root_forward_inputs);
  py::class_<DataParallelDims>(module, "DataParallelDims")
      .def_readonly("shard", &DataParallelDims::shard)
      .def_readonly("replicate", &DataParallelDims::replicate);
  py::class_<ParameterMeshRule>(module, "ParameterMeshRule")
      .def_readonly("parameters", &ParameterMeshRule::parameters)
      .def_readonly("data_parallel", &ParameterMeshRule::data_parallel);
  py::class_<UnitRule>(module, "UnitRule")
      .def_readonly("modules", &UnitRule::modules)
      .def_readonly("group", &UnitRule::group)
      .def_readonly("data_parallel", &UnitRule::data_parallel)
      .def_readonly("parameter_meshes", &UnitRule::parameter_meshes)
      .def_readonly("mixed_precision", &UnitRule::mixed_precision);
  py::class_<StrategyMeshDim>(module, "MeshDim")
      .def_readonly("name", &StrategyMeshDim::name)
      .def_readonly("size", &StrategyMeshDim::size);
  py::class_<Communicator>(module, "Communicator")
      .def_readonly("name", &Communicator::name)
      .def_readonly("size", &Communicator::size)
      .def("group_of", &executor::GroupOf, py::arg("rank"));
}

}  // namespace

// Equal for plans whose ranks meet each other in every collective: which parameters of which unit, in which
// order and size.
std::string DigestOfCollectives(const Plan& plan) {
  std::string text = fmt::format("{}", plan.steady_step);
  const auto add = [&](BufferId id) {
    if (id < 0) return;
    const Buffer& buffer = plan.buffers[id];
    text += fmt::format(" {} {} {} {}", buffer.unit, Name(buffer.role), Name(buffer.dtype),
                        fmt::join(buffer.parameters, ","));
    for (const Bytes part : buffer.parts_bytes) text += fmt::format(" {}", part.value);
  };
  for (const PlanStep& step : plan.steps) {
    text += "\n";
    for (const Trigger& trigger : step.triggers) {
      for (const Instruction& i : trigger.instructions) {
        if (!IsCollective(i.kind)) continue;
        text += fmt::format("{} {} {} {}", Name(i.kind), i.communicator, static_cast<int>(i.reduce_op),
                            i.divisor);
        add(i.src);
        add(i.dst);
      }
    }
  }
  return Digest(text);
}

void BindPlan(py::module_& module) {
  BindUnits(module);
  BindStrategy(module);
  py::class_<Plan, std::shared_ptr<Plan>>(module, "Plan")
      .def_readonly("model", &Plan::model)
      .def_readonly("policy", &Plan::policy)
      .def_readonly("world_size", &Plan::world_size)
      .def_readonly("mesh", &Plan::mesh)
      .def_readonly("units", &Plan::units)
      .def_property_readonly("has_operators",
                             [](const Plan& plan) {
                               return std::ranges::any_of(plan.segments, [](const Segment& segment) {
                                 return segment.phase != SegmentPhase::kOptimizer && !segment.entries.empty();
                               });
                             })
      .def_property_readonly("json", [](const Plan& plan) { return ToJson(plan); })
      .def_property_readonly("digest", [](const Plan& plan) { return Digest(ToJson(plan)); })
      .def_property_readonly("digest_of_collectives", &DigestOfCollectives)
      .def_property_readonly("pytorch", &ReleaseOf)
      .def_property_readonly("strategy_json", [](const Plan& plan) { return ToJson(plan.strategy); })
      .def_property_readonly("cluster_json", [](const Plan& plan) { return ToJson(plan.cluster); })
      .def_readonly("communicators", &Plan::communicators)
      .def(
          "shards_on_host",
          [](const Plan& plan, UnitId unit) {
            return std::ranges::any_of(plan.buffers, [&](const Buffer& buffer) {
              return buffer.unit == unit && buffer.role == BufferRole::kParamSharded &&
                     buffer.memory != MemoryKind::kDevice;
            });
          },
          py::arg("unit"))
      .def_property_readonly("activations",
                             [](const Plan& plan) {
                               std::map<UnitId, std::vector<std::int64_t>> parts;
                               for (const Buffer& buffer : plan.buffers) {
                                 if (buffer.role != BufferRole::kActivation) continue;
                                 for (const Bytes part : buffer.parts_bytes)
                                   parts[buffer.unit].push_back(part.value);
                               }
                               return parts;
                             })
      .def_property_readonly("use_orig_params",
                             [](const Plan& plan) { return plan.strategy.fsdp1.use_orig_params; })
      .def_property_readonly("full_precision_in_eval",
                             [](const Plan& plan) { return plan.strategy.fsdp1.full_precision_in_eval; })
      .def_property_readonly("ignored_modules",
                             [](const Plan& plan) { return plan.strategy.fsdp1.ignored_modules; })
      .def_property_readonly("ignored_parameters",
                             [](const Plan& plan) { return plan.strategy.ignored_parameters; })
      .def_property_readonly("unit_rules", [](const Plan& plan) { return plan.strategy.units; })
      .def_property_readonly("data_parallel", [](const Plan& plan) { return plan.strategy.data_parallel; })
      .def_property_readonly("mixed_precision",
                             [](const Plan& plan) { return plan.strategy.mixed_precision; });
  module.def(
      "read_plan", &ReadPlanOrThrow, py::arg("path"),
      "Reads a plan document; ValueError with the file, the JSON pointer, what was found and expected.");
  module.def("verify_plan", &VerifyPlan, py::arg("plan"), py::call_guard<py::gil_scoped_release>(),
             "What the verifier objects to, a paragraph each; empty when the plan is safe to run.");
  module.def(
      "check_plan_for_use", &CheckPlanForUse, py::arg("plan"), py::call_guard<py::gil_scoped_release>(),
      "A paragraph for each fault of PyTorch's that the plan carries; ValueError, in the verifier's words, "
      "for anything else that does not verify.");
}

}  // namespace shardplan::python
