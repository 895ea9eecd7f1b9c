// SPDX-License-Identifier: Apache-2.0
#include "shardplan/schemas/instruction_set.h"

#include <fmt/format.h>

#include <string>

namespace shardplan {
namespace {

class OperandCheck {
 public:
  OperandCheck(const Plan& plan, const Instruction& instruction)
      : plan_(plan), i_(instruction), is_(DescriptionOf(instruction.kind)) {}

  Status Run() const {
    for (const auto& check : {CheckId("stream", i_.stream, plan_.streams, is_.place == Place::kStream),
                              CheckId("src", i_.src, plan_.buffers, Has(is_.src)),
                              CheckId("dst", i_.dst, plan_.buffers, Has(is_.dst)),
                              CheckId("event", i_.event, plan_.events, is_.event),
                              CheckId("communicator", i_.communicator, plan_.communicators, is_.communicator),
                              CheckId("segment", i_.segment, plan_.segments, is_.segment),
                              CheckId("exchange", i_.exchange, plan_.exchanges, is_.exchange),
                              CheckId("unit", i_.unit, plan_.units, false)}) {
      if (!check) return check;
    }
    for (const StreamId stream : i_.safe_after) {
      if (Status check = CheckId("safe_after stream", stream, plan_.streams, true); !check) return check;
    }
    if (Status check = CheckMatrix(); !check) return check;
    if (Status check = CheckParameter(); !check) return check;
    if (Status check = CheckParts(); !check) return check;
    if (Status check = CheckDivisor(); !check) return check;
    if (i_.src >= 0 && i_.src == i_.dst && i_.kind != InstructionKind::kAllGather) {
      return Wrong("src and dst are the same buffer", plan_.buffers[i_.src].name, "two buffers");
    }
    if (is_.family == InstructionFamily::kBind && i_.unit < 0 && plan_.buffers[i_.src].unit < 0) {
      return Wrong("neither the instruction nor its buffer says which unit");
    }
    return is_.place == Place::kStreamOrHost && i_.stream < 0 ? CheckReachOfHost() : Status();
  }

 private:
  std::unexpected<Error> Wrong(const std::string& what, std::string found = {},
                               std::string expected = {}) const {
    return MakeInputError("", fmt::format("{}: {}", Name(i_.kind), what), std::move(found),
                          std::move(expected));
  }

  template <typename List>
  Status CheckId(const char* what, std::int32_t id, const List& list, bool needed) const {
    if (id >= 0 && id < std::ssize(list)) return {};
    if (id == -1 && !needed) return {};
    if (id == -1) return Wrong(fmt::format("it has no {}", what), "none", "one");
    return Wrong(fmt::format("there is no such {}", what), std::to_string(id),
                 fmt::format("0 to {}", std::ssize(list) - 1));
  }

  Status CheckMatrix() const {
    if (!is_.exchange && i_.exchange != -1) return Wrong("it is of no exchange");
    if (i_.kind != InstructionKind::kOrthogonalize) {
      return i_.matrix == -1 ? Status() : Wrong("only an orthogonalize has a matrix");
    }
    return CheckId("matrix", i_.matrix, plan_.exchanges[i_.exchange].matrices, true);
  }

  Status CheckParameter() const {
    if (i_.parameter == -1) return {};
    if (i_.unit < 0) return Wrong("it names a parameter", "no unit", "its unit");
    return CheckId("parameter", i_.parameter, plan_.units[i_.unit].parameters, true);
  }

  Status CheckParts() const {
    if (i_.parts.empty()) return {};
    if (!Has(is_.optional, OptionalField::kParts)) return Wrong("only a free has parts");
    for (std::size_t k = 0; k < i_.parts.size(); ++k) {
      Status check = CheckId("part", i_.parts[k], plan_.buffers[i_.src].parts_bytes, true);
      if (!check) return check;
      if (k > 0 && i_.parts[k] <= i_.parts[k - 1]) {
        return Wrong("parts are not ascending", fmt::format("{} behind {}", i_.parts[k], i_.parts[k - 1]));
      }
    }
    return {};
  }

  Status CheckDivisor() const {
    if (!Has(is_.optional, OptionalField::kDivisor)) return {};
    if (!(i_.divisor > 0)) {
      return Wrong("wrong divisor", fmt::format("{}", i_.divisor), "a positive number");
    }
    if (i_.reduce_op == ReduceOp::kAverage && i_.divisor != 1) {
      return Wrong("an average has no divisor of its own", fmt::format("{}", i_.divisor), "1");
    }
    return {};
  }

  Status CheckReachOfHost() const {
    for (const BufferId id : {Has(is_.src) ? i_.src : -1, Has(is_.dst) ? i_.dst : -1}) {
      if (id < 0 || plan_.buffers[id].memory != MemoryKind::kDevice) continue;
      return Wrong(fmt::format("{} is in memory of the device", plan_.buffers[id].name), "no stream",
                   "a stream");
    }
    return {};
  }

  const Plan& plan_;
  const Instruction& i_;
  const InstructionDescription& is_;
};

}  // namespace

Status CheckOperands(const Plan& plan, const Instruction& instruction) {
  return OperandCheck(plan, instruction).Run();
}

}  // namespace shardplan
