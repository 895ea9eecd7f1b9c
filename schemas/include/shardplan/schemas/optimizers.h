// SPDX-License-Identifier: Apache-2.0
// Optimizers: what torch.optim's optimizers (2.11, 2.15) keep, move and take, in tables. Strategy checks,
// flags, layouts of checkpoints, planner, costs, memory and docs/reference/memory.md read them. An optimizer
// without a row does not compile, nor does one without temporaries (src/optimizers/temporaries.cc).
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "shardplan/schemas/assert.h"
#include "shardplan/schemas/plan.h"
#include "shardplan/schemas/quantity.h"
#include "shardplan/schemas/strategy.h"
#include "shardplan/schemas/trace.h"

namespace shardplan {

// A set of optimizers: bit number k is kind k.
using OptimizerSet = std::uint32_t;
constexpr OptimizerSet OptimizersIn(std::initializer_list<OptimizerKind> kinds) {
  OptimizerSet set = 0;
  for (const OptimizerKind kind : kinds) set |= OptimizerSet{1} << static_cast<unsigned>(kind);
  return set;
}
constexpr bool Has(OptimizerSet set, OptimizerKind kind) { return (set & OptimizersIn({kind})) != 0; }

// Reads, writes and launches of a step. Reads and writes are passes over the shards; launches are by list of
// tensors (foreach) or by tensor (a loop), and in any case by tensor.
struct OptimizerPasses {
  std::int64_t read = 0;
  std::int64_t written = 0;
  std::int64_t kernels = 0;
  std::int64_t kernels_by_tensor = 0;
};

enum class GradientDType : std::uint8_t {
  kAny,
  kOfParameter,  // torch fails where gradients have another dtype
};

struct OptimizerDescription {
  OptimizerKind kind;
  std::string_view name;     // in the documents and flags
  std::string_view pytorch;  // the class; "": none
  OptimizerImplementation by_default;
  bool has_fused;
  GradientDType gradients;
  bool whole_matrices;    // a step needs whole parameters, not shards
  OptimizerPasses fused;  // without arguments
  OptimizerPasses unfused;
  std::int64_t flops_per_element;  // of an unfused step without arguments
};

// A boolean argument.
struct OptimizerArgument {
  bool Optimizer::*argument;
  std::string_view name;  // in the documents
  std::string_view flag;  // the word of --optimizer; "": the kind's own word has it
  OptimizerSet takes;     // others refuse it
  OptimizerSet works;     // on these it changes the passes
  OptimizerPasses fused;  // added
  OptimizerPasses unfused;
};

enum class StateShape : std::uint8_t {
  kScalar,
  kParameter,
  kRows,      // of a matrix: the parameter's shape with one column
  kColumns,   // of a matrix: ... with one row
  kOfVector,  // the parameter's shape, unless it is a matrix
};
enum class StateDType : std::uint8_t { kFloat32, kParameter, kGradient };
enum class StatePlace : std::uint8_t {
  kShard,   // where the shard is
  kHost,    // in host memory
  kKernel,  // where the shard is if kernels read it (fused, capturable); else in host memory
};

// A tensor that the first step leaves behind for a parameter. In order of creation.
struct OptimizerStateDescription {
  OptimizerKind kind;
  std::string_view name;  // the key in Optimizer.state
  StateShape shape;
  StateDType dtype;
  StatePlace place;
  bool Optimizer::*when;  // the argument that makes it; null: always
};

namespace optimizers {

using enum OptimizerKind;
using I = OptimizerImplementation;
using G = GradientDType;
using S = StateShape;
using D = StateDType;
using P = StatePlace;
using O = Optimizer;

inline constexpr OptimizerSet kAll = ((OptimizerSet{1} << kOptimizerKinds) - 1) & ~OptimizersIn({kMuon});
inline constexpr OptimizerSet kAdams = OptimizersIn({kAdamW, kAdam});

// In the order of the enumerators.
//
//   sgd        p += -lr * g
//   adam(w)    p *= 1 - lr * wd; m lerp g; v *= beta2; v += g * g; t = sqrt(v); t /= c; t += eps; p += m / t
//   adafactor  |p|; |rows of g|; |columns of g|; t = r x c; t /= mean(r); clamp; rsqrt; t *= g; |t|; (t *=
//   a);
//              p += t
//
#pragma GCC diagnostic push
#pragma GCC diagnostic error "-Wmissing-field-initializers"
// clang-format off
inline constexpr auto kTable = std::to_array<OptimizerDescription>({
//   kind         name         class        by default   fused  gradients         matrices  fused pass  unfused          FLOPs
    {kNone,      "none",      "",          I::kForeach, true,  G::kAny,          false,    {},         {},              0},
    {kSgd,       "sgd",       "SGD",       I::kForeach, true,  G::kAny,          false,    {2, 1, 1},  {2, 1, 1},       2},
    {kAdamW,     "adamw",     "AdamW",     I::kForeach, true,  G::kOfParameter,  false,    {4, 3, 1},  {12, 8, 8},      14},
    {kAdam,      "adam",      "Adam",      I::kForeach, true,  G::kOfParameter,  false,    {4, 3, 1},  {12, 8, 8},      14},
    {kAdafactor, "adafactor", "Adafactor", I::kForLoop, false, G::kAny,          false,    {},         {11, 6, 12, 7},  16},
    {kMuon,      "muon",      "Muon",      I::kForLoop, false, G::kAny,          true,     {},         {},              0},
});

//   argument              name            flag          takes                         works                         fused       unfused
inline constexpr auto kArguments = std::to_array<OptimizerArgument>({
    {&O::momentum,        "momentum",     "",           OptimizersIn({kSgd}),         OptimizersIn({kSgd}),         {1, 1, 0},  {3, 2, 2}},  // buf *= momentum; buf += g
    {&O::nesterov,        "nesterov",     "nesterov",   OptimizersIn({kSgd}),         OptimizersIn({kSgd}),         {},         {2, 1, 1}},  // g += momentum * buf
    {&O::weight_decay,    "weight_decay", "decay",      kAll, OptimizersIn({kSgd, kAdam}),  {},         {2, 1, 1}},  // g += decay * p
    {&O::amsgrad,         "amsgrad",      "amsgrad",    kAdams,                       kAdams,                       {1, 1, 0},  {2, 1, 1}},  // max(v)
    {&O::capturable,      "capturable",   "capturable", kAdams,                       0,                            {},         {}},
    {&O::maximize,        "maximize",     "maximize",   kAll, kAll,                         {},         {1, 1, 1}},  // -g
});

//   kind         key                shape           dtype           place        when
inline constexpr auto kStates = std::to_array<OptimizerStateDescription>({
    {kSgd,       "momentum_buffer", S::kParameter,  D::kGradient,   P::kShard,   &O::momentum},
    {kAdamW,     "step",            S::kScalar,     D::kFloat32,    P::kKernel,  nullptr},
    {kAdamW,     "exp_avg",         S::kParameter,  D::kParameter,  P::kShard,   nullptr},
    {kAdamW,     "exp_avg_sq",      S::kParameter,  D::kParameter,  P::kShard,   nullptr},
    {kAdamW,     "max_exp_avg_sq",  S::kParameter,  D::kParameter,  P::kShard,   &O::amsgrad},
    {kAdam,      "step",            S::kScalar,     D::kFloat32,    P::kKernel,  nullptr},
    {kAdam,      "exp_avg",         S::kParameter,  D::kParameter,  P::kShard,   nullptr},
    {kAdam,      "exp_avg_sq",      S::kParameter,  D::kParameter,  P::kShard,   nullptr},
    {kAdam,      "max_exp_avg_sq",  S::kParameter,  D::kParameter,  P::kShard,   &O::amsgrad},
    {kAdafactor, "step",            S::kScalar,     D::kFloat32,    P::kHost,    nullptr},
    {kAdafactor, "row_var",         S::kRows,       D::kGradient,   P::kShard,   nullptr},
    {kAdafactor, "col_var",         S::kColumns,    D::kGradient,   P::kShard,   nullptr},
    {kAdafactor, "variance",        S::kOfVector,   D::kGradient,   P::kShard,   nullptr},
    {kMuon,      "momentum_buffer", S::kParameter,  D::kGradient,   P::kShard,   nullptr},
});

// The words of --optimizer, in the order of the enumerators.
struct Implementation {
  OptimizerImplementation implementation;
  std::string_view flag;
};
inline constexpr auto kImplementations = std::to_array<Implementation>({
    {I::kForLoop, "forloop"},
    {I::kForeach, "foreach"},
    {I::kFused,   "fused"},
});
// clang-format on
#pragma GCC diagnostic pop

static_assert(kTable.size() == kOptimizerKinds && !IsEnumerator<static_cast<OptimizerKind>(kTable.size())>(),
              "a row for every optimizer");
// Every kind but `none` has a class and states.
consteval bool IsComplete() {
  for (std::size_t k = 0; k < kOptimizerKinds; ++k) {
    const auto kind = static_cast<OptimizerKind>(k);
    if (kTable[k].kind != kind || kTable[k].name.empty()) return false;
    if (kTable[k].pytorch.empty() && kind != kNone) return false;
    bool has_states = kind == kNone;
    for (const OptimizerStateDescription& state : kStates) has_states = has_states || state.kind == kind;
    if (!has_states) return false;
  }
  return true;
}
static_assert(IsComplete(), "rows in the order of the kinds, and states of each but `none`");

}  // namespace optimizers

inline constexpr const auto& kOptimizers = optimizers::kTable;

// Any kind that a reader makes has a row.
constexpr const OptimizerDescription& DescriptionOf(OptimizerKind kind) {
  return kOptimizers[static_cast<std::size_t>(kind)];
}

// PyTorch's default where the strategy does not say it.
OptimizerImplementation ImplementationOf(const Optimizer& optimizer);

// Passes of a step with these arguments.
OptimizerPasses PassesOf(const Optimizer& optimizer);

// Whether the argument adds to the gradients (in place or in a copy): weight decay that is not decoupled.
bool AddsDecay(const Optimizer& optimizer);

// The optimizer of a parameter: Muon's, or that of the rest.
Optimizer OptimizerOf(const Optimizer& optimizer, bool muon);

// Whether Muon steps a parameter of this name, of which `shared_with` are others: of a strategy that names
// its matrices.
bool MuonSteps(const Optimizer& optimizer, const std::string& fqn,
               const std::vector<std::string>& shared_with);

// Muon's step of a matrix, as traced on so many ranks that shard it and replicas. Null: it is not. A whole
// matrix is orthogonalised alike whatever the momentum is.
const TracedOptimizerStep* TracedMuonStep(const Trace& trace, const Muon& muon, std::int64_t shards,
                                          std::int64_t replicas, const std::vector<std::int64_t>& shape,
                                          DType dtype);

// The states that these arguments make, in order of creation.
std::vector<OptimizerStateDescription> StatesOf(const Optimizer& optimizer);

// Whether every state has its parameter's shape, or is a number: such a state is cut as its parameter is.
bool StatesHaveParameterShapes(OptimizerKind kind);

// The names in alphabetical order, joined by `last` before the last: "adam and adamw".
std::string NamesOf(OptimizerSet kinds, std::string_view last);

// One tensor that the optimizer steps, as this rank holds it.
struct OptimizerShard {
  std::vector<std::int64_t> shape;
  DType dtype = DType::kFloat32;
  std::int32_t parameter = 0;       // index into Unit::parameters; of a flat parameter: its first one
  std::optional<DType> grad_dtype;  // of its gradient, where that is another
  bool muon = false;                // UnitParameter::muon
  bool operator==(const OptimizerShard&) const = default;
};

Bytes SizeBytes(const OptimizerShard& shard);

// The optimizer's parameters for a unit that `ranks` ranks shard, on the first rank: trainable parameters,
// their pieces, or the whole flat parameter (flat, without original parameters). Pieces of a flat parameter
// have one dimension.
std::vector<OptimizerShard> OptimizerShardsOf(const Unit& unit, std::int64_t ranks, bool use_orig_params);

// Requested sizes of the states of a shard that are in its own memory, in order of creation.
std::vector<Bytes> OptimizerStates(const Optimizer& optimizer, const OptimizerShard& shard);

// Temporaries below are without those of shards that Muon steps: segments and exchanges have them.
//
// Requested sizes of the temporaries of a step that are alive at the same time, where that is most; `shards`
// in the optimizer's order. The Python of torch/optim/{adam,sgd,_adafactor}.py makes and drops them so.
std::vector<Bytes> OptimizerTemporaries(const Optimizer& optimizer,
                                        const std::vector<OptimizerShard>& shards);

// A temporary is taken, or one of those taken so far is dropped.
struct OptimizerTensorStep {
  Bytes taken;
  std::int32_t dropped = -1;  // which of those taken, from 0; -1: none
  bool operator==(const OptimizerTensorStep&) const = default;
};

// All temporaries of the same step, one after the other. A temporary that is not dropped before is when the
// step ends.
std::vector<OptimizerTensorStep> OptimizerTensorSteps(const Optimizer& optimizer,
                                                      const std::vector<OptimizerShard>& shards);

}  // namespace shardplan
