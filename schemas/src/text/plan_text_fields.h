// SPDX-License-Identifier: Apache-2.0
// The parts of a plan that the text form has on lines of their own.
#pragma once

#include "documents/plan_fields.h"

namespace shardplan {

// A plan's scalars.
struct PlanHeader {
  std::string model;
  std::string policy;
  Digests digests;
  std::vector<KnownFault> known_faults;
  std::int64_t world_size = 1;
  std::int64_t tokens_per_step = 0;
  std::int64_t ranks_per_batch = 1;
  std::vector<StrategyMeshDim> mesh;
  UnmanagedParameters unmanaged;
  ModelPasses passes;
  std::int32_t steady_step = 0;
};
inline PlanHeader PlanHeaderOf(const Plan& plan) {
  return {plan.model,      plan.policy,          plan.digests,         plan.known_faults,
          plan.world_size, plan.tokens_per_step, plan.ranks_per_batch, plan.mesh,
          plan.unmanaged,  plan.passes,          plan.steady_step};
}
template <>
inline constexpr auto kFields<PlanHeader> =
    FieldList(Required("model", &PlanHeader::model), Required("policy", &PlanHeader::policy),
              Optional("digests", &PlanHeader::digests), Optional("known_faults", &PlanHeader::known_faults),
              Required("world_size", &PlanHeader::world_size),
              Optional("tokens_per_step", &PlanHeader::tokens_per_step),
              Optional("ranks_per_batch", &PlanHeader::ranks_per_batch).AtLeast(1),
              Optional("mesh", &PlanHeader::mesh), Optional("unmanaged", &PlanHeader::unmanaged),
              Optional("passes", &PlanHeader::passes), Optional("steady_step", &PlanHeader::steady_step));

// A procedure without its instructions.
struct ProcedureHeader {
  ProcedureKind kind = ProcedureKind::kUnshard;
  UnitId unit = -1;
};
inline ProcedureHeader ProcedureHeaderOf(const Procedure& procedure) {
  return {procedure.kind, procedure.unit};
}
template <>
inline constexpr auto kFields<ProcedureHeader> = FieldList(
    Required("kind", &ProcedureHeader::kind), Required("unit", &ProcedureHeader::unit).Ref(RefKind::kUnit));
static_assert(std::tuple_size_v<std::remove_cv_t<decltype(kFields<ProcedureHeader>)>> + 1 ==
              std::tuple_size_v<std::remove_cv_t<decltype(kFields<Procedure>)>>);

// A segment without its entries.
struct SegmentHeader {
  std::string name;
  SegmentPhase phase = SegmentPhase::kForward;
  UnitId unit = -1;
  std::int32_t pass = -1;
  std::int32_t begin = 0;
  std::int32_t end = 0;
  std::int32_t forward = 0;
  std::vector<UnitId> reads;
  std::vector<SegmentGrad> grads;
};
inline SegmentHeader SegmentHeaderOf(const Segment& segment) {
  return {segment.name, segment.phase,   segment.unit,  segment.pass, segment.begin,
          segment.end,  segment.forward, segment.reads, segment.grads};
}
template <>
inline constexpr auto kFields<SegmentHeader> = FieldList(
    Required("name", &SegmentHeader::name), Optional("phase", &SegmentHeader::phase),
    Optional("unit", &SegmentHeader::unit).Ref(RefKind::kUnit), Optional("pass", &SegmentHeader::pass),
    Optional("begin", &SegmentHeader::begin), Optional("end", &SegmentHeader::end),
    Optional("forward", &SegmentHeader::forward),
    Optional("reads", &SegmentHeader::reads).Ref(RefKind::kUnit), Optional("grads", &SegmentHeader::grads));
static_assert(std::tuple_size_v<std::remove_cv_t<decltype(kFields<SegmentHeader>)>> + 1 ==
              std::tuple_size_v<std::remove_cv_t<decltype(kFields<Segment>)>>);

}  // namespace shardplan
