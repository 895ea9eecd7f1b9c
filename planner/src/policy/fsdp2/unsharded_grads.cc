// SPDX-License-Identifier: Apache-2.0
#include "policy/fsdp2/unsharded_grads.h"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <map>
#include <string>
#include <utility>

#include "shardplan/schemas/assert.h"
#include "shardplan/schemas/layout.h"
#include "shardplan/schemas/precision.h"
#include "units/layout.h"

namespace shardplan::fsdp2 {

BufferId UnshardedGrads::GradBuffer(const std::set<std::int32_t>& parameters, bool accumulated) const {
  const Unit& unit = scope_.unit();
  SHARDPLAN_ASSERT(!parameters.empty(), "a buffer holds a gradient");
  const DType dtype = GradDType(*parameters.begin(), accumulated);
  std::vector<Bytes> parts;
  for (const std::int32_t p : parameters) {
    parts.push_back(Bytes{Numel(unit.parameters[p]) * SizeBytes(dtype)});
  }
  const BufferRole role = accumulated ? BufferRole::kGradUnshardedAccumulated : BufferRole::kGradUnsharded;
  std::string suffix;
  if (parameters.size() == 1 && unit.parameters.size() > 1) {
    suffix = fmt::format("p{}", *parameters.begin());
  } else if (!accumulated && dtype != unit.param_dtype) {
    suffix = Name(dtype);
  }
  return scope_.Buffer(role, dtype, std::move(parts), {parameters.begin(), parameters.end()}, suffix);
}

DType UnshardedGrads::GradDType(std::int32_t parameter, bool accumulated) const {
  const Unit& unit = scope_.unit();
  const UnitParameter& of = unit.parameters[parameter];
  return accumulated ? AccumulatedGradDType(unit, of) : MadeGradDType(unit, of);
}

void UnshardedGrads::AccumulateIfNeeded() {
  ProgramBuilder& program = scope_.program();
  for (const std::int32_t p : state_.accumulated) {
    if (state_.grads.erase(p) == 0) continue;
    const BufferId grad = GradBuffer({p}, false);
    program.Move(InstructionKind::kGradAccumulate, grad, GradBuffer({p}, true), kCompute);
    program.Free(grad, kCompute);
  }
}

// Without synchronisation gradients wait in the reduce dtype, each cast before the next one.
void UnshardedGrads::ToAccumulatedIfNeeded() {
  ProgramBuilder& program = scope_.program();
  for (const std::int32_t p : std::set(state_.grads)) {
    if (GradDType(p, true) == GradDType(p, false)) continue;
    state_.grads.erase(p);
    const BufferId grad = GradBuffer({p}, false);
    const BufferId accumulated = GradBuffer({p}, true);
    program.Allocate(accumulated, kCompute);
    program.Move(InstructionKind::kGradCast, grad, accumulated, kCompute);
    program.Free(grad, kCompute);
    state_.accumulated.insert(p);
  }
}

// A parameter that is replicated over a tensor-parallel dimension may get its gradient as a partial sum over
// it: FSDP reduces that first (FSDPParam._get_grad_inner_tensor), parameter by parameter. Takes these
// parameters out of `grads`.
std::vector<BufferId> UnshardedGrads::ReducePartialGrads(std::set<std::int32_t>& grads,
                                                         bool accumulated) const {
  std::vector<BufferId> reduced;
  for (const std::int32_t p : std::set(grads)) {
    BufferId grad = -1;
    for (const ParameterPlacement& placement : scope_.unit().parameters[p].placements) {
      if (!placement.grad_partial || placement.size == 1) continue;
      const CommunicatorId communicator = scope_.partition().mesh_groups.at(placement.mesh_dim);
      if (communicator < 0) continue;
      if (grad < 0) grad = GradBuffer({p}, accumulated);
      Instruction& reduce = scope_.program().Emit(InstructionKind::kAllReduce, kCompute);
      reduce.src = grad;
      reduce.communicator = communicator;
    }
    if (grad < 0) continue;
    reduced.push_back(grad);
    grads.erase(p);
  }
  return reduced;
}

// Gradients whose pieces do not lie one behind another are put in order one by one: each has a buffer.
std::vector<BufferId> UnshardedGrads::TakeBuffers(std::set<std::int32_t> grads, bool accumulated) const {
  std::vector<BufferId> taken;
  const std::vector<BufferId> partial = ReducePartialGrads(grads, accumulated);
  for (const std::int32_t p : std::set(grads)) {
    if (!scope_.IsChunked(p)) continue;
    taken.push_back(GradBuffer({p}, accumulated));
    grads.erase(p);
  }
  std::map<DType, std::set<std::int32_t>> by_dtype;
  for (const std::int32_t p : grads) by_dtype[GradDType(p, accumulated)].insert(p);
  for (const auto& [dtype, of_dtype] : by_dtype) taken.push_back(GradBuffer(of_dtype, accumulated));
  taken.insert(taken.end(), partial.begin(), partial.end());
  return taken;
}

void UnshardedGrads::Discard() {
  const State dropped = std::exchange(state_, {});
  for (const std::int32_t p : dropped.accumulated) scope_.program().Free(GradBuffer({p}, true), kCompute);
  for (const std::int32_t p : dropped.grads) scope_.program().Free(GradBuffer({p}, false), kCompute);
}

// FSDPParam.unsharded_zero_grad_data. Parameters that are cut along another dimension than the first have a
// buffer of their own, as in TakeBuffers.
std::vector<BufferId> UnshardedGrads::MakeZeros(const std::set<std::int32_t>& parameters,
                                                bool accumulated) const {
  const Unit& unit = scope_.unit();
  std::map<std::pair<DType, std::int32_t>, std::vector<std::int32_t>> together;
  for (const std::int32_t p : parameters) {
    const DType dtype = accumulated ? GradDType(p, true) : ComputeDType(unit, unit.parameters[p]);
    together[{dtype, scope_.IsChunked(p) ? p : -1}].push_back(p);
  }
  std::vector<BufferId> made;
  for (const auto& [kind, of_kind] : together) {
    const auto& [dtype, chunked] = kind;
    std::vector<Bytes> parts;
    for (const std::int32_t p : of_kind) {
      parts.push_back(Bytes{Numel(unit.parameters[p]) * SizeBytes(dtype)});
    }
    std::string suffix = accumulated ? "zeros" : fmt::format("zeros.{}", Name(dtype));
    if (chunked >= 0) suffix += fmt::format(".p{}", chunked);
    made.push_back(
        scope_.Buffer(BufferRole::kGradUnshardedAccumulated, dtype, std::move(parts), of_kind, suffix));
    scope_.program().Allocate(made.back(), kCompute);
    Instruction& zero = scope_.program().Emit(InstructionKind::kGradZero, kCompute);
    zero.dst = made.back();
  }
  return made;
}

UnshardedGrads::Taken UnshardedGrads::Take(const std::set<std::int32_t>& zeros, bool zeros_are_accumulated) {
  std::set<std::int32_t> parameters = state_.grads;
  parameters.insert(state_.accumulated.begin(), state_.accumulated.end());
  std::set<std::int32_t> unused;
  std::ranges::set_difference(zeros, parameters, std::inserter(unused, unused.end()));
  parameters.insert(unused.begin(), unused.end());
  Taken taken{.parameters = {parameters.begin(), parameters.end()}, .buffers = {}};
  const auto take = [&](const std::set<std::int32_t>& grads, bool accumulated) {
    const std::vector<BufferId> buffers = TakeBuffers(grads, accumulated);
    taken.buffers.insert(taken.buffers.end(), buffers.begin(), buffers.end());
  };
  for (const std::int32_t p : state_.accumulated) take({p}, true);
  take(state_.grads, false);
  const std::vector<BufferId> made = MakeZeros(unused, zeros_are_accumulated);
  taken.buffers.insert(taken.buffers.end(), made.begin(), made.end());
  state_ = {};
  return taken;
}

}  // namespace shardplan::fsdp2
