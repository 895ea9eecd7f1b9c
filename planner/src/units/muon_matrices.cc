// SPDX-License-Identifier: Apache-2.0
#include "units/muon_matrices.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <string_view>
#include <utility>
#include <vector>

#include "units/unit_parameters.h"

namespace shardplan {
namespace {

constexpr std::array<std::string_view, 4> kHeads = {"lm_head", "output", "head", "unembed"};

// A Linear that makes the logits: in no numbered block, where attention has its output.
bool IsHead(const Module& module) {
  std::string_view path = module.fqn;
  const std::size_t dot = path.rfind('.');
  const std::string_view name = dot == std::string_view::npos ? path : path.substr(dot + 1);
  path = dot == std::string_view::npos ? std::string_view() : path.substr(0, dot);
  bool numbered = false;
  while (!path.empty()) {
    const std::size_t end = std::min(path.find('.'), path.size());
    numbered = numbered || path.substr(0, end).find_first_not_of("0123456789") == std::string_view::npos;
    path.remove_prefix(std::min(end + 1, path.size()));
  }
  return !numbered && module.class_name.ends_with("Linear") &&
         std::ranges::find(kHeads, name) != kHeads.end();
}

bool IsEmbeddingOrHead(const Module& module) {
  const auto is = [&](ModulePart part) {
    return std::ranges::find(module.parts, part) != module.parts.end();
  };
  return is(ModulePart::kInputEmbeddings) || is(ModulePart::kOutputEmbeddings) ||
         module.class_name.ends_with("Embedding") || IsHead(module);
}

// By parameter: one of the modules that register it is an embedding or the head, or a convolution, whose
// kernels are no batch of matrices. (GPT-2's Conv1D is a linear layer of two dimensions.)
std::vector<char> EmbeddingsAndHeads(const Trace& trace) {
  std::vector<char> found(trace.parameters.size(), 0);
  for (const Module& module : trace.modules) {
    const bool left_out = IsEmbeddingOrHead(module), convolution = module.class_name.starts_with("Conv");
    for (const NamedParameter& named : module.parameters) {
      if (left_out || (convolution && trace.parameters[named.parameter].shape.size() != 2))
        found[named.parameter] = 1;
    }
  }
  return found;
}

template <typename Visit>
Status ForEachMatch(const Trace& trace, const std::vector<std::string>& patterns, const std::string& pointer,
                    Visit visit) {
  for (std::size_t p = 0; p < patterns.size(); ++p) {
    const std::string here = fmt::format("{}/{}", pointer, p);
    bool matches = false;
    for (const Parameter& parameter : trace.parameters) {
      if (!MatchesAny({patterns[p]}, parameter.fqn, parameter.shared_with)) continue;
      matches = true;
      if (Status s = visit(parameter, here); !s) return s;
    }
    if (!matches)
      return MakeInputError(here, "no parameter has this name", patterns[p], "an FQN or a pattern over FQNs");
  }
  return {};
}

std::string Dimensions(const Parameter& parameter) {
  return fmt::format("{} dimension{}", parameter.shape.size(), parameter.shape.size() == 1 ? "" : "s");
}

const MatrixRule* RuleOf(const Muon& muon, const std::string& fqn, const std::vector<std::string>& others) {
  const MatrixRule* rest = nullptr;
  for (const MatrixRule& rule : muon.compute) {
    if (rule.parameters.empty()) {
      rest = &rule;
    } else if (MatchesAny(rule.parameters, fqn, others)) {
      return rule.compute == MatrixCompute::kSharded ? nullptr : &rule;
    }
  }
  return rest != nullptr && rest->compute == MatrixCompute::kSharded ? nullptr : rest;
}

Status CheckRules(const Trace& trace, const Muon& muon) {
  std::vector<int> rule_of(trace.parameters.size(), -1);
  for (std::size_t r = 0; r < muon.compute.size(); ++r) {
    const std::string pointer = fmt::format("/optimizer/muon/compute/{}", r);
    const auto take = [&](const Parameter& parameter, const std::string& here) -> Status {
      int& known = rule_of[static_cast<std::size_t>(&parameter - trace.parameters.data())];
      if (known >= 0 && known != static_cast<int>(r))
        return MakeInputError(here, fmt::format("{} is under two rules", parameter.fqn),
                              fmt::format("rules {} and {}", known, r), "one");
      known = static_cast<int>(r);
      return {};
    };
    if (Status s = ForEachMatch(trace, muon.compute[r].parameters, pointer + "/parameters", take); !s)
      return s;
    if (!muon.compute[r].parameters.empty()) continue;
    for (std::size_t other = 0; other < r; ++other) {
      if (muon.compute[other].parameters.empty())
        return MakeInputError(pointer + "/parameters", "two rules are for all the rest", "an empty list",
                              "FQNs or patterns");
    }
  }
  std::vector<int> bucket_of(trace.parameters.size(), -1);
  for (std::size_t b = 0; b < muon.buckets.size(); ++b) {
    const auto take = [&](const Parameter& parameter, const std::string& here) -> Status {
      int& known = bucket_of[static_cast<std::size_t>(&parameter - trace.parameters.data())];
      if (known >= 0 && known != static_cast<int>(b))
        return MakeInputError(here, fmt::format("{} is in two buckets", parameter.fqn),
                              fmt::format("buckets {} and {}", known, b), "one");
      known = static_cast<int>(b);
      return {};
    };
    const std::string pointer = fmt::format("/optimizer/muon/buckets/{}", b);
    if (Status s = ForEachMatch(trace, muon.buckets[b], pointer, take); !s) return s;
  }
  return {};
}

}  // namespace

const MatrixRule* RuleOf(const Muon& muon, const UnitParameter& parameter) {
  return RuleOf(muon, parameter.fqn, parameter.shared_with);
}

Result<Strategy> WithMuonMatrices(const Trace& trace, Strategy strategy) {
  if (!strategy.optimizer.muon) return strategy;
  Muon& muon = *strategy.optimizer.muon;
  if (Status s = CheckRules(trace, muon); !s) return std::unexpected(std::move(s.error()));
  const auto is_matrix = [&](const Parameter& parameter) {
    const MatrixRule* rule = RuleOf(muon, parameter.fqn, parameter.shared_with);
    return parameter.shape.size() == 2 || (parameter.shape.size() == 3 && rule != nullptr);
  };
  if (!muon.matrices.empty()) {
    const auto take = [&](const Parameter& parameter, const std::string& here) -> Status {
      if (is_matrix(parameter)) return {};
      return MakeInputError(here, fmt::format("{} is no matrix that Muon can step", parameter.fqn),
                            Dimensions(parameter), "2 dimensions; 3 with an owner");
    };
    if (Status s = ForEachMatch(trace, muon.matrices, "/optimizer/muon/matrices", take); !s)
      return std::unexpected(std::move(s.error()));
    return strategy;
  }
  const std::vector<char> left_out = EmbeddingsAndHeads(trace);
  for (std::size_t p = 0; p < trace.parameters.size(); ++p) {
    const Parameter& parameter = trace.parameters[p];
    if (left_out[p] != 0 || !parameter.requires_grad || !is_matrix(parameter)) continue;
    const bool batch = parameter.shape.size() == 3;
    if (parameter.fqn.ends_with("bias") || (batch && std::ranges::min(parameter.shape) < 2)) continue;
    muon.matrices.push_back(parameter.fqn);
  }
  if (muon.matrices.empty())
    return MakeInputError("/optimizer/muon/matrices", "the model has no matrix for Muon", "none",
                          "a trainable parameter of two dimensions that is no embedding and no head");
  return strategy;
}

}  // namespace shardplan
