// SPDX-License-Identifier: Apache-2.0
// Collectives of the user's own in place of the backend's, unit by unit.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <utility>
#include <vector>

#include "shardplan/executor/collectives.h"
#include "shardplan/executor/torch_device.h"
#include "training/binding/py_ref.h"

namespace shardplan::python {

// Hands the collectives on to `inner`, but for those of a unit and kind that a Python object was set for: it
// is called as FSDP2 calls its AllGather and ReduceScatter: (output_tensor=, input_tensor=, group=,
// async_op=False, op=), the last for a reduce_scatter only. Its result may be a Work, which is waited for.
class CustomCollectives final : public executor::Collectives {
 public:
  // groups: by CommunicatorId. `device` outlives this.
  CustomCollectives(std::unique_ptr<executor::Collectives> inner, executor::TorchDevice& device,
                    std::vector<c10::intrusive_ptr<c10d::ProcessGroup>> groups)
      : inner_(std::move(inner)), device_(device), groups_(std::move(groups)) {}

  // An empty `comm` gives the backend's back. The GIL is held.
  void Set(UnitId unit, CollectiveKind kind, PyRef comm);
  // Before this dies, with the GIL held: Python objects need it to die.
  void Clear() { custom_.clear(); }

  Status Prepare(const Plan& plan, std::int64_t rank) override;
  Result<executor::CollectiveId> PrepareCollective(const executor::CollectiveSpec& spec) override;
  Status Issue(executor::CollectiveId collective, StreamId stream) override;
  Status Check() override { return inner_->Check(); }
  std::vector<std::int64_t> Issued() const override { return inner_->Issued(); }
  void Abort(const std::string& reason) override { inner_->Abort(reason); }

 private:
  Status Call(const executor::CollectiveSpec& spec, PyObject* comm);

  std::unique_ptr<executor::Collectives> inner_;
  executor::TorchDevice& device_;
  std::vector<c10::intrusive_ptr<c10d::ProcessGroup>> groups_;
  const Plan* plan_ = nullptr;
  std::vector<executor::CollectiveSpec> specs_;  // by CollectiveId
  std::map<std::pair<UnitId, CollectiveKind>, PyRef> custom_;
};

}  // namespace shardplan::python
