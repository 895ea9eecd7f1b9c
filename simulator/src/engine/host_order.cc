// SPDX-License-Identifier: Apache-2.0
#include "engine/host_order.h"

#include <deque>

namespace shardplan::internal {
namespace {

// Entries of a stream's queue: every operator of a segment, and everything else that has a stream.
std::int64_t Launches(const EngineProgram& program, const EngineInstruction& code) {
  return code.op == EngineOp::kSegment ? program.segments[static_cast<std::size_t>(code.operand)].count : 1;
}

// The host issues an instruction when so many of its stream before it are done that the rest and its own
// launches fit, or all of them.
std::vector<std::int32_t> LimitedByDepth(const EngineProgram& program, const EngineStep& step,
                                         std::int64_t depth) {
  struct Queue {
    std::deque<std::int32_t> waiting;
    std::int64_t launches = 0;  // of `waiting`
    std::int32_t passed = -1;   // the last that had to be
  };
  std::vector<Queue> queues(static_cast<std::size_t>(program.streams));
  std::vector<std::int32_t> behind(step.code.size(), -1);
  for (std::size_t i = 0; i < step.code.size(); ++i) {
    if (step.code[i].stream < 0) continue;
    Queue& queue = queues[static_cast<std::size_t>(step.code[i].stream)];
    queue.launches += Launches(program, step.code[i]);
    while (!queue.waiting.empty() && queue.launches > depth) {
      queue.passed = queue.waiting.front();
      queue.launches -= Launches(program, step.code[static_cast<std::size_t>(queue.passed)]);
      queue.waiting.pop_front();
    }
    queue.waiting.push_back(static_cast<std::int32_t>(i));
    behind[i] = queue.passed;
  }
  return behind;
}

// Work is given to a stream that has passed all before it.
std::vector<std::int32_t> BehindAllOfItsStream(const EngineProgram& program, const EngineStep& step) {
  std::vector<std::int32_t> last(static_cast<std::size_t>(program.streams), -1);
  std::vector<std::int32_t> behind(step.code.size(), -1);
  for (std::size_t i = 0; i < step.code.size(); ++i) {
    const EngineInstruction& code = step.code[i];
    if (code.stream < 0) continue;
    std::int32_t& before = last[static_cast<std::size_t>(code.stream)];
    if (code.op == EngineOp::kWork || code.op == EngineOp::kSegment) behind[i] = before;
    before = static_cast<std::int32_t>(i);
  }
  return behind;
}

}  // namespace

std::vector<std::int32_t> QueuedBehind(const EngineProgram& program, const EngineStep& step,
                                       const Host& host) {
  if (host.runs_kernels) return BehindAllOfItsStream(program, step);
  if (host.launch_queue_depth > 0) return LimitedByDepth(program, step, host.launch_queue_depth);
  return {};
}

}  // namespace shardplan::internal
