// SPDX-License-Identifier: Apache-2.0
// A policy that is not built in, from a shared library.
#pragma once

#include <memory>
#include <string>
#include <utility>

#include "shardplan/planner/policy.h"
#include "shardplan/schemas/error.h"

namespace shardplan {

// Loaded as long as it lives. It outlives the policies that its description makes.
class PolicyLibrary {
 public:
  // Compares the stamps (SHARDPLAN_POLICY_STAMP) before it calls anything of the library. kBadInput, with the
  // file: it is missing or no library, has no policy, was built for another shardplan, throws, or describes a
  // policy that cannot be used (a name that is taken, two knobs of one name, nothing that makes it).
  static Result<PolicyLibrary> Load(const std::string& path);

  const PolicyDescription& description() const { return description_; }

 private:
  using Handle = std::unique_ptr<void, void (*)(void*)>;
  PolicyLibrary(Handle handle, PolicyDescription description)
      : handle_(std::move(handle)), description_(std::move(description)) {}

  Handle handle_;
  PolicyDescription description_;  // of code in the library: ends first
};

}  // namespace shardplan
