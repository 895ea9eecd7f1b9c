// SPDX-License-Identifier: Apache-2.0
// Models that are recorded in C++ and, as tests/python/tracer/recorded_twins.py has them, by the tracer.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <torch/nn/module.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "shardplan/executor/module_calls.h"
#include "shardplan/executor/trace_recorder.h"

namespace shardplan::executor::testing {

struct TraceModel {
  std::shared_ptr<torch::nn::Module> model;
  ModuleCalls calls;
  std::function<at::Tensor()> forward;
  RecordOptions options;

  Result<Trace> Record() { return RecordTrace(*model, calls, forward, options); }
};

// Each with its inputs, on that device (the CPU or meta) and in that dtype.
TraceModel MakeTraceModel(const std::string& name, c10::DeviceType device, at::ScalarType dtype = at::kFloat);
std::vector<std::string> TraceModelNames();

}  // namespace shardplan::executor::testing
