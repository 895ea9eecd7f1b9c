// SPDX-License-Identifier: Apache-2.0
// RecordTrace: what a recording in C++ says of a step.
#include "shardplan/executor/trace_recorder.h"

#include <ATen/ops/zeros.h>
#include <gmock/gmock.h>

#include <cstdio>

#include "gpt_model.h"
#include "shardplan/schemas/io.h"

namespace shardplan::executor {
namespace {

using testing::Gpt;
using testing::GptConfig;
using testing::GptLoss;

TEST(TraceRecorder, GptIsRecorded) {
  const GptConfig config;
  Gpt gpt(config);
  const at::Tensor tokens = at::zeros({2, config.context}, at::kLong), targets = at::zeros_like(tokens);
  const auto trace = RecordTrace(*gpt, gpt->calls, [&] { return GptLoss(gpt, tokens, targets); });
  ASSERT_TRUE(trace) << ToString(trace.error());
  if (const char* path = std::getenv("OUT")) {
    std::fputs(ToJson(*trace).c_str(), std::fopen(path, "w"));
  }
}

}  // namespace
}  // namespace shardplan::executor
