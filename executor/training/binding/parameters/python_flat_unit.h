// SPDX-License-Identifier: Apache-2.0
// A flat unit of a model in Python: which objects its modules and the optimizer hold.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/python_headers.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "shardplan/schemas/error.h"
#include "training/binding/parameters/python_parameter.h"
#include "training/binding/py_ref.h"
#include "training/parameters/flat_unit.h"

namespace shardplan::python {

// [Note: visible parameters]
// Without original parameters the optimizer sees the unit's flat parameter, whose data is the rank's whole
// shard. With them it sees the model's own nn.Parameters: each one's data is the slice of it that lies in the
// shard, one-dimensional (the whole parameter in its shape when the unit is not sharded), or empty. Both are
// views of the shard, so what the optimizer does in place is done to the shard.
struct VisibleParameter {
  PyRef object;                      // nn.Parameter
  std::string fqn;                   // for people
  std::int64_t offset = 0;           // elements before it in the shard
  std::vector<std::int64_t> shape;   // of its data
  bool in_shard = true;              // false: no element of it is in this rank's shard
  std::vector<ParameterSlot> slots;  // where modules register it
};

// The GIL must be held in every function and where one is destroyed.
class PythonFlatUnit final : public executor::FlatUnit {
 public:
  // shard: 1-D, padding included; used in place. views: by parameter of the unit, the places that hold its
  // unsharded view.
  PythonFlatUnit(Options options, at::Tensor shard, std::vector<VisibleParameter> visible,
                 std::vector<std::vector<ParameterSlot>> views,
                 std::shared_ptr<executor::FlatGradient> gradient);

  Status BindViews(std::vector<at::Tensor> views, bool track) override;
  Status BindViewsAgain() override;
  Status BindSharded() override;
  Status WriteBack(const Issue& issue) override;
  std::optional<bool> RequiresGrad(std::int32_t parameter) const override;
  Status PublishGradient(const at::Tensor& local) override;
  void PublishZeros() override;
  Status StepInBackward(std::int32_t parameter) override;
  void ForgetGradient() override { published_ = at::Tensor(); }
  void DropGradient() override;

 private:
  at::Tensor Slice(const at::Tensor& whole, const VisibleParameter& visible) const;
  Status CheckDtype(const VisibleParameter& visible) const;
  Status WriteBackParameter(VisibleParameter& visible, const Issue& issue);
  Status WriteBackGradient(const VisibleParameter& visible, const Issue& issue);

  at::Tensor shard_;
  std::vector<VisibleParameter> visible_;
  std::vector<std::vector<ParameterSlot>> view_slots_;
  std::vector<PyRef> views_;  // bound last in a forward
  bool views_bound_ = false;
  at::Tensor published_;  // the plan's gradient that .grad are views of
};

}  // namespace shardplan::python
