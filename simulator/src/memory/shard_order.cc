// SPDX-License-Identifier: Apache-2.0
#include "memory/shard_order.h"

#include <algorithm>
#include <string_view>
#include <utility>

#include "shardplan/schemas/layout.h"

namespace shardplan::internal {
namespace {

bool IsInside(std::string_view inner, std::string_view outer) {
  return outer.empty() || (inner.starts_with(outer) && inner.substr(outer.size()).starts_with('.'));
}

// Units are listed with the outer ones first.
std::vector<BufferId> InnerFirst(const Plan& plan, const std::vector<BufferId>& shards) {
  std::vector<BufferId> ordered;
  std::vector<BufferId> open;
  const auto fqn = [&](BufferId b) -> const std::string& {
    return plan.units[static_cast<std::size_t>(plan.buffers[static_cast<std::size_t>(b)].unit)].fqn;
  };
  const auto close = [&] {
    ordered.push_back(open.back());
    open.pop_back();
  };
  for (const BufferId shard : shards) {
    while (!open.empty() && !IsInside(fqn(shard), fqn(open.back()))) close();
    open.push_back(shard);
  }
  while (!open.empty()) close();
  return ordered;
}

}  // namespace

std::vector<ShardMade> ShardsInOrder(const Plan& plan) {
  std::vector<BufferId> flat;
  std::vector<std::pair<std::int32_t, ShardMade>> by_index;
  for (std::size_t b = 0; b < plan.buffers.size(); ++b) {
    const Buffer& buffer = plan.buffers[b];
    if (!buffer.persistent || buffer.role != BufferRole::kParamSharded || buffer.unit < 0) continue;
    const Unit& unit = plan.units[static_cast<std::size_t>(buffer.unit)];
    const std::vector<std::int32_t> parameters = ParametersOf(plan, buffer);
    if (unit.layout == LayoutKind::kFlat || parameters.size() != buffer.parts_bytes.size()) {
      flat.push_back(static_cast<BufferId>(b));
      continue;
    }
    for (std::size_t p = 0; p < parameters.size(); ++p) {
      const std::int32_t index = unit.parameters[static_cast<std::size_t>(parameters[p])].index;
      by_index.push_back({index, {static_cast<BufferId>(b), static_cast<std::int32_t>(p)}});
    }
  }
  std::ranges::stable_sort(by_index, {}, [](const auto& entry) { return entry.first; });
  std::vector<ShardMade> ordered;
  for (const BufferId b : InnerFirst(plan, flat)) {
    const std::size_t parts = plan.buffers[static_cast<std::size_t>(b)].parts_bytes.size();
    for (std::size_t p = 0; p < parts; ++p) ordered.push_back({b, static_cast<std::int32_t>(p)});
  }
  for (const auto& [index, shard] : by_index) ordered.push_back(shard);
  return ordered;
}

}  // namespace shardplan::internal
