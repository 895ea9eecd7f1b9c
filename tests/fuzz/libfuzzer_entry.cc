// SPDX-License-Identifier: Apache-2.0
// One libFuzzer program per target: SHARDPLAN_FUZZ_TARGET is the function, FuzzTrace and so on.
#include <cstddef>
#include <cstdint>

#include "tests/fuzz/fuzz_targets.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  shardplan::test::SHARDPLAN_FUZZ_TARGET(std::string_view(reinterpret_cast<const char*>(data), size));
  return 0;
}
