// SPDX-License-Identifier: Apache-2.0
// Plans that follow FSDP2's and FSDP1's schedules verify, whatever the options.
#include <gtest/gtest.h>

#include <string>

#include "shardplan/verifier/verifier.h"
#include "tests/support/small_plans.h"

namespace shardplan {
namespace {

std::string Explained(const Plan& plan) {
  std::string text;
  for (const Violation& v : Verify(plan)) text += Explain(plan, v);
  return text;
}

TEST(GoodPlans, Fsdp2VerifiesWithEveryCombinationOfOptions) {
  int plans = 0;
  for (int bits = 0; bits < 128; ++bits) {
    for (const int units : {1, 2, 3}) {
      test::SmallPlanOptions options;
      options.units = units;
      options.parameters = 1 + units % 2;
      options.replicas = (bits & 1) != 0 ? 2 : 1;
      options.mixed_precision = (bits & 2) != 0;
      options.reshard_after_forward = (bits & 4) != 0;
      options.prefetch = (bits & 8) != 0;
      options.sum_reduction = (bits & 16) != 0;
      options.microbatches = (bits & 32) != 0 ? 2 : 1;
      options.reduce_into_grad = (bits & 64) != 0;
      options.reshard_to_shards = (bits & 24) == 16;
      for (const bool bf16_reduce : {false, true}) {
        if (bf16_reduce && options.reduce_into_grad) continue;
        options.bf16_reduce = bf16_reduce;
        const Plan plan = test::Fsdp2LikePlan(options);
        EXPECT_EQ(Explained(plan), "")
            << "bits " << bits << ", units " << units << ", bf16_reduce " << bf16_reduce;
        ++plans;
      }
    }
  }
  EXPECT_EQ(plans, 64 * 3 * 3);
}

TEST(GoodPlans, Fsdp1VerifiesWithEveryCombinationOfOptions) {
  for (int bits = 0; bits < 64; ++bits) {
    for (const int units : {1, 2, 4}) {
      test::SmallFsdp1Options options;
      options.units = units;
      options.replicas = (bits & 1) != 0 ? 2 : 1;
      options.mixed_precision = (bits & 2) != 0;
      options.free_after_forward = (bits & 4) != 0;
      options.prefetch = (bits & 8) != 0;
      options.limit_all_gathers = (bits & 16) != 0;
      options.offload = (bits & 32) != 0;
      EXPECT_EQ(Explained(test::Fsdp1LikePlan(options)), "") << "bits " << bits << ", units " << units;
    }
  }
}

}  // namespace
}  // namespace shardplan
