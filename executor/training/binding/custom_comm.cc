// SPDX-License-Identifier: Apache-2.0
#include "training/binding/custom_comm.h"

#include <pybind11/pybind11.h>
#include <torch/csrc/utils/pybind.h>

#include <torch/csrc/distributed/c10d/Types.hpp>

#include "training/binding/python_error.h"

namespace shardplan::python {
namespace py = pybind11;
namespace {

c10d::ReduceOp OpOf(const executor::CollectiveSpec& spec) {
  if (spec.reduce_op == ReduceOp::kAverage) return c10d::ReduceOp::AVG;
  if (spec.divisor == 1.0) return c10d::ReduceOp::SUM;
  // torch 2.11 and 2.15 have functions of different names for this.
  c10d::ReduceOp op;
  op.op_ = c10d::ReduceOp::PREMUL_SUM;
  op.supplement_ = c10::make_intrusive<c10d::NCCLPreMulSumSupplement>(1.0 / spec.divisor);
  return op;
}

}  // namespace

void CustomCollectives::Set(UnitId unit, CollectiveKind kind, PyRef comm) {
  if (comm) {
    custom_[{unit, kind}] = std::move(comm);
  } else {
    custom_.erase({unit, kind});
  }
}

Status CustomCollectives::Prepare(const Plan& plan, std::int64_t rank) {
  plan_ = &plan;
  return inner_->Prepare(plan, rank);
}

Result<executor::CollectiveId> CustomCollectives::PrepareCollective(const executor::CollectiveSpec& spec) {
  specs_.push_back(spec);
  return inner_->PrepareCollective(spec);
}

Status CustomCollectives::Issue(executor::CollectiveId id, StreamId stream) {
  if (custom_.empty()) [[likely]] {
    return inner_->Issue(id, stream);
  }
  const executor::CollectiveSpec& spec = specs_[id];
  const auto found = custom_.find({plan_->buffers[spec.dst].unit, spec.kind});
  if (found == custom_.end()) return inner_->Issue(id, stream);
  Status status;
  const Status ran = device_.RunOn(stream, [&] { status = Call(spec, found->second.get()); });
  return ran ? status : ran;
}

Status CustomCollectives::Call(const executor::CollectiveSpec& spec, PyObject* comm) {
  const InsidePython guards;
  try {
    const at::Tensor whole = device_.Part(spec.src, 0);
    const bool gathers = spec.kind == CollectiveKind::kAllGather;
    py::dict arguments;
    arguments["output_tensor"] = device_.Part(spec.dst, 0);
    arguments["input_tensor"] = gathers ? whole.narrow(0, spec.src_offset, spec.slot_numel) : whole;
    arguments["group"] = py::cast(groups_[spec.communicator]);
    arguments["async_op"] = false;
    if (!gathers) {
      arguments["op"] = py::cast(OpOf(spec));
    }
    const py::object work = py::handle(comm)(**arguments);
    if (!work.is_none() && py::hasattr(work, "wait")) work.attr("wait")();
  } catch (const py::error_already_set& error) {
    return MakeError(ErrorCode::kEnvironment, std::string("the custom collective failed: ") + error.what());
  }
  return {};
}

}  // namespace shardplan::python
