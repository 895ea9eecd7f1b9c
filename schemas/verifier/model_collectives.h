// SPDX-License-Identifier: Apache-2.0
// The collectives that the model itself issues: whether every send meets its receive. Every rank of the plan
// issues the same, so what a rank sends `d` places on is what another receives from `d` places back.
#pragma once

#include "verifier/words/report.h"

namespace shardplan::verifier {

// Rules of the model's collectives in the steps of a plan, each step once:
//   wait_before_record  a segment waits for a collective that none has issued
//   collective_order    a send without its receive, or the reverse; or they differ in size, dtype or group
//   deadlock            a rank waits for one of the two before it issues the other
// The plan's tables are checked.
void CheckModelCollectives(const Plan& plan, Reporter& reporter);

}  // namespace shardplan::verifier
