// SPDX-License-Identifier: Apache-2.0
// Many sentences that say the same thing of many layers, as one sentence with a count.
#pragma once

#include <string>
#include <vector>

namespace shardplan {

// Sentences that differ only in the layer numbers of dotted names ("layers.3") are put together where the
// first of them stands: "free layers.{n}.param_unsharded in post_forward layers.{n} (n = 0..31: 32 times)".
// Several numbers in one sentence must keep their distance: "layers.{n}", "layers.{n-1}".
std::vector<std::string> GroupSentences(const std::vector<std::string>& sentences);

// "0..3, 7" of ascending numbers.
std::string NumberRanges(const std::vector<long long>& numbers);

}  // namespace shardplan
