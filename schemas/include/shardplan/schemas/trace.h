// SPDX-License-Identifier: Apache-2.0
// The trace: what one training step of the unsharded model does (docs/reference/trace-format.md).
//
// A trace is recorded on fake tensors by tools/python/shardplan/tracer, or of a model in C++ by the
// executor's trace_recorder.h, and read by the planner. It says nothing about sharding: any choice of units
// can be made from it afterwards. All sizes are bytes of a whole (unsharded) storage as requested, not
// rounded to an allocator's block.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "shardplan/schemas/cluster.h"
#include "shardplan/schemas/dtype.h"
#include "shardplan/schemas/optimizer_kind.h"
#include "shardplan/schemas/quantity.h"

namespace shardplan {

// Indices into Trace::modules, ::parameters and Pass::tensors; ids of storages are unique in a trace. -1:
// none.
using ModuleId = std::int32_t;
using ParameterId = std::int32_t;
using TensorId = std::int32_t;
using StorageId = std::int32_t;
// Index into Trace::communicators; in a plan into Plan::communicators.
using CommunicatorId = std::int32_t;

// A parameter or buffer as a module registers it. Tied parameters: several modules name the same ParameterId.
struct NamedParameter {
  std::string name;  // attribute name in the module, "weight"
  ParameterId parameter = -1;
  bool operator==(const NamedParameter&) const = default;
};

// Roles of a module by the model's own account (transformers: base_model_prefix, _no_split_modules,
// get_input_embeddings, get_output_embeddings). Frameworks ask it when they make units.
enum class ModulePart : std::uint8_t { kBaseModel, kLayer, kInputEmbeddings, kOutputEmbeddings };

struct Module {
  std::string fqn;  // "" for the root
  std::string class_name;
  std::vector<std::string> children;       // names in registration order; the child's FQN is fqn + "." + name
  std::vector<NamedParameter> parameters;  // direct ones, registration order
  std::vector<std::string> buffers;        // names of direct buffers
  std::string same_module_as;              // FQN first seen of a module registered twice; "" otherwise
  std::string compiled;                    // torch.compile's backend of a module that runs as compiled graphs
  std::vector<ModulePart> parts;           // empty: the model says nothing of it
  bool operator==(const Module&) const = default;
};

// A group of ranks for each rank: the ranks that differ only in the digit (rank / stride) mod size. shard of
// a {replicate: R, shard: S} mesh: size S, stride 1; replicate: size R, stride S. Dimensions that do not lie
// side by side are flattened: the ranks differ only in the digits of `dims`, the first the most significant.
// Then size is the product of the dimensions, and stride that of the last.
struct CommunicatorDim {
  std::int64_t size = 1;
  std::int64_t stride = 1;
  bool operator==(const CommunicatorDim&) const = default;
};
struct Communicator {
  std::string name;  // "shard", "replicate", "post_forward"
  std::int64_t size = 1;
  std::int64_t stride = 1;
  std::vector<CommunicatorDim> dims;  // empty: size and stride say it
  bool operator==(const Communicator&) const = default;
};

// The placement of a parameter on one dimension of the mesh that is not FSDP's own (tensor, expert, ...
// parallelism), as a DTensor has it.
struct ParameterPlacement {
  std::string mesh_dim;       // its name, as in the strategy's mesh; or that of a communicator over several
  std::int64_t size = 1;      // ranks along it
  std::int32_t dim = -1;      // the parameter's dimension that is cut along it; -1: replicated
  bool grad_partial = false;  // replicated: the gradient comes as a partial sum, to be reduced over it
  bool operator==(const ParameterPlacement&) const = default;
};

struct Parameter {
  std::string fqn;                  // the name first seen
  std::vector<std::int64_t> shape;  // what this rank has of it: local where placements cut it
  DType dtype = DType::kFloat32;
  bool requires_grad = true;
  std::optional<DType> grad_dtype;             // Tensor.grad_dtype, where it is not the parameter's own
  bool any_grad_dtype = false;                 // Tensor.grad_dtype is None: as autograd makes the gradient
  std::vector<std::string> shared_with;        // the other FQNs of a tied parameter
  std::vector<ParameterPlacement> placements;  // of a DTensor, outermost mesh dimension first; else empty
  bool muon = false;  // a matrix of a hidden layer, or one that `shardplan trace --muon-matrices` named
  bool operator==(const Parameter&) const = default;
};

// A module buffer. `storage` is its id when the passes name it (ops read it), else -1.
struct ModuleBuffer {
  std::string fqn;
  std::vector<std::int64_t> shape;
  DType dtype = DType::kFloat32;
  bool persistent = true;
  StorageId storage = -1;
  bool operator==(const ModuleBuffer&) const = default;
};

// A tensor that crosses a module boundary. Same id: same tensor object.
struct Tensor {
  std::vector<std::int64_t> shape;
  DType dtype = DType::kFloat32;
  bool requires_grad = false;
  // For a tensor without gradient, where known: would it need one if every parameter did, and would the loss
  // depend on it?
  std::optional<bool> may_require_grad;
  std::optional<bool> in_loss;
  StorageId storage = -1;  // -1 when unknown
  bool operator==(const Tensor&) const = default;
};

// The role of a storage over its whole life.
enum class StorageRole : std::uint8_t {
  kInput,          // batch data, alive before the step
  kBuffer,         // a module buffer, alive before the step
  kSaved,          // born in the forward, kept for the backward
  kForwardTemp,    // born and freed inside the forward
  kOutput,         // what the root returns, dropped by the caller after the loss (logits)
  kLossSaved,      // born in the loss, kept for the backward
  kLossTemp,       // born and freed inside the loss
  kBackwardTemp,   // born in the backward, freed there
  kRecompute,      // born in a recomputation (activation checkpointing)
  kParameterGrad,  // becomes the .grad of an unsharded parameter
  kOptimizerTemp,  // born and freed in an optimizer's step
};

// ---- events of a pass, in host order ----

// A module's forward is entered / left. Tensors are those found in args and kwargs (outputs), flattened in
// order.
struct EnterEvent {
  ModuleId module = -1;
  std::vector<TensorId> inputs;
  bool operator==(const EnterEvent&) const = default;
};
struct ExitEvent {
  ModuleId module = -1;
  std::vector<TensorId> outputs;
  bool operator==(const ExitEvent&) const = default;
};

// [Note: collectives of the model]
// A collective that the model issues itself (tensor, expert, context parallelism) is an operator with this
// part. It runs on the communicator's own stream: behind what the compute stream was given before it, behind
// the communicator's collectives before it. The compute stream waits for it at once, or at the
// CollectiveWaitEvent of its `work`. Every rank issues the same: `peer` is a distance, and `size_bytes` what
// each rank has.
struct ModelCollective {
  CollectiveKind kind = CollectiveKind::kAllReduce;
  CommunicatorId communicator = -1;      // below 0 in optimizer steps of a trace alone
  Bytes size_bytes;                      // the full tensor (CollectiveSize in collective_kinds.h)
  std::int32_t work = -1;                // asynchronous: its number in the trace; -1: waited for at once
  std::int32_t peer = -1;                // send, recv: (peer - this rank) mod size, as positions in the group
  std::int32_t batch = -1;               // issued as one group: all of one number
  std::int64_t busiest_ppm = 1'000'000;  // all_to_all: what the busiest rank moves, of size_bytes
  bool operator==(const ModelCollective&) const = default;
};

// One operator that a GPU would run.
struct OperatorEvent {
  std::string name;      // "aten.mm"
  ModuleId module = -1;  // innermost module (of the forward that made the autograd node, in a backward)
  DType dtype = DType::kFloat32;  // of the arithmetic (the largest floating input)
  std::int64_t flops = 0;
  Bytes bytes_read;
  Bytes bytes_written;
  Nanoseconds duration_ns{-1};   // measured; -1 when not
  std::vector<StorageId> reads;  // storages of the passes (not parameters)
  std::vector<StorageId> writes;
  std::vector<ParameterId> parameters;  // parameters whose storage is read
  std::optional<ModelCollective> collective;
  bool operator==(const OperatorEvent&) const = default;
};

// The compute stream waits for the latest collective of this number.
struct CollectiveWaitEvent {
  std::int32_t work = -1;
  bool operator==(const CollectiveWaitEvent&) const = default;
};

// A storage is born / dies.
struct AllocateEvent {
  StorageId storage = -1;
  Bytes size_bytes;
  StorageRole role = StorageRole::kForwardTemp;
  ModuleId module = -1;        // innermost module, as in OperatorEvent
  ParameterId parameter = -1;  // kParameterGrad: whose gradient
  bool operator==(const AllocateEvent&) const = default;
};
struct FreeEvent {
  StorageId storage = -1;
  bool operator==(const FreeEvent&) const = default;
};

// Forward: what the model's Python held of a storage is gone; from here on autograd alone holds it.
struct ReleaseEvent {
  StorageId storage = -1;
  bool operator==(const ReleaseEvent&) const = default;
};

// Backward: the gradient of the module's `index`-th output tensor is ready (where a tensor hook on it fires).
struct OutputGradReadyEvent {
  ModuleId module = -1;
  std::int32_t index = 0;       // k-th tensor of the flattened output
  std::int32_t occurrence = 0;  // which call of the module in the forward (0, 1, ...), for reused modules
  std::int32_t forward = 0;     // which of Pass::forwards this belongs to (position)
  bool operator==(const OutputGradReadyEvent&) const = default;
};
// Backward: the gradients of all the module's inputs that need one are done (where an identity autograd
// function on the inputs runs its backward). A module none of whose inputs needs a gradient has no such
// event.
struct InputsGradDoneEvent {
  ModuleId module = -1;
  std::int32_t occurrence = 0;
  std::int32_t forward = 0;
  bool operator==(const InputsGradDoneEvent&) const = default;
};
// Backward: a parameter's gradient has been accumulated into .grad.
struct ParameterGradEvent {
  ParameterId parameter = -1;
  StorageId storage = -1;
  // The dtype in which autograd makes it, if the parameter is computed in another: float32 of a bfloat16
  // weight that multiplies a float32 activation, say.
  std::optional<DType> dtype;
  bool operator==(const ParameterGradEvent&) const = default;
};
// Backward: a checkpointed module's forward is run again / is done.
struct RecomputeEnterEvent {
  ModuleId module = -1;
  bool operator==(const RecomputeEnterEvent&) const = default;
};
struct RecomputeExitEvent {
  ModuleId module = -1;
  bool stopped = false;  // early, inside of it: its hooks do not run
  bool operator==(const RecomputeExitEvent&) const = default;
};
// Backward: the autograd engine has finished and runs its queued callbacks. Later frees are of memory that
// the caller of backward held (the loss and its gradient). A trace without it ends there.
struct BackwardEndEvent {
  bool operator==(const BackwardEndEvent&) const = default;
};

using TraceEvent =
    std::variant<EnterEvent, ExitEvent, OperatorEvent, AllocateEvent, FreeEvent, OutputGradReadyEvent,
                 InputsGradDoneEvent, ParameterGradEvent, RecomputeEnterEvent, RecomputeExitEvent,
                 BackwardEndEvent, ReleaseEvent, CollectiveWaitEvent>;

// A stretch of compute: operators, allocations and frees in host order.
using SegmentEntry = std::variant<OperatorEvent, AllocateEvent, FreeEvent, CollectiveWaitEvent>;

// [Note: matrix optimizers]
// A matrix optimizer's step of one matrix that is cut along its first dimension over `ranks` ranks, as the
// first of them runs it. DTensor decides by sizes, ranks, replicas, device and devices of a host which
// collectives it needs, so the step is traced for each. Storages are its own (kOptimizerTemp); shards of
// parameter, gradient and states have none. The communicator of a collective is one of these.
constexpr CommunicatorId kOfShards = -1;    // the ranks that the matrix is cut over
constexpr CommunicatorId kOfReplicas = -2;  // ... that have the same rows (HSDP)
constexpr CommunicatorId kOfBoth = -3;      // all of them together
struct TracedOptimizerStep {
  OptimizerKind optimizer = OptimizerKind::kMuon;
  std::int64_t ranks = 1;           // 1: the whole matrix, a plain tensor
  std::int64_t replicas = 1;        // of the ranks, by which DTensor chooses, too
  std::vector<std::int64_t> shape;  // of the whole matrix
  DType dtype = DType::kFloat32;    // of parameter and gradient
  bool nesterov = true;
  std::int32_t ns_steps = 5;                // Newton-Schulz iterations
  std::vector<SegmentEntry> update;         // gradient and momentum to what is orthogonalised
  std::vector<SegmentEntry> orthogonalize;  // from the cast to bfloat16 to the end of the iterations
  std::vector<SegmentEntry> apply;          // to the parameter
  bool operator==(const TracedOptimizerStep&) const = default;
};

// One forward (the loss included: its events follow the root's exit) or one backward.
struct Pass {
  std::string name;             // "f0", "b0"
  bool grad_enabled = true;     // false: a no_grad forward
  bool abandoned = false;       // it raised: modules are not left, or the backward does not end
  std::vector<Tensor> tensors;  // forward only
  std::vector<std::int32_t>
      forwards;  // backward only: indices into Trace::forwards of the forwards it covers
  std::vector<TraceEvent> events;
  bool operator==(const Pass&) const = default;
};

// A call of the step: which pass runs.
struct TracedForward {
  std::int32_t forward = 0;  // index into Trace::forwards
  bool operator==(const TracedForward&) const = default;
};
struct TracedBackward {
  std::int32_t backward = 0;  // index into Trace::backwards
  bool operator==(const TracedBackward&) const = default;
};
using TraceCall = std::variant<TracedForward, TracedBackward>;

struct TraceInput {
  std::string name;
  std::vector<std::int64_t> shape;
  DType dtype = DType::kInt64;
  StorageId storage = -1;
  bool operator==(const TraceInput&) const = default;
};

struct Trace {
  std::string model;                      // a name for people, "llama-3.1-8b"
  std::string source;                     // "package.module:callable" or the config file's name
  std::string recorded_with;              // "torch 2.11.0"
  DType compute_dtype = DType::kFloat32;  // dtype the passes were recorded in
  std::int64_t tokens_per_batch = 0;  // batch x sequence of one rank's micro-batch (samples when no sequence)
  std::int64_t world_size = 1;        // ranks of the job that was traced
  // Names of mesh dimensions along which all ranks work on one batch (tensor, pipeline parallelism). Along
  // others each has its own, or its own part of a sequence.
  std::vector<std::string> same_batch;
  // The groups of the model's own collectives, and the dimensions that placements name.
  std::vector<Communicator> communicators;
  std::vector<Module> modules;        // pre-order, children in registration order; modules[0] is the root
  std::vector<Parameter> parameters;  // named_parameters() order
  std::vector<ModuleBuffer> buffers;
  std::vector<TraceInput> inputs;
  std::vector<Pass> forwards;
  std::vector<Pass> backwards;
  // The calls of one micro-batch, in order, if they are more than a forward and then its backward: a loss
  // that calls modules and runs backwards of its own. Empty: it is not.
  std::vector<TraceCall> calls;
  std::vector<TracedOptimizerStep> optimizer_steps;
  bool operator==(const Trace&) const = default;
};

}  // namespace shardplan
