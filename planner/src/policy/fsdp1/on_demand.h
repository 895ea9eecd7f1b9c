// SPDX-License-Identifier: Apache-2.0
// Procedures of a flat parameter, beside the steps: the handle as in a step, on the compute stream.
#pragma once

#include "policy/fsdp1/context.h"

namespace shardplan::fsdp1 {

// Emits the procedures of all flat parameters. `context`: of the steps.
void EmitProcedures(const Context& context);

}  // namespace shardplan::fsdp1
