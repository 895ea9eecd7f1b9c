// SPDX-License-Identifier: Apache-2.0
#include "tests/executor/virtual/field_mutations.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <utility>
#include <vector>

#include "shardplan/schemas/plan_text.h"

namespace shardplan::test {
namespace {

constexpr std::array kDTypes = {DType::kFloat64, DType::kFloat32, DType::kBFloat16, DType::kFloat16,
                                DType::kUInt8};
constexpr int kRoles = static_cast<int>(kBufferRoles);

std::int64_t BytesOf(const Buffer& buffer) {
  std::int64_t bytes = 0;
  for (const Bytes part : buffer.parts_bytes) bytes += part.value;
  return bytes;
}

class Series {
 public:
  Series(const Plan& plan, std::uint64_t first, std::uint64_t stride,
         const std::function<void(const FieldMutation&)>& visit)
      : plan_(plan), next_(first), stride_(stride), visit_(visit) {}

  void Run() {
    for (std::size_t s = 0; s < plan_.steps.size(); ++s) {
      for (std::size_t t = 0; t < plan_.steps[s].triggers.size(); ++t) {
        for (std::size_t i = 0; i < plan_.steps[s].triggers[t].instructions.size(); ++i) {
          at_ = {s, t, i};
          MoveInstruction();
          ChangeInstruction();
        }
      }
    }
    for (std::size_t b = 0; b < plan_.buffers.size(); ++b) {
      if (IsInSteps(static_cast<BufferId>(b))) ChangeBuffer(static_cast<BufferId>(b));
    }
    for (std::size_t s = 0; s < plan_.segments.size(); ++s) {
      ChangeSegment(s, "pass", &Segment::pass, -1);
      ChangeSegment(s, "pass", &Segment::pass, plan_.segments[s].pass + 1);
      ChangeSegment(s, "begin", &Segment::begin, plan_.segments[s].begin + 1);
      ChangeSegment(s, "begin", &Segment::begin, plan_.segments[s].begin - 1);
      ChangeSegment(s, "end", &Segment::end, plan_.segments[s].end + 1);
      ChangeSegment(s, "end", &Segment::end, plan_.segments[s].end - 1);
      ChangeSegment(s, "forward", &Segment::forward, plan_.segments[s].forward + 1);
    }
  }

 private:
  // Buffers that procedures alone use are judged by their own program (on_demand_test.cc).
  bool IsInSteps(BufferId buffer) const {
    for (const PlanStep& step : plan_.steps) {
      for (const Trigger& trigger : step.triggers) {
        for (const Instruction& i : trigger.instructions) {
          if (i.src == buffer || i.dst == buffer) return true;
        }
      }
    }
    return !plan_.buffers[buffer].name.ends_with(".on_demand");
  }

  struct Place {
    std::size_t step = 0, trigger = 0, instruction = 0;
  };

  bool IsTaken() {
    if (count_++ != next_) return false;
    next_ += stride_;
    return true;
  }

  const Instruction& Found() const {
    return plan_.steps[at_.step].triggers[at_.trigger].instructions[at_.instruction];
  }
  std::string Where() const {
    const Trigger& trigger = plan_.steps[at_.step].triggers[at_.trigger];
    return fmt::format("step {}, {}: {}", plan_.steps[at_.step].name, Describe(plan_, trigger),
                       Describe(plan_, trigger, Found()));
  }

  template <typename Change>
  void OfTrigger(const std::string& field, const std::string& to, const Change& change) {
    if (!IsTaken()) return;
    FieldMutation mutation = {fmt::format("{}: {}", Name(Found().kind), field),
                              fmt::format("{} ({} {})", Where(), field, to), plan_, field == "twice"};
    change(mutation.plan.steps[at_.step].triggers[at_.trigger].instructions.Edit());
    visit_(mutation);
  }
  template <typename T>
  void Set(const std::string& field, T Instruction::*member, T value, const std::string& to) {
    if (Found().*member == value) return;
    OfTrigger(field, to, [&](std::vector<Instruction>& all) { all[at_.instruction].*member = value; });
  }
  template <typename List>
  void SetId(const std::string& field, std::int32_t Instruction::*member, const List& list) {
    const std::int32_t found = Found().*member;
    if (found < 0) return;
    const auto size = static_cast<std::int32_t>(list.size());
    for (std::int32_t id = 0; id < size; ++id) {
      if (size > 4 && id != (found + 1) % size && id != (found + size - 1) % size) continue;
      Set(field, member, id, std::to_string(id));
    }
    Set(field, member, -1, "none");
  }

