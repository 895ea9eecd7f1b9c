// SPDX-License-Identifier: Apache-2.0
#include "training/binding/parameters/extensions.h"

#include <fmt/format.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>

#include "shardplan/schemas/layout.h"
#include "training/binding/python_error.h"

namespace shardplan::python {
namespace {

std::int64_t BytesOf(const ExtensionBuffer& tensor) { return tensor.numel * SizeBytes(tensor.dtype); }

// Bytes of a parameter that one rank gathers.
std::int64_t GatheredBytes(const Unit& unit, const UnitParameter& parameter, std::int64_t ranks) {
  std::int64_t bytes = 0;
  for (const ExtensionBuffer& tensor : parameter.gathered) bytes += BytesOf(tensor);
  if (!parameter.gathered.empty()) return bytes;
  return PaddedPieceNumel(parameter, ranks) * SizeBytes(parameter.param_dtype.value_or(unit.param_dtype));
}

at::Tensor AsBytes(const at::Tensor& tensor) { return tensor.reshape({-1}).view(at::kByte); }

// A list of tensors; empty with a Python error set when it is something else.
std::vector<at::Tensor> Tensors(PyObject* list) {
  std::vector<at::Tensor> tensors;
  const PyRef sequence = PyRef::Steal(PySequence_Fast(list, "expected a list of tensors"));
  if (!sequence) return tensors;
  for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(sequence.get()); ++i) {
    PyObject* item = PySequence_Fast_GET_ITEM(sequence.get(), i);
    if (!THPVariable_Check(item)) {
      PyErr_SetString(PyExc_TypeError, "expected a list of tensors");
      return {};
    }
    tensors.push_back(THPVariable_Unpack(item));
  }
  return tensors;
}

}  // namespace

Extensions::Extensions(const Plan& plan, executor::TorchDevice& device)
    : plan_(plan),
      device_(device),
      of_unit_(plan.units.size()),
      unsharded_(plan.units.size(), -1),
      others_(plan.units.size(), -1),
      allocated_(plan.units.size(), -1) {
  for (std::size_t b = 0; b < plan.buffers.size(); ++b) {
    const Buffer& buffer = plan.buffers[b];
    std::vector<BufferId>* const kind = buffer.role == BufferRole::kParamUnsharded       ? &unsharded_
                                        : buffer.role == BufferRole::kExtensionGathered  ? &others_
                                        : buffer.role == BufferRole::kExtensionUnsharded ? &allocated_
                                                                                         : nullptr;
    if (kind == nullptr || buffer.unit < 0) continue;
    if ((*kind)[buffer.unit] < 0) (*kind)[buffer.unit] = static_cast<BufferId>(b);
  }
}

void Extensions::Add(UnitId unit, std::int32_t parameter, PyRef inputs, PyRef finish) {
  of_unit_[unit][parameter] = {std::move(inputs), std::move(finish)};
}

Result<bool> Extensions::Move(BufferId src, BufferId dst) {
  const Buffer& from = plan_.buffers[src];
  const Buffer& to = plan_.buffers[dst];
  if (from.role == BufferRole::kAllGatherOutput) {
    if (Status status = CopyOthers(from.unit, AsBytes(device_.Part(src, 0)), src); !status) {
      return std::unexpected(status.error());
    }
    return false;
  }
  if (from.role == BufferRole::kParamSharded && to.role == BufferRole::kAllGatherOutput) {
    if (Status status = FillShards(src); !status) return std::unexpected(status.error());
    return false;
  }
  if (to.role != BufferRole::kAllGatherInput) return false;
  const std::vector<std::int32_t> held = ParametersOf(plan_, to);
  const std::vector<std::int32_t> copied = ParametersOf(plan_, from);
  bool filled = false;
  for (std::size_t i = 0; i < held.size(); ++i) {
    const auto extension = of_unit_[to.unit].find(held[i]);
    if (extension == of_unit_[to.unit].end() || std::ranges::find(copied, held[i]) == copied.end()) continue;
    const at::Tensor part = device_.Part(dst, static_cast<std::int32_t>(i));
    if (Status status = FillInput(extension->second, part); !status) return std::unexpected(status.error());
    filled = true;
  }
  return filled;
}

// An extension whose tensor is like the shard is gathered straight from the shard's buffer.
Status Extensions::FillShards(BufferId shard) {
  const UnitId unit = plan_.buffers[shard].unit;
  const std::vector<std::int32_t> held = ParametersOf(plan_, plan_.buffers[shard]);
  for (std::size_t i = 0; i < held.size(); ++i) {
    const auto extension = of_unit_[unit].find(held[i]);
    const at::Tensor part = device_.Part(shard, static_cast<std::int32_t>(i));
    if (extension == of_unit_[unit].end() || part.numel() == 0) continue;
    if (Status status = FillInput(extension->second, part); !status) return status;
  }
  return {};
}

