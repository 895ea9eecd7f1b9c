// SPDX-License-Identifier: Apache-2.0
#include "training/cpp/model_tree.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <set>

#include "shardplan/executor/torch_device.h"
#include "shardplan/schemas/dtype.h"
#include "shardplan/schemas/io.h"

namespace shardplan::executor {
namespace {

constexpr std::size_t kShownDifferences = 8;  // the rest are counted

std::string UnitName(const Unit& unit) { return unit.fqn.empty() ? "the root" : unit.fqn; }

std::string Joined(const std::string& prefix, const std::string& name) {
  return prefix.empty() ? name : prefix + "." + name;
}

std::string NamesText(std::vector<std::string> names) {
  std::ranges::sort(names);
  return names.empty() ? "none" : fmt::format("{}", fmt::join(names, ", "));
}

// The fault of one parameter of the plan; "": none.
std::string Difference(const Unit& unit, const UnitParameter& expected, const TreeParameter* found) {
  const std::string name = fmt::format("parameter {} of {}", expected.fqn, UnitName(unit));
  if (found == nullptr) return name + ": expected by the plan, not in the model";
  const auto says = [&](std::string_view what, const auto& in_plan, const auto& in_model) {
    return fmt::format("{}: {} expected {}, found {}", name, what, in_plan, in_model);
  };
  const at::Tensor& tensor = found->tensor;
  const std::vector<std::int64_t> shape = tensor.sizes().vec();
  if (shape != expected.shape) {
    return says("shape", fmt::format("[{}]", fmt::join(expected.shape, ", ")),
                fmt::format("[{}]", fmt::join(shape, ", ")));
  }
  if (tensor.scalar_type() != ToScalarType(expected.dtype)) {
    return says("dtype", Name(expected.dtype), at::toString(tensor.scalar_type()));
  }
  if (tensor.requires_grad() != expected.requires_grad) {
    return says("requires_grad", expected.requires_grad, tensor.requires_grad());
  }
  std::vector<std::string> others;
  for (const std::string& other : found->names) {
    if (other != expected.fqn) others.push_back(other);
  }
  if (NamesText(others) != NamesText(expected.shared_with)) {
    return says("tied names", NamesText(expected.shared_with), NamesText(others));
  }
  if (!tensor.is_contiguous()) return name + ": not contiguous";
  if (!expected.gathered.empty()) return name + ": has an all-gather extension, which is Python's";
  if (!expected.placements.empty()) {
    return name + ": is cut over dimensions of the mesh that are not FSDP's, which takes a DTensor";
  }
  return {};
}

std::vector<std::string> Differences(const Plan& plan, const ModelTree& tree) {
  std::vector<std::string> differences;
  std::map<std::size_t, std::string> held;  // by parameter of the tree: the first unit that has it
  for (const Unit& unit : plan.units) {
    for (const std::string& module : unit.modules) {
      if (!tree.modules.contains(module)) {
        differences.push_back(
            fmt::format("module {} of {}: expected by the plan, not in the model", module, UnitName(unit)));
      }
    }
    for (const UnitParameter& expected : unit.parameters) {
      const auto entry = tree.by_name.find(expected.fqn);
      const TreeParameter* found = entry == tree.by_name.end() ? nullptr : &tree.parameters[entry->second];
      if (found != nullptr) {
        const auto [first, is_new] = held.emplace(entry->second, UnitName(unit));
        if (!is_new) {
          differences.push_back(fmt::format(
              "parameter {}: is tied across units ({} and {}), of which each would train a copy of "
              "its own; modules in C++ hold one tensor",
              expected.fqn, first->second, UnitName(unit)));
          continue;
        }
      }
      if (std::string difference = Difference(unit, expected, found); !difference.empty()) {
        differences.push_back(std::move(difference));
      }
    }
  }
  const std::vector<std::string>& ignored = plan.strategy.ignored_parameters;
  for (std::size_t p = 0; p < tree.parameters.size(); ++p) {
    const std::string& name = tree.parameters[p].names.front();
    if (held.contains(p) || std::ranges::find(ignored, name) != ignored.end()) continue;
    differences.push_back(fmt::format("parameter {}: in the model, in no unit of the plan", name));
  }
  return differences;
}

}  // namespace

ModelTree TreeOf(const torch::nn::Module& model) {
  ModelTree tree;
  tree.class_name = model.name();
  std::map<const void*, std::size_t> seen;
  std::set<const void*> buffers;
  for (const auto& module : model.named_modules()) {
    tree.modules.emplace(module.key(), module.value().get());
    for (const auto& item : module.value()->named_parameters(/*recurse=*/false)) {
      const std::string name = Joined(module.key(), item.key());
      const auto [known, is_new] = seen.emplace(item.value().unsafeGetTensorImpl(), tree.parameters.size());
      if (is_new) tree.parameters.push_back({item.value(), {}});
      tree.parameters[known->second].names.push_back(name);
      tree.by_name.emplace(name, known->second);
    }
    for (const auto& item : module.value()->named_buffers(/*recurse=*/false)) {
      if (!item.value().defined() || !buffers.insert(item.value().unsafeGetTensorImpl()).second) continue;
      tree.buffers.emplace_back(Joined(module.key(), item.key()), item.value());
    }
  }
  return tree;
}

Status CheckFits(const Plan& plan, const ModelTree& tree) {
  for (std::size_t u = 0; u < plan.units.size(); ++u) {
    if (plan.units[u].layout != LayoutKind::kFlat) continue;
    return MakeInputError(fmt::format("/units/{}/layout", u),
                          "modules in C++ cannot hold views of a flat parameter", "flat",
                          "per_parameter (policies fsdp2 and optimized)");
  }
  for (std::size_t b = 0; b < plan.buffers.size(); ++b) {
    if (plan.buffers[b].role != BufferRole::kActivation) continue;
    return MakeInputError(fmt::format("/buffers/{}/role", b),
                          "modules in C++ cannot hand over what autograd saves", "activation",
                          "a plan that offloads no activations");
  }
  const std::vector<std::string> differences = Differences(plan, tree);
  if (differences.empty()) return {};
  const auto shown = std::min(differences.size(), kShownDifferences);
  std::string text =
      fmt::format("the plan was made for another model ({}): {} differences from {}:",
                  plan.model.empty() ? "unnamed" : plan.model, differences.size(), tree.class_name);
  for (std::size_t d = 0; d < shown; ++d) text += "\n  " + differences[d];
  if (shown < differences.size()) text += fmt::format("\n  and {} more", differences.size() - shown);
  return MakeError(ErrorCode::kBadInput, text + "\nTrace this model and plan it again.");
}

std::string SignatureOf(const ModelTree& tree) {
  std::string text;
  const auto add = [&](std::string_view kind, std::string_view names, const at::Tensor& tensor) {
    text += fmt::format("{} {} [{}] {} {}\n", kind, names, fmt::join(tensor.sizes(), ", "),
                        at::toString(tensor.scalar_type()), tensor.requires_grad());
  };
  for (const TreeParameter& parameter : tree.parameters) {
    add("parameter", fmt::format("{}", fmt::join(parameter.names, "=")), parameter.tensor);
  }
  for (const auto& [name, tensor] : tree.buffers) add("buffer", name, tensor);
  return Digest(text);
}

}  // namespace shardplan::executor
