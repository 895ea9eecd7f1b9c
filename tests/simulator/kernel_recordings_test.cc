// SPDX-License-Identifier: Apache-2.0
// The memory that operators take inside of their kernels, next to what PyTorch's own host code takes
// (kernels_211.json and kernels_215.json, written by tests/python/device/record_kernels.py).
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "shardplan/simulator/memory_history.h"
#include "tests/support/plan_builder.h"

namespace shardplan::test {
namespace {

using Json = nlohmann::json;

// "+bytes", "-which" and "o"; what is given back at the end is in no order.
std::vector<std::string> Texts(std::vector<std::string> steps) {
  const auto is_free = [](const std::string& step) { return step[0] == '-'; };
  const auto last = std::find_if_not(steps.rbegin(), steps.rend(), is_free);
  std::sort(last.base(), steps.end());
  return steps;
}

std::vector<std::string> Recorded(const Json& steps) {
  std::vector<std::string> texts;
  for (const Json& step : steps) {
    texts.push_back(
        step.is_string() ? "o" : step[0].get<std::string>() + std::to_string(step[1].get<std::int64_t>()));
  }
  return Texts(std::move(texts));
}

// An operator alone in a segment, behind the storages that it reads.
MemoryHistory HistoryOf(const Json& kernel, PyTorchVersion release) {
  PlanBuilder b(1);
  b.plan().strategy.pytorch = release;
  b.Backward("backward (root)", {});
  std::vector<SegmentEntry>& entries = b.plan().segments[0].entries;
  OperatorEvent op{.name = kernel["op"],
                   .dtype = kernel["dtype"] == "float32"    ? DType::kFloat32
                            : kernel["dtype"] == "bfloat16" ? DType::kBFloat16
                                                            : DType::kFloat16,
                   .flops = kernel["flops"]};
  StorageId next = 0;
  const auto make = [&](const Json& sizes, StorageRole role, std::vector<StorageId>& ids) {
    for (const Json& size : sizes) {
      entries.push_back(
          AllocateEvent{.storage = next, .size_bytes = {size.get<std::int64_t>()}, .role = role});
      ids.push_back(next++);
    }
  };
  // An operator between them: reads are none of its outputs.
  make(kernel["reads"], StorageRole::kSaved, op.reads);
  entries.push_back(OperatorEvent{.name = "aten.detach"});
  const bool sum = op.name == "aten.sum";
  make(kernel["writes"], sum ? StorageRole::kParameterGrad : StorageRole::kBackwardTemp, op.writes);
  entries.push_back(op);
  if (kernel.contains("sequences")) {
    b.plan().inputs = {{.name = "tokens", .shape = {kernel["sequences"].get<std::int64_t>()}}};
  }
  b.Step("steady").At(TriggerKind::kPreBackward).Compute(0);
  return MemoryHistoryOf(b.plan(), {.kernel_temporaries = true});
}

std::vector<std::string> Computed(const Json& kernel, PyTorchVersion release) {
  const MemoryHistory history = HistoryOf(kernel, release);
  std::vector<std::string> texts;
  std::map<std::int32_t, std::size_t> taken;
  for (std::size_t a = history.first_recorded; a < history.actions.size(); ++a) {
    const MemoryAction& action = history.actions[a];
    const MemoryBlock& block = history.blocks[static_cast<std::size_t>(action.block)];
    const std::string& category = MemoryCategories()[static_cast<std::size_t>(block.category)];
    const bool kernel_takes = category == "kernel_temp" || category == "cublas_workspace";
    if (kernel_takes && action.frees) {
      texts.push_back("-" + std::to_string(taken.at(action.block)));
    } else if (kernel_takes) {
      const std::size_t number = taken.size();
      taken[action.block] = number;
      texts.push_back("+" + std::to_string(block.requested_bytes.value));
    } else if ((category == "backward_temp" || category == "grad_unsharded") && !action.frees) {
      texts.push_back("o");
    }
  }
  return Texts(std::move(texts));
}

class KernelRecordings : public testing::TestWithParam<PyTorchVersion> {};

TEST_P(KernelRecordings, EveryAllocationIsWhereTheRealKernelHasIt) {
  const bool old = GetParam() == PyTorchVersion::k2_11;
  std::ifstream file(
      fmt::format("{}/tests/simulator/kernels_{}.json", SHARDPLAN_SOURCE_DIR, old ? "211" : "215"));
  const Json kernels = Json::parse(file);
  ASSERT_GE(kernels.size(), 40U);
  std::map<std::string, int> with_memory;
  for (const Json& kernel : kernels) {
    const std::vector<std::string> recorded = Recorded(kernel["steps"]);
    EXPECT_EQ(Computed(kernel, GetParam()), recorded) << kernel;
    with_memory[kernel["op"]] += recorded.size() > kernel["writes"].size() ? 1 : 0;
  }
  for (const auto& [op, count] : with_memory) EXPECT_GE(count, 3) << op;
}

INSTANTIATE_TEST_SUITE_P(Releases, KernelRecordings,
                         testing::Values(PyTorchVersion::k2_11, PyTorchVersion::k2_15));

}  // namespace
}  // namespace shardplan::test
