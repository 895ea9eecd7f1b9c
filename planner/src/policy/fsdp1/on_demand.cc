// SPDX-License-Identifier: Apache-2.0
#include "policy/fsdp1/on_demand.h"

#include <set>

#include "policy/fsdp1/flat_param_grad.h"
#include "policy/fsdp1/flat_param_handle.h"
#include "policy/fsdp1/fsdp_state.h"
#include "policy/fsdp1/reduce_grad.h"
#include "policy/fsdp1/runtime_utils.h"

namespace shardplan::fsdp1 {
namespace {

class HandleEmitter {
 public:
  HandleEmitter(const Context& context, UnitId id) : context_(context), id_(id) {
    for (std::size_t p = 0; p < context.UnitOf(id).parameters.size(); ++p) {
      if (context.UnitOf(id).parameters[p].requires_grad) trained_.insert(static_cast<std::int32_t>(p));
    }
  }

  void Run() {
    Gather(ProcedureKind::kUnshard, ProcedureKind::kReshard, false);
    if (context_.flat_params[id_]->casts_params) {
      Gather(ProcedureKind::kUnshardFullPrecision, ProcedureKind::kReshardFullPrecision, true);
    }
    if (!context_.flat_params[id_]->requires_grad) return;
    Gradients(ProcedureKind::kReduce, /*kept=*/false, /*adds=*/true, /*reduces=*/true);
    Gradients(ProcedureKind::kAccumulate, false, true, false);
    Gradients(ProcedureKind::kAccumulateAgain, true, true, false);
    Gradients(ProcedureKind::kReduceAccumulated, true, true, true);
    Gradients(ProcedureKind::kReduceKept, true, false, true);
  }

 private:
  // The handle before anything has run.
  FlatParamHandle Fresh() const {
    FlatParamHandle handle(context_, id_);
    handle.flat_param.data = handle.flat_param.local_shard;
    handle.training_state = HandleTrainingState::kForward;
    return handle;
  }

  void Gather(ProcedureKind unshard, ProcedureKind reshard, bool full_precision) const {
    context_.builder.BeginProcedure(unshard, id_);
    FsdpState state;
    FlatParamHandle handle = Fresh();
    handle.evaluates_in_full_precision = full_precision;
    Unshard(state, handle, kUnshardOnCompute, "on_demand");
    context_.builder.BeginProcedure(reshard, id_);
    Reshard(state, handle, /*free_unsharded_flat_param=*/true, /*grad_enabled=*/false, kUnshardOnCompute);
  }

  // kept: gradients of an earlier backward wait. adds: this one's views have gradients, too.
  void Gradients(ProcedureKind kind, bool kept, bool adds, bool reduces) const {
    context_.builder.BeginProcedure(kind, id_);
    FlatParamHandle handle = Fresh();
    if (kept) {
      handle.flat_param.grad.buffer = context_.FlatBuffer(id_, BufferRole::kGradUnshardedAccumulated,
                                                          GradDType(handle), handle.config().numel);
    }
    if (adds) {
      handle.flat_param.view_grads = trained_;
      FreeAddedGrad(handle, AccumulateGrad(handle));
    }
    if (!reduces) return;
    if (handle.config().offloads && context_.strategy.optimizer.in_backward) {
      handle.flat_param.cpu_grad.Allocate(context_.builder, kHost);  // else it is there for ever
    }
    ReduceGrad(handle, /*engine_holds=*/true);
    handle.flat_param.post_backward_called = true;
    PrepareGradientForOptim(handle, kCompute);
    if (handle.config().offloads) {
      context_.SynchronizeStream(kCompute, context_.EventName(id_, "offloaded"));
    }
  }

  const Context& context_;
  const UnitId id_;
  std::set<std::int32_t> trained_;
};

}  // namespace

void EmitProcedures(const Context& context) {
  Strategy strategy = context.strategy;
  strategy.fsdp1.limit_all_gathers = false;  // nothing is in flight that could be too much
  const Context on_compute{.trace = context.trace,
                           .index = context.index,
                           .partition = context.partition,
                           .strategy = strategy,
                           .builder = context.builder,
                           .optimizer = context.optimizer,
                           .faults_seen = context.faults_seen,
                           .streams = {kCompute, kCompute, kCompute, kCompute},
                           .flat_params = context.flat_params};
  for (std::size_t u = 0; u < context.flat_params.size(); ++u) {
    if (context.flat_params[u]) HandleEmitter(on_compute, static_cast<UnitId>(u)).Run();
  }
}

}  // namespace shardplan::fsdp1
