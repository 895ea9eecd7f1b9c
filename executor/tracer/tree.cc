// SPDX-License-Identifier: Apache-2.0
#include "tracer/tree.h"

#include <string>

#include "tracer/operators.h"
#include "training/cpp/torch_names.h"

namespace shardplan::executor {
namespace {

class ModelReader {
 public:
  TracedTree Read(const torch::nn::Module& model) {
    for (const auto& item : model.named_parameters()) AddParameter(item.key(), item.value());
    AddModule(model, "");
    return std::move(tree_);
  }

 private:
  void AddParameter(const std::string& fqn, const at::Tensor& tensor) {
    const auto id = static_cast<ParameterId>(tree_.parameters.size());
    const auto [known, is_new] = parameter_ids_.try_emplace(tensor.unsafeGetTensorImpl(), id);
    if (!is_new) {
      tree_.parameters[static_cast<std::size_t>(known->second)].shared_with.push_back(fqn);
      return;
    }
    Parameter parameter;
    parameter.fqn = fqn;
    parameter.shape = tensor.sizes().vec();
    parameter.dtype = ToDType(tensor.scalar_type());
    parameter.requires_grad = tensor.requires_grad();
    tree_.parameters.push_back(std::move(parameter));
    tree_.parameter_tensors.push_back(tensor);
    tree_.owners.push_back(-1);
  }

  bool AddModule(const torch::nn::Module& module, const std::string& fqn) {
    const auto id = static_cast<ModuleId>(tree_.modules.size());
    const auto position = tree_.modules.size();
    tree_.modules.emplace_back();
    tree_.has_parameters.push_back(false);
    const auto [known, is_new] = tree_.module_ids.try_emplace(&module, id);
    Module entry;
    entry.fqn = fqn;
    entry.class_name = ClassNameInDocuments(module);
    if (!is_new) entry.same_module_as = tree_.modules[static_cast<std::size_t>(known->second)].fqn;
    for (const auto& item : module.named_parameters(/*recurse=*/false)) {
      const ParameterId parameter = parameter_ids_.at(item.value().unsafeGetTensorImpl());
      entry.parameters.push_back({item.key(), parameter});
      ModuleId& owner = tree_.owners[static_cast<std::size_t>(parameter)];
      if (owner < 0) owner = id;
    }
    for (const auto& item : module.named_buffers(/*recurse=*/false)) {
      entry.buffers.push_back(item.key());
      if (is_new) AddBuffer(fqn.empty() ? item.key() : fqn + "." + item.key(), item.value());
    }
    const auto children = module.named_children();
    for (const auto& item : children) entry.children.push_back(item.key());
    bool has_parameters = !entry.parameters.empty();
    tree_.modules[position] = std::move(entry);
    for (const auto& item : children) {
      has_parameters |= AddModule(*item.value(), fqn.empty() ? item.key() : fqn + "." + item.key());
    }
    tree_.has_parameters[position] = has_parameters;
    return has_parameters;
  }

  void AddBuffer(const std::string& fqn, const at::Tensor& tensor) {
    ModuleBuffer buffer;
    buffer.fqn = fqn;
    buffer.shape = tensor.sizes().vec();
    buffer.dtype = ToDType(tensor.scalar_type());
    tree_.buffers.push_back(std::move(buffer));
    tree_.buffer_tensors.push_back(tensor);
  }

  TracedTree tree_;
  std::unordered_map<const c10::TensorImpl*, ParameterId> parameter_ids_;
};

}  // namespace

TracedTree ReadModel(const torch::nn::Module& model) { return ModelReader().Read(model); }

}  // namespace shardplan::executor
