// SPDX-License-Identifier: Apache-2.0
// The modules that units are made of, in the order in which the forward enters them.
#pragma once

#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "shardplan/schemas/trace.h"

namespace shardplan::optimize {

struct ChainModule {
  std::string fqn;
  bool block = false;  // one of the repeated blocks
};

struct ModelChain {
  std::vector<ChainModule> modules;   // every parameter is under one of them, or the root's own
  std::vector<std::string> children;  // names that every block has, of modules that can be recomputed
  // In every block, modules below it with an eighth of its parameters and more: they may be units of their
  // own.
  std::vector<std::string> parts;
  // Operators with matrix work that the blocks run, by what they are called.
  std::vector<std::string> products, attentions;
  std::map<std::string, std::set<std::string>> operators_of;  // those of each of `children`
  std::int32_t blocks = 0;
};

ModelChain MakeModelChain(const Trace& trace);

}  // namespace shardplan::optimize
