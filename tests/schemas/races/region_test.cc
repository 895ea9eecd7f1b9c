// SPDX-License-Identifier: Apache-2.0
// Regions overlap where they have a byte in common.
#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <vector>

#include "tests/schemas/races/naive_races.h"

namespace shardplan {
namespace {

using test::BytesOf;

MemoryRegion RandomRegion(std::mt19937_64& engine) {
  constexpr DType kDTypes[] = {DType::kUInt8, DType::kBFloat16, DType::kFloat32};
  MemoryRegion region;
  region.address = static_cast<std::int64_t>(engine() % 40);
  region.dtype = kDTypes[engine() % 3];
  const std::size_t dims = engine() % 4;
  const bool has_strides = engine() % 3 != 0 && dims > 0;
  for (std::size_t d = 0; d < dims; ++d) {
    region.shape.push_back(static_cast<std::int64_t>(engine() % 4));
    if (has_strides) region.strides.push_back(static_cast<std::int64_t>(engine() % 9));
  }
  return region;
}

TEST(Region, OverlapsWhereABytesIsInBoth) {
  std::mt19937_64 engine(7);
  int overlapping = 0;
  for (int i = 0; i < 40000; ++i) {
    const MemoryRegion a = RandomRegion(engine), b = RandomRegion(engine);
    const std::set<std::int64_t> of_a = BytesOf(a), of_b = BytesOf(b);
    const bool expected = std::ranges::any_of(of_a, [&](std::int64_t byte) { return of_b.contains(byte); });
    ASSERT_EQ(Overlap(a, b), expected) << "case " << i;
    if (!of_a.empty()) {
      ASSERT_EQ(SpanBytes(a), *of_a.rbegin() + 1 - a.address) << "case " << i;
    }
    overlapping += expected ? 1 : 0;
  }
  EXPECT_GT(overlapping, 4000);
}

TEST(Region, ColumnsOfAMatrixAreApart) {
  const MemoryRegion left{
      .address = 0, .dtype = DType::kFloat32, .shape = {4096, 2048}, .strides = {4096, 1}};
  MemoryRegion right = left;
  right.address = 2048 * 4;
  EXPECT_FALSE(Overlap(left, right));
  right.address -= 4;
  EXPECT_TRUE(Overlap(left, right));
}

}  // namespace
}  // namespace shardplan
