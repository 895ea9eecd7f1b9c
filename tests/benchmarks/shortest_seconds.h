// SPDX-License-Identifier: Apache-2.0
// How benchmarks time what they put into a ratio.
#pragma once

#include <algorithm>
#include <chrono>

namespace shardplan {

// The shortest of `repeats` runs: what else runs on the machine only adds.
template <typename Function>
double ShortestSeconds(int repeats, Function function) {
  double shortest = 1e9;
  for (int i = 0; i < repeats; ++i) {
    const auto start = std::chrono::steady_clock::now();
    function();
    shortest =
        std::min(shortest, std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
  }
  return shortest;
}

}  // namespace shardplan
