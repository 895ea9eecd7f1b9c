// SPDX-License-Identifier: Apache-2.0
// The needs of a backward in checkpointed modules: the first half of pass `apply_checkpointing`.
#pragma once

#include <map>
#include <set>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "units/model_index.h"

namespace shardplan {

// One call of a checkpointed module.
struct CheckpointRegion {
  ModuleId module = -1;  // canonical
  std::int32_t forward = -1, occurrence = 0;
  std::size_t enter = 0, exit = 0;  // events of the forward
  std::vector<StorageId> inputs;
  std::unordered_set<StorageId> saved;              // born inside, read by the region's own backward
  std::unordered_set<ParameterId> parameters;       // read by the region's own backward
  std::unordered_map<StorageId, StorageId> remade;  // by the recomputation
  std::set<std::size_t> saves;                      // events of the forward: operators that are not run again
  std::unordered_set<StorageId> kept;               // what those made
  std::size_t stop = 0;                             // event behind which the recomputation ends
  std::size_t first_use = 0;                        // position in the backward that needs the recomputation
  bool recomputes = false;
  bool started = true;  // its backward has begun: the gradient of an output is there
  std::size_t end = 0;  // position in the backward behind which the inputs are dropped
  bool done = false;    // its backward is over
};

// The life of a storage, in the trace as it is.
struct StorageLife {
  std::int32_t birth_forward = -1;
  StorageRole role = StorageRole::kSaved;
  std::size_t birth = 0;
  std::int32_t death_forward = -1;  // -1: in the backward, or never
  std::size_t death = 0;
  bool dies = false;
  std::size_t last_forward_use = 0;
  bool released = false;    // by Python, in the forward
  std::size_t release = 0;  // where
};

// The regions of the forwards that a backward covers, and the storages in them.
struct CheckpointRegions {
  std::vector<CheckpointRegion> regions;
  std::unordered_map<StorageId, StorageLife> lives;
  std::unordered_map<StorageId, std::size_t> region_of_birth;
  std::unordered_set<StorageId> needed_outside;  // of its region, in the backward
  std::map<StorageId, std::size_t> kept_until;   // a region's input: position in the backward
  std::set<std::int32_t> says_releases;          // forwards in which the trace says what Python holds

  // Whether the storage was made by an operator that is not run again.
  bool IsKept(StorageId storage) const;

  // Whether a storage born in the forward dies there now, and behind which event. Else it dies in the
  // backward.
  bool DiesInForward(StorageId storage, std::size_t& behind) const;
};

// `checkpointed`: by canonical module.
CheckpointRegions FindCheckpointRegions(const Trace& trace, const ModelIndex& index,
                                        const std::vector<bool>& checkpointed, const Pass& backward);

// Whether an entry of the module tree is `ancestor` or below it.
bool IsUnder(const ModelIndex& index, ModuleId module, ModuleId ancestor);

}  // namespace shardplan
