// SPDX-License-Identifier: Apache-2.0
// Costs of the operators and copies of a plan: layers repeat, so equal ones are looked up once.
#pragma once

#include <cstdint>
#include <unordered_map>
#include <vector>

#include "shardplan/simulator/cost_model.h"

namespace shardplan::internal {

// The host's time to issue an operator: nothing where it runs the kernels itself, which pay for it.
constexpr Nanoseconds IssueOfOperator(const Host& host) {
  return host.runs_kernels ? Nanoseconds{0} : host.operator_issue_ns;
}

struct OperatorFacts {
  Nanoseconds duration_ns;        // CostModel::Operator
  std::int64_t matmul_flops = 0;  // of matrix work (IsMatmulOperator), 0 of all else
};

// The events outlive it: they stand for those equal to them.
class OperatorCosts {
 public:
  explicit OperatorCosts(const CostModel& costs) : costs_(costs), table_(kSmallest) {}

  const OperatorFacts& Of(const OperatorEvent& event);
  // One of each kind that was asked for.
  template <typename Visit>
  void ForEachKind(Visit visit) const {
    for (const Entry& entry : entries_) visit(*entry.event, entry.facts);
  }

 private:
  static constexpr std::size_t kSmallest = 1 << 8;
  struct Entry {
    const OperatorEvent* event = nullptr;
    std::size_t hash = 0;
    OperatorFacts facts;
    std::int32_t next = 0;  // index of the one that came after it the last time: layers repeat
  };
  std::int32_t Find(const OperatorEvent& event);
  std::size_t Place(const OperatorEvent& event, std::size_t hash) const;
  void Grow();

  const CostModel& costs_;
  std::vector<Entry> entries_;
  std::vector<std::int32_t>
      table_;  // indices into entries_ and 1, 0: free; open addressing, half full at most
  std::int32_t last_ = -1;
};

// CostModel::DeviceCopy by bytes.
class CopyCosts {
 public:
  explicit CopyCosts(const CostModel& costs) : costs_(costs) {}
  Nanoseconds Of(Bytes read, Bytes written) {
    const auto [known, added] = known_.try_emplace((read + written).value);
    if (added) known->second = costs_.DeviceCopy(read, written);
    return known->second;
  }

 private:
  const CostModel& costs_;
  std::unordered_map<std::int64_t, Nanoseconds> known_;
};

}  // namespace shardplan::internal
