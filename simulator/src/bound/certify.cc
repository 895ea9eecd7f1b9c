// SPDX-License-Identifier: Apache-2.0
// The check of a certificate: documents in, yes or no out.
#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <optional>
#include <set>
#include <utility>

#include "shardplan/schemas/alive_buffers.h"
#include "shardplan/schemas/io.h"
#include "shardplan/schemas/layout.h"
#include "shardplan/schemas/program.h"
#include "shardplan/simulator/cost_model.h"
#include "shardplan/simulator/engine.h"
#include "shardplan/simulator/lower_bound.h"
#include "shardplan/simulator/memory_profile.h"
#include "shardplan/simulator/reserved_memory.h"
#include "shardplan/verifier/verifier.h"

namespace shardplan {
namespace {

std::unexpected<Error> NotOfClass(std::string why) {
  return MakeError(ErrorCode::kNegative,
                   fmt::format("the plan is not of the class {}: {}", kPlanClass, std::move(why)));
}

bool SameGroup(const Plan& plan, CommunicatorId a, CommunicatorId b) {
  if (a < 0 || b < 0) return a < 0 && b < 0;
  return SameRanks(plan.communicators[a], plan.communicators[b]);
}

// The dimensions of the mesh that a parameter of the model lies on: experts, tensor parallelism.
std::vector<std::string> LiesOn(const UnitParameter& parameter) {
  std::vector<std::string> dims;
  for (const ParameterPlacement& placement : parameter.placements) dims.push_back(placement.mesh_dim);
  return dims;
}

Status CheckUnitsAlike(const Plan& plan) {
  const Unit* first = nullptr;
  std::map<std::vector<std::string>, const Unit*> first_on;  // by dimensions that parameters lie on
  for (const Unit& unit : plan.units) {
    if (unit.parameters.empty()) continue;
    if (first == nullptr) first = &unit;
    if (unit.layout != first->layout || unit.param_dtype != first->param_dtype ||
        unit.reduce_dtype != first->reduce_dtype) {
      return NotOfClass("its units differ in layout or dtypes");
    }
    const bool scattered_alike = unit.reduce_scatter_communicator < 0 ||
                                 SameGroup(plan, unit.reduce_scatter_communicator, unit.shard_communicator);
    if (!scattered_alike) return NotOfClass("a unit is gathered over other ranks than it is reduced over");
    if (unit.hook_communicator >= 0) return NotOfClass("a hook reduces gradients");
    for (const UnitParameter& parameter : unit.parameters) {
      const Unit& alike = *first_on.try_emplace(LiesOn(parameter), &unit).first->second;
      if (!SameGroup(plan, unit.shard_communicator, alike.shard_communicator) ||
          !SameGroup(plan, unit.replicate_communicator, alike.replicate_communicator)) {
        return NotOfClass("its units are cut over different ranks");
      }
      const std::int64_t ranks =
          ShardCount(plan, unit) *
          (unit.replicate_communicator < 0 ? 1 : plan.communicators[unit.replicate_communicator].size);
      if (ranks != plan.world_size && parameter.placements.empty() && !plan.strategy.data_parallel)
        return NotOfClass("parameters are not cut over all ranks of the mesh");
      if (!parameter.gathered.empty() || parameter.param_dtype)
        return NotOfClass("a parameter has a layout or dtype of its own");
      if (unit.post_forward_communicator >= 0 && parameter.shard_dim != 0)
        return NotOfClass("a parameter that is not cut by rows is kept on part of the ranks");
    }
  }
  return {};
}

Status CheckJob(const Plan& plan) {
  const Strategy& strategy = plan.strategy;
  if (!strategy.ignored_parameters.empty()) return NotOfClass("parameters are left out of all units");
  if (strategy.compile) return NotOfClass("operators are fused, and the bound is of the trace's own");
  if (strategy.optimizer.in_backward || strategy.optimizer.kind == OptimizerKind::kNone)
    return NotOfClass("the optimizer does not step once, behind the backward");
  const auto on_device = [](const Buffer& buffer) {
    return buffer.memory == MemoryKind::kDevice || buffer.role == BufferRole::kActivationHost;
  };
  if (!std::ranges::all_of(plan.buffers, on_device)) return NotOfClass("buffers are in host memory");
  const auto is_step = [](const ProgramCall& call) {
    return std::holds_alternative<OptimizerStepCall>(call);
  };
  const auto is_pass = [](const ProgramCall& call) {
    return std::holds_alternative<ForwardCall>(call) || std::holds_alternative<BackwardCall>(call);
  };
  if (strategy.program.empty()) return {};
  const StepProgram& step = strategy.program.back();
  const auto stepped = std::ranges::find_if(step, is_step);
  if (stepped == step.end() || std::find_if(stepped, step.end(), is_pass) != step.end())
    return NotOfClass("the step does not end with the optimizer");
  return {};
}

Status CheckStep(const Plan& plan) {
  const PlanStep& step = plan.steps.back();
  std::int64_t optimizer_steps = 0;
  for (const Trigger& trigger : step.triggers) {
    for (const Instruction& i : trigger.instructions) {
      if (i.kind == InstructionKind::kCompute && (i.stream != 0 || optimizer_steps > 0))
        return NotOfClass("the model does not compute on one stream, before the optimizer");
      if (i.kind == InstructionKind::kOptimizerStep &&
          (++optimizer_steps > 1 || i.unit >= 0 || i.stream != 0))
        return NotOfClass("the optimizer does not step all units at once, on the compute stream");
      const bool copies = i.kind == InstructionKind::kCopyOut || i.kind == InstructionKind::kGradCopyIn;
      if (copies && i.stream != 0 && i.unit >= 0 && plan.units[i.unit].layout == LayoutKind::kPerParameter)
        return NotOfClass("units of their own layout copy beside the model");
      if (i.kind != InstructionKind::kAllGather) continue;
      const Buffer& gathered = plan.buffers[i.dst];
      if (gathered.unit >= 0 && plan.units[gathered.unit].layout == LayoutKind::kPerParameter &&
          gathered.role != BufferRole::kAllGatherOutput) {
        return NotOfClass("parameters of their own layout are gathered without a copy");
      }
    }
  }
  if (optimizer_steps != 1) return NotOfClass("the step has no optimizer's step");
  return {};
}

// Activations leave behind the pass that makes them, and are back for a later one.
Status CheckActivations(const Plan& plan) {
  if (!OffloadsActivations(plan)) return {};
  const std::vector<std::vector<ActivationTouch>> touched = ActivationsTouched(plan);
  std::set<BufferId> back;
  for (const Trigger& trigger : plan.steps.back().triggers) {
    for (const Instruction& i : trigger.instructions) {
      if (i.kind == InstructionKind::kAllocate && plan.buffers[i.dst].role == BufferRole::kActivation)
        back.insert(i.dst);
      if (i.kind != InstructionKind::kCompute) continue;
      for (const ActivationTouch& touch : touched[i.segment]) {
        if (!touch.made.empty()) back.erase(touch.buffer);
        if (back.contains(touch.buffer) && !IsBackward(plan.segments[i.segment].phase))
          return NotOfClass("activations come back in the pass that makes them");
      }
    }
  }
  return {};
}

// If gradients of their own layout are reduced in another dtype than they are made in, those that wait for a
// later micro-batch are added up in the dtype of the reduction, and have it before the next pass begins.
Status CheckWaitingGradients(const Plan& plan) {
  std::map<std::pair<UnitId, std::int32_t>, std::int32_t> made;  // by unit and parameter: in which pass
  std::int32_t pass = 0, begin = -1;
  bool backward = false;
  const auto casts = [&](UnitId unit) {
    return unit >= 0 && plan.units[unit].layout == LayoutKind::kPerParameter &&
           plan.units[unit].param_dtype != plan.units[unit].reduce_dtype;
  };
  for (const Trigger& trigger : plan.steps.back().triggers) {
    for (const Instruction& i : trigger.instructions) {
      if (i.kind == InstructionKind::kCompute) {
        const Segment& segment = plan.segments[i.segment];
        if (std::exchange(backward, IsBackward(segment.phase)) != IsBackward(segment.phase) ||
            segment.begin <= begin)
          ++pass;
        begin = segment.begin;
        if (std::ranges::any_of(made, [&](const auto& gradient) { return gradient.second != pass; }))
          return NotOfClass("an unsharded gradient waits for a later pass in the dtype that it is made in");
        for (const SegmentGrad& grad : segment.grads) {
          if (casts(grad.unit)) made[{grad.unit, grad.parameter}] = pass;
        }
        continue;
      }
      if (i.kind == InstructionKind::kFree && plan.buffers[i.src].role == BufferRole::kGradUnsharded) {
        const Buffer& buffer = plan.buffers[i.src];
        for (std::size_t p = 0; p < buffer.parameters.size(); ++p) {
          const bool goes = i.parts.empty() || std::ranges::count(i.parts, static_cast<std::int32_t>(p)) > 0;
          if (goes) made.erase({buffer.unit, buffer.parameters[p]});
        }
      }
      const bool adds = i.kind == InstructionKind::kGradCast || i.kind == InstructionKind::kGradAccumulate;
      if (!adds || plan.buffers[i.dst].role != BufferRole::kGradUnshardedAccumulated) continue;
      const Buffer& sum = plan.buffers[i.dst];
      if (casts(sum.unit) && (i.stream != 0 || sum.dtype != plan.units[sum.unit].reduce_dtype))
        return NotOfClass(
            "gradients that wait are not added up in the dtype of the reduction, on the compute stream");
    }
  }
  return {};
}

// [Note: pools apart]
// Memory of a stream is never another's, so pools that are full at different times add up. Units of the
// layout per_parameter gather into pools that hold nothing else, copy out of each output once, and reduce
// gradients into others that hold nothing else.
Status CheckPools(const Plan& plan) {
  const auto of_own_layout = [&](const Buffer& buffer) {
    return buffer.unit >= 0 && plan.units[buffer.unit].layout == LayoutKind::kPerParameter;
  };
  std::set<BufferId> outputs, copied;
  for (const PlanStep& step : plan.steps) {
    for (const Trigger& trigger : step.triggers) {
      for (const Instruction& i : trigger.instructions) {
        if (i.kind == InstructionKind::kAllGather && of_own_layout(plan.buffers[i.dst])) {
          outputs.insert(i.dst);
          copied.erase(i.dst);
        } else if (i.kind == InstructionKind::kCopyOut && outputs.contains(i.src) &&
                   !copied.insert(i.src).second) {
          return NotOfClass("the output of a gather is copied out twice");
        }
      }
    }
  }
  using Pool = std::pair<StreamId, CommunicatorId>;
  std::set<Pool> gathered, reduced, others = {{0, -1}};  // the model's own activations
  for (const PlanStep& step : plan.steps) {
    for (const Trigger& trigger : step.triggers) {
      for (const Instruction& i : trigger.instructions) {
        if (i.kind != InstructionKind::kAllocate) continue;
        const Buffer& buffer = plan.buffers[i.dst];
        const Pool pool{buffer.pool < 0 ? i.stream : -1, buffer.pool};
        if (!of_own_layout(buffer)) continue;
        if (outputs.contains(i.dst)) {
          gathered.insert(pool);
        } else if (buffer.role == BufferRole::kReduceScatterOutput ||
                   buffer.role == BufferRole::kPartialReduceOutput || IsInnerReduced(buffer.role) ||
                   buffer.role == BufferRole::kGradSharded) {
          reduced.insert(pool);
        } else if (buffer.role != BufferRole::kAllGatherInput) {
          others.insert(pool);
        }
      }
    }
  }
  const auto shared = [](const std::set<Pool>& a, const std::set<Pool>& b) {
    return std::ranges::any_of(a, [&](const Pool& pool) { return b.contains(pool); });
  };
  if (shared(gathered, others) || shared(reduced, others) || shared(gathered, reduced))
    return NotOfClass("a stream's memory holds outputs of gathers or of reductions, and something else, too");
  return {};
}

// A part of parameters that nobody updates may stay gathered from step to step: then the first gather is no
// gather from all ranks.
Status CheckEnd(const Plan& plan) {
  AliveBuffers alive(plan);
  for (const PlanStep& step : plan.steps) {
    for (const Trigger& trigger : step.triggers) {
      for (const Instruction& i : trigger.instructions) alive.Pass(i);
    }
  }
  for (std::size_t b = 0; b < plan.buffers.size(); ++b) {
    if (plan.buffers[b].role == BufferRole::kParamPostForwardShard && alive.IsAlive(static_cast<BufferId>(b)))
      return NotOfClass("a unit stays gathered in part at the step's end");
  }
  return {};
}

std::unexpected<Error> Differs(std::string_view what, std::int64_t says, std::int64_t is) {
  return MakeError(ErrorCode::kNegative,
                   fmt::format("the certificate is wrong: {} is {}, and it says {}", what, is, says));
}

Status CheckPlanIsMeant(const Trace& trace, const Plan& plan, const Certificate& certificate) {
  if (plan.digests.trace != Digest(ToJson(trace)))
    return MakeInputError("/digests/trace", "the plan was not made from this trace");
  if (certificate.plan_class != kPlanClass)
    return MakeInputError("/plan_class", "a class of plans that this program does not know",
                          certificate.plan_class, std::string(kPlanClass));
  if (certificate.digests != plan.digests || certificate.plan_digest != DigestOfJson(plan))
    return MakeError(ErrorCode::kNegative, "the certificate is another plan's");
  return {};
}

Status CheckFigures(const Plan& plan, const Certificate& certificate) {
  const Bytes pooled = PoolMemory(plan).pooled_bytes;
  if (pooled != certificate.peak_pooled_bytes)
    return Differs("the sum of the pools' peaks", certificate.peak_pooled_bytes.value, pooled.value);
  const FitOptions options{.budget_bytes = certificate.budget_bytes};
  const Result<DeviceFit> fit = FitDevice(plan, options);
  if (!fit) return std::unexpected(fit.error());
  if (fit->out_of_memory)
    return MakeError(ErrorCode::kNegative,
                     fmt::format("the plan needs {} bytes, more than the budget of {}",
                                 ReservedToShow(plan, options, *fit).value, certificate.budget_bytes.value));
  const std::unique_ptr<CostModel> costs = MakeCostModel(plan.cluster);
  const Result<EngineProgram> program = LowerPlan(plan, plan.cluster, *costs);
  if (!program) return std::unexpected(program.error());
  const Result<EngineResult> step =
      RunStep(*program, static_cast<std::int32_t>(plan.steps.size()) - 1, nullptr);
  if (!step) return std::unexpected(step.error());
  if (step->end_ns != certificate.step_ns)
    return Differs("the step's time", certificate.step_ns.value, step->end_ns.value);
  return {};
}

Status CheckBound(const StepWork& work, const Certificate& certificate) {
  if (!std::ranges::is_sorted(certificate.cuts))
    return MakeInputError("/cuts", "the cuts are not in ascending order");
  std::optional<Nanoseconds> least;
  for (const LayoutKind layout : certificate.layouts) {
    const auto branch = std::ranges::find(certificate.branches, layout, &CertificateBranch::layout);
    if (branch == certificate.branches.end())
      return MakeError(ErrorCode::kNegative, "the certificate has no branch for one of its layouts");
    const WindowedWork windowed(work, certificate.cuts, layout, certificate.budget_bytes);
    const Result<Nanoseconds> value = windowed.Value(branch->windows, branch->bytes);
    if (!value) return std::unexpected(value.error());
    if (*value != branch->lower_bound_ns)
      return Differs("what a branch proves", branch->lower_bound_ns.value, value->value);
    least = least ? std::min(*least, *value) : *value;
  }
  if (!least) return MakeError(ErrorCode::kNegative, "the certificate is about no layout");
  if (*least != certificate.lower_bound_ns)
    return Differs("the lower bound", certificate.lower_bound_ns.value, least->value);
  if (*least > certificate.step_ns)
    return MakeError(ErrorCode::kInternal, "the bound is above the step's time: one of them is wrong");
  return {};
}

}  // namespace

bool SharesPools(const Plan& plan) { return !CheckPools(plan); }

bool OffloadsActivations(const Plan& plan) {
  return std::ranges::any_of(plan.buffers, [](const Buffer& b) { return b.role == BufferRole::kActivation; });
}

Status CheckPlanClass(const Plan& plan) {
  if (plan.steps.empty()) return NotOfClass("it has no step");
  if (!plan.known_faults.empty()) return NotOfClass("it carries faults of PyTorch's");
  if (Status units = CheckUnitsAlike(plan); !units) return units;
  if (Status job = CheckJob(plan); !job) return job;
  if (Status step = CheckStep(plan); !step) return step;
  if (Status activations = CheckActivations(plan); !activations) return activations;
  if (Status waiting = CheckWaitingGradients(plan); !waiting) return waiting;
  if (Status end = CheckEnd(plan); !end) return end;
  for (const Remark& remark : Remarks(plan)) {
    if (remark.kind != RemarkKind::kGatherForNothing) return NotOfClass(remark.message);
  }
  return {};
}

Status CheckCertificate(const Trace& trace, const Plan& plan, const Certificate& certificate) {
  if (Status meant = CheckPlanIsMeant(trace, plan, certificate); !meant) return meant;
  if (const auto used = CheckForUse(plan, "a plan has to verify to be certified"); !used)
    return std::unexpected(used.error());
  if (Status in_class = CheckPlanClass(plan); !in_class) return in_class;
  const bool recomputes = std::ranges::any_of(
      plan.segments, [](const Segment& segment) { return segment.phase == SegmentPhase::kRecompute; });
  if (recomputes && !certificate.recomputation)
    return MakeError(ErrorCode::kNegative,
                     "the plan recomputes, and the certificate is about plans that do not");
  if (OffloadsActivations(plan) && !certificate.activation_offload)
    return MakeError(ErrorCode::kNegative,
                     "the plan offloads activations, and the certificate is about plans that do not");
  if (!certificate.shared_pools) {
    if (Status pools = CheckPools(plan); !pools) return pools;
  }
  const auto in_layouts = [&](const Unit& unit) {
    return unit.parameters.empty() || std::ranges::count(certificate.layouts, unit.layout) > 0;
  };
  if (!std::ranges::all_of(plan.units, in_layouts))
    return MakeError(ErrorCode::kNegative, "the plan has a layout that the certificate is not about");
  if (Status figures = CheckFigures(plan, certificate); !figures) return figures;
  const Result<StepWork> work = StepWork::Make(trace, plan, certificate.recomputation,
                                               certificate.activation_offload, certificate.shared_pools);
  if (!work) return std::unexpected(work.error());
  if (work->Meshes() != certificate.meshes)
    return MakeError(ErrorCode::kNegative, "the certificate is wrong: parameters are cut over other ranks");
  if (work->ModelWait() != certificate.model_wait_ns)
    return Differs("what plans wait for the model's collectives", certificate.model_wait_ns.value,
                   work->ModelWait().value);
  return CheckBound(*work, certificate);
}

}  // namespace shardplan
