// SPDX-License-Identifier: Apache-2.0
// All-gather extensions: tensor subclasses that gather something else than their shard (fsdp_pre_all_gather,
// fsdp_post_all_gather).
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <utility>
#include <vector>

#include "shardplan/executor/torch_device.h"
#include "shardplan/schemas/plan.h"
#include "training/binding/parameters/python_parameter.h"
#include "training/binding/py_ref.h"

namespace shardplan::python {

// [Note: extensions]
// A parameter's extension makes the tensors that are gathered where the plan copies its shard into the
// all-gather's input. The tensors beside the first one get buffers of their own when the plan copies the
// output out. When the modules are about to hold the parameter, the extension makes the whole of what was
// gathered: the first time an nn.Parameter, later in that one's memory. Tensors that it allocates then are
// the plan's from that time on, which frees them with the rest.
class Extensions {
 public:
  // Both outlive this.
  Extensions(const Plan& plan, executor::TorchDevice& device);

  // inputs(): the tensors to gather, 1-D, as the plan has them. finish(outputs): all ranks' of each, one
  // after the other; returns (nn.Parameter, [tensors that it allocated]) the first time, later None.
  void Add(UnitId unit, std::int32_t parameter, PyRef inputs, PyRef finish);
  bool Has(UnitId unit) const { return !of_unit_[unit].empty(); }
  void Clear() { of_unit_.clear(); }

  // The GIL is held in all of these, and the stream is the current one.
  // True: `dst` holds what `src` was to be copied for. False: the copy is still to be made.
  Result<bool> Move(BufferId src, BufferId dst);
  // Everything that was gathered of the unit is there.
  // parameters: of the unit.
  Status Finish(UnitId unit, const std::vector<PythonParameter*>& parameters);

 private:
  struct Extension {
    PyRef inputs;
    PyRef finish;
  };
  Result<std::vector<at::Tensor>> InputsOf(const Extension& extension) const;
  Status FillInput(const Extension& extension, const at::Tensor& part);
  Status FillShards(BufferId shard);
  Status CopyOthers(UnitId unit, const at::Tensor& gathered, BufferId output);
  Status FinishOne(UnitId unit, std::int32_t parameter, std::int32_t first_other, PythonParameter& whole,
                   std::vector<at::Tensor>& allocated);

  const Plan& plan_;
  executor::TorchDevice& device_;
  std::vector<std::map<std::int32_t, Extension>> of_unit_;
  // By UnitId, -1: none: param_unsharded, its further gathered tensors, what extensions allocate.
  std::vector<BufferId> unsharded_, others_, allocated_;
};

}  // namespace shardplan::python
