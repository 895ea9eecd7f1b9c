// SPDX-License-Identifier: Apache-2.0
#include "recorded/groups.h"

#include <algorithm>
#include <vector>

namespace shardplan::internal {

// The innermost digit first: as many ranks as lie at one distance; the rest repeats them.
std::optional<Communicator> GroupOfRanks(const RecordedCommunicator& recorded) {
  Communicator group{.name = recorded.name, .size = recorded.size, .stride = 1, .dims = {}};
  std::vector<std::int64_t> ranks = recorded.ranks;
  std::ranges::sort(ranks);
  std::vector<CommunicatorDim> dims;
  while (ranks.size() > 1) {
    const std::int64_t stride = ranks[1] - ranks[0];
    std::size_t size = 1;
    while (size < ranks.size() && ranks[size] - ranks[size - 1] == stride) ++size;
    if (ranks.size() % size != 0) return std::nullopt;
    std::vector<std::int64_t> outer;
    for (std::size_t block = 0; block < ranks.size(); block += size) {
      for (std::size_t i = 0; i < size; ++i) {
        if (ranks[block + i] - ranks[block] != static_cast<std::int64_t>(i) * stride) return std::nullopt;
      }
      outer.push_back(ranks[block]);
    }
    dims.push_back({static_cast<std::int64_t>(size), stride});
    ranks = std::move(outer);
  }
  std::ranges::reverse(dims);
  if (!dims.empty()) group.stride = dims.back().stride;
  if (dims.size() > 1) group.dims = std::move(dims);
  return group;
}

}  // namespace shardplan::internal
