// SPDX-License-Identifier: Apache-2.0
#include "policy/fsdp2/on_demand.h"

#include <algorithm>
#include <set>

#include "policy/fsdp2/fsdp_param_group.h"
#include "shardplan/schemas/alive_buffers.h"
#include "shardplan/schemas/precision.h"

namespace shardplan::fsdp2 {
namespace {

constexpr std::string_view kReason = "on_demand";

class Emitter {
 public:
  Emitter(const UnitScope& scope, ParamGroupSettings settings, OptimizerMemory* optimizer_in_backward,
          FaultList& faults)
      : scope_(scope), settings_(settings), optimizer_(optimizer_in_backward), faults_(faults) {
    // Everything that a caller may have switched off is on: it asks for the opposite.
    settings_.reduce_grads = settings_.all_reduce_grads = settings_.unshard_in_backward = true;
    settings_.reshard_after_backward = settings_.part_after_backward = settings_.unshard_async_op = false;
    for (std::size_t p = 0; p < scope.unit().parameters.size(); ++p) {
      const UnitParameter& parameter = scope.unit().parameters[p];
      if (!parameter.requires_grad) continue;
      trained_.insert(static_cast<std::int32_t>(p));
      const bool casts =
          MadeGradDType(scope.unit(), parameter) != AccumulatedGradDType(scope.unit(), parameter);
      (casts ? cast_ : kept_).insert(static_cast<std::int32_t>(p));
    }
  }

  Status Run() {
    if (Status s = Gather(); !s) return s;
    if (trained_.empty()) return {};
    if (Status s = Reduce(ProcedureKind::kReduce, {.grads = trained_, .accumulated = {}}); !s) return s;
    if (!cast_.empty()) {
      Accumulate(ProcedureKind::kAccumulate, {.grads = trained_, .accumulated = {}});
      Accumulate(ProcedureKind::kAccumulateAgain, {.grads = trained_, .accumulated = cast_});
      const Status both =
          Reduce(ProcedureKind::kReduceAccumulated, {.grads = trained_, .accumulated = cast_});
      if (!both) return both;
      const Status kept = Reduce(ProcedureKind::kReduceKept, {.grads = kept_, .accumulated = cast_});
      if (!kept) return kept;
    }
    ReducePartial();
    return {};
  }

 private:
  // A group as it is before anything has run, whose instructions are those of one procedure.
  struct Fresh {
    Fresh(const Emitter& emitter, ProcedureKind kind)
        : comm_ctx(emitter.scope_.program()),
          group(emitter.scope_, emitter.settings_, comm_ctx, emitter.optimizer_, emitter.faults_) {
      emitter.scope_.program().BeginProcedure(kind, emitter.scope_.id());
      comm_ctx.UseComputeStream();
    }
    void Finish() {
      if (group.scope().rules().one_wait_a_stream) comm_ctx.WaitForLastReductions();
      group.FinalizeBackward();
      comm_ctx.WaitForReduceScatters(0);
    }
    FsdpCommContext comm_ctx;
    FsdpParamGroup group;
  };

  // The reshard is of the group that unshard has made: nothing of it is another in a fresh one.
  Status Gather() {
    Fresh fresh(*this, ProcedureKind::kUnshard);
    if (Status s = fresh.group.Unshard(/*async_op=*/false, kReason); !s) return s;
    fresh.group.WaitForUnshard();
    scope_.program().BeginProcedure(ProcedureKind::kReshard, scope_.id());
    fresh.group.ToSharded();
    return {};
  }

  Status Reduce(ProcedureKind kind, UnshardedGrads::State grads) {
    Fresh fresh(*this, kind);
    fresh.group.unsharded_grads().Restore(std::move(grads));
    if (Status s = fresh.group.PostBackward(kReason); !s) return s;
    fresh.Finish();
    return {};
  }

  void Accumulate(ProcedureKind kind, UnshardedGrads::State grads) {
    Fresh fresh(*this, kind);
    fresh.group.unsharded_grads().Restore(std::move(grads));
    fresh.group.unsharded_grads().AccumulateIfNeeded();
    fresh.group.unsharded_grads().ToAccumulatedIfNeeded();
  }

  // Reduces the buffer that the steps leave, if they do.
  void ReducePartial() {
    const std::vector<Buffer>& buffers = scope_.program().plan().buffers;
    const auto found = std::ranges::find_if(buffers, [&](const Buffer& buffer) {
      return buffer.unit == scope_.id() && IsPartlyReduced(buffer.role);
    });
    if (found == buffers.end()) return;
    const auto partial = static_cast<BufferId>(found - buffers.begin());
    Fresh fresh(*this, ProcedureKind::kReducePartial);
    fresh.group.ReducePartial(partial);
    fresh.Finish();
  }

  const UnitScope& scope_;
  ParamGroupSettings settings_;
  OptimizerMemory* const optimizer_;
  FaultList& faults_;
  std::set<std::int32_t> trained_;
  std::set<std::int32_t> cast_;  // of them: gradients that wait in the reduce dtype
  std::set<std::int32_t> kept_;  // and the others
};

}  // namespace

Status EmitProcedures(const UnitScope& scope, ParamGroupSettings settings,
                      OptimizerMemory* optimizer_in_backward, FaultList& faults) {
  return Emitter(scope, settings, optimizer_in_backward, faults).Run();
}

}  // namespace shardplan::fsdp2
