// SPDX-License-Identifier: Apache-2.0
#include "shardplan/executor/trace_recorder.h"

#include <ATen/core/grad_mode.h>
#include <fmt/format.h>
#include <torch/version.h>

#include <algorithm>
#include <string_view>
#include <utility>
#include <vector>

#include "shardplan/schemas/checks.h"
#include "tracer/merge.h"
#include "tracer/mode.h"
#include "tracer/step.h"
#include "tracer/tree.h"

namespace shardplan::executor {
namespace {

// The parameters have no gradients while it lives.
class GradientsAside {
 public:
  explicit GradientsAside(const std::vector<at::Tensor>& parameters) : parameters_(parameters) {
    for (const at::Tensor& parameter : parameters_)
      gradients_.push_back(std::exchange(parameter.mutable_grad(), {}));
  }
  ~GradientsAside() {
    for (std::size_t i = 0; i < parameters_.size(); ++i)
      parameters_[i].mutable_grad() = std::move(gradients_[i]);
  }
  GradientsAside(const GradientsAside&) = delete;
  GradientsAside& operator=(const GradientsAside&) = delete;

 private:
  const std::vector<at::Tensor>& parameters_;
  std::vector<at::Tensor> gradients_;
};

// Parameters that do not train do while it lives.
class EverythingTrains {
 public:
  explicit EverythingTrains(const std::vector<at::Tensor>& parameters) {
    for (const at::Tensor& parameter : parameters) {
      if (!parameter.requires_grad() && at::isFloatingType(parameter.scalar_type()))
        frozen_.push_back(parameter);
    }
    for (const at::Tensor& parameter : frozen_) parameter.set_requires_grad(true);
  }
  ~EverythingTrains() {
    for (const at::Tensor& parameter : frozen_) parameter.set_requires_grad(false);
  }
  EverythingTrains(const EverythingTrains&) = delete;
  EverythingTrains& operator=(const EverythingTrains&) = delete;
  bool changes_something() const { return !frozen_.empty(); }

 private:
  std::vector<at::Tensor> frozen_;
};

enum class Marks : std::uint8_t { kOnInputs, kNone };
enum class Kept : std::uint8_t { kForBackward, kNothing };

void CheckLoss(const at::Tensor& loss) {
  if (!loss.defined() || loss.numel() != 1) {
    throw RecordingError(ErrorCode::kBadInput,
                         fmt::format("the loss must be one number to go backward from; found {}",
                                     loss.defined() ? fmt::format("a tensor of {} numbers", loss.numel())
                                                    : "an undefined tensor"));
  }
  if (!loss.requires_grad()) {
    throw RecordingError(ErrorCode::kBadInput,
                         "the loss needs no gradient: no parameter that requires one takes part in it "
                         "(RecordOptions::grad = false "
                         "records the forward alone)");
  }
}

class Recorder {
 public:
  Recorder(const torch::nn::Module& model, ModuleCalls& calls, const std::function<at::Tensor()>& forward,
           const RecordOptions& options)
      : model_(model), calls_(calls), forward_(forward), options_(options), tree_(ReadModel(model)) {}

  const TracedTree& tree() const { return tree_; }

  Trace Record() {
    const GradientsAside aside(tree_.parameter_tensors);
    TracedStep step = RecordPlaced();
    if (!step.backwards.empty())
      MarkReleases(step.forwards, RecordOnce(Marks::kNone, Kept::kNothing).forwards);
    const EverythingTrains trains(tree_.parameter_tensors);
    if (trains.changes_something()) {
      const TracedStep trained = RecordOnce(Marks::kNone, Kept::kForBackward);
      MarkTrainable(step.forwards, trained.forwards, trained.backwards);
    }
    return Put(std::move(step));
  }

 private:
  // See [Note: two recordings].
  TracedStep RecordPlaced() {
    TracedStep marked = RecordOnce(Marks::kOnInputs, Kept::kForBackward);
    if (!marked.sums_regrouped) return marked;
    TracedStep plain = RecordOnce(Marks::kNone, Kept::kForBackward);
    if (plain.backwards.size() != marked.backwards.size()) return marked;
    for (std::size_t i = 0; i < plain.backwards.size(); ++i) {
      auto events = WithInputsDone(plain.backwards[i].events, marked.backwards[i].events);
      if (!events) return marked;
      plain.backwards[i].events = std::move(*events);
    }
    return plain;
  }

