// SPDX-License-Identifier: Apache-2.0
// A recording as a document: names are in the plan, numbers are here.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <iterator>
#include <utility>

#include "shardplan/executor/step_recorder.h"
#include "shardplan/schemas/exchanges.h"
#include "shardplan/schemas/instruction_set.h"
#include "shardplan/schemas/io.h"

namespace shardplan::executor {
namespace {

using Text = std::back_insert_iterator<std::string>;

// The characters that JSON takes without escapes. Names of devices have nothing else.
std::string Plain(std::string name) {
  std::erase_if(name, [](char c) { return c < ' ' || c > '~' || c == '"' || c == '\\'; });
  return name;
}

// [kind, unit, stream, communicator of a collective, full tensor bytes, phase]
void WriteInstruction(Text to, const Plan& plan, const Instruction& instruction) {
  const bool collective = IsCollective(instruction.kind);
  UnitId unit = instruction.unit;
  const bool optimizers = instruction.kind == InstructionKind::kOptimizerStep || instruction.exchange >= 0;
  std::string_view phase = optimizers ? "optimizer" : "";
  if (instruction.kind == InstructionKind::kCompute) {
    unit = plan.segments[instruction.segment].unit;
    phase = Name(plan.segments[instruction.segment].phase);
  }
  fmt::format_to(to, R"(["{}",{},{},{},{},"{}"])", Name(instruction.kind), unit, instruction.stream,
                 collective ? instruction.communicator : -1,
                 collective ? TensorBytesOf(plan, instruction).value : 0, phase);
}

// [kind, unit, micro-batch, [instructions]]
void WriteTriggers(Text to, const Plan& plan) {
  const char* between = "";
  for (const Trigger& trigger : plan.steps[plan.steady_step].triggers) {
    fmt::format_to(to, "{}\n  [\"{}\",{},{},[", std::exchange(between, ","), Name(trigger.kind), trigger.unit,
                   trigger.microbatch);
    const char* comma = "";
    for (const Instruction& instruction : trigger.instructions) {
      fmt::format_to(to, "{}", std::exchange(comma, ","));
      WriteInstruction(to, plan, instruction);
    }
    fmt::format_to(to, "]]");
  }
}

void WriteStep(Text to, const MeasuredStep& step) {
  fmt::format_to(to, R"({{"begin_ns":{},"end_ns":{},"device_begin_ns":{},"device_end_ns":{},)", step.begin_ns,
                 step.end_ns, step.on_device.begin_ns, step.on_device.end_ns);
  fmt::format_to(to, R"("peak_bytes":{},"peak_trigger":{},"steady_bytes":{},)", step.peak_bytes.value,
                 step.peak_trigger, step.steady_bytes.value);
  const char* comma = "";
  fmt::format_to(to, R"("peak_by_category":{{)");
  for (const CategoryBytes& entry : step.peak_by_category)
    fmt::format_to(to, R"({}"{}":{})", std::exchange(comma, ","), entry.category, entry.size_bytes.value);
  comma = "";
  fmt::format_to(to, "}},\n  \"instructions\":[");
  for (const RecordedInstruction& one : step.instructions) {
    fmt::format_to(to, "{}\n  [{},{},{},{},{},{},{},{}]", std::exchange(comma, ","), one.trigger,
                   one.instruction, one.host_begin_ns, one.host_end_ns, one.span, one.work.begin_ns,
                   one.work.end_ns, one.allocated_bytes.value);
  }
  fmt::format_to(to, "]}}");
}

}  // namespace

std::string ToJson(const Recording& recording, const Plan& plan, std::int64_t rank,
                   const DeviceFacts& facts) {
  std::string json;
  const Text to = std::back_inserter(json);
  fmt::format_to(to, R"({{"schema":"shardplan.recording/1","plan_digest":"{}","rank":{},"world_size":{},)",
                 DigestOfJson(plan), rank, plan.world_size);
  fmt::format_to(to, R"("device":"{}","device_bytes":{},"reserved_bytes":{},"cache_releases":{},)",
                 Plain(facts.name), facts.memory_bytes.value, facts.reserved_bytes.value,
                 facts.cache_releases);
  fmt::format_to(to, R"("abandoned":{},"unrecorded_steps_ns":[{}],)", recording.abandoned,
                 fmt::join(recording.unrecorded_steps_ns, ","));
  const char* comma = "";
  fmt::format_to(to, "\"groups\":[");
  for (const Communicator& communicator : plan.communicators)
    fmt::format_to(to, "{}[{}]", std::exchange(comma, ","), fmt::join(GroupOf(communicator, rank), ","));
  fmt::format_to(to, "],\n\"triggers\":[");
  WriteTriggers(to, plan);
  fmt::format_to(to, "],\n\"steps\":[");
  comma = "";
  for (const MeasuredStep& step : recording.steps) {
    fmt::format_to(to, "{}\n", std::exchange(comma, ","));
    WriteStep(to, step);
  }
  fmt::format_to(to, "]}}\n");
  return json;
}

}  // namespace shardplan::executor
