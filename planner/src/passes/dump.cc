// SPDX-License-Identifier: Apache-2.0
#include "passes/dump.h"

#include <fmt/format.h>

#include <string_view>

#include "shardplan/schemas/printable.h"

namespace shardplan {
namespace {

std::string RanksText(const Partition& partition, CommunicatorId communicator) {
  if (communicator < 0) return "one rank";
  const Communicator& c = partition.communicators[communicator];
  return fmt::format("{} ranks ({}, stride {})", c.size, Printable(c.name), c.stride);
}

std::string ReshardText(const UnitChoice& choice) {
  if (choice.post_forward_size == 0) return "stays unsharded";
  if (choice.post_forward_size == choice.shard_size) return "resharded";
  return fmt::format("resharded to {} ranks", choice.post_forward_size);
}

std::string UnitText(const Partition& partition, const UnitChoice& choice) {
  const Unit& unit = choice.unit;
  std::string text =
      fmt::format("  layout: {}\n", unit.layout == LayoutKind::kFlat
                                        ? fmt::format("flat, {} elements with padding", unit.flat_numel)
                                        : "per_parameter");
  text +=
      fmt::format("  sharded over {}, replicated over {}\n", RanksText(partition, unit.shard_communicator),
                  RanksText(partition, unit.replicate_communicator));
  text += fmt::format("  dtypes: {}, gathered in {}, reduced in {}\n", Name(unit.orig_dtype),
                      Name(unit.param_dtype), Name(unit.reduce_dtype));
  text += fmt::format("  after the forward: {}{}\n", ReshardText(choice),
                      choice.reshard_given ? "" : " (not given; a root stays unsharded)");
  if (choice.cpu_offload) text += "  offloaded to the host\n";
  for (std::size_t p = 0; p < unit.parameters.size(); ++p) {
    const UnitParameter& parameter = unit.parameters[p];
    text += fmt::format("  parameter {}: {} [{}] {}{}\n", choice.parameter_ids[p], Printable(parameter.fqn),
                        fmt::join(parameter.shape, ", "), Name(parameter.dtype),
                        parameter.requires_grad ? "" : ", frozen");
  }
  return text;
}

std::string_view HookPointName(HookPointKind kind) {
  switch (kind) {
    case HookPointKind::kForwardBegin:
      return "forward_begin";
    case HookPointKind::kForwardEnd:
      return "forward_end";
    case HookPointKind::kPreForward:
      return "pre_forward";
    case HookPointKind::kPostForward:
      return "post_forward";
    case HookPointKind::kRecomputePreForward:
      return "recompute_pre_forward";
    case HookPointKind::kRecomputePostForward:
      return "recompute_post_forward";
    case HookPointKind::kBackwardBegin:
      return "backward_begin";
    case HookPointKind::kPreBackward:
      return "pre_backward";
    case HookPointKind::kInputsGradDone:
      return "inputs_grad_done";
    case HookPointKind::kParameterGradsDone:
      return "parameter_grads_done";
    case HookPointKind::kUnitBackwardDone:
      return "unit_backward_done";
    case HookPointKind::kBackwardEnd:
      return "backward_end";
    case HookPointKind::kOptimizerStep:
      return "optimizer_step";
    case HookPointKind::kZeroGrad:
      return "zero_grad";
    case HookPointKind::kModuleCall:
      return "module_call";
    case HookPointKind::kSegment:
      return "segment";
  }
  return "";
}

}  // namespace

std::string UnitsText(const Trace& trace, const Partition& partition) {
  std::string text;
  for (std::size_t u = 0; u < partition.units.size(); ++u) {
    const UnitChoice& choice = partition.units[u];
    text += fmt::format("unit {}: {}\n", u, Printable(DisplayName(choice.unit.fqn)));
    if (choice.modules.size() > 1) text += fmt::format("  a group of {} modules\n", choice.modules.size());
    text += UnitText(partition, choice);
  }
  for (std::size_t p = 0; p < trace.parameters.size(); ++p) {
    if (partition.owners[p].empty()) {
      text += fmt::format("parameter {}: {} is in no unit\n", p, Printable(trace.parameters[p].fqn));
    }
  }
  return text;
}

std::string OrderText(const Partition& partition, const std::vector<RecordedStep>& steps) {
  std::string text;
  for (std::size_t s = 0; s < steps.size(); ++s) {
    text += fmt::format("step {}\n", s);
    for (const HookPoint& event : steps[s].events) {
      text += fmt::format("  {}", HookPointName(event.kind));
      if (event.unit >= 0) text += " " + Printable(DisplayName(partition.units[event.unit].unit.fqn));
      if (event.kind == HookPointKind::kSegment) {
        text +=
            fmt::format(" \"{}\": events {} to {} of {} {}", Printable(event.name), event.range.begin,
                        event.range.end - 1, event.range.backward ? "backward" : "forward", event.range.pass);
      }
      if (event.call != nullptr) text += fmt::format(": {}", event.call->method);
      text += fmt::format(", micro-batch {}\n", event.microbatch);
    }
  }
  return text;
}

}  // namespace shardplan
