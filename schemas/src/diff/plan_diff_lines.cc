// SPDX-License-Identifier: Apache-2.0
#include "diff/plan_diff_lines.h"

#include <fmt/format.h>

#include <map>

#include "names/enum_names.h"
#include "shardplan/schemas/instruction_set.h"

namespace shardplan {
namespace {

class LineWalker {
 public:
  explicit LineWalker(const Plan& plan) : plan_(plan), words_(plan) {}

  DiffLine LineOf(const Trigger& trigger, const Instruction& instruction) {
    if (instruction.kind == InstructionKind::kRecord) {
      const Work work = last_work_[instruction.stream];
      recorded_[instruction.event] = work;
      return {fmt::format("record on {} after {}", Stream(instruction), work.text), work.unit, &instruction};
    }
    if (instruction.kind == InstructionKind::kWait || instruction.kind == InstructionKind::kHostWait) {
      const Work work = recorded_[instruction.event];
      const bool host = instruction.kind == InstructionKind::kHostWait;
      return {fmt::format("{} waits for {}", host ? "the host" : Stream(instruction), work.text), work.unit,
              &instruction};
    }
    Instruction plain = AsWritten(trigger, instruction);
    plain.reason.clear();
    DiffLine line{words_.Line(plain), UnitOf(instruction), &instruction};
    if (instruction.stream != -1 && IsWork(instruction.kind)) {
      last_work_[instruction.stream] = {ShortText(instruction), line.unit};
    }
    return line;
  }

 private:
  struct Work {
    std::string text = "nothing of this plan";
    std::string unit;
  };

  std::string Stream(const Instruction& instruction) const {
    return words_.Word(RefKind::kStream, instruction.stream);
  }
  // The kind and what it reads (or writes).
  std::string ShortText(const Instruction& instruction) const {
    std::string text(EnumName(instruction.kind));
    if (instruction.kind == InstructionKind::kCompute) {
      return text + " " + words_.Word(RefKind::kSegment, instruction.segment);
    }
    const BufferId buffer = instruction.src != -1 ? instruction.src : instruction.dst;
    return buffer == -1 ? text : text + " " + words_.Word(RefKind::kBuffer, buffer);
  }
  std::string UnitOf(const Instruction& instruction) const {
    if (instruction.unit >= 0) return words_.Word(RefKind::kUnit, instruction.unit);
    for (const BufferId buffer : {instruction.src, instruction.dst}) {
      if (buffer < 0 || buffer >= static_cast<BufferId>(plan_.buffers.size())) continue;
      const UnitId unit = plan_.buffers[static_cast<std::size_t>(buffer)].unit;
      if (unit >= 0) return words_.Word(RefKind::kUnit, unit);
    }
    return "";
  }

  const Plan& plan_;
  PlanWords words_;
  std::map<StreamId, Work> last_work_;
  std::map<EventId, Work> recorded_;
};

}  // namespace

std::vector<std::vector<std::vector<DiffLine>>> DiffLinesOf(const Plan& plan) {
  LineWalker walker(plan);
  std::vector<std::vector<std::vector<DiffLine>>> steps;
  for (const PlanStep& step : plan.steps) {
    auto& triggers = steps.emplace_back();
    for (const Trigger& trigger : step.triggers) {
      auto& lines = triggers.emplace_back();
      for (const Instruction& instruction : trigger.instructions) {
        lines.push_back(walker.LineOf(trigger, instruction));
      }
    }
  }
  return steps;
}

}  // namespace shardplan
