// SPDX-License-Identifier: Apache-2.0
// The static part of a trace: modules, parameters and buffers of a LibTorch model.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <memory>
#include <unordered_map>
#include <vector>

#include "shardplan/schemas/trace.h"

namespace shardplan::executor {

struct TracedTree {
  // Laid out as in the document; buffers without their storages.
  std::vector<Module> modules;
  std::vector<Parameter> parameters;
  std::vector<ModuleBuffer> buffers;

  std::vector<at::Tensor> parameter_tensors;  // by ParameterId
  std::vector<ModuleId> owners;               // by ParameterId: the first module that has it
  std::vector<at::Tensor> buffer_tensors;     // as `buffers`
  std::unordered_map<const torch::nn::Module*, ModuleId> module_ids;  // of its first place
  std::vector<bool> has_parameters;                                   // by ModuleId: it or one below
};

// Modules of LibTorch keep no buffers that are not persistent.
TracedTree ReadModel(const torch::nn::Module& model);

}  // namespace shardplan::executor
