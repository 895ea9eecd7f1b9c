// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "shardplan/schemas/error.h"
#include "shardplan/schemas/strategy.h"
#include "shardplan/schemas/trace.h"
#include "units/model_index.h"

namespace shardplan {

// ApplyCheckpointing of a trace that CheckTrace has passed, with its index.
Result<Trace> CheckpointChecked(const Trace& trace, const ModelIndex& index, const CheckpointRule& rule);

}  // namespace shardplan
