// SPDX-License-Identifier: Apache-2.0
// The plan: one explicit program (docs/reference/plan-format.md). It is self-contained: it can be verified,
// simulated and replayed without the trace it came from.
//
// [Note: host order and stream order]
// A step is a list of triggers in the order in which the host passes them; a trigger holds instructions in
// the order in which the host issues them. An instruction with a stream runs there, FIFO. `allocate` and
// `free` take effect in host order: the block of a freed buffer goes back to the pool of the stream that it
// was allocated on. It may be handed out again at once to work issued later on that stream (the CUDA caching
// allocator's rule).
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "shardplan/schemas/cluster.h"
#include "shardplan/schemas/dtype.h"
#include "shardplan/schemas/quantity.h"
#include "shardplan/schemas/shared_list.h"
#include "shardplan/schemas/strategy.h"
#include "shardplan/schemas/trace.h"

namespace shardplan {

using UnitId = std::int32_t;
using BufferId = std::int32_t;
using StreamId = std::int32_t;
using EventId = std::int32_t;
using SegmentId = std::int32_t;
using ExchangeId = std::int32_t;

enum class LayoutKind : std::uint8_t { kPerParameter, kFlat };

// A flat tensor of an all-gather extension.
struct ExtensionBuffer {
  DType dtype = DType::kUInt8;
  std::int64_t numel = 0;
  bool operator==(const ExtensionBuffer&) const = default;
};

struct UnitParameter {
  std::string fqn;
  std::vector<std::string> shared_with;  // other FQNs of a tied parameter, anywhere in the model
  std::vector<std::int64_t> shape;       // unsharded by FSDP; local to the rank where placements cut it
  DType dtype = DType::kFloat32;         // original
  bool requires_grad = true;
  std::int32_t index = -1;       // place in model.parameters(), the optimizer's order; -1: unknown
  std::int32_t shard_dim = 0;    // per_parameter
  std::int64_t flat_offset = 0;  // flat: elements before it in the flat parameter (alignment included)
  std::vector<ParameterPlacement> placements;  // over the mesh's other dimensions, as in the trace
  std::optional<DType> param_dtype;            // gathered and computed in, where it is not the unit's
  std::optional<DType> grad_dtype;             // of the sharded gradient, where it is not the parameter's
  // fsdp2 of 2.15: the dtype in which autograd leaves the unsharded gradient, if it is not the one that the
  // parameter is computed in. Then the dtype in which the gradient waits for a later micro-batch, if it is
  // not the unit's reduce_dtype (several grad_dtypes in a unit). See precision.h.
  std::optional<DType> made_grad_dtype;
  std::optional<DType> accumulated_grad_dtype;
  // An all-gather extension: what one rank gathers in place of its shard, and what is allocated beside the
  // gathered tensors. Empty: the shard itself.
  std::vector<ExtensionBuffer> gathered;
  std::vector<ExtensionBuffer> unsharded;
  bool muon = false;  // Muon steps it (Optimizer::muon), not the optimizer of the rest
  bool operator==(const UnitParameter&) const = default;
};

// The parameters all-gathered together.
//
// per_parameter (FSDP2, FSDPParam._init_sharded_param): each parameter is cut along shard_dim as torch.chunk
// does; every rank's piece is padded to ceil(shape[shard_dim] / N) rows. An all-gather input is the
// concatenation of the padded pieces in parameter order; its output is N such inputs. It is gathered as bytes
// (uint8) when the pieces differ in dtype. flat (FSDP1, FlatParamHandle): parameters are concatenated at
// flat_offset, the whole is padded to flat_numel and cut into N equal pieces.
struct Unit {
  // "layers.0"; "" for the root; "a,b" for a group of modules; "layers.0[1]" for one of several groups
  std::string fqn;
  std::vector<std::string> modules;  // FQNs
  // fsdp2: of which parameter group of its modules the unit is; several where their parameters are on several
  // meshes. They are units one after the other, with hooks each.
  std::int32_t parameter_group = 0;
  LayoutKind layout = LayoutKind::kPerParameter;
  std::vector<UnitParameter> parameters;  // in buffer order
  DType orig_dtype = DType::kFloat32;
  DType param_dtype = DType::kFloat32;  // gathered and computed in
  DType reduce_dtype = DType::kFloat32;
  CommunicatorId shard_communicator = -1;  // all_gather and reduce_scatter; -1: not sharded (one rank)
  CommunicatorId reduce_scatter_communicator = -1;  // reduce_scatter's own; -1: shard_communicator
  CommunicatorId replicate_communicator = -1;       // HSDP all_reduce
  CommunicatorId post_forward_communicator = -1;    // integer reshard_after_forward
  // Reductions in two levels: over neighbouring ranks of the shards (a node) first, then over the ranks that
  // have the same place in theirs. Both or none; together they are shard_communicator's ranks.
  CommunicatorId inner_reduce_communicator = -1;
  CommunicatorId outer_reduce_communicator = -1;
  CommunicatorId hook_communicator = -1;         // fsdp2: what the user's all-reduce hook reduces over
  double hook_divisor = 1.0;                     // ... and divides by in all
  std::optional<double> gradient_divide_factor;  // fsdp2: instead of the number of ranks
  std::int64_t flat_numel = 0;                   // flat: padded unsharded elements
  bool operator==(const Unit&) const = default;
};

enum class BufferRole : std::uint8_t {
  kParamSharded,  // the rank's persistent shard
  kParamUnsharded,
  kParamPostForwardShard,
  kAllGatherInput,  // the shard in the low precision / copied to the device, before the all_gather
  kAllGatherOutput,
  kReduceScatterInput,
  kReduceScatterOutput,
  kGradUnsharded,  // made by the model's backward, parameter by parameter
  kGradUnshardedAccumulated,
  kGradSharded,
  kGradHost,  // offloaded gradient shard
  kOptimizerState,
  kOptimizerTemp,
  kOrderCheck,   // what fsdp1's ranks compare: counts and indices of units, of no unit
  kModelBuffer,  // the model's own buffers in another dtype than the trace's, of no unit
  // fsdp2, of parameters with an all-gather extension: what is gathered beside their first tensor / what the
  // extension allocates of its own. Alive as long as param_unsharded; no instruction reads them.
  kExtensionGathered,
  kExtensionUnsharded,
  // HSDP: gradients that are reduced over the shards and not yet over the replicas, kept for a later
  // micro-batch.
  kPartialReduceOutput,
  // Reductions in two levels: gradients that are reduced over the inner ranks and not yet over the outer
  // ones, on their way / kept for a later micro-batch.
  kInnerReduceOutput,
  kInnerReduceAccumulated,
  // Storages that the model saves in a unit's forward for its backward: in host memory between the two, and
  // on the device before and after.
  kActivation,
  kActivationHost,
  // An exchange of matrices: this rank's rows of them, by owner / the whole matrices that this rank owns.
  kUpdatePieces,
  kUpdateWhole,
};
inline constexpr std::size_t kBufferRoles = static_cast<std::size_t>(BufferRole::kUpdateWhole) + 1;

enum class MemoryKind : std::uint8_t { kDevice, kPinnedHost, kHost };

// A named piece of memory. At most one instance is alive at a time.
struct Buffer {
  std::string name;  // unique, "layers.0.all_gather_output"
  BufferRole role = BufferRole::kParamSharded;
  UnitId unit = -1;
  DType dtype = DType::kFloat32;
  // Separate allocations the buffer consists of, bytes each, as requested (not rounded). For param_unsharded,
  // grad_unsharded, param_sharded and grad_sharded of a per_parameter unit: one per entry of `parameters`.
  std::vector<Bytes> parts_bytes;
  std::vector<std::int32_t> parameters;  // indices into Unit::parameters that it holds, ascending
  // activation, activation_host: the storage of the model that each part is or is a copy of, of the
  // micro-batch of the trigger that works on it. Segments make an activation's storages and free what is left
  // of them; allocate and free do the same for all of them at once.
  std::vector<StorageId> storages;
  MemoryKind memory = MemoryKind::kDevice;
  bool persistent = false;   // alive before the first step and after the last
  CommunicatorId pool = -1;  // allocated from this communicator's own memory pool; -1: the caching allocator
  bool operator==(const Buffer&) const = default;
};

inline bool IsOnHost(const Buffer& buffer) { return buffer.memory != MemoryKind::kDevice; }

struct PlanStream {
  std::string name;  // "compute", "all_gather_copy_in", "all_gather", "reduce_scatter", "all_reduce"
  std::int32_t priority = 0;
  bool operator==(const PlanStream&) const = default;
};

// Whether both make the same groups of ranks (under any name).
inline bool SameRanks(const Communicator& a, const Communicator& b) {
  return a.size == b.size && a.stride == b.stride && a.dims == b.dims;
}

// The model's compute between two triggers: operators, and its own allocations and frees in host order.
// Storage ids are the trace's; an instance is (storage, micro-batch).
// A collective of the model is an operator; its communicator is the plan's.
struct SegmentGrad {
  UnitId unit = -1;
  std::int32_t parameter = -1;  // index into Unit::parameters
  bool operator==(const SegmentGrad&) const = default;
};
enum class SegmentPhase : std::uint8_t {
  kForward,
  kLoss,       // behind the root's forward
  kBackward,   // of the loss and of the model; what follows the engine's end in the same call, too
  kRecompute,  // a checkpointed forward again, inside the backward
  kOptimizer,  // of one matrix in the optimizer's step; it reads no unsharded parameter
};
struct Segment {
  std::string name;  // for people: "forward layers.0", "loss", "backward layers.0"
  SegmentPhase phase = SegmentPhase::kForward;
  UnitId unit = -1;  // in whose forward, backward or recomputation it is; -1: in none (the loss)
  // Its place in the model: [begin, end) of the work of forward number `pass` of the trace (of backward
  // number `pass`, for phases of a backward). -1: unknown.
  std::int32_t pass = -1;
  std::int32_t begin = 0;
  std::int32_t end = 0;
  std::int32_t forward = 0;  // of a backward of several micro-batches: of which of them
  std::vector<SegmentEntry> entries;
  std::vector<UnitId> reads;       // units whose unsharded parameters it reads, ascending
  std::vector<SegmentGrad> grads;  // parameters whose unsharded gradient it makes or adds to
  bool operator==(const Segment&) const = default;
};

// How much each pass of the trace does, counted in what segments are made of: operators, allocations, frees
// and gradients. A call of the user runs a pass from 0 to here, in order. Empty: the plan does not say.
struct ModelPasses {
  std::vector<std::int32_t> forwards;
  std::vector<std::int32_t> backwards;
  bool operator==(const ModelPasses&) const = default;
};

// [Note: exchanges]
// A matrix optimizer needs whole matrices, and every rank has rows of each. An exchange gives each of its
// matrices to one rank, its owner, and brings the result back: update_copy_in, all_to_all, orthogonalize,
// all_to_all, update_apply. An exchange without owners gives all of its matrices to every rank, and nothing
// goes back: update_copy_in, update_gather, orthogonalize, update_apply (exchanges.h says what lies where).
struct ExchangedMatrix {
  UnitId unit = -1;
  std::int32_t parameter = -1;  // index into Unit::parameters
  // The matrix is these rows of the parameter seen as [elements / columns, columns] (columns: its last
  // dimension): one of a batch of experts', say. 0 rows: all.
  std::int64_t first_row = 0;
  std::int64_t rows = 0;
  // Rank in the communicator's group; -1: every rank. All matrices of an exchange have an owner or none has.
  std::int32_t owner = -1;
  bool operator==(const ExchangedMatrix&) const = default;
};
struct Exchange {
  std::string name;  // "muon.0"
  // The ranks that shard the parameters; or, with owners, these and the replicas of them (HSDP), replicas
  // outermost.
  CommunicatorId communicator = -1;
  DType dtype = DType::kBFloat16;  // of what is sent
  std::vector<ExchangedMatrix> matrices;
  bool operator==(const Exchange&) const = default;
};

enum class InstructionKind : std::uint8_t {
  kCompute,        // run `segment` on `stream`
  kAllocate,       // dst, on `stream`
  kFree,           // src, or some of its parts; safe_after lists streams recorded on it (record_stream)
  kBindUnsharded,  // the modules' parameters become views of src (param_unsharded)
  kBindSharded,    // ... of src (param_sharded)
  kCopyIn,         // src -> dst: cast if dtypes differ, flatten into this rank's slot of an all-gather buffer
  kAllGather,      // src (this rank's slot) -> dst, on `communicator`
  kCopyOut,        // src (all-gather output) -> dst (param_unsharded)
  kReshardPostForward,  // src (param_unsharded) -> dst (param_post_forward_shard): keep the smaller mesh's
                        // shard
  kGradCopyIn,          // src (grad_unsharded) -> dst (reduce_scatter_input), cast, chunk and pad
  kGradScale,           // src in place: multiplied by 1 / divisor
  kGradZero,            // dst becomes zeros
  kReduceScatter,       // src -> dst, times 1 / divisor
  kAllReduce,           // src in place, times 1 / divisor
  kGradCast,  // src (reduce_scatter_output) -> dst (grad_sharded) in its dtype; a view when the same dtype
  kGradAccumulate,  // dst += src
  kCopyToHost,      // src -> dst
  kCopyToDevice,    // src -> dst
  kRecord,          // event on stream
  kWait,            // stream waits for event
  kHostWait,        // host waits for event
  kUpdateCopyIn,    // shards of gradients and momentum -> dst (update_pieces)
  kAllToAll,        // src -> dst: pieces to their owners, or an owner's rows to the ranks that shard them
  kUpdateGather,    // src (update_pieces) -> dst (update_whole), without owners: every rank gets all pieces
  kOrthogonalize,   // dst (update_whole) in place: one matrix, on its owner alone; without owners on each
  kUpdateApply,     // src (update_pieces; without owners update_whole) -> shards of parameters
  kOptimizerStep,   // of all units (unit = -1), of one, or of one parameter of one
  kZeroGrad,        // sharded gradients are dropped
};
inline constexpr std::size_t kInstructionKinds = static_cast<std::size_t>(InstructionKind::kZeroGrad) + 1;

// A plan of ten thousand units has a million of them: small, and texts are shared.
struct Instruction {
  InstructionKind kind = InstructionKind::kCompute;
  ReduceOp reduce_op = ReduceOp::kSum;
  StreamId stream = -1;  // -1: host only
  UnitId unit = -1;
  BufferId src = -1;
  BufferId dst = -1;
  EventId event = -1;
  CommunicatorId communicator = -1;
  SegmentId segment = -1;
  ExchangeId exchange = -1;
  std::int32_t matrix = -1;  // orthogonalize: index into Exchange::matrices
  // optimizer_step of one parameter: index into Unit::parameters; -1: all. Ranks without a piece of it do
  // nothing.
  std::int32_t parameter = -1;
  // compute: its micro-batch is the trigger's and so many. (MicrobatchOf; the documents have the sum.)
  std::int32_t microbatch_offset = 0;
  // grad_scale; of a sum: every rank's input is multiplied by 1 / divisor on its way into it (NCCL's
  // PREMUL_SUM).
  double divisor = 1.0;
  IdList safe_after;  // free: streams whose work issued so far must finish before reuse
  // free: indices into the buffer's parts_bytes, ascending. Only these go; the others stay until a free
  // without parts, which ends the buffer. Until then copies of unshard and reshard may move parameters whose
  // parts are left; nothing else uses the buffer.
  IdList parts;
  SharedText reason;  // why it is here: "pre_forward", "prefetch_backward", "final"... (plan --explain)
  bool operator==(const Instruction&) const = default;
};

enum class TriggerKind : std::uint8_t {
  kStepBegin,
  kLazyInit,     // fsdp1: once, before the root's first forward or summon_full_params: buffers are made ready
  kPreForward,   // a unit's first module is entered
  kPostForward,  // a unit's last module is left
  kPreBackward,  // the gradient of an output of the unit is ready
  kPostBackward,   // the gradients of the unit's inputs are done
  kBackwardEnd,    // the autograd engine has finished (queued callback of the root)
  kOptimizerStep,  // the user calls optimizer.step()
  kZeroGrad,
  kUserCall,  // a setter, unshard() or reshard() by the user
  kStepEnd,
};

// [Note: equal micro-batches]
// Instructions hold the distance to their trigger's micro-batch, not the micro-batch. So the triggers of
// equal micro-batches (and of equal steps) have equal lists. Planner and readers let equal lists share one
// memory: InstructionSharing.
using InstructionList = SharedList<Instruction>;

struct Trigger {
  TriggerKind kind = TriggerKind::kStepBegin;
  UnitId unit = -1;
  std::int32_t microbatch = 0;
  std::int32_t occurrence = 0;  // how often (kind, unit, microbatch) was passed before in this step
  InstructionList instructions;
  bool operator==(const Trigger&) const = default;
};

// The micro-batch of a compute instruction of the trigger.
inline std::int32_t MicrobatchOf(const Trigger& trigger, const Instruction& compute) {
  return trigger.microbatch + compute.microbatch_offset;
}
// An instruction of the trigger as documents and people have it: with the micro-batch itself in the place of
// the distance.
inline Instruction AsWritten(const Trigger& trigger, Instruction instruction) {
  if (instruction.kind == InstructionKind::kCompute) instruction.microbatch_offset += trigger.microbatch;
  return instruction;
}

struct PlanStep {
  std::string name;  // "first", "steady"
  std::vector<Trigger> triggers;
  bool operator==(const PlanStep&) const = default;
};

// Procedures run on demand, beside the steps: in an evaluation, at a call of the user, and in a step that
// leaves the plan. Each is issued on the compute stream and is done when it ends.
enum class ProcedureKind : std::uint8_t {
  kUnshard,               // the shards -> the modules hold the whole parameters
  kReshard,               // after unshard
  kUnshardFullPrecision,  // as unshard, in the original dtype (fsdp1: evaluation), where that is not
                          // param_dtype
  kReshardFullPrecision,  // after unshard_full_precision
  kReduce,      // the unsharded gradients of all parameters that train -> the sharded (or host) gradients
  kAccumulate,  // keeps the unsharded gradients for a later micro-batch (no_sync); none is kept yet
  kAccumulateAgain,    // ... and adds them to those that are kept, of every parameter
  kReduceAccumulated,  // reduces the unsharded gradients and those that are kept, of every parameter
  kReduceKept,         // reduces those that are kept alone
  // Reduces the rest of the way what is reduced over a part of the ranks only (a partial_reduce_output, an
  // inner_reduce_accumulated).
  kReducePartial,
};
struct Procedure {
  ProcedureKind kind = ProcedureKind::kUnshard;
  UnitId unit = -1;
  InstructionList instructions;
  bool operator==(const Procedure&) const = default;
};

struct Digests {
  std::string trace;  // "sha256:..." of the document's bytes; "" when there was none
  std::string strategy;
  std::string cluster;
  std::string program;  // with known_faults: of the plan itself without them (verifier.h)
  bool operator==(const Digests&) const = default;
};

// The faults of PyTorch that the policies reproduce: the whole list (verifier.h describes each).
enum class PyTorchFault : std::uint8_t {
  kFsdp1OffloadedGradientReplaced,
  kFsdp1ReplicasNotAdded,
  kFsdp1NotGatheredAgain,
  kFsdp1LostGradient,
  kFsdp1MissedHook,
  kFsdp1MixedWithReduced,
  kFsdp1DroppedUnreduced,
  kFsdp1KeptUnused,
  kFsdp1GradientsGrow,
  kFsdp2NoUnshardInBackward,
  kFsdp2PrefetchedByOtherRoot,
  kFsdp2DividedTwice,
  kFsdp2HookInputFreed,
  kFsdp2GroupNotUnsharded,
  kFsdp2GradientsGrow,
  kFsdp2PartialSumLeft,
  kFsdp2Outdated,
};

// A violation that the verifier finds in the plan because PyTorch has it.
struct KnownFault {
  PyTorchFault fault = PyTorchFault::kFsdp1LostGradient;
  std::string rule;  // the verifier's
  std::int32_t step = -1;
  std::int32_t trigger = -1;      // index in the step
  std::int32_t instruction = -1;  // index in the trigger; -1: of no instruction
  std::int32_t procedure = -1;    // index into Plan::procedures, instead of step and trigger
  std::string unit;               // that it works on, as people read it; "": of none
  bool operator==(const KnownFault&) const = default;
};

// Parameters of the trace that are in no unit (ignored ones, or what no unit wraps). Every rank has them
// whole, in blocks of 512 bytes, beside what the plan allocates.
struct UnmanagedParameters {
  Bytes parameter_bytes, gradient_bytes, state_bytes;
  Bytes Total() const { return parameter_bytes + gradient_bytes + state_bytes; }
  bool operator==(const UnmanagedParameters&) const = default;
};

struct Plan {
  std::string model;
  std::string policy;
  Digests digests;
  std::vector<KnownFault> known_faults;  // a plan that verifies has none
  std::int64_t world_size = 1;
  std::int64_t tokens_per_step = 0;  // that one rank works on
  std::int64_t ranks_per_batch = 1;  // ranks that work on the same ones together (tensor parallelism)
  std::vector<StrategyMeshDim> mesh;
  Cluster cluster;  // costs are computed from it when no other is given
  Strategy strategy;
  std::vector<Unit> units;
  std::vector<Buffer> buffers;
  std::vector<PlanStream> streams;  // streams[0] is the compute stream
  std::vector<std::string>
      events;  // names; an event may be recorded again, a wait refers to the latest record
  std::vector<Communicator> communicators;
  std::vector<TraceInput> inputs;           // alive from step begin; freed at step end
  std::vector<ModuleBuffer> model_buffers;  // alive for ever
  UnmanagedParameters unmanaged;
  ModelPasses passes;
  std::vector<Exchange> exchanges;
  std::vector<Segment> segments;
  std::vector<PlanStep> steps;
  std::int32_t steady_step = 0;       // after the last step, go on with steps[steady_step]
  std::vector<Procedure> procedures;  // by unit, and in the order of their kinds; at most one of each
  bool operator==(const Plan&) const = default;
};

// Names as in the documents ("all_gather", "pre_forward", "param_unsharded").
std::string_view Name(InstructionKind kind);
std::string_view Name(TriggerKind kind);
std::string_view Name(BufferRole role);
std::string_view Name(StorageRole role);
std::string_view Name(SegmentPhase phase);
std::string_view Name(ProcedureKind kind);

// How people read the FQN of a module or unit: "(root)" for the root's, which is empty. Names of buffers,
// events and segments spell it so, too.
inline constexpr std::string_view kRootName = "(root)";
std::string DisplayName(std::string_view fqn);

// Bytes of a buffer: the sum of its parts as requested / each part rounded up to `granularity_bytes`.
Bytes SizeBytes(const Buffer& buffer);
Bytes RoundedSizeBytes(const Buffer& buffer, Bytes granularity_bytes);

// Whether the communicator's groups are all there on so many ranks: its dims, where it has them, make its
// size and end with its stride, and every digit divides the ranks.
bool Divides(const Communicator& communicator, std::int64_t ranks);

}  // namespace shardplan
