// SPDX-License-Identifier: Apache-2.0
#include "units/muon_matrices.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "shardplan/schemas/optimizers.h"
#include "units/unit_parameters.h"

namespace shardplan {
namespace {

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

// Each pattern is of a parameter that trains and that Muon steps; `otherwise`: the error's message.
Status CheckSteps(const Trace& trace, const Optimizer& optimizer, const std::vector<std::string>& patterns,
                  const std::string& pointer, const char* otherwise, const char* expected) {
  for (std::size_t p = 0; p < patterns.size(); ++p) {
    const bool steps = std::ranges::any_of(trace.parameters, [&](const Parameter& parameter) {
      return parameter.requires_grad && MatchesAny({patterns[p]}, parameter.fqn, parameter.shared_with) &&
             MuonSteps(optimizer, parameter.fqn, parameter.shared_with);
    });
    if (!steps) return MakeInputError(fmt::format("{}/{}", pointer, p), otherwise, patterns[p], expected);
  }
  return {};
}

// Each pattern of a rule or a bucket is of a matrix that Muon steps.
Status CheckPatterns(const Trace& trace, const Optimizer& optimizer) {
  const Muon& muon = *optimizer.muon;
  const auto check = [&](const std::vector<std::string>& patterns, const std::string& pointer) {
    return CheckSteps(trace, optimizer, patterns, pointer, "no matrix that Muon steps has this name",
                      "FQNs or patterns of Muon's matrices");
  };
  for (std::size_t r = 0; r < muon.compute.size(); ++r) {
    const std::string pointer = fmt::format("/optimizer/muon/compute/{}/parameters", r);
    if (Status s = check(muon.compute[r].parameters, pointer); !s) return s;
  }
  for (std::size_t b = 0; b < muon.buckets.size(); ++b) {
    if (Status s = check(muon.buckets[b], fmt::format("/optimizer/muon/buckets/{}", b)); !s) return s;
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
    if (Status s = CheckSteps(trace, strategy.optimizer, muon.matrices, "/optimizer/muon/matrices",
                              "no parameter of this name trains", "a parameter with a gradient");
        !s)
      return std::unexpected(std::move(s.error()));
    if (Status s = CheckPatterns(trace, strategy.optimizer); !s) return std::unexpected(std::move(s.error()));
    return strategy;
  }
  for (const Parameter& parameter : trace.parameters) {
    if (parameter.muon && is_matrix(parameter)) muon.matrices.push_back(parameter.fqn);
  }
  if (muon.matrices.empty())
    return MakeInputError("/optimizer/muon/matrices", "the trace has no matrix for Muon", "none",
                          "parameters of two dimensions that `shardplan trace --muon` marks, or patterns");
  if (Status s = CheckPatterns(trace, strategy.optimizer); !s) return std::unexpected(std::move(s.error()));
  return strategy;
}

}  // namespace shardplan
