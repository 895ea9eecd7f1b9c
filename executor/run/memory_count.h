// Bytes allocated by a replay, instruction by instruction: the plan's buffers and the model's activations,
// each rounded as the CUDA caching allocator rounds.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "shardplan/schemas/plan.h"

namespace shardplan::run {

inline constexpr Bytes kGranularityBytes{512};

class MemoryCount {
 public:
  explicit MemoryCount(const Plan& plan);

  void On(const Instruction& instruction);
  // A segment makes gradients in the buffer.
  void Allocate(BufferId buffer);
  // Anything else.
  void Add(Bytes requested) { Change(Rounded(requested)); }
  void Remove(Bytes requested) { Change({-Rounded(requested).value}); }

  // Since the step began: what a simulation's report is of.
  void BeginStep() { peak_ = now_; }
  Bytes peak_bytes() const { return peak_; }

 private:
  static Bytes Rounded(Bytes bytes) {
    return {(bytes.value + kGranularityBytes.value - 1) / kGranularityBytes.value * kGranularityBytes.value};
  }
  void Change(Bytes bytes) {
    now_ += bytes;
    peak_ = std::max(peak_, now_);
  }
  void Free(BufferId buffer);
  void FreeParts(BufferId buffer, const std::vector<std::int32_t>& parts);
  void Alias(BufferId buffer, BufferId owner);

  const Plan& plan_;
  Bytes now_;
  Bytes peak_;
  std::vector<std::int32_t> memory_of_;  // by buffer: index into names_, -1 while not alive
  std::vector<std::int32_t> names_;      // buffers that refer to a piece of memory
  std::vector<Bytes> size_bytes_;        // of a piece of memory
};

}  // namespace shardplan::run