  TracedStep RecordOnce(Marks marks, Kept kept) {
    const bool keeps = kept == Kept::kForBackward && options_.grad;
    StepTracer recording(tree_, model_, calls_, marks == Marks::kOnInputs, options_.kernels,
                         /*always_trains=*/kept == Kept::kNothing);
    for (std::int32_t step = 0; step < options_.steps; ++step) {
      at::Tensor loss;
      {
        const at::AutoGradMode grad(keeps);
        recording.BeginForward();
        loss = forward_();
        recording.EndForward();
      }
      if (!recording.entered()) {
        throw RecordingError(
            ErrorCode::kBadInput,
            "no module was entered: the step calls the model itself through calls(model, ...)");
      }
      if (!keeps) continue;
      CheckLoss(loss);
      recording.Backward(std::move(loss));
    }
    return recording.Finish();
  }

  Trace Put(TracedStep step) {
    Trace trace;
    trace.model = options_.model.empty() ? tree_.modules.front().class_name : options_.model;
    trace.source = options_.source;
    trace.recorded_with = RecordedWith();
    trace.compute_dtype = ComputeDType();
    trace.tokens_per_batch = step.tokens;
    trace.modules = tree_.modules;
    trace.parameters = tree_.parameters;
    for (Parameter& parameter : trace.parameters) {
      if (options_.param_dtype && IsFloatingPoint(parameter.dtype)) parameter.dtype = *options_.param_dtype;
    }
    trace.buffers = tree_.buffers;
    for (std::size_t i = 0; i < trace.buffers.size(); ++i) trace.buffers[i].storage = step.buffer_storages[i];
    trace.inputs = std::move(step.inputs);
    trace.forwards = std::move(step.forwards);
    trace.backwards = std::move(step.backwards);
    return trace;
  }

  std::string RecordedWith() const {
    const bool on_device = !tree_.parameter_tensors.empty() && tree_.parameter_tensors.front().is_cuda();
    const bool of_cpu = options_.kernels == RecordedKernels::kCpu;
    return fmt::format("torch {}{}", TORCH_VERSION,
                       on_device ? ""
                       : of_cpu  ? "; attention cpu"
                                 : "; attention auto");
  }

  DType ComputeDType() const {
    for (const Parameter& parameter : tree_.parameters) {
      if (IsFloatingPoint(parameter.dtype)) return parameter.dtype;
    }
    return DType::kFloat32;
  }

  const torch::nn::Module& model_;
  ModuleCalls& calls_;
  const std::function<at::Tensor()>& forward_;
  const RecordOptions& options_;
  TracedTree tree_;
};

Status CheckCanRecord(const TracedTree& tree, const RecordOptions& options) {
  if (options.steps < 1) return MakeError(ErrorCode::kUsage, "a recording has one step or more");
  if (DispatchMode::IsAnyActive()) {
    return MakeError(
        ErrorCode::kUsage,
        "a recording runs on this thread already, or something else that watches torch's operators");
  }
  const bool on_meta = !tree.parameter_tensors.empty() && tree.parameter_tensors.front().is_meta();
  if (options.kernels == RecordedKernels::kGpu && !on_meta) {
    return MakeError(ErrorCode::kUsage,
                     "the kernels of a GPU are recorded on the meta device (BuildOnMeta); elsewhere the step "
                     "runs its own");
  }
  for (std::size_t i = 0; i < tree.parameters.size(); ++i) {
    const at::Device device = tree.parameter_tensors[i].device(), first = tree.parameter_tensors[0].device();
    if (device != first) {
      return MakeError(
          ErrorCode::kUsage,
          fmt::format("the parameters are on several devices: \"{}\" on {}, \"{}\" on {}",
                      tree.parameters[0].fqn, first.str(), tree.parameters[i].fqn, device.str()));
    }
  }
  return {};
}

}  // namespace

Result<Trace> RecordTrace(const torch::nn::Module& model, ModuleCalls& calls,
                          const std::function<at::Tensor()>& forward, const RecordOptions& options) {
  Recorder recorder(model, calls, forward, options);
  if (Status status = CheckCanRecord(recorder.tree(), options); !status)
    return std::unexpected(status.error());
  try {
    Trace trace = recorder.Record();
    if (Status status = CheckTrace(trace); !status) return std::unexpected(status.error());
    return trace;
  } catch (const RecordingError& error) {
    return MakeError(error.code, error.what());
  }
}

}  // namespace shardplan::executor
