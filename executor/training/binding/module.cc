// SPDX-License-Identifier: Apache-2.0
// The Python module _shardplan: the compiled half of the package shardplan.torch, which is its only user.
#include <fmt/format.h>
#include <pybind11/stl.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <chrono>
#include <cstdio>
#include <memory>
#include <optional>
#include <stdexcept>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <utility>
#include <vector>

#include "shardplan/executor/backends.h"
#include "shardplan/executor/peers.h"
#include "torch/agreement.h"
#include "training/binding/hooks.h"
#include "training/binding/plan_binding.h"
#include "training/binding/python_error.h"
#include "training/binding/python_runtime.h"
#include "training/binding/session_binding.h"

namespace shardplan::python {
namespace {

namespace py = pybind11;
using ProcessGroups = std::vector<c10::intrusive_ptr<c10d::ProcessGroup>>;
using StorePointer = c10::intrusive_ptr<c10d::Store>;
using PeersPointer = std::shared_ptr<executor::Peers>;

std::chrono::milliseconds Milliseconds(double seconds) {
  return std::chrono::milliseconds(static_cast<std::int64_t>(seconds * 1e3));
}

template <typename T>
T ValueOrThrow(Result<T> result) {
  if (!result) throw std::runtime_error("shardplan: " + ToString(result.error()));
  return std::move(*result);
}

// Says it at once: whoever started the ranks may end them all before a collective fails.
std::function<void(const std::string&)> Speaker(std::int64_t rank) {
  return [rank](const std::string& text) {
    std::fputs(fmt::format("shardplan: rank {}: {}\n", rank, text).c_str(), stderr);
  };
}

// cpu: collectives go through `groups` (by communicator; None where the size is 1). cuda: NCCL communicators
// of the executor's own, made through `store`. names: of the plan's ranks, as people know them.
std::shared_ptr<PythonRuntime> MakeRuntime(std::shared_ptr<Plan> plan, std::int64_t rank, at::Device device,
                                           ProcessGroups groups, StorePointer store, PeersPointer peers,
                                           std::vector<std::int64_t> names, double timeout_s, bool arena) {
  const auto memory = arena ? executor::MemorySource::kArena : executor::MemorySource::kAllocator;
  const auto timeout = Milliseconds(timeout_s);
  std::unique_ptr<executor::TorchDevice> torch_device;
  std::unique_ptr<executor::Collectives> collectives;
  std::shared_ptr<executor::DeviationConsensus> consensus;
  if (store && names.size() > 1)
    consensus = std::make_shared<executor::DeviationConsensus>(store, rank, names, timeout, peers,
                                                               Speaker(names[rank]));
  if (device.is_cuda()) {
    torch_device = ValueOrThrow(executor::MakeCudaDevice(device.index(), memory));
    collectives = ValueOrThrow(executor::MakeNcclCollectives(
        *torch_device,
        {timeout, std::move(store), plan->world_size, std::move(peers), std::move(names), consensus}));
  } else if (device.is_cpu()) {
    torch_device = executor::MakeCpuDevice(memory);
    collectives = executor::MakeProcessGroupCollectives(
        *torch_device, {groups, timeout, std::move(store), std::move(peers), std::move(names), consensus});
  } else {
    throw std::invalid_argument("shardplan runs on cpu and cuda, not on " + device.str());
  }
  auto custom = std::make_unique<CustomCollectives>(std::move(collectives), *torch_device, groups);
  return std::make_shared<PythonRuntime>(std::move(plan), rank, std::move(torch_device), std::move(custom),
                                         std::move(groups), std::move(consensus));
}

PyRef OrEmpty(const py::object& object) { return object.is_none() ? PyRef() : PyRef::Borrow(object.ptr()); }

std::vector<ParameterSlot> ToSlots(const py::list& slots) {
  std::vector<ParameterSlot> result;
  for (const py::handle& item : slots) {
    const auto [module, dict, name, fast] = py::cast<std::tuple<py::object, py::object, py::str, bool>>(item);
    PyRef module_reference = PyRef::Steal(PyWeakref_NewRef(module.ptr(), nullptr));
    if (!module_reference) throw py::error_already_set();
    py::str interned = name;
    PyObject* key = interned.release().ptr();
    PyUnicode_InternInPlace(&key);
    PyRef entries = dict.is_none() ? PyRef() : PyRef::Borrow(dict.ptr());
    result.push_back({std::move(module_reference), std::move(entries), PyRef::Steal(key), fast});
  }
  return result;
}

void AddParameter(PythonRuntime& runtime, UnitId unit, const py::object& shard, const py::object& unsharded,
                  const py::list& slots, const py::object& make_grad, const py::object& local_grad) {
  if (!THPVariable_Check(shard.ptr()) || !THPVariable_Check(unsharded.ptr())) {
    throw std::invalid_argument("shard and unsharded must be tensors");
  }
  runtime.AddPythonParameter(unit, std::make_unique<PythonParameter>(
                                       PyRef::Borrow(shard.ptr()), PyRef::Borrow(unsharded.ptr()),
                                       PyRef::Borrow(make_grad.ptr()), OrEmpty(local_grad), ToSlots(slots)));
}

// (parameter, its FQN, offset in the shard, shape of its data, is any of it in the shard, slots)
using VisibleTuple =
    std::tuple<py::object, std::string, std::int64_t, std::vector<std::int64_t>, bool, py::list>;

void AddFlatUnit(PythonRuntime& runtime, UnitId unit, bool original_parameters, bool trains,
                 std::optional<at::ScalarType> grad_dtype, const std::vector<VisibleTuple>& visible,
                 const std::vector<py::list>& views) {
  std::vector<VisibleParameter> parameters;
  for (const auto& [object, fqn, offset, shape, in_shard, slots] : visible) {
    if (!THPVariable_Check(object.ptr())) throw std::invalid_argument(fqn + " must be a tensor");
    parameters.push_back({PyRef::Borrow(object.ptr()), fqn, offset, shape, in_shard, ToSlots(slots)});
  }
  std::vector<std::vector<ParameterSlot>> view_slots;
  for (const py::list& slots : views) view_slots.push_back(ToSlots(slots));
  runtime.AddFlatUnit(unit, {original_parameters, trains, grad_dtype}, std::move(parameters),
                      std::move(view_slots));
}

void WriteBack(PythonRuntime& runtime, UnitId unit) {
  if (Status status = runtime.ShardedParametersRead(unit, 0); !status) {
    throw std::runtime_error("shardplan: " + ToString(status.error()));
  }
}

// modules: of the unit; they own the hooks, so these know them by their addresses only.
py::tuple Hooks(std::shared_ptr<PythonRuntime> runtime, UnitId unit, const std::vector<py::object>& modules,
                std::optional<at::ScalarType> input_dtype, std::optional<at::ScalarType> output_dtype,
                bool full_precision_in_eval) {
  std::vector<const void*> identities;
  for (const py::object& module : modules) identities.push_back(module.ptr());
  ModuleHooks hooks = MakeModuleHooks(
      std::move(runtime), {unit, std::move(identities), input_dtype, output_dtype, full_precision_in_eval});
  if (!hooks.pre_forward || !hooks.post_forward) throw py::error_already_set();
  return py::make_tuple(py::reinterpret_steal<py::object>(hooks.pre_forward.release()),
                        py::reinterpret_steal<py::object>(hooks.post_forward.release()));
}

// [(kind, unit, [(unit, parameter) of a gradient], keeps)]. A module of a unit of several has ("enter" or
// "leave", unit, [its number], False). A backward whose end no hook saw ends with "backward_over".
py::list LogOf(const std::vector<executor::Fallback::Passed>& points) {
  py::list log;
  for (const executor::Fallback::Passed& passed : points) {
    py::list grads;
    if (passed.module >= 0) {
      grads.append(passed.module);
      log.append(py::make_tuple(passed.kind == TriggerKind::kPreForward ? "enter" : "leave", passed.unit,
                                grads, false));
      continue;
    }
    for (const SegmentGrad& grad : passed.grads) grads.append(py::make_tuple(grad.unit, grad.parameter));
    const std::string kind(passed.seen ? Name(passed.kind) : "backward_over");
    log.append(py::make_tuple(kind, passed.unit, grads, passed.keeps));
  }
  return log;
}

// Raises RuntimeError, in words, when the ranks are not about to do the same.
void AgreeOrThrow(const StorePointer& store, std::int64_t place, const std::vector<std::int64_t>& ranks,
                  const std::vector<std::pair<std::string, std::string>>& facts, const std::string& failure,
                  double timeout_s, const PeersPointer& peers) {
  executor::Statement statement{.facts = {}, .failure = failure};
  for (const auto& [name, value] : facts) statement.facts.push_back({name, value});
  if (Status status = executor::Agree(store, place, ranks, statement, Milliseconds(timeout_s), peers.get());
      !status)
    throw std::runtime_error(ToString(status.error()));
}

void SetReductionHook(PythonRuntime& runtime, UnitId unit, const py::object& hook) {
  if (hook.is_none()) return runtime.SetReductionHook(unit, {});
  runtime.SetReductionHook(unit, [call = PyRef::Borrow(hook.ptr())](const at::Tensor& gradient) {
    const PyRef tensor = PyRef::Steal(THPVariable_Wrap(gradient));
    const PyRef result = PyRef::Steal(tensor ? PyObject_CallOneArg(call.get(), tensor.get()) : nullptr);
    if (!result) throw std::runtime_error(PythonError("the hook on reduced gradients").error().message);
  });
}

// Records `steps` steps, and leaves as many between them unrecorded.
void StartRecording(PythonRuntime& runtime, std::int64_t warmup, std::int64_t steps) {
  executor::RecorderOptions options = {.warmup = warmup, .steps = steps};
  const c10::Device device = runtime.torch_device();
  options.allocations =
      device.is_cuda() ? executor::CudaAllocations(device.index()) : executor::CpuAllocations();
  runtime.StartRecording(std::move(options));
}

// gathers: the unit's all_gathers; otherwise its reduce_scatters.
void SetCustomCollective(PythonRuntime& runtime, UnitId unit, bool gathers, const py::object& comm) {
  runtime.SetCustomCollective(unit, gathers ? CollectiveKind::kAllGather : CollectiveKind::kReduceScatter,
                              OrEmpty(comm));
}

PeersPointer MakePeers(StorePointer store, std::int64_t rank, std::int64_t ranks,
                       std::optional<std::int64_t> store_rank) {
  executor::PeersOptions options = {.store = std::move(store),
                                    .rank = rank,
                                    .ranks = ranks,
                                    .store_rank = store_rank,
                                    .speak = Speaker(rank)};
  return std::make_shared<executor::Peers>(std::move(options));
}

void BindPeers(py::module_& module) {
  py::class_<executor::Peers, PeersPointer>(module, "Peers")
      .def(py::init(&MakePeers), py::arg("store"), py::arg("rank"), py::arg("ranks"), py::arg("store_rank"))
      .def("leave", &executor::Peers::Leave)
      .def("fail", &executor::Peers::Fail)
      .def("dead", &executor::Peers::Dead, py::call_guard<py::gil_scoped_release>())
      .def(
          "culprit",
          [](const executor::Peers& peers, double patience_s) {
            const std::string seen = executor::AwaitCulprit(&peers, Milliseconds(patience_s));
            return seen.empty() ? peers.SilentStore().value_or("") : seen;
          },
          py::arg("patience_s"), py::call_guard<py::gil_scoped_release>());
}

void BindRuntime(py::module_& module) {
  py::class_<PythonRuntime, std::shared_ptr<PythonRuntime>>(module, "Runtime")
      .def(py::init(&MakeRuntime), py::arg("plan"), py::arg("rank"), py::arg("device"), py::arg("groups"),
           py::arg("store"), py::arg("peers"), py::arg("names"), py::arg("timeout_s"), py::arg("arena"))
      .def("set_shards", &PythonRuntime::SetShards, py::arg("unit"), py::arg("padded"))
      .def("start", &PythonRuntime::Start, py::call_guard<py::gil_scoped_release>())
      .def("unsharded_view", &PythonRuntime::UnshardedView, py::arg("unit"), py::arg("parameter"))
      .def("add_parameter", &AddParameter, py::arg("unit"), py::arg("shard"), py::arg("unsharded"),
           py::arg("slots"), py::arg("make_grad"), py::arg("local_grad"))
      .def(
          "add_extension",
          [](PythonRuntime& runtime, UnitId unit, std::int32_t parameter, const py::object& inputs,
             const py::object& finish) {
            runtime.AddExtension(unit, parameter, PyRef::Borrow(inputs.ptr()), PyRef::Borrow(finish.ptr()));
          },
          py::arg("unit"), py::arg("parameter"), py::arg("inputs"), py::arg("finish"))
      .def("set_flat_shard", &PythonRuntime::SetFlatShard, py::arg("unit"), py::arg("shard"))
      .def("add_flat_unit", &AddFlatUnit, py::arg("unit"), py::arg("original_parameters"), py::arg("trains"),
           py::arg("grad_dtype"), py::arg("visible"), py::arg("views"))
      .def("write_back", &WriteBack, py::arg("unit"))
      .def("hooks", &Hooks, py::arg("unit"), py::arg("modules"), py::arg("input_dtype"),
           py::arg("output_dtype"), py::arg("full_precision_in_eval"))
      .def("unshard", &PythonRuntime::Unshard, py::arg("unit"))
      .def("pass_call", &PythonRuntime::PassCall, py::arg("unit"), py::arg("method"))
      .def("fall_back_on_deviation",
           [](PythonRuntime& runtime, const py::object& on_step_end) {
             runtime.fallback().Enable([call = PyRef::Borrow(on_step_end.ptr())] {
               const PyRef result = PyRef::Steal(PyObject_CallNoArgs(call.get()));
               if (!result) Throw(PythonError("planning again").error());
             });
           })
      .def("on_requires_grad_change",
           [](PythonRuntime& runtime, const py::object& on_change) {
             runtime.OnRequiresGradChange(PyRef::Borrow(on_change.ptr()));
           })
      .def(
          "at_next_step",
          [](PythonRuntime& runtime, const py::object& on_begin) {
            runtime.AtNextStep(PyRef::Borrow(on_begin.ptr()));
          },
          py::arg("on_begin"))
      .def(
          "at_next_forward",
          [](PythonRuntime& runtime, const py::object& on_begin) {
            runtime.AtNextForward(PyRef::Borrow(on_begin.ptr()));
          },
          py::arg("on_begin"))
      .def("leave", &PythonRuntime::Leave, py::arg("left"))
      .def("explain_deviations",
           [](PythonRuntime& runtime, const py::object& explain) {
             runtime.ExplainDeviations(PyRef::Borrow(explain.ptr()));
           })
      .def(
          "on_left",
          [](PythonRuntime& runtime, const py::object& on_left) {
            runtime.OnLeft(PyRef::Borrow(on_left.ptr()));
          },
          py::arg("on_left"))
      .def(
          "set_activations",
          [](PythonRuntime& runtime, const py::object& activations) {
            runtime.SetActivations(PyRef::Borrow(activations.ptr()));
          },
          py::arg("activations"))
      .def("optimizer_steps", &PythonRuntime::OptimizerSteps)
      .def("optimizer_stepped", &PythonRuntime::OptimizerStepped)
      .def("start_recording", &StartRecording, py::arg("warmup"), py::arg("steps"))
      .def("stop_recording", &PythonRuntime::StopRecording)
      .def_property_readonly("has_recorded", &PythonRuntime::HasRecorded)
      .def_property_readonly("recorded_steps", &PythonRuntime::recorded_steps)
      .def("await_optimizer", &PythonRuntime::AwaitOptimizer)
      .def("expect_optimizer", &PythonRuntime::ExpectOptimizer)
      .def_property_readonly("optimizer_seen", &PythonRuntime::optimizer_seen)
      .def("set_requires_gradient_sync", &PythonRuntime::SetRequiresGradientSync, py::arg("units"),
           py::arg("value"))
      .def("set_is_last_backward", &PythonRuntime::SetIsLastBackward, py::arg("value"))
      .def("abandon", &PythonRuntime::Abandon)
      .def("restart", &PythonRuntime::Restart)
      .def("alike", &PythonRuntime::Alike, py::arg("number"))
      .def("tell", &PythonRuntime::Tell, py::arg("text"))
      .def("show_shards", &PythonRuntime::ShowShards, py::arg("show"))
      .def_property_readonly("deviation",
                             [](const PythonRuntime& runtime) { return runtime.fallback().deviation(); })
      .def_property_readonly("log",
                             [](const PythonRuntime& runtime) { return LogOf(runtime.fallback().log()); })
      .def_property_readonly("planned_log",
                             [](const PythonRuntime& runtime) { return LogOf(runtime.PlannedLog()); })
      .def_property_readonly("full_precision_forwards", &PythonRuntime::full_precision_forwards)
      .def(
          "set_adopt",
          [](PythonRuntime& runtime, const py::object& adopt) {
            runtime.parameter_changes().SetAdopt(PyRef::Borrow(adopt.ptr()));
          },
          py::arg("adopt"))
      .def("suspend", &PythonRuntime::Suspend, py::arg("reason"))
      .def("set_reduction_hook", &SetReductionHook, py::arg("unit"), py::arg("hook"))
      .def("set_custom_collective", &SetCustomCollective, py::arg("unit"), py::arg("gathers"),
           py::arg("comm"))
      .def("reshard", &PythonRuntime::Reshard, py::arg("unit"))
      .def_property_readonly("between_steps", &PythonRuntime::BetweenSteps)
      .def_property_readonly("forwards", &PythonRuntime::forwards)
      .def_property_readonly("backwards", &PythonRuntime::backwards)
      .def_property("step", &PythonRuntime::step, &PythonRuntime::CountFrom)
      .def_property_readonly("next_point",
                             [](const PythonRuntime& runtime) {
                               const executor::TriggerKey key = runtime.NextPoint();
                               return std::tuple(std::string(Name(key.kind)), key.unit, key.microbatch);
                             })
      .def_property_readonly("where", &PythonRuntime::Where);
}

}  // namespace
}  // namespace shardplan::python

PYBIND11_MODULE(_shardplan, module) {
  module.doc() = "The compiled half of shardplan.torch.";
  // The types of the constructors' arguments.
  pybind11::module_::import("torch._C._distributed_c10d");
  shardplan::python::BindPlan(module);
  shardplan::python::BindPeers(module);
  shardplan::python::BindRuntime(module);
  shardplan::python::BindSession(module);
  module.attr("__version__") = SHARDPLAN_VERSION;
  module.def(
      "count_cpu_memory", [] { (void)shardplan::executor::CountCpuAllocations(); },
      "From now on what this thread allocates for CPU tensors is counted.");
  module.def("agree", &shardplan::python::AgreeOrThrow, pybind11::arg("store"), pybind11::arg("place"),
             pybind11::arg("ranks"), pybind11::arg("facts"), pybind11::arg("failure"),
             pybind11::arg("timeout_s"), pybind11::arg("peers"),
             pybind11::call_guard<pybind11::gil_scoped_release>(),
             "Compares what the ranks say of themselves (docs/reference/python.md, \"What apply does\").");
}
