#include "cost/moved_bytes.h"

#include <algorithm>

namespace shardplan {

MovedBytes MovedBy(const Plan& plan, const Instruction& copy) {
  const Buffer& src = plan.buffers[static_cast<std::size_t>(copy.src)];
  const bool in_place = copy.kind == InstructionKind::kGradScale;
  const Buffer& dst = in_place ? src : plan.buffers[static_cast<std::size_t>(copy.dst)];
  const Bytes read = SizeBytes(src);
  const Bytes written = SizeBytes(dst);
  switch (copy.kind) {
    case InstructionKind::kCopyIn:
    case InstructionKind::kReshardPostForward: {
      // Only this rank's part moves, whichever of the two buffers holds the other ranks' parts too.
      const std::int64_t elements =
          std::min(read.value / SizeBytes(src.dtype), written.value / SizeBytes(dst.dtype));
      return {{elements * SizeBytes(src.dtype)}, {elements * SizeBytes(dst.dtype)}};
    }
    case InstructionKind::kGradCopyIn: {  // of several that bring their parameters, each moves its own
      const std::int64_t elements = read.value / SizeBytes(src.dtype);
      const bool one_of_several = src.parameters.size() < dst.parameters.size();
      return {read, one_of_several ? Bytes{elements * SizeBytes(dst.dtype)} : written};
    }
    case InstructionKind::kGradAccumulate:
      return {read + written, written};
    default:
      return {read, written};
  }
}

}  // namespace shardplan
