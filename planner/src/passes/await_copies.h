// SPDX-License-Identifier: Apache-2.0
// Pass `await_copies`: before the host itself works on memory of its own (an optimizer's step of offloaded
// parameters), it waits for copies between that memory and the device that nothing has waited for yet.
//
// PyTorch has no such waits: an evaluation between a backward and the optimizer's step copies shards that the
// optimizer may change meanwhile. Nothing is added if PyTorch's own waits are enough.
#pragma once

#include "shardplan/schemas/plan.h"

namespace shardplan {

void AwaitCopies(Plan& plan);

}  // namespace shardplan
