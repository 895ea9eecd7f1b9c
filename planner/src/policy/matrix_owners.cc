// SPDX-License-Identifier: Apache-2.0
#include "policy/matrix_owners.h"

#include <algorithm>
#include <numeric>
#include <tuple>

namespace shardplan {
namespace {

struct RankLoad {
  std::int64_t work = 0;
  std::int64_t bytes = 0;
  std::int64_t all_work = 0;
};

}  // namespace

std::int64_t NewtonSchulzWork(std::int64_t rows, std::int64_t columns, std::int64_t iterations) {
  const auto [shorter, longer] = std::minmax(rows, columns);
  return iterations * shorter * shorter * (2 * longer + shorter);
}

std::vector<std::int32_t> AssignOwners(const std::vector<MatrixLoad>& matrices,
                                       std::vector<std::int64_t>& earlier_work) {
  std::vector<RankLoad> loads(earlier_work.size());
  for (std::size_t r = 0; r < loads.size(); ++r) loads[r].all_work = earlier_work[r];
  std::vector<std::size_t> order(matrices.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::ranges::stable_sort(order, {}, [&](std::size_t m) {
    return std::tuple(-matrices[m].work, -matrices[m].bytes, matrices[m].name);
  });
  std::vector<std::int32_t> all(loads.size());
  std::iota(all.begin(), all.end(), 0);
  std::vector<std::int32_t> owners(matrices.size());
  for (const std::size_t m : order) {
    const std::vector<std::int32_t>& ranks = matrices[m].ranks.empty() ? all : matrices[m].ranks;
    const std::int32_t owner = *std::ranges::min_element(ranks, {}, [&](std::int32_t rank) {
      const RankLoad& load = loads[static_cast<std::size_t>(rank)];
      return std::tuple(load.work, load.bytes, load.all_work);
    });
    RankLoad& load = loads[static_cast<std::size_t>(owner)];
    load.work += matrices[m].work;
    load.bytes += matrices[m].bytes;
    load.all_work += matrices[m].work;
    owners[m] = owner;
  }
  for (std::size_t r = 0; r < loads.size(); ++r) earlier_work[r] = loads[r].all_work;
  return owners;
}

}  // namespace shardplan
