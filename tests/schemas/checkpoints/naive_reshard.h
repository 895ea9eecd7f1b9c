// SPDX-License-Identifier: Apache-2.0
// Layouts and plans of resharding, element by element: the oracle of the tests. It shares no code with what
// it judges but the value types.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "shardplan/schemas/reshard.h"

namespace shardplan::test {

// Bytes of a rank by the name of a tensor, or of the flat buffer that it lies in.
using RankStorage = std::map<std::string, std::vector<std::uint8_t>>;
using NaiveState = std::vector<RankStorage>;

// The elements of a tensor that a rank holds, in the order of its storage.
std::vector<std::int64_t> HeldElements(const StateLayout& layout, const StateTensor& tensor,
                                       std::int64_t rank);

// Every byte of a tensor is a hash of its name, its element and its place in the element; padding is 0xee.
NaiveState StateIn(const StateLayout& layout);
// The storages of `StateIn(layout)`, all bytes 0xee.
NaiveState EmptyIn(const StateLayout& layout);
// Executes a plan in its rounds. An out-of-range access is a message.
std::optional<std::string> Execute(const ReshardPlan& plan, const NaiveState& from, NaiveState& to);

// The same tensors in random layouts: flat, cut along any dimensions, nested, replicated, on some ranks only.
struct RandomTensors {
  std::vector<std::string> names;
  std::vector<std::vector<std::int64_t>> shapes;
  std::vector<DType> dtypes;
};
RandomTensors MakeTensors(std::mt19937_64& random);
StateLayout MakeLayout(const RandomTensors& tensors, std::mt19937_64& random);

}  // namespace shardplan::test
