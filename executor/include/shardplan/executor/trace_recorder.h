// SPDX-License-Identifier: Apache-2.0
// RecordTrace: the trace of a model that exists in C++ alone. One step of it, on the CPU or on the meta
// device, becomes a document that `shardplan plan` reads (docs/guide/cpp.md;
// docs/internals/trace-recorder.md).
//
//   auto trace = RecordTrace(*gpt, gpt->calls, [&] {
//     at::Tensor logits = gpt->calls(gpt, tokens);
//     return torch::cross_entropy_loss(logits.flatten(0, 1), targets.flatten());
//   }, {.model = "gpt"});
//   if (trace) WriteFileAtomically("trace.json", ToJson(*trace));
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "shardplan/executor/module_calls.h"
#include "shardplan/schemas/error.h"
#include "shardplan/schemas/trace.h"

namespace shardplan::executor {

// The kernels that a step on the meta device is recorded with.
enum class RecordedKernels : std::uint8_t {
  kCpu,  // those of CPU ranks: the trace is that of the same step on the CPU
  kGpu,  // those of a GPU, as `shardplan trace` records them: attention, dropout and the statistics of norms
};

struct RecordOptions {
  std::string model;   // Trace::model; empty: the class of the root
  std::string source;  // Trace::source, as "gpt.cc"
  // Forward-backward pairs. Gradients are cleared in between.
  std::int32_t steps = 1;
  // False: the forwards alone, without gradients (no_grad). The result of `forward` is not looked at.
  bool grad = true;
  // The dtype that parameters are kept in between steps, of those that float; nothing: the model's own.
  std::optional<DType> param_dtype;
  // kGpu: the model is on the meta device. For plans of jobs on GPUs.
  RecordedKernels kernels = RecordedKernels::kCpu;
};

// The trace of a step of `model`, which passes its modules through `calls`: modules, their order, operators
// and storages. `forward` runs the model, root included (calls(model, ...)), and returns the loss, one
// number; the backward is the recorder's. Several calls of the model in one `forward` are several forwards of
// one backward. Recording takes two to four calls of `forward` for each of `steps` (the page says what each
// is for), and one or two backwards: on the meta device that costs next to nothing, elsewhere it is that many
// real steps, which draw random numbers and update buffers. Gradients that the parameters have are put back
// afterwards.
//
// The tensors that `forward` captures or gives the root are the trace's inputs; it should make none of them.
// Errors: kUsage (no step, somebody listens to `calls`, another recording on this thread, parameters on
// several devices), kBadInput (the root is not entered, the loss is no number or needs no gradient, what a
// trace cannot say). Exceptions of `forward` are thrown on; everything is detached then. Same model and step,
// same trace.
Result<Trace> RecordTrace(const torch::nn::Module& model, ModuleCalls& calls,
                          const std::function<at::Tensor()>& forward, const RecordOptions& options = {});

// While it lives, tensors that this thread makes without naming a device are on the meta device: they have
// shapes and no memory.
class MetaDevice {
 public:
  MetaDevice();
  ~MetaDevice();
  MetaDevice(const MetaDevice&) = delete;
  MetaDevice& operator=(const MetaDevice&) = delete;

 private:
  struct Implementation;
  std::unique_ptr<Implementation> implementation_;
};

// The result of `build`, made on the meta device: a model of any size, to be recorded. (LibTorch moves no
// module there: Module::to(at::kMeta) throws.) at::tensor(values) in it names its device, at::kCPU.
//
//   auto gpt = BuildOnMeta([] { return Gpt(GptConfig()); });
//   const at::Tensor tokens = at::zeros({8, 1024}, at::TensorOptions(at::kLong).device(at::kMeta));
template <class Build>
auto BuildOnMeta(const Build& build) {
  const MetaDevice guard;
  return build();
}

}  // namespace shardplan::executor
