// SPDX-License-Identifier: Apache-2.0
// What must hold of a unit's own table before anything is said about its buffers.
#include <fmt/format.h>

#include <algorithm>
#include <cstdint>

#include "shardplan/schemas/layout.h"
#include "verifier/references.h"

namespace shardplan::verifier {
namespace {

// "": the parameter has elements, and a dimension to be cut along.
std::string WrongShape(const Unit& unit, const UnitParameter& parameter) {
  std::int64_t numel = 1;
  for (const std::int64_t rows : parameter.shape) {
    if (rows < 0) return fmt::format("{} has a dimension of {}", parameter.fqn, rows);
    if (__builtin_mul_overflow(numel, rows, &numel)) {
      return fmt::format("{} has more elements than can be counted", parameter.fqn);
    }
  }
  const std::int32_t dims = std::max<std::int32_t>(1, static_cast<std::int32_t>(parameter.shape.size()));
  if (unit.layout == LayoutKind::kPerParameter && (parameter.shard_dim < 0 || parameter.shard_dim >= dims)) {
    return fmt::format("{} of {} dimensions is cut along dimension {}", parameter.fqn, parameter.shape.size(),
                       parameter.shard_dim);
  }
  return {};
}

// "": the parameters lie one behind the other in the flat one, which is cut into equal pieces.
std::string WrongFlat(const Unit& unit, std::int64_t shards) {
  std::int64_t end = 0;
  for (const UnitParameter& parameter : unit.parameters) {
    if (parameter.flat_offset < end) {
      return fmt::format("{} begins at element {} of the flat parameter, where another one ends at {}",
                         parameter.fqn, parameter.flat_offset, end);
    }
    if (__builtin_add_overflow(parameter.flat_offset, Numel(parameter), &end)) {
      return fmt::format("{} has more elements than can be counted", parameter.fqn);
    }
  }
  if (end > unit.flat_numel) {
    return fmt::format("the flat parameter has {} elements, and its parameters end at {}", unit.flat_numel,
                       end);
  }
  if (unit.flat_numel % shards == 0) return {};
  return fmt::format("{} elements cannot be cut into {} equal pieces", unit.flat_numel, shards);
}

}  // namespace

std::string WhatIsWrongWithUnit(const Plan& plan, const Unit& unit) {
  for (const UnitParameter& parameter : unit.parameters) {
    if (std::string wrong = WrongShape(unit, parameter); !wrong.empty()) return wrong;
  }
  return unit.layout == LayoutKind::kFlat ? WrongFlat(unit, ShardCount(plan, unit)) : std::string();
}

}  // namespace shardplan::verifier
