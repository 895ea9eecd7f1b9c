// SPDX-License-Identifier: Apache-2.0
#include "training/binding/session_binding.h"

#include <fmt/format.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <chrono>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <variant>
#include <vector>

#include "shardplan/checkpoints/checkpoint.h"
#include "shardplan/executor/checkpoints.h"
#include "shardplan/executor/peers.h"

namespace shardplan::python {
namespace {

namespace py = pybind11;
using executor::Session;

void SessionOrThrow(const Status& status) {
  if (!status) throw std::runtime_error(ToString(status.error()));
}

// (name, dtype, shape)
using TensorTuple = std::tuple<std::string, std::string, std::vector<std::int64_t>>;
// (index of the tensor, rank, low, size)
using BoxTuple = std::tuple<std::int32_t, std::int64_t, std::vector<std::int64_t>, std::vector<std::int64_t>>;
using Keys = std::map<std::string, std::vector<std::variant<std::int64_t, std::string>>>;

StateDescription DescriptionOf(const std::vector<TensorTuple>& tensors, const std::vector<BoxTuple>& boxes,
                               const std::map<std::string, py::bytes>& objects, const Keys& keys) {
  StateDescription description;
  for (const auto& [name, dtype, shape] : tensors) {
    const std::optional<DType> known = DTypeFromName(dtype);
    if (!known) throw std::invalid_argument(fmt::format("{}: checkpoints have no dtype {}", name, dtype));
    description.tensors.push_back({.name = name, .dtype = *known, .shape = shape, .pieces = {}});
  }
  for (const auto& [tensor, rank, low, size] : boxes)
    description.boxes.push_back({.tensor = tensor, .rank = rank, .low = low, .size = size});
  for (const auto& [name, archive] : objects) description.objects.push_back({name, archive});
  for (const auto& [name, path] : keys) {
    std::vector<CheckpointKey>& of = description.keys[name];
    for (const auto& key : path) {
      if (const auto* index = std::get_if<std::int64_t>(&key)) {
        of.push_back({CheckpointKey::Kind::kIndex, std::to_string(*index)});
      } else {
        of.push_back({CheckpointKey::Kind::kText, std::get<std::string>(key)});
      }
    }
  }
  return description;
}

void Save(Session& session, const std::string& path, const std::vector<TensorTuple>& tensors,
          const std::vector<BoxTuple>& boxes, const std::map<std::string, py::bytes>& objects,
          const Keys& keys, std::vector<at::Tensor> own, bool background, bool replaces) {
  executor::SessionState state{.description = DescriptionOf(tensors, boxes, objects, keys),
                               .boxes = std::move(own)};
  const py::gil_scoped_release released;
  SessionOrThrow(background ? session.SaveInBackground(path, std::move(state), {.replaces = replaces})
                            : session.Save(path, std::move(state), {.replaces = replaces}));
}

// A checkpoint that is read from.
class OpenCheckpoint {
 public:
  explicit OpenCheckpoint(const std::string& path) {
    Result<Checkpoint> read = ReadCheckpoint(path);
    if (!read) throw std::runtime_error(ToString(read.error()));
    checkpoint_ = std::make_unique<Checkpoint>(std::move(*read));
    Result<StateReader> reader = StateReader::Open(*checkpoint_);
    if (!reader) throw std::runtime_error(ToString(reader.error()));
    reader_ = std::make_unique<StateReader>(std::move(*reader));
  }

  std::map<std::string, std::pair<std::string, std::vector<std::int64_t>>> Tensors() const {
    std::map<std::string, std::pair<std::string, std::vector<std::int64_t>>> tensors;
    for (const CheckpointTensor& tensor : checkpoint_->tensors)
      tensors[tensor.name] = {std::string(Name(tensor.dtype)), tensor.shape};
    return tensors;
  }
  std::map<std::string, py::bytes> Objects() const {
    std::map<std::string, py::bytes> objects;
    for (const CheckpointObject& object : checkpoint_->objects)
      objects[object.name] = py::bytes(object.archive);
    return objects;
  }

  // To the memory of a contiguous tensor on the host.
  void Read(const std::string& name, const std::vector<std::int64_t>& low,
            const std::vector<std::int64_t>& size, const at::Tensor& to) {
    const py::gil_scoped_release released;
    const std::int32_t tensor = reader_->Find(name);
    if (tensor < 0) throw std::out_of_range(name);
    if (!to.is_cpu() || !to.is_contiguous())
      throw std::invalid_argument("a contiguous tensor on the host is needed");
    SessionOrThrow(
        reader_->Read(tensor, low, size, {static_cast<std::byte*>(to.mutable_data_ptr()), to.nbytes()}));
  }
  void CheckUnchanged() const { SessionOrThrow(reader_->CheckUnchanged()); }

 private:
  std::unique_ptr<Checkpoint> checkpoint_;
  std::unique_ptr<StateReader> reader_;  // ends first
};

std::shared_ptr<Session> MakeSession(c10::intrusive_ptr<c10d::Store> store, std::int64_t rank,
                                     std::int64_t ranks, std::shared_ptr<executor::Peers> peers,
                                     double timeout_s) {
  return std::make_shared<Session>(executor::SessionOptions{
      .rank = rank,
      .ranks = ranks,
      .store = std::move(store),
      .peers = std::move(peers),
      .timeout = std::chrono::milliseconds(static_cast<std::int64_t>(timeout_s * 1e3))});
}

}  // namespace

void BindSession(py::module_& module) {
  py::class_<Session, std::shared_ptr<Session>>(module, "Session")
      .def(py::init(&MakeSession), py::arg("store"), py::arg("rank"), py::arg("ranks"), py::arg("peers"),
           py::arg("timeout_s"))
      .def("save", &Save, py::arg("path"), py::arg("tensors"), py::arg("boxes"), py::arg("objects"),
           py::arg("keys"), py::arg("own"), py::arg("background"), py::arg("replaces"))
      .def(
          "wait", [](Session& session) { SessionOrThrow(session.Wait()); },
          py::call_guard<py::gil_scoped_release>())
      .def("hold_back", &Session::HoldBack)
      .def_property_readonly("is_saving", &Session::IsSaving)
      .def_property_readonly("figures", [](const Session& session) {
        const executor::SaveFigures figures = session.figures();
        return std::make_tuple(figures.bytes, static_cast<double>(figures.held_ns) / 1e9,
                               static_cast<double>(figures.saved_ns) / 1e9);
      });
  py::class_<OpenCheckpoint>(module, "Checkpoint")
      .def(py::init<const std::string&>(), py::arg("path"))
      .def_property_readonly("tensors", &OpenCheckpoint::Tensors)
      .def_property_readonly("objects", &OpenCheckpoint::Objects)
      .def("read", &OpenCheckpoint::Read, py::arg("name"), py::arg("low"), py::arg("size"), py::arg("to"))
      .def("check_unchanged", &OpenCheckpoint::CheckUnchanged);
}

}  // namespace shardplan::python
