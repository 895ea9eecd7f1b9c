// SPDX-License-Identifier: Apache-2.0
// The fsdp2 knobs of a unit's parameters: dtypes, shard dimensions, all-gather extensions, placements over
// the mesh's other dimensions (FSDPParam._init_sharded_param, init_dtype_attrs).
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "shardplan/schemas/strategy.h"
#include "units/partition.h"

namespace shardplan {

// Whether one of the patterns matches the name, or another of the same parameter.
bool MatchesAny(const std::vector<std::string>& patterns, const std::string& fqn,
                const std::vector<std::string>& shared_with);

// Sets the dtypes of `choice.unit` and every knob of its parameters. kBadInput at `pointer` (the unit's call)
// for what PyTorch refuses: a scalar, trainable parameters of several dtypes, uneven shards along another
// dimension than the first, ...
Status SetParameterKnobs(const Strategy& strategy, const Mesh& mesh, std::string_view pointer,
                         UnitChoice& choice);

// kBadInput for a rule of shard_dims, extensions or a unit's parameter_meshes that matches no parameter.
Status CheckParameterRules(const Trace& trace, const Strategy& strategy);

}  // namespace shardplan
