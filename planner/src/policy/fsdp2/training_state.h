// SPDX-License-Identifier: Apache-2.0
// The activity of a state or a parameter group (TrainingState in _fsdp_common.py).
#pragma once

#include <cstdint>

namespace shardplan::fsdp2 {

enum class TrainingState : std::uint8_t { kIdle, kForward, kPreBackward, kPostBackward };

}  // namespace shardplan::fsdp2
