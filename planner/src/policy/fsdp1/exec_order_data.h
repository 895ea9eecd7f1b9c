// SPDX-License-Identifier: Apache-2.0
// The orders in which units run, which prefetches follow (_exec_order_utils.py).
#pragma once

#include <vector>

#include "policy/fsdp1/context.h"

namespace shardplan::fsdp1 {

class FlatParamHandle;

class ExecOrderData {
 public:
  // Notes the first use of a unit in the first iteration. There, in training, ranks compare their orders if
  // the strategy asks for that.
  void RecordPreForward(const Context& context, FlatParamHandle& handle, bool is_training);
  void RecordPostForward(FlatParamHandle& handle);
  // The unit to gather after `handle` in a backward; -1: none.
  UnitId HandleToBackwardPrefetch(const FlatParamHandle& handle) const;
  // ... in a forward.
  UnitId HandleToForwardPrefetch(const FlatParamHandle& handle) const;
  // A backward that reaches the root is over.
  void NextIter();

  bool operator==(const ExecOrderData&) const = default;

 private:
  // First uses in the forwards of the first iteration (handles_pre_forward_order).
  std::vector<UnitId> pre_forward_order_;
  // All uses in the forwards since the last backward (handles_post_forward_order).
  std::vector<UnitId> post_forward_order_;
  // is_first_iter: until the first backward is over. How many are over (_iter) decides nothing.
  bool is_first_iter_ = true;
};

}  // namespace shardplan::fsdp1
