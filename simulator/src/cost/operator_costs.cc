// SPDX-License-Identifier: Apache-2.0
#include "cost/operator_costs.h"

#include "cost/operator_class.h"

namespace shardplan::internal {
namespace {

// Everything that CostModel::Operator may look at but the name, which is compared and not hashed: operators
// of one size and several names are few.
std::size_t HashOf(const OperatorEvent& event) {
  std::uint64_t hash = static_cast<std::uint64_t>(event.dtype) + (event.name.size() << 8);
  for (const std::int64_t part :
       {event.flops, event.bytes_read.value, event.bytes_written.value, event.duration_ns.value}) {
    hash = (hash ^ static_cast<std::uint64_t>(part)) * 0x9E3779B97F4A7C15ULL;
    hash ^= hash >> 29;
  }
  return hash;
}

bool CostTheSame(const OperatorEvent& a, const OperatorEvent& b) {
  return a.flops == b.flops && a.bytes_read == b.bytes_read && a.bytes_written == b.bytes_written &&
         a.duration_ns == b.duration_ns && a.dtype == b.dtype && a.name == b.name;
}

}  // namespace

const OperatorFacts& OperatorCosts::Of(const OperatorEvent& event) {
  if (last_ >= 0) {
    const std::int32_t next = entries_[static_cast<std::size_t>(last_)].next;
    if (CostTheSame(*entries_[static_cast<std::size_t>(next)].event, event)) {
      last_ = next;
      return entries_[static_cast<std::size_t>(next)].facts;
    }
  }
  const std::int32_t found = Find(event);
  if (last_ >= 0) entries_[static_cast<std::size_t>(last_)].next = found;
  last_ = found;
  return entries_[static_cast<std::size_t>(found)].facts;
}

std::int32_t OperatorCosts::Find(const OperatorEvent& event) {
  const std::size_t hash = HashOf(event);
  const std::size_t place = Place(event, hash);
  if (table_[place] > 0) return table_[place] - 1;
  const OperatorFacts facts{costs_.Operator(event),
                            event.flops != 0 && IsMatmulOperator(event.name) ? event.flops : 0};
  entries_.push_back({&event, hash, facts, 0});
  table_[place] = static_cast<std::int32_t>(entries_.size());
  if (entries_.size() * 2 > table_.size()) Grow();
  return static_cast<std::int32_t>(entries_.size()) - 1;
}

std::size_t OperatorCosts::Place(const OperatorEvent& event, std::size_t hash) const {
  std::size_t at = hash & (table_.size() - 1);
  for (; table_[at] > 0; at = (at + 1) & (table_.size() - 1)) {
    const Entry& entry = entries_[static_cast<std::size_t>(table_[at]) - 1];
    if (entry.hash == hash && CostTheSame(*entry.event, event)) break;
  }
  return at;
}

void OperatorCosts::Grow() {
  table_.assign(table_.size() * 2, 0);
  for (std::size_t e = 0; e < entries_.size(); ++e) {
    table_[Place(*entries_[e].event, entries_[e].hash)] = static_cast<std::int32_t>(e) + 1;
  }
}

}  // namespace shardplan::internal
