// SPDX-License-Identifier: Apache-2.0
// The violations of several ranks' programs in words.
#pragma once

#include <vector>

#include "shardplan/verifier/verifier.h"
#include "verifier/collectives.h"

namespace shardplan::verifier {

// The plan of `rank` is for another number of ranks than there are plans.
Violation OtherWorldSize(const std::vector<Plan>& plans_by_rank, std::size_t rank);
Violation DifferentCollective(const RankPrograms& programs, const OrderFault& fault);
// `circle` is not empty.
Violation CircleOfWaits(const RankPrograms& programs, const std::vector<WaitLink>& circle);

}  // namespace shardplan::verifier
