// SPDX-License-Identifier: Apache-2.0
#include "training/cpp/torch_names.h"

#include <string_view>

#include "shardplan/executor/torch_device.h"

namespace shardplan::executor {

std::optional<DType> KnownDType(at::ScalarType type) {
  for (int number = 0; number <= static_cast<int>(DType::kFloat8E8M0FNU); ++number) {
    const auto dtype = static_cast<DType>(number);
    if (ToScalarType(dtype) == type) return dtype;
  }
  return std::nullopt;
}

std::string ClassNameInDocuments(const torch::nn::Module& module) {
  std::string_view name = module.name();
  int depth = 0;  // in template arguments
  std::size_t begin = 0;
  for (std::size_t i = 0; i < name.size(); ++i) {
    if (name[i] == '<' || name[i] == '(') ++depth;
    if (name[i] == '>' || name[i] == ')') --depth;
    if (depth == 0 && name[i] == ':') begin = i + 1;
  }
  name.remove_prefix(begin);
  constexpr std::string_view kImplementation = "Impl";
  if (name.size() > kImplementation.size() && name.ends_with(kImplementation)) {
    name.remove_suffix(kImplementation.size());
  }
  return std::string(name);
}

}  // namespace shardplan::executor
