// SPDX-License-Identifier: Apache-2.0
// Pass `offload_activations`: which tensors leave for host memory in a unit's forward, and at which points of
// a step they go, end on the device, come back and are waited for.
//
// [Note: when activations go and come back]
// A unit's copy to the host begins when its forward ends. The device gives the memory up when the next unit
// that is offloaded has run forward, and its copy begins: so the copy has the time of all units between the
// two, and one unit's tensors are on their way at a time. The backward is the mirror of it: a unit's tensors
// are brought back when the one that was offloaded behind it begins to run backward. The last unit that is
// offloaded has the distance of the two before. The memory of one unit more than has to be is there on the
// way, where others are not there yet, or not any more.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "shardplan/planner/hook_points.h"
#include "shardplan/planner/program_builder.h"
#include "shardplan/schemas/error.h"
#include "shardplan/schemas/strategy.h"
#include "shardplan/schemas/trace.h"
#include "units/model_index.h"
#include "units/partition.h"

namespace shardplan {

// The offloaded storages of a unit in a forward of the trace.
struct OffloadedUnit {
  UnitId unit = -1;
  std::int32_t forward = -1;
  std::vector<StorageId> storages;  // in the order of their birth
  std::vector<Bytes> bytes;         // of each
};

struct OffloadPoint {
  // In the order in which they are issued at one point.
  enum class Kind : std::uint8_t { kAwait, kRelease, kOut, kBack };
  std::size_t behind = 0;  // which of the step's points
  Kind kind = Kind::kOut;
  std::int32_t unit = -1;  // index into ActivationOffloads::units
  std::int32_t microbatch = 0;
};

struct ActivationOffloads {
  std::vector<OffloadedUnit> units;
  std::vector<std::vector<OffloadPoint>> steps;  // by recorded step; in the order of `behind`
};

// kBadInput: a module of the rule is in no unit, runs more than once in a forward, is recomputed, too, or
// runs the forward of another micro-batch before the backward of the first; a backward covers several
// micro-batches.
Result<ActivationOffloads> OffloadActivations(const Trace& trace, const ModelIndex& index,
                                              const Partition& partition, const Strategy& strategy,
                                              const std::vector<RecordedStep>& steps);

// Writes the instructions of a point.
void EmitOffload(const OffloadedUnit& offloaded, const OffloadPoint& point, ProgramBuilder& builder);

// For people.
std::string OffloadText(const Partition& partition, const ActivationOffloads& offloads);

}  // namespace shardplan
