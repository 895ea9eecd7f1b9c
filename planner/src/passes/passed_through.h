// SPDX-License-Identifier: Apache-2.0
// Pass `join_tensors`: hooks on tensors that a module returns as it got them.
//
// [Note: tensors that a module passes through]
// The tracer puts an identity function around the inputs of every module that has parameters, because any of
// them may be a unit. FSDP2 puts one around the inputs of its units only, FSDP1 around none. If a module
// returns one of its inputs, the identity makes another tensor of it: hooks on the two fire apart, the ones
// on the later tensor first. Without the identity both are one tensor, and all hooks on it fire when its
// gradient is complete, in the order of registration. T5's position bias goes through every layer like that.
#pragma once

#include <optional>

#include "units/partition.h"

namespace shardplan {

// The trace as the units of `partition` make it: output_grad_ready events of such tensors moved to where they
// fire. `inputs_wrapped`: units have an identity (PolicyDescription::wraps_inputs). nullopt: nothing moves.
std::optional<Trace> JoinPassedThrough(const Trace& trace, const ModelIndex& index,
                                       const Partition& partition, bool inputs_wrapped);

}  // namespace shardplan
