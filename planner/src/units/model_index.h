// SPDX-License-Identifier: Apache-2.0
// Lookups over the module tree of a trace.
#pragma once

#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "shardplan/schemas/error.h"
#include "shardplan/schemas/precision.h"
#include "shardplan/schemas/trace.h"

namespace shardplan {

// A module that is registered under several names is one module: `canonical` maps every ModuleId to the one
// first seen.
struct ModelIndex {
  std::map<std::string, ModuleId, std::less<>> by_fqn;
  std::vector<ModuleId> canonical;
  std::vector<ModuleId> parent;                 // of the entry, -1 for the root
  std::vector<std::vector<ModuleId>> children;  // entries, registration order (not canonical)
};

// `fqn` is `module` or the name of one of its descendants; "" is the root.
bool IsUnder(std::string_view fqn, const std::string& module);

// The index of a trace that CheckTrace (schemas) lets through, or of one made of it.
ModelIndex MakeModelIndex(const Trace& trace);

}  // namespace shardplan
