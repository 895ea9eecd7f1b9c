// SPDX-License-Identifier: Apache-2.0
#include "units/dtype_checks.h"

#include <fmt/format.h>

#include <algorithm>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "shardplan/schemas/io.h"
#include "shardplan/schemas/layout.h"
#include "shardplan/schemas/precision.h"

namespace shardplan {
namespace {

constexpr std::string_view kReduces = "float64, float32, bfloat16 or float16";

bool IsFloat8(DType dtype) { return IsFloatingPoint(dtype) && SizeBytes(dtype) == 1; }
bool IsComplex(DType dtype) {
  return dtype == DType::kComplex32 || dtype == DType::kComplex64 || dtype == DType::kComplex128;
}
bool IsInteger(DType dtype) { return !IsFloatingPoint(dtype) && !IsComplex(dtype); }
// Neither Gloo nor NCCL has such elements.
bool IsOfNoCollective(DType dtype) {
  return IsInteger(dtype) && SizeBytes(dtype) > 1 && dtype != DType::kInt32 && dtype != DType::kInt64;
}

class DTypeChecks {
 public:
  DTypeChecks(const Trace& trace, const Strategy& strategy, const UnitChoice& choice)
      : trace_(trace),
        strategy_(strategy),
        choice_(choice),
        unit_(choice.unit),
        trains_(!trace.backwards.empty() &&
                std::ranges::any_of(choice.unit.parameters, &UnitParameter::requires_grad)) {}

  Status Run() const {
    if (Status s = CheckFlat(); !s) return s;
    if (Status s = CheckComputed(); !s) return s;
    if (Status s = CheckGathered(); !s) return s;
    if (Status s = CheckReduced(); !s) return s;
    return CheckOutput();
  }

 private:
  std::string UnitName() const { return unit_.fqn.empty() ? "the root" : fmt::format("unit {}", unit_.fqn); }
  // A unit that has no policy of its own has the strategy's.
  std::string PlaceOf(std::string_view field) const {
    return choice_.mixed_precision != strategy_.mixed_precision ? "/units"
                                                                : fmt::format("/mixed_precision/{}", field);
  }
  Status Bad(std::string_view pointer, std::string_view says, std::string what, std::string found,
             std::string_view expected) const {
    return MakeInputError(std::string(pointer), fmt::format("PyTorch fails here ({}): {}", says, what),
                          std::move(found), std::string(expected));
  }

  // FlatParamHandle._validate_tensors_to_flatten.
  Status CheckFlat() const {
    if (unit_.layout != LayoutKind::kFlat) return {};
    for (const UnitParameter& parameter : unit_.parameters) {
      if (IsFloatingPoint(parameter.dtype)) continue;
      return Bad("/units", "Cannot flatten integer dtype tensors",
                 fmt::format("{} is a parameter of {}, and the dtype is no floating-point one", parameter.fqn,
                             UnitName()),
                 std::string(Name(parameter.dtype)),
                 "floating-point parameters, the others ignored (ignored_parameters), or fsdp2");
    }
    return {};
  }

  // Checks the parameters that the modules hold while the unit is gathered.
  Status CheckComputed() const {
    if (!trains_) return {};
    for (const UnitParameter& parameter : unit_.parameters) {
      if (!parameter.requires_grad || !parameter.gathered.empty()) continue;
      const DType computed = ComputeDType(unit_, parameter);
      if (computed == parameter.dtype) continue;
      const std::string what = fmt::format("{} of {} trains", parameter.fqn, UnitName());
      if (IsInteger(computed)) {
        return Bad(PlaceOf("param_dtype"),
                   "Only Tensors of floating point and complex dtype can require gradients", what,
                   std::string(Name(computed)), "a floating-point dtype");
      }
      if (IsFloat8(computed) && !IsFloat8(trace_.compute_dtype)) {
        return Bad(PlaceOf("param_dtype"), "\"addmm_cuda\" not implemented for float8",
                   what + ", and operators have no kernel of float8", std::string(Name(computed)),
                   fmt::format("{}, as {}, or an extension that gathers in float8",
                               "a wider floating-point dtype", Name(trace_.compute_dtype)));
      }
    }
    return {};
  }

  // Pieces that differ in dtype are gathered as bytes.
  Status CheckGathered() const {
    if (choice_.shard_size == 1 || unit_.parameters.empty()) return {};
    const DType first = ComputeDType(unit_, unit_.parameters.front());
    const bool alike = std::ranges::all_of(unit_.parameters, [&](const UnitParameter& parameter) {
      return parameter.gathered.empty() && ComputeDType(unit_, parameter) == first;
    });
    if (!alike || !IsOfNoCollective(first)) return {};
    return Bad(
        "/units", "Unsupported tensor data type for NCCL; Gloo: Invalid scalar type",
        fmt::format("all parameters of {} are gathered in a dtype that collectives do not have", UnitName()),
        std::string(Name(first)), "another dtype, or a unit with parameters of others beside them");
  }

  Status CheckReduced() const {
    if (!trains_) return {};
    const DType reduced = unit_.reduce_dtype;
    const std::string what = fmt::format("{} reduces gradients in it", UnitName());
    const std::string pointer =
        choice_.mixed_precision.reduce_dtype ? PlaceOf("reduce_dtype") : "/mixed_precision";
    if (IsInteger(reduced)) {
      return Bad(pointer, "result type Float can't be cast to an integer one", what,
                 std::string(Name(reduced)), kReduces);
    }
    if (IsFloat8(reduced) || reduced == DType::kComplex32) {
      return Bad(pointer, "\"div\" not implemented for it", what, std::string(Name(reduced)), kReduces);
    }
    return {};
  }

  // The module's output is cast, and the backward begins there.
  Status CheckOutput() const {
    const std::optional<DType> output = choice_.mixed_precision.output_dtype;
    if (!trains_ || unit_.layout == LayoutKind::kFlat || !output || !IsInteger(*output)) return {};
    return Bad(PlaceOf("output_dtype"), "element 0 of tensors does not require grad",
               fmt::format("the output of {} is cast to it", UnitName()), std::string(Name(*output)),
               "a floating-point dtype");
  }

  const Trace& trace_;
  const Strategy& strategy_;
  const UnitChoice& choice_;
  const Unit& unit_;
  const bool trains_;
};

}  // namespace

Status CheckDTypes(const Trace& trace, const Strategy& strategy, const Partition& partition) {
  for (const UnitChoice& choice : partition.units) {
    if (Status s = DTypeChecks(trace, strategy, choice).Run(); !s) return s;
  }
  return {};
}

}  // namespace shardplan
