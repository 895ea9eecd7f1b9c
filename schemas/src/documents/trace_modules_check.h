// SPDX-License-Identifier: Apache-2.0
// The part of CheckTrace that is about modules and parameters.
#pragma once

#include <vector>

#include "shardplan/schemas/error.h"
#include "shardplan/schemas/trace.h"

namespace shardplan {

// Modules and parameters have names of their own, the modules are a tree, parameters are where modules say.
Status CheckModules(const Trace& trace);

// By module: the one that it is, which is another where a module is registered twice. The modules are
// checked.
std::vector<ModuleId> CanonicalModules(const Trace& trace);

}  // namespace shardplan