Result<std::vector<at::Tensor>> Extensions::InputsOf(const Extension& extension) const {
  const PyRef made = PyRef::Steal(PyObject_CallNoArgs(extension.inputs.get()));
  std::vector<at::Tensor> tensors = made ? Tensors(made.get()) : std::vector<at::Tensor>();
  if (PyErr_Occurred() != nullptr) return std::unexpected(PythonError("fsdp_pre_all_gather").error());
  return tensors;
}

Status Extensions::FillInput(const Extension& extension, const at::Tensor& part) {
  const Result<std::vector<at::Tensor>> tensors = InputsOf(extension);
  if (!tensors) return std::unexpected(tensors.error());
  const at::Tensor bytes = AsBytes(part);
  std::int64_t offset = 0;
  for (const at::Tensor& tensor : *tensors) {
    const at::Tensor source = AsBytes(tensor);
    bytes.narrow(0, offset, source.numel()).copy_(source, true);
    offset += source.numel();
  }
  return {};
}

// Copies the tensors behind the first one of each parameter in the ranks' slots.
Status Extensions::CopyOthers(UnitId id, const at::Tensor& gathered, BufferId output) {
  if (others_[id] < 0) return {};
  const Unit& unit = plan_.units[id];
  const std::int64_t ranks = ShardCount(plan_, unit);
  const at::Tensor slots = gathered.view({ranks, -1});
  std::int64_t offset = 0;
  std::int32_t part = 0;
  for (const std::int32_t p : ParametersOf(plan_, plan_.buffers[output])) {
    const UnitParameter& parameter = unit.parameters[p];
    std::int64_t at = offset;
    for (std::size_t t = 0; t < parameter.gathered.size(); ++t) {
      const std::int64_t bytes = BytesOf(parameter.gathered[t]);
      if (t > 0) {
        device_.Part(others_[id], part++).view({ranks, bytes}).copy_(slots.narrow(1, at, bytes), true);
      }
      at += bytes;
    }
    offset += GatheredBytes(unit, parameter, ranks);
  }
  return {};
}

Status Extensions::Finish(UnitId unit, const std::vector<PythonParameter*>& parameters) {
  std::vector<at::Tensor> allocated;
  std::int32_t other = 0;
  for (const auto& [p, extension] : of_unit_[unit]) {
    if (Status status = FinishOne(unit, p, other, *parameters[p], allocated); !status) return status;
    other += static_cast<std::int32_t>(plan_.units[unit].parameters[p].gathered.size()) - 1;
  }
  if (allocated.empty()) return {};
  return device_.SetParts(allocated_[unit], std::move(allocated));
}

Status Extensions::FinishOne(UnitId unit, std::int32_t p, std::int32_t first_other, PythonParameter& whole,
                             std::vector<at::Tensor>& allocated) {
  const UnitParameter& parameter = plan_.units[unit].parameters[p];
  const PyRef outputs = PyRef::Steal(PyList_New(0));
  for (std::size_t t = 0; outputs && t < parameter.gathered.size(); ++t) {
    const at::Tensor part = t == 0
                                ? device_.Part(unsharded_[unit], p)
                                : device_.Part(others_[unit], first_other + static_cast<std::int32_t>(t) - 1);
    const at::Tensor typed = part.view(executor::ToScalarType(parameter.gathered[t].dtype));
    const PyRef object = PyRef::Steal(THPVariable_Wrap(typed));
    if (!object || PyList_Append(outputs.get(), object.get()) != 0) return PythonError("gathered tensors");
  }
  const PyRef made =
      PyRef::Steal(outputs ? PyObject_CallOneArg(of_unit_[unit].at(p).finish.get(), outputs.get()) : nullptr);
  if (!made) return PythonError("fsdp_post_all_gather");
  if (made.get() == Py_None) return {};
  PyObject *parameter_object = nullptr, *tensors = nullptr;
  if (!PyArg_ParseTuple(made.get(), "OO", &parameter_object, &tensors))
    return PythonError("fsdp_post_all_gather");
  whole.SetUnsharded(PyRef::Borrow(parameter_object));
  for (const at::Tensor& tensor : Tensors(tensors)) allocated.push_back(AsBytes(tensor));
  return PyErr_Occurred() == nullptr ? Status() : PythonError("fsdp_post_all_gather");
}

}  // namespace shardplan::python
