// SPDX-License-Identifier: Apache-2.0
// RecordTrace: what a recording in C++ says of a step, and what it leaves behind. That it says what the
// tracer says is in tests/python/tracer/test_recorded_in_cpp.py.
#include "shardplan/executor/trace_recorder.h"

#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <gmock/gmock.h>
#include <torch/nn/modules/linear.h>

#include <stdexcept>
#include <utility>

#include "gpt_model.h"
#include "shardplan/schemas/io.h"
#include "trace_models.h"
#include "tracer/mode.h"

namespace shardplan::executor {
namespace {

using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::MakeTraceModel;
using ::testing::Not;
using testing::TraceModel;
namespace nn = torch::nn;

struct TwoLinearImpl : nn::Module {
  TwoLinearImpl() {
    first = register_module("first", nn::Linear(4, 4));
    second = register_module("second", nn::Linear(4, 4));
  }
  at::Tensor forward(at::Tensor x) {
    x = calls(first, x);
    if (fails) throw std::domain_error("the model's own");
    return calls(second, x);
  }
  ModuleCalls calls;
  nn::Linear first{nullptr}, second{nullptr};
  bool fails = false;
};
TORCH_MODULE(TwoLinear);

at::Tensor SumOf(TwoLinear& model, const at::Tensor& x) { return model->calls(model, x).sum(); }

Result<Trace> Record(TwoLinear& model, const std::function<at::Tensor()>& forward,
                     const RecordOptions& options = {}) {
  return RecordTrace(*model, model->calls, forward, options);
}

std::vector<std::string> OperatorNames(const Pass& pass) {
  std::vector<std::string> names;
  for (const TraceEvent& event : pass.events) {
    if (const auto* op = std::get_if<OperatorEvent>(&event)) names.push_back(op->name);
  }
  return names;
}

template <class Event>
std::vector<Event> EventsOf(const Pass& pass) {
  std::vector<Event> found;
  for (const TraceEvent& event : pass.events) {
    if (const auto* wanted = std::get_if<Event>(&event)) found.push_back(*wanted);
  }
  return found;
}

// Nothing of a recording is left: another one can begin.
void ExpectDetached(TwoLinear& model) {
  EXPECT_FALSE(DispatchMode::IsAnyActive());
  EXPECT_TRUE(at::GradMode::is_enabled());
  model->fails = false;
  const at::Tensor x = at::ones({2, 4});
  const auto again = Record(model, [&] { return SumOf(model, x); });
  EXPECT_TRUE(again) << ToString(again.error());
}

// ---- every model: deterministic, and alike on both devices ----

class RecordedModel : public ::testing::TestWithParam<std::string> {
 protected:
  static void SetUpTestSuite() { at::set_num_threads(1); }  // small operators wait for each other's threads
};

TEST_P(RecordedModel, IsTheSameEachTimeAndOnTheMetaDevice) {
  TraceModel on_cpu = MakeTraceModel(GetParam(), c10::kCPU);
  const auto first = on_cpu.Record();
  ASSERT_TRUE(first) << ToString(first.error());
  const std::string text = ToJson(*first);
  EXPECT_EQ(ToJson(on_cpu.Record().value()), text);
  EXPECT_EQ(ToJson(MakeTraceModel(GetParam(), c10::kCPU).Record().value()), text);
  EXPECT_EQ(ToJson(MakeTraceModel(GetParam(), c10::kMeta).Record().value()), text);
  EXPECT_EQ(ParseTrace(text).value(), *first);
}

INSTANTIATE_TEST_SUITE_P(TraceRecorder, RecordedModel, ::testing::ValuesIn(testing::TraceModelNames()),
                         [](const auto& info) { return info.param; });

// ---- what a trace says ----

TEST(TraceRecorder, OperatorsStoragesAndMomentsOfTwoLayers) {
  TwoLinear model;
  const at::Tensor x = at::ones({2, 4});
  const Trace trace =
      Record(model, [&] { return SumOf(model, x); }, {.model = "two", .source = "two.cc"}).value();
  EXPECT_EQ(trace.model, "two");
  EXPECT_EQ(trace.source, "two.cc");
  EXPECT_THAT(trace.recorded_with, HasSubstr("torch 2."));
  EXPECT_EQ(trace.tokens_per_batch, 2);
  EXPECT_EQ(trace.modules[0].class_name, "TwoLinear");
  EXPECT_EQ(trace.modules[1].class_name, "Linear");
  EXPECT_THAT(OperatorNames(trace.forwards[0]), ElementsAre("aten.addmm", "aten.addmm", "aten.sum"));
  const OperatorEvent product = EventsOf<OperatorEvent>(trace.forwards[0])[0];
  EXPECT_EQ(product.flops, 2 * 2 * 4 * 4);
  EXPECT_EQ(product.bytes_read, Bytes{(8 + 16 + 4) * 4});
  EXPECT_EQ(product.bytes_written, Bytes{8 * 4});
  EXPECT_THAT(product.parameters, ElementsAre(1, 0));
  EXPECT_EQ(EventsOf<ParameterGradEvent>(trace.backwards[0]).size(), 4U);
  // The input of the first layer needs no gradient.
  EXPECT_THAT(EventsOf<InputsGradDoneEvent>(trace.backwards[0]), ElementsAre(InputsGradDoneEvent{2, 0, 0}));
  EXPECT_EQ(EventsOf<BackwardEndEvent>(trace.backwards[0]).size(), 1U);
}

TEST(TraceRecorder, ParametersKeepTheirDTypeOrTheGivenOne) {
  TwoLinear model;
  model->to(at::kBFloat16);
  const at::Tensor x = at::ones({2, 4}, at::kBFloat16);
  const auto forward = [&] { return SumOf(model, x); };
  EXPECT_EQ(Record(model, forward)->parameters[0].dtype, DType::kBFloat16);
  const Trace trace = Record(model, forward, {.param_dtype = DType::kFloat32}).value();
  EXPECT_EQ(trace.parameters[0].dtype, DType::kFloat32);
  EXPECT_EQ(trace.compute_dtype, DType::kBFloat16);
}

TEST(TraceRecorder, ModulesOutsideOfCallsHaveNoEvents) {
  TwoLinear model;
  const at::Tensor x = at::ones({2, 4});
  const Trace trace = Record(model, [&] {
                        return model->calls
                            .Call(
                                "", [&](const at::Tensor& y) { return model->first->forward(y); }, x)
                            .sum();
                      }).value();
  EXPECT_EQ(EventsOf<EnterEvent>(trace.forwards[0]).size(), 1U);
  EXPECT_EQ(EventsOf<OperatorEvent>(trace.forwards[0])[0].module, 0);
}

// On the CPU dropout draws a mask and divides it, where a GPU has one kernel and a mask of bytes.
TEST(TraceRecorder, DropoutIsThatOfTheCpu) {
  const Trace trace = MakeTraceModel("dropping", c10::kCPU).Record().value();
  EXPECT_THAT(OperatorNames(trace.forwards[0]),
              ElementsAre("aten.addmm", "aten.bernoulli_", "aten.div_", "aten.mul", "aten.sum"));
}

TEST(TraceRecorder, ParametersWithoutGradientHaveNone) {
  const Trace trace = MakeTraceModel("detached", c10::kCPU).Record().value();
  std::vector<std::string> with;
  for (const ParameterGradEvent& gradient : EventsOf<ParameterGradEvent>(trace.backwards[0])) {
    with.push_back(trace.parameters[static_cast<std::size_t>(gradient.parameter)].fqn);
  }
  EXPECT_THAT(with,
              ::testing::UnorderedElementsAre("first.weight", "first.bias", "last.weight", "last.bias"));
}

TEST(TraceRecorder, OutputsThatTheCallerKeepsLiveOn) {
  TwoLinear model;
  const at::Tensor x = at::ones({2, 4});
  at::Tensor kept;
  const Trace trace = Record(model, [&] {
                        kept = model->calls(model, x);
                        return kept.sum();
                      }).value();
  const auto births = EventsOf<AllocateEvent>(trace.forwards[0]);
  const auto output = std::ranges::find(births, StorageRole::kOutput, &AllocateEvent::role);
  ASSERT_NE(output, births.end());
  EXPECT_THAT(EventsOf<FreeEvent>(trace.backwards[0]), Not(Contains(FreeEvent{output->storage})));
  // Its memory and its hooks outlive the recording.
  EXPECT_EQ(kept.sizes(), x.sizes());
  kept.fill_(3);
  kept = at::Tensor();
  ExpectDetached(model);
}

// ---- what is left behind ----

TEST(TraceRecorder, GradientsHooksAndFlagsAreWhatTheyWere) {
  TwoLinear model;
  model->first->bias.set_requires_grad(false);
  const at::Tensor x = at::ones({2, 4});
  SumOf(model, x).backward();
  const at::Tensor gradient = model->first->weight.grad();
  const at::Tensor before = gradient.clone();
  ASSERT_TRUE(Record(model, [&] { return SumOf(model, x); }));
  EXPECT_TRUE(model->first->weight.grad().is_same(gradient));
  EXPECT_TRUE(gradient.equal(before));
  EXPECT_FALSE(model->first->bias.requires_grad());
  EXPECT_FALSE(model->first->bias.grad().defined());
  SumOf(model, x).backward();  // accumulates as ever
  EXPECT_TRUE(gradient.equal(2 * before));
  ExpectDetached(model);
}

TEST(TraceRecorder, WhatTheStepThrowsIsThrownOn) {
  TwoLinear model;
  model->fails = true;
  const at::Tensor x = at::ones({2, 4});
  EXPECT_THROW((void)Record(model, [&] { return SumOf(model, x); }), std::domain_error);
  ExpectDetached(model);
}

TEST(TraceRecorder, AHookThatThrowsInTheBackward) {
  TwoLinear model;
  const at::Tensor x = at::ones({2, 4});
  const auto forward = [&] {
    at::Tensor y = model->calls(model, x);
    y.register_hook([](const at::Tensor&) { throw std::domain_error("the hook's own"); });
    return y.sum();
  };
  EXPECT_ANY_THROW((void)Record(model, forward));
  ExpectDetached(model);
}

// ---- errors ----

void ExpectError(const Result<Trace>& result, ErrorCode code, const std::string& part) {
  ASSERT_FALSE(result);
  EXPECT_EQ(result.error().code, code);
  EXPECT_THAT(result.error().message, HasSubstr(part));
}

TEST(TraceRecorder, StepsThatCannotBeRecorded) {
  TwoLinear model;
  const at::Tensor x = at::ones({2, 4});
  const auto error = [&](const std::function<at::Tensor()>& forward, ErrorCode code,
                         const std::string& part) {
    ExpectError(Record(model, forward), code, part);
    ExpectDetached(model);
  };
  using enum ErrorCode;
  error([&] { return x.sum(); }, kBadInput, "no module was entered");
  error([&] { return model->first->forward(x).sum(); }, kBadInput, "no module was entered");
  error([&] { return model->calls(model->first, x).sum(); }, kBadInput,
        "\"first\" is entered outside of the model");
  error([&] { return model->calls(model, x); }, kBadInput,
        "one number to go backward from; found a tensor of 8 numbers");
  error([&] { return SumOf(model, x), at::Tensor(); }, kBadInput, "found an undefined tensor");
  error([&] { return SumOf(model, x).detach(); }, kBadInput, "the loss needs no gradient");
  const auto resized = [&] {
    at::Tensor y = model->calls(model, x);
    y.detach().clone().resize_({64, 64});
    return y.sum();
  };
  error(resized, kBadInput, "other memory");
}

TEST(TraceRecorder, NestedRecordingsAreRefused) {
  TwoLinear model, other;
  const at::Tensor x = at::ones({2, 4});
  Result<Trace> inner;
  const auto outer = Record(model, [&] {
    at::Tensor y = model->calls(model, x);
    inner = Record(other, [&] { return SumOf(other, x); });
    return y.sum();
  });
  EXPECT_TRUE(outer);
  ExpectError(inner, ErrorCode::kUsage, "a recording runs on this thread already");
  ExpectDetached(model);
}

struct Deaf : ModuleListener {
  void Enter(std::int32_t, std::span<at::Tensor* const>) override {}
  void Leave(std::int32_t, std::span<at::Tensor* const>) override {}
  void Abandon(std::int32_t) noexcept override {}
};

TEST(TraceRecorder, SomebodyElseListens) {
  TwoLinear model;
  Deaf listener;
  model->calls.Attach(*model, listener);
  const at::Tensor x = at::ones({2, 4});
  ExpectError(Record(model, [&] { return SumOf(model, x); }), ErrorCode::kUsage, "listened to already");
  model->calls.Detach();
  ExpectDetached(model);
}

TEST(TraceRecorder, ModelsOnSeveralDevicesAreRefused) {
  TwoLinear model = BuildOnMeta([] { return TwoLinear(); });
  model->register_module("third", nn::Linear(4, 4));
  const at::Tensor x = at::ones({2, 4}, c10::Device(c10::kMeta));
  ExpectError(Record(model, [&] { return SumOf(model, x); }), ErrorCode::kUsage,
              "\"first.weight\" on meta, \"third.weight\" on cpu");
  ExpectError(Record(model, [&] { return SumOf(model, x); }, {.steps = 0}), ErrorCode::kUsage,
              "one step or more");
  TwoLinear on_cpu;
  ExpectError(Record(on_cpu, [&] { return SumOf(on_cpu, x); }, {.kernels = RecordedKernels::kGpu}),
              ErrorCode::kUsage, "on the meta device");
}

// ---- the meta device ----

TEST(MetaDevice, TensorsThatNameNoDeviceAreThere) {
  {
    const MetaDevice guard;
    EXPECT_TRUE(at::ones({2}).is_meta());
    EXPECT_TRUE(at::ones({2}, c10::Device(c10::kCPU)).is_cpu());
    EXPECT_TRUE(at::zeros_like(at::ones({2}, c10::Device(c10::kCPU))).is_cpu());
  }
  EXPECT_TRUE(at::ones({2}).is_cpu());
}

TEST(MetaDevice, AModelLargerThanAnyMemory) {
  const testing::GptConfig config{
      .vocabulary = 1 << 17, .context = 1 << 13, .width = 1 << 14, .heads = 128, .blocks = 3};
  testing::Gpt gpt = BuildOnMeta([&] { return testing::Gpt(config); });
  const at::Tensor tokens = at::zeros({1, config.context}, at::TensorOptions(at::kLong).device(c10::kMeta));
  const auto trace = RecordTrace(*gpt, gpt->calls, [&] { return testing::GptLoss(gpt, tokens, tokens); });
  ASSERT_TRUE(trace) << ToString(trace.error());
  std::int64_t parameters_bytes = 0;
  for (const at::Tensor& parameter : gpt->parameters())
    parameters_bytes += static_cast<std::int64_t>(parameter.nbytes());
  EXPECT_GT(parameters_bytes, std::int64_t{50} << 30);
}

}  // namespace
}  // namespace shardplan::executor
