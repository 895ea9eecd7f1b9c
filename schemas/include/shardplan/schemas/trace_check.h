// SPDX-License-Identifier: Apache-2.0
// Consistency of a trace: rules that the JSON Schema cannot express and planning relies on.
#pragma once

#include <string_view>
#include <unordered_map>

#include "shardplan/schemas/error.h"
#include "shardplan/schemas/trace.h"

namespace shardplan {

// kBadInput, with the pointer: the modules are no tree, modules are left that were not entered, a storage is
// used that is not alive, an event refers to a call that the forward does not have, ...
// docs/reference/trace-format.md lists the rules. Reading a trace asks it, and planning.
Status CheckTrace(const Trace& trace);

// Whether the pointer is a place in a trace: its first key is that of one of the document's fields.
bool IsPlaceInTrace(std::string_view pointer);

// The compiled modules of a trace, which outlives this.
class CompiledModules {
 public:
  explicit CompiledModules(const Trace& trace);
  // The outermost one whose graph this module is part of; nullptr: there is none.
  const Module* Around(const Module& module) const;

 private:
  std::unordered_map<std::string_view, const Module*> by_fqn_;
};

}  // namespace shardplan
