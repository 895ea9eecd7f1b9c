// SPDX-License-Identifier: Apache-2.0
// Random jobs for the parts of the optimising planner.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <string>
#include <utility>
#include <variant>

#include "shardplan/schemas/cluster.h"
#include "shardplan/schemas/trace.h"
#include "tests/planner/bound_cases.h"

namespace shardplan::testing {

struct PartsCase {
  Trace trace;
  Cluster cluster;
};

// Blocks of a norm, an attention and an mlp, of which each keeps something for the backward.
inline PartsCase RandomPartsCase(std::uint32_t seed, int blocks) {
  Random random(seed * 7919U + 3);
  TreeModule list{.name = "layers", .class_name = "ModuleList"};
  const std::int64_t rows = 512 * (1 + random.Below(6)), columns = 512 * (1 + random.Below(6));
  for (int i = 0; i < blocks; ++i) {
    list.children.push_back({.name = std::to_string(i),
                             .class_name = "Block",
                             .children = {{.name = "norm", .parameters = {{columns}}},
                                          {.name = "attn", .parameters = {{rows, columns}}},
                                          {.name = "mlp", .parameters = {{2 * rows, columns}}}}});
  }
  PartsCase c{.trace = TraceOf({.name = "",
                                .children = {{.name = "embed", .parameters = {{rows, columns}}},
                                             list,
                                             {.name = "head", .parameters = {{rows, columns}}}}},
                               100'000 * (1 + random.Below(100))),
              .cluster = RandomCluster(random, 4)};
  c.cluster.device.memory_bytes_per_second = 10'000'000'000;
  const std::int64_t saved = 262'144 * (1 + random.Below(512));
  for (TraceEvent& event : c.trace.forwards.front().events) {
    if (auto* allocate = std::get_if<AllocateEvent>(&event)) allocate->size_bytes = {saved};
    if (auto* op = std::get_if<OperatorEvent>(&event); op != nullptr && op->module >= 0) {
      const std::string& fqn = c.trace.modules[op->module].fqn;
      if (fqn.ends_with("attn")) op->name = "aten._scaled_dot_product_flash_attention";
      if (fqn.ends_with("norm")) op->name = "aten.mul", op->flops = 0;
    }
  }
  return c;
}

// SHARDPLAN_SEED names the one seed of a test: what some of all seeds have to show is not asked of it.
inline bool OfOneSeed() { return std::getenv("SHARDPLAN_SEED") != nullptr; }

// The seeds of a test: from 1 to `last` (more: tools/nightly --only optimizer), or SHARDPLAN_SEED alone.
inline std::pair<std::uint32_t, std::uint32_t> SeedsUpTo(std::uint32_t last) {
  if (const char* seed = std::getenv("SHARDPLAN_SEED"); seed != nullptr) {
    const auto only = static_cast<std::uint32_t>(std::atoi(seed));
    return {only, only};
  }
  return {1, last};
}

}  // namespace shardplan::testing
