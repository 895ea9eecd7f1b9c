// SPDX-License-Identifier: Apache-2.0
#include "units/model_communicators.h"

#include <fmt/format.h>

#include <algorithm>
#include <set>

namespace shardplan {
namespace {

std::set<CommunicatorId> UsedByCollectives(const Trace& trace) {
  std::set<CommunicatorId> used;
  for (const std::vector<Pass>* passes : {&trace.forwards, &trace.backwards}) {
    for (const Pass& pass : *passes) {
      for (const TraceEvent& event : pass.events) {
        const auto* op = std::get_if<OperatorEvent>(&event);
        if (op != nullptr && op->collective) used.insert(op->collective->communicator);
      }
    }
  }
  return used;
}

// A dimension that parameters lie on has its size whatever the job.
bool HasPlacements(const Trace& trace, const Communicator& communicator) {
  return std::ranges::any_of(trace.parameters, [&](const Parameter& parameter) {
    return std::ranges::find(parameter.placements, communicator.name, &ParameterPlacement::mesh_dim) !=
           parameter.placements.end();
  });
}

// Its outermost digit goes to the end of the traced ranks: with more of them it may be another group.
bool ReachesTheEnd(const Trace& trace, const Communicator& communicator) {
  const bool one_digit = communicator.dims.empty();
  const std::int64_t size = one_digit ? communicator.size : communicator.dims.front().size;
  const std::int64_t stride = one_digit ? communicator.stride : communicator.dims.front().stride;
  return size * stride == trace.world_size;
}

}  // namespace

Status AddModelCommunicators(const Trace& trace, std::int64_t ranks, Partition& partition) {
  partition.model_communicators.assign(trace.communicators.size(), -1);
  for (const CommunicatorId id : UsedByCollectives(trace)) {
    const Communicator& used = trace.communicators[id];
    const std::string pointer = fmt::format("/communicators/{}", id);
    if (ranks != trace.world_size && ReachesTheEnd(trace, used) && !HasPlacements(trace, used)) {
      return MakeInputError(
          pointer,
          fmt::format("the model communicates over {}, whose groups depend on the ranks of the job",
                      used.name),
          fmt::format("a trace of {} ranks, a plan of {}", trace.world_size, ranks),
          fmt::format("a trace whose process group has {} ranks", ranks));
    }
    if (!Divides(used, ranks)) {
      return MakeInputError(pointer,
                            "the groups of the model's collectives are not all there on so many ranks",
                            fmt::format("{} of {} ranks on {}", used.name, used.size, ranks),
                            fmt::format("a multiple of {} ranks", used.size * used.stride));
    }
    const auto same = std::ranges::find_if(partition.communicators, [&](const Communicator& c) {
      return c.name == used.name && SameRanks(c, used);
    });
    partition.model_communicators[id] = static_cast<CommunicatorId>(same - partition.communicators.begin());
    if (same != partition.communicators.end()) continue;
    partition.communicators.push_back(used);
    // FSDP's of the same name is another group.
    const auto taken = [&](const std::string& name) {
      return std::ranges::count(partition.communicators, name, &Communicator::name) > 1;
    };
    Communicator& added = partition.communicators.back();
    if (taken(added.name)) added.name = "model_" + added.name;
  }
  return {};
}

std::int64_t RanksPerBatch(const Trace& trace) {
  std::int64_t ranks = 1;
  for (const Communicator& communicator : trace.communicators) {
    if (std::ranges::find(trace.same_batch, communicator.name) != trace.same_batch.end())
      ranks *= communicator.size;
  }
  return ranks;
}

}  // namespace shardplan
