// SPDX-License-Identifier: Apache-2.0
// The parameters of a LibTorch model, by name, and whether a plan fits it.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <map>
#include <string>
#include <vector>

#include "shardplan/schemas/error.h"
#include "shardplan/schemas/plan.h"

namespace shardplan::executor {

struct TreeParameter {
  at::Tensor tensor;
  std::vector<std::string> names;  // all of them, in the order of the modules
};

struct ModelTree {
  std::map<std::string, const torch::nn::Module*> modules;
  std::vector<TreeParameter> parameters;       // each tensor once
  std::map<std::string, std::size_t> by_name;  // index into parameters
  std::vector<std::pair<std::string, at::Tensor>> buffers;
  std::string class_name;
};

ModelTree TreeOf(const torch::nn::Module& model);

// kBadInput: units, FQNs, shapes, dtypes, requires_grad or ties are not the plan's, each parameter named, or
// the plan's layout is none that modules in C++ can have.
Status CheckFits(const Plan& plan, const ModelTree& tree);

// Covers names, shapes, dtypes and ties of parameters and buffers; not devices and values.
std::string SignatureOf(const ModelTree& tree);

}  // namespace shardplan::executor
