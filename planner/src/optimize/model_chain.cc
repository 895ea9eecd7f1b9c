// SPDX-License-Identifier: Apache-2.0
#include "optimize/model_chain.h"

#include <algorithm>
#include <map>
#include <set>

#include "shardplan/planner/planner.h"

namespace shardplan::optimize {
namespace {

bool IsInside(const std::string& fqn, const std::set<std::string>& outer) {
  for (std::size_t dot = fqn.find('.'); dot != std::string::npos; dot = fqn.find('.', dot + 1)) {
    if (outer.contains(fqn.substr(0, dot))) return true;
  }
  return false;
}

// When the forwards enter each module first.
std::map<std::string, std::size_t> FirstEntered(const Trace& trace) {
  std::map<std::string, std::size_t> first;
  std::size_t count = 0;
  for (const Pass& pass : trace.forwards) {
    for (const TraceEvent& event : pass.events) {
      if (const auto* enter = std::get_if<EnterEvent>(&event))
        first.emplace(trace.modules[enter->module].fqn, count++);
    }
  }
  return first;
}

std::vector<std::string> ChildrenOf(const Trace& trace, const std::string& fqn) {
  std::vector<std::string> children;
  for (const Module& module : trace.modules) {
    if (module.fqn.size() > fqn.size() && module.fqn.starts_with(fqn + ".") &&
        module.fqn.find('.', fqn.size() + 1) == std::string::npos && module.same_module_as.empty()) {
      children.push_back(module.fqn.substr(fqn.size() + 1));
    }
  }
  return children;
}

std::int64_t OwnNumel(const Trace& trace, const Module& module) {
  std::int64_t numel = 0;
  for (const NamedParameter& named : module.parameters) {
    std::int64_t product = 1;
    for (const std::int64_t size : trace.parameters[named.parameter].shape) product *= size;
    numel += product;
  }
  return numel;
}

// The parts of one block.
std::vector<std::string> PartsOf(const Trace& trace, const std::string& fqn,
                                 const std::map<std::string, std::size_t>& entered) {
  constexpr std::int64_t kMost = 8;  // of them
  std::int64_t all = 0;
  std::vector<std::pair<std::string, std::int64_t>> below;
  for (const Module& module : trace.modules) {
    if (module.fqn != fqn && !module.fqn.starts_with(fqn + ".")) continue;
    const std::int64_t numel = OwnNumel(trace, module);
    all += numel;
    if (module.fqn != fqn && module.same_module_as.empty() && entered.contains(module.fqn))
      below.emplace_back(module.fqn.substr(fqn.size() + 1), numel);
  }
  std::vector<std::string> parts;
  for (const auto& [name, numel] : below) {
    if (numel > 0 && numel >= (all + kMost - 1) / kMost) parts.push_back(name);
  }
  return parts;
}

void AddOperators(const Trace& trace, ModelChain& chain) {
  std::set<std::string> blocks, products, attentions;
  for (const ChainModule& module : chain.modules) {
    if (module.block) blocks.insert(module.fqn);
  }
  for (const Pass& pass : trace.forwards) {
    for (const TraceEvent& event : pass.events) {
      const auto* op = std::get_if<OperatorEvent>(&event);
      if (op == nullptr || op->flops <= 0 || op->module < 0) continue;
      const std::string& fqn = trace.modules[op->module].fqn;
      if (!blocks.contains(fqn) && !IsInside(fqn, blocks)) continue;
      for (const std::string& child : chain.children) {
        if ((fqn + ".").find("." + child + ".") != std::string::npos)
          chain.operators_of[child].insert(op->name);
      }
      const bool attention = op->name.find("attention") != std::string::npos;
      (attention ? attentions : products).insert(op->name);
    }
  }
  chain.products.assign(products.begin(), products.end());
  chain.attentions.assign(attentions.begin(), attentions.end());
}

}  // namespace

ModelChain MakeModelChain(const Trace& trace) {
  const std::map<std::string, std::size_t> entered = FirstEntered(trace);
  const std::vector<UnitRule> rules = DefaultUnits(trace);
  std::set<std::string> blocks;
  if (rules.size() > 1) blocks.insert(rules.front().modules.begin(), rules.front().modules.end());
  ModelChain chain;
  std::set<std::string> taken = blocks;
  for (const Module& module : trace.modules) {
    const bool runs = entered.contains(module.fqn) && module.same_module_as.empty();
    if (!runs || module.fqn.empty()) continue;
    const bool block = blocks.contains(module.fqn);
    if (!block && (module.parameters.empty() || IsInside(module.fqn, taken))) continue;
    taken.insert(module.fqn);
    chain.modules.push_back({module.fqn, block});
    chain.blocks += block;
  }
  std::ranges::stable_sort(chain.modules, {}, [&](const ChainModule& m) { return entered.at(m.fqn); });
  bool first = true;
  for (const ChainModule& module : chain.modules) {
    if (!module.block) continue;
    std::vector<std::string> children = ChildrenOf(trace, module.fqn);
    std::erase_if(children, [&](const std::string& c) { return !entered.contains(module.fqn + "." + c); });
    const std::vector<std::string> parts = PartsOf(trace, module.fqn, entered);
    if (first) {
      chain.children = children;
      chain.parts = parts;
    }
    std::erase_if(chain.children, [&](const std::string& c) { return std::ranges::count(children, c) == 0; });
    std::erase_if(chain.parts, [&](const std::string& p) { return std::ranges::count(parts, p) == 0; });
    first = false;
  }
  AddOperators(trace, chain);
  return chain;
}

}  // namespace shardplan::optimize
