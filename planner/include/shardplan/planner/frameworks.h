// SPDX-License-Identifier: Apache-2.0
// What frameworks do around FSDP, each as the release named here does it: the units that they make and the
// operators that they keep. Tests hold both against the installed packages (tools/requirements-alone.txt).
#pragma once

#include <string_view>

#include "shardplan/schemas/strategy.h"

namespace shardplan {

inline constexpr std::string_view kTorchtitanVersion = "0.3.0";

// torchtitan's selective checkpointing by operator (torchtitan/distributed/activation_checkpoint.py,
// SelectiveAC), with what torch 2.15 calls compute-intensive: operators whose results are kept, of products
// without a bias every second is run again; no early stop. `modules` is empty.
const CheckpointRule& TorchtitanSelectiveCheckpointing();

}  // namespace shardplan
