// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <utility>

#include "documents/document_json.h"
#include "documents/plan_check.h"
#include "documents/plan_fields.h"
#include "json/tables.h"
#include "names/plan_names.h"
#include "shardplan/schemas/checks.h"
#include "shardplan/schemas/exchanges.h"
#include "shardplan/schemas/io.h"

namespace shardplan {

template const JsonObjectType& JsonObjectTypeOf<Plan>();
template const JsonObjectType& JsonObjectTypeOf<Unit>();
template const JsonObjectType& JsonObjectTypeOf<UnitParameter>();
template const JsonObjectType& JsonObjectTypeOf<Buffer>();
template const JsonObjectType& JsonObjectTypeOf<PlanStream>();
template const JsonObjectType& JsonObjectTypeOf<SegmentGrad>();
template const JsonObjectType& JsonObjectTypeOf<ExchangedMatrix>();
template const JsonObjectType& JsonObjectTypeOf<Exchange>();
template const JsonObjectType& JsonObjectTypeOf<Segment>();
template const JsonObjectType& JsonObjectTypeOf<ModelPasses>();
template const JsonObjectType& JsonObjectTypeOf<Trigger>();
template const JsonObjectType& JsonObjectTypeOf<Instruction>();
template const JsonObjectType& JsonObjectTypeOf<Procedure>();
template const JsonObjectType& JsonObjectTypeOf<RepeatedTriggers>();
template const JsonObjectType& JsonObjectTypeOf<Digests>();
template const JsonObjectType& JsonObjectTypeOf<UnmanagedParameters>();
template const JsonObjectType& JsonObjectTypeOf<KnownFault>();

namespace {

Status CheckSegments(const Plan& plan) {
  for (std::size_t i = 0; i < plan.segments.size(); ++i) {
    const SegmentPhase phase = plan.segments[i].phase;
    if (!plan.segments[i].grads.empty() && phase != SegmentPhase::kBackward) {
      return MakeInputError(fmt::format("/segments/{}/phase", i),
                            "a segment that makes gradients is backward", std::string(Name(phase)),
                            std::string(Name(SegmentPhase::kBackward)));
    }
    for (std::size_t e = 0; e < plan.segments[i].entries.size(); ++e) {
      const auto* op = std::get_if<OperatorEvent>(&plan.segments[i].entries[e]);
      if (op == nullptr || !op->collective || op->collective->communicator >= 0) continue;
      return MakeInputError(fmt::format("/segments/{}/entries/{}/11/communicator", i, e),
                            "a collective has a communicator", "none", "one of the plan's");
    }
  }
  return {};
}

Status CheckUnits(const Plan& plan) {
  for (std::size_t i = 0; i < plan.units.size(); ++i) {
    if (plan.units[i].layout != LayoutKind::kPerParameter) continue;
    for (std::size_t k = 0; k < plan.units[i].parameters.size(); ++k) {
      const UnitParameter& parameter = plan.units[i].parameters[k];
      if (parameter.shard_dim < static_cast<std::int32_t>(parameter.shape.size())) continue;
      return MakeInputError(fmt::format("/units/{}/parameters/{}/shard_dim", i, k),
                            "not a dimension of the parameter", fmt::format("{}", parameter.shard_dim),
                            fmt::format("less than {}", parameter.shape.size()));
    }
  }
  return {};
}

Status CheckProcedures(const Plan& plan) {
  for (std::size_t i = 1; i < plan.procedures.size(); ++i) {
    const Procedure& before = plan.procedures[i - 1];
    const Procedure& procedure = plan.procedures[i];
    if (std::pair(before.unit, before.kind) < std::pair(procedure.unit, procedure.kind)) continue;
    return MakeInputError(fmt::format("/procedures/{}", i),
                          "procedures are ordered by unit and by kind, one of each",
                          fmt::format("{} of unit {} behind {} of unit {}", Name(procedure.kind),
                                      procedure.unit, Name(before.kind), before.unit));
  }
  return {};
}

}  // namespace

Status CheckPlan(const Plan& plan) {
  if (plan.streams.empty()) {
    return MakeInputError("/streams", "there is no stream", "an empty list", "the compute stream first");
  }
  if (plan.steps.empty())
    return MakeInputError("/steps", "there is no step", "an empty list", "at least one step");
  if (plan.steady_step >= static_cast<std::int32_t>(plan.steps.size())) {
    return MakeInputError("/steady_step", "not a step of this plan", fmt::format("{}", plan.steady_step),
                          fmt::format("less than {}", plan.steps.size()));
  }
  if (Status status = CheckCluster(plan.cluster, "/cluster"); !status) return status;
  if (Status status = CheckUnits(plan); !status) return status;
  if (Status status = CheckOwners(plan); !status) return status;
  if (Status status = CheckSegments(plan); !status) return status;
  if (Status status = CheckExchanges(plan); !status) return status;
  return CheckProcedures(plan);
}

Result<Plan> PlanFromTape(const JsonTape& tape) {
  Result<Plan> plan = ReadDocumentAs<Plan>(tape, kPlanSchema);
  if (!plan.has_value()) return plan;
  if (Status status = CheckPlan(*plan); !status) return std::unexpected(status.error());
  return plan;
}

void WriteJson(const Plan& plan, const JsonSink& sink, MicrobatchText microbatches) {
  const PlanNames names(plan);
  JsonWriter writer(&names, sink, microbatches);
  writer.WriteDocument(kPlanSchema, plan);
  sink(writer.Take());
}

// In memory of its own size: a string that grows takes up to three times as much.
std::string ToJson(const Plan& plan) {
  std::size_t bytes = 0;
  WriteJson(plan, [&](std::string_view piece) { bytes += piece.size(); });
  std::string text;
  text.reserve(bytes);
  WriteJson(plan, [&](std::string_view piece) { text += piece; });
  return text;
}

}  // namespace shardplan
