// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <string>

#include "shardplan/schemas/checks.h"

namespace shardplan {
namespace {

bool IsUnit(const Plan& plan, UnitId unit) { return unit >= 0 && unit < std::ssize(plan.units); }

Status CheckUnitParameter(const Plan& plan, UnitId unit, std::int32_t parameter, const std::string& pointer) {
  const std::int64_t size =
      IsUnit(plan, unit) ? std::ssize(plan.units[static_cast<std::size_t>(unit)].parameters) : 0;
  if (parameter >= 0 && parameter < size) return {};
  return MakeInputError(pointer, "not a parameter of the unit", fmt::format("{}", parameter),
                        fmt::format("less than {}", size));
}

}  // namespace

Status CheckOwners(const Plan& plan) {
  for (std::size_t b = 0; b < plan.buffers.size(); ++b) {
    const Buffer& buffer = plan.buffers[b];
    if (buffer.unit != -1 && !IsUnit(plan, buffer.unit)) {
      return MakeInputError(fmt::format("/buffers/{}/unit", b), "the unit does not exist",
                            std::to_string(buffer.unit));
    }
    for (std::size_t k = 0; k < buffer.parameters.size(); ++k) {
      const std::string pointer = fmt::format("/buffers/{}/parameters/{}", b, k);
      if (Status status = CheckUnitParameter(plan, buffer.unit, buffer.parameters[k], pointer); !status)
        return status;
    }
  }
  for (std::size_t s = 0; s < plan.segments.size(); ++s) {
    for (std::size_t k = 0; k < plan.segments[s].grads.size(); ++k) {
      const SegmentGrad& grad = plan.segments[s].grads[k];
      const std::string pointer = fmt::format("/segments/{}/grads/{}/parameter", s, k);
      if (Status status = CheckUnitParameter(plan, grad.unit, grad.parameter, pointer); !status)
        return status;
    }
  }
  return {};
}

}  // namespace shardplan
