// SPDX-License-Identifier: Apache-2.0
// Which modules FSDP1 wraps and which parameters it leaves alone (wrap.py, _wrap_utils.py, _init_utils.py).
#pragma once

#include <set>
#include <vector>

#include "shardplan/schemas/strategy.h"
#include "units/partition.h"

namespace shardplan {

// The modules of Fsdp1Knobs::ignored_modules and all below them, canonical. kBadInput: an entry that matches
// nothing.
Result<std::set<ModuleId>> IgnoredModules(const Trace& trace, const ModelIndex& index,
                                          const Strategy& strategy);

// The strategy's rules with every class rule and the size-based policy replaced by the modules that they
// choose: none that is ignored or that a rule names. With mixed precision, such a policy also makes units in
// full precision of the classes that mixed precision ignores. Rules that name modules wrap by hand and do
// neither.
Result<std::vector<UnitRule>> ExpandWrapPolicy(const Trace& trace, const ModelIndex& index,
                                               const Strategy& strategy, std::vector<UnitRule> rules,
                                               const std::set<ModuleId>& ignored_modules,
                                               const std::set<ParameterId>& ignored_parameters);

// The model's buffers as FSDP1 casts them before the first forward: floating ones to the buffer_dtype of the
// innermost unit around them, those of ignored modules not.
void CastBuffers(const ModelIndex& index, const Partition& partition,
                 const std::set<ModuleId>& ignored_modules, std::vector<ModuleBuffer>& buffers);

}  // namespace shardplan
