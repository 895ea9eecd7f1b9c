// The faults that a policy has met while it emitted a plan, each once.
#pragma once

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "policy/policy.h"

namespace shardplan {

class FaultList {
 public:
  void Add(Rule rule, std::string why) {
    const bool known = std::ranges::any_of(
        faults_, [&](const KnownFault& fault) { return fault.rule == rule && fault.why == why; });
    if (!known) faults_.push_back({rule, std::move(why)});
  }
  const std::vector<KnownFault>& faults() const { return faults_; }

 private:
  std::vector<KnownFault> faults_;
};

}  // namespace shardplan