  void MoveInstruction() {
    const std::size_t at = at_.instruction;
    const auto offset = static_cast<std::ptrdiff_t>(at);
    OfTrigger("left out", "", [&](auto& all) { all.erase(all.begin() + offset); });
    OfTrigger("twice", "", [&](auto& all) { all.insert(all.begin() + offset, Instruction(all[at])); });
    const std::vector<Instruction>& all = plan_.steps[at_.step].triggers[at_.trigger].instructions;
    if (at + 1 < all.size() && !(all[at] == all[at + 1])) {
      OfTrigger("behind the next one", "", [&](auto& moved) { std::swap(moved[at], moved[at + 1]); });
    }
  }

  // Buffers that could stand there by their size, and the same role's of another unit.
  void ChangeBufferOf(const std::string& field, BufferId Instruction::*member) {
    const BufferId found = Found().*member;
    if (found < 0) return;
    const Buffer& buffer = plan_.buffers[found];
    int equal = 0, alike = 0;
    for (std::size_t b = 0; b < plan_.buffers.size(); ++b) {
      const Buffer& other = plan_.buffers[b];
      if (static_cast<BufferId>(b) == found) continue;
      const bool same_size = BytesOf(other) == BytesOf(buffer) && other.unit == buffer.unit && ++equal <= 3;
      const bool same_role = other.role == buffer.role && other.unit != buffer.unit && ++alike <= 1;
      if (same_size || same_role) Set(field, member, static_cast<BufferId>(b), other.name);
    }
    Set(field, member, BufferId{-1}, "none");
  }

  void ChangeInstruction() {
    const Instruction& i = Found();
    SetId("stream", &Instruction::stream, plan_.streams);
    SetId("unit", &Instruction::unit, plan_.units);
    SetId("event", &Instruction::event, plan_.events);
    SetId("communicator", &Instruction::communicator, plan_.communicators);
    SetId("segment", &Instruction::segment, plan_.segments);
    if (i.kind == InstructionKind::kOptimizerStep && i.unit >= 0) {
      SetId("parameter", &Instruction::parameter, plan_.units[i.unit].parameters);
    }
    SetId("exchange", &Instruction::exchange, plan_.exchanges);
    if (i.matrix >= 0) SetId("matrix", &Instruction::matrix, plan_.exchanges[i.exchange].matrices);
    ChangeBufferOf("src", &Instruction::src);
    ChangeBufferOf("dst", &Instruction::dst);
    if (i.kind == InstructionKind::kCompute) {
      const Trigger& trigger = plan_.steps[at_.step].triggers[at_.trigger];
      Set("microbatch", &Instruction::microbatch_offset, i.microbatch_offset + 1,
          std::to_string(MicrobatchOf(trigger, i) + 1));
      Set("microbatch", &Instruction::microbatch_offset, -trigger.microbatch, "0");
    }
    const bool reduces = i.kind == InstructionKind::kReduceScatter || i.kind == InstructionKind::kAllReduce;
    if (reduces) {
      const bool sum = i.reduce_op == ReduceOp::kSum;
      Set("reduce_op", &Instruction::reduce_op, sum ? ReduceOp::kAverage : ReduceOp::kSum,
          sum ? "average" : "sum");
    }
    if (reduces || i.kind == InstructionKind::kGradScale) {
      Set("divisor", &Instruction::divisor, i.divisor * 2, "twice as large");
      Set("divisor", &Instruction::divisor, 1.0, "1");
    }
    if (i.kind == InstructionKind::kFree) ChangeFree();
    for (const InstructionKind kind : SimilarKinds(i.kind)) {
      Set("kind", &Instruction::kind, kind, std::string(Name(kind)));
    }
  }

  static std::vector<InstructionKind> SimilarKinds(InstructionKind kind) {
    using enum InstructionKind;
    static const std::vector<std::vector<InstructionKind>> kGroups = {
        {kCopyIn, kAllGather, kCopyOut, kReshardPostForward, kCopyToDevice},
        {kGradCopyIn, kReduceScatter, kGradCast, kGradAccumulate, kCopyToHost},
        {kBindUnsharded, kBindSharded, kFree},
        {kGradScale, kAllReduce},
        {kRecord, kWait, kHostWait},
        {kUpdateCopyIn, kAllToAll, kUpdateGather, kOrthogonalize, kUpdateApply},
        {kOptimizerStep, kZeroGrad}};
    for (const std::vector<InstructionKind>& group : kGroups) {
      if (std::ranges::find(group, kind) != group.end()) return group;
    }
    return {};
  }

