// SPDX-License-Identifier: Apache-2.0
// The names of LibTorch's types in documents.
#pragma once

#include <c10/core/ScalarType.h>
#include <torch/nn/module.h>

#include <optional>
#include <string>

#include "shardplan/schemas/dtype.h"

namespace shardplan::executor {

// The reverse of ToScalarType; nothing: documents have no name for it.
std::optional<DType> KnownDType(at::ScalarType type);

// The C++ class without namespaces and the "Impl" of LibTorch's holders: torch::nn::LinearImpl is "Linear".
std::string ClassNameInDocuments(const torch::nn::Module& module);

}  // namespace shardplan::executor
