// SPDX-License-Identifier: Apache-2.0
// Rules of a unit's own table, before anything is said about its buffers.
#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <vector>

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

// The digits of a rank that a group of it goes over, the most significant first; neighbours joined.
std::vector<CommunicatorDim> DigitsOfGroup(const Communicator& group) {
  if (!group.dims.empty()) return group.dims;
  return {{group.size, group.stride}};
}

// "": the unit reduces over all shards at once, or its two levels are the ranks of its shards.
std::string WrongLevels(const Plan& plan, const Unit& unit) {
  const CommunicatorId inner = unit.inner_reduce_communicator, outer = unit.outer_reduce_communicator;
  if (inner < 0 && outer < 0) return {};
  if (inner < 0 || outer < 0) return "its reductions have one of two levels";
  if (unit.layout == LayoutKind::kFlat) return "a flat parameter is reduced in two levels";
  if (unit.shard_communicator < 0) return "it is not sharded, and reduced in two levels";
  const Communicator &first = plan.communicators[inner], &second = plan.communicators[outer];
  std::vector<CommunicatorDim> both = DigitsOfGroup(second);
  for (const CommunicatorDim& digit : DigitsOfGroup(first)) {
    // Digits that lie side by side are one.
    if (both.back().stride == digit.stride * digit.size) {
      both.back() = {both.back().size * digit.size, digit.stride};
    } else {
      both.push_back(digit);
    }
  }
  if (both == DigitsOfGroup(plan.communicators[unit.shard_communicator])) return {};
  return fmt::format("the levels of its reductions, {} and {}, are not the ranks of its shards", first.name,
                     second.name);
}

}  // namespace

std::string WhatIsWrongWithUnit(const Plan& plan, const Unit& unit) {
  for (const UnitParameter& parameter : unit.parameters) {
    if (std::string wrong = WrongShape(unit, parameter); !wrong.empty()) return wrong;
  }
  if (std::string wrong = WrongLevels(plan, unit); !wrong.empty()) return wrong;
  return unit.layout == LayoutKind::kFlat ? WrongFlat(unit, ShardCount(plan, unit)) : std::string();
}

}  // namespace shardplan::verifier
