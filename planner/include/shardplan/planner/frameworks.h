// SPDX-License-Identifier: Apache-2.0
// What frameworks do around FSDP, each as the release named here does it: the units that they make and the
// operators that they keep. Tests hold both against the installed packages (tools/requirements-alone.txt).
#pragma once

#include <span>
#include <string_view>
#include <vector>

#include "shardplan/schemas/error.h"
#include "shardplan/schemas/strategy.h"
#include "shardplan/schemas/trace.h"

namespace shardplan {

inline constexpr std::string_view kTorchtitanVersion = "0.3.0";

// torchtitan's selective checkpointing by operator (torchtitan/distributed/activation_checkpoint.py,
// SelectiveAC), with what torch 2.15 calls compute-intensive: operators whose results are kept, of products
// without a bias every second is run again; no early stop. `modules` is empty.
const CheckpointRule& TorchtitanSelectiveCheckpointing();

// "accelerate", "torchtitan", "peft".
std::span<const std::string_view> FrameworksWithUnits();

// The units that a framework makes of the traced model under strategy.policy, the root last: accelerate 1.15,
// torchtitan 0.3, peft 0.21. kUsage: no such framework, or it does not have the policy. kBadInput: the trace
// does not say what the framework asks the model (Module::parts), or it wraps no such model.
Result<std::vector<UnitRule>> UnitsOfFramework(std::string_view framework, const Trace& trace,
                                               const Strategy& strategy);

}  // namespace shardplan
