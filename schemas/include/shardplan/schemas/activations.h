// SPDX-License-Identifier: Apache-2.0
// Activations that a plan moves to host memory and back (docs/reference/plan-format.md): buffers of the role
// activation, whose parts are storages of the model. Segments make and free the storages one by one.
#pragma once

#include <vector>

#include "shardplan/schemas/plan.h"

namespace shardplan {

// What a segment does to one of them. A segment that only reads or writes storages has neither.
struct ActivationTouch {
  BufferId buffer = -1;
  std::vector<StorageId> made, freed;
  bool operator==(const ActivationTouch&) const = default;
};

// By segment: the activation buffers of which it makes, uses or frees a storage, in the order in which it
// comes to them. A storage that is in several buffers counts for the last.
std::vector<std::vector<ActivationTouch>> ActivationsTouched(const Plan& plan);

}  // namespace shardplan
