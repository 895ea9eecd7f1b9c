// SPDX-License-Identifier: Apache-2.0
// The faults that a policy has met while it emitted a plan, each once.
#pragma once

#include <algorithm>
#include <vector>

#include "shardplan/planner/policy.h"

namespace shardplan {

class FaultList {
 public:
  void Add(PyTorchFault fault) {
    if (std::ranges::find(faults_, fault) == faults_.end()) faults_.push_back(fault);
  }
  const std::vector<PyTorchFault>& faults() const { return faults_; }

 private:
  std::vector<PyTorchFault> faults_;
};

}  // namespace shardplan
