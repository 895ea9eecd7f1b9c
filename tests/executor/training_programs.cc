// SPDX-License-Identifier: Apache-2.0
// Programs that train or record LibTorch modules, and their tests, as one: the compiler takes longer for
// LibTorch's headers than for all of them. The name that it is called by chooses.
#include <gtest/gtest.h>

#include <cstdio>
#include <string_view>

#define main RecordModelMain
#include "tests/executor/record_model.cc"  // NOLINT(bugprone-suspicious-include)
#undef main
#define main TrainingWorkerMain
#include "tests/executor/training_worker.cc"  // NOLINT(bugprone-suspicious-include)
#undef main
#define main GptMain
#include "examples/gpt_cpp/train.cc"  // NOLINT(bugprone-suspicious-include)
#undef main

int main(int argc, char** argv) {
  const std::string_view path = argc > 0 ? argv[0] : "";
  const std::string_view name = path.substr(path.find_last_of('/') + 1);
  if (name == "record_model") return RecordModelMain(argc, argv);
  if (name == "training_worker") return TrainingWorkerMain(argc, argv);
  if (name == "gpt_cpp") return GptMain(argc, argv);
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