  void ChangeFree() {
    const Instruction& i = Found();
    if (!i.safe_after.empty()) Set("safe_after", &Instruction::safe_after, {}, "none");
    for (std::size_t s = 0; s < plan_.streams.size(); ++s) {
      Set("safe_after", &Instruction::safe_after, {static_cast<StreamId>(s)}, plan_.streams[s].name);
    }
    if (!i.parts.empty()) Set("parts", &Instruction::parts, {}, "all");
    if (plan_.buffers[i.src].parts_bytes.size() > 1) Set("parts", &Instruction::parts, {0}, "0");
  }

  template <typename Change>
  void OfBuffer(BufferId id, const std::string& field, const std::string& to, const Change& change) {
    if (!IsTaken()) return;
    const Buffer& found = plan_.buffers[id];
    FieldMutation mutation = {fmt::format("buffer {}: {}", Name(found.role), field),
                              fmt::format("buffer {} ({} {})", found.name, field, to), plan_, false,
                              field == "role" || field == "persistent"};
    change(mutation.plan.buffers[id]);
    visit_(mutation);
  }

  void ChangeBuffer(BufferId id) {
    const Buffer& found = plan_.buffers[id];
    for (int r = 0; r < kRoles; ++r) {
      const auto role = static_cast<BufferRole>(r);
      if (role != found.role) {
        OfBuffer(id, "role", std::string(Name(role)), [&](Buffer& b) { b.role = role; });
      }
    }
    for (UnitId unit = -1; unit < std::min<UnitId>(3, static_cast<UnitId>(plan_.units.size())); ++unit) {
      if (unit != found.unit) OfBuffer(id, "unit", std::to_string(unit), [&](Buffer& b) { b.unit = unit; });
    }
    for (const DType dtype : kDTypes) {
      if (dtype == found.dtype) continue;
      OfBuffer(id, "dtype", std::string(Name(dtype)), [&](Buffer& b) { b.dtype = dtype; });
      OfBuffer(id, "dtype and size", std::string(Name(dtype)), [&](Buffer& b) {
        for (Bytes& part : b.parts_bytes) {
          part.value = part.value / SizeBytes(b.dtype) * SizeBytes(dtype);
        }
        b.dtype = dtype;
      });
    }
    const std::int64_t element = SizeBytes(found.dtype);
    for (std::size_t k = 0; k < found.parts_bytes.size(); ++k) {
      if (k > 0 && k + 1 < found.parts_bytes.size()) continue;
      for (const std::int64_t more : {-element, element}) {
        if (found.parts_bytes[k].value + more < 0) continue;
        OfBuffer(id, "parts_bytes", fmt::format("of part {}: {:+}", k, more),
                 [&](Buffer& b) { b.parts_bytes[k].value += more; });
      }
    }
    if (found.parts_bytes.size() > 1) {
      OfBuffer(id, "parts_bytes", "in one", [&](Buffer& b) { b.parts_bytes = {Bytes{BytesOf(b)}}; });
      OfBuffer(id, "parts_bytes", "one part less", [&](Buffer& b) { b.parts_bytes.pop_back(); });
    }
    if (!found.parameters.empty()) {
      OfBuffer(id, "parameters", "without the first",
               [&](Buffer& b) { b.parameters.erase(b.parameters.begin()); });
    }
    for (const MemoryKind memory : {MemoryKind::kDevice, MemoryKind::kPinnedHost, MemoryKind::kHost}) {
      if (memory == found.memory) continue;
      OfBuffer(id, "memory", std::to_string(static_cast<int>(memory)), [&](Buffer& b) { b.memory = memory; });
    }
    OfBuffer(id, "persistent", found.persistent ? "no more" : "now",
             [&](Buffer& b) { b.persistent = !b.persistent; });
    OfBuffer(id, "pool", "another", [&](Buffer& b) { b.pool = b.pool < 0 ? 0 : -1; });
  }

  void ChangeSegment(std::size_t id, const std::string& field, std::int32_t Segment::*member,
                     std::int32_t value) {
    if (!IsTaken()) return;
    const Segment& found = plan_.segments[id];
    FieldMutation mutation = {fmt::format("segment: {}", field),
                              fmt::format("segment {} ({} {})", found.name, field, value), plan_, false,
                              true};
    mutation.plan.segments[id].*member = value;
    visit_(mutation);
  }

  const Plan& plan_;
  std::uint64_t count_ = 0;
  std::uint64_t next_ = 0;
  const std::uint64_t stride_;
  const std::function<void(const FieldMutation&)>& visit_;
  Place at_;
};

}  // namespace

void ForEachFieldMutation(const Plan& plan, std::uint64_t first, std::uint64_t stride,
                          const std::function<void(const FieldMutation&)>& visit) {
  Series(plan, first, stride, visit).Run();
}

}  // namespace shardplan::test
