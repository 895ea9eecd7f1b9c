// SPDX-License-Identifier: Apache-2.0
// Good inputs of each fuzz target, which the mutator changes.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace shardplan::test {

// Made of random documents, small plans and the cases of the other tests, and the files of
// tests/fuzz/corpus/TARGET: inputs that once found a fault. Empty: there is no such target.
std::vector<std::string> FuzzSeeds(std::string_view target);

}  // namespace shardplan::test
