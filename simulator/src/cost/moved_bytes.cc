// SPDX-License-Identifier: Apache-2.0
#include "cost/moved_bytes.h"

#include <algorithm>

#include "shardplan/schemas/instruction_set.h"

namespace shardplan {

CopiedBytes MovedBy(const Plan& plan, const Instruction& copy) {
  if (copy.src < 0) return {Bytes{0}, SizeBytes(plan.buffers[static_cast<std::size_t>(copy.dst)])};
  const Buffer& src = plan.buffers[static_cast<std::size_t>(copy.src)];
  const InstructionDescription& is = DescriptionOf(copy.kind);
  const Buffer& dst = !Has(is.dst) ? src : plan.buffers[static_cast<std::size_t>(copy.dst)];
  const Bytes read = SizeBytes(src);
  const Bytes written = SizeBytes(dst);
  switch (is.movement) {
    case Movement::kToSlot:
    case Movement::kToPostForward: {
      // Only this rank's part moves, whichever of the two buffers holds the other ranks' parts too.
      const std::int64_t elements =
          std::min(read.value / SizeBytes(src.dtype), written.value / SizeBytes(dst.dtype));
      return {{elements * SizeBytes(src.dtype)}, {elements * SizeBytes(dst.dtype)}};
    }
    case Movement::kToSlots: {  // of several that bring their parameters, each moves its own
      const std::int64_t elements = read.value / SizeBytes(src.dtype);
      const bool one_of_several = src.parameters.size() < dst.parameters.size();
      return {read, one_of_several ? Bytes{elements * SizeBytes(dst.dtype)} : written};
    }
    case Movement::kFromSlots:
    case Movement::kWithin:
    case Movement::kNone:
      break;
  }
  return {Reads(is.dst) ? read + written : read, written};
}

}  // namespace shardplan
