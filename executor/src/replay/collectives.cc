// SPDX-License-Identifier: Apache-2.0
#include "shardplan/executor/collectives.h"

#include <fmt/format.h>

#include <utility>

namespace shardplan::executor {

Status Collectives::Exchange(const ByteExchange&, StreamId) {
  return MakeError(ErrorCode::kUsage, "this backend moves no bytes between ranks");
}

Status CheckCommunicators(const Plan& plan) {
  for (std::size_t c = 0; c < plan.communicators.size(); ++c) {
    const Communicator& communicator = plan.communicators[c];
    if (Divides(communicator, plan.world_size)) continue;
    return MakeInputError(
        fmt::format("/communicators/{}", c), "the communicator does not divide the plan's ranks",
        fmt::format("{} with size {}, stride {}", communicator.name, communicator.size, communicator.stride),
        fmt::format("groups that {} ranks make", plan.world_size));
  }
  return {};
}

std::int64_t RankInGroup(const Communicator& communicator, std::int64_t rank) {
  if (communicator.dims.empty()) return rank / communicator.stride % communicator.size;
  std::int64_t position = 0;
  for (const CommunicatorDim& dim : communicator.dims) {
    position = position * dim.size + rank / dim.stride % dim.size;
  }
  return position;
}

std::vector<std::int64_t> GroupOf(const Communicator& communicator, std::int64_t rank) {
  std::vector<CommunicatorDim> dims = communicator.dims;
  if (dims.empty()) dims.push_back({communicator.size, communicator.stride});
  for (const CommunicatorDim& dim : dims) rank -= rank / dim.stride % dim.size * dim.stride;
  std::vector<std::int64_t> ranks = {rank};
  for (const CommunicatorDim& dim : dims) {
    std::vector<std::int64_t> longer;
    for (const std::int64_t first : ranks) {
      for (std::int64_t i = 0; i < dim.size; ++i) longer.push_back(first + i * dim.stride);
    }
    ranks = std::move(longer);
  }
  return ranks;
}

}  // namespace shardplan::executor
