// SPDX-License-Identifier: Apache-2.0
#include "tests/executor/virtual/edits.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <functional>
#include <random>
#include <set>
#include <utility>
#include <variant>
#include <vector>

#include "shardplan/schemas/plan_text.h"

namespace shardplan::test {
namespace {

using enum InstructionKind;

struct Spot {
  std::size_t step = 0, trigger = 0, instruction = 0;
};
using Change = std::function<void(std::vector<Instruction>& all, std::size_t at)>;

class Editor {
 public:
  Editor(const Plan& plan, std::uint64_t seed) : random_(seed) { mutation_.plan = plan; }

  FieldMutation Edit(int edits) {
    for (int e = 0; e < edits; ++e) {
      std::string done;
      while (done.empty()) done = Below(4) == 0 ? EditTable() : EditInstruction();
      mutation_.what += (e == 0 ? "" : "; ") + done;
    }
    return std::move(mutation_);
  }

 private:
  Plan& plan() { return mutation_.plan; }
  std::size_t Below(std::size_t bound) { return bound == 0 ? 0 : random_() % bound; }
  std::int32_t Other(std::size_t size, std::int32_t than) {
    const auto found = static_cast<std::int32_t>(Below(size + 1)) - 1;  // -1, too
    return found == than ? static_cast<std::int32_t>(Below(size)) : found;
  }
  void Count(const std::string& kind) { mutation_.kind += (mutation_.kind.empty() ? "" : " + ") + kind; }

  // ---- instructions ----

  bool IsNear(const Instruction& i) const {
    const bool buffer = buffer_ >= 0 && (i.src == buffer_ || i.dst == buffer_);
    const bool partner = partner_ >= 0 && (i.src == partner_ || i.dst == partner_);
    return buffer || partner || (event_ >= 0 && i.event == event_) ||
           (segment_ >= 0 && i.segment == segment_);
  }

  // Mostly one that has to do with the edit before.
  bool Choose(Spot& spot) {
    std::vector<Spot> all, near;
    for (std::size_t s = 0; s < plan().steps.size(); ++s) {
      for (std::size_t t = 0; t < plan().steps[s].triggers.size(); ++t) {
        const std::vector<Instruction>& instructions = plan().steps[s].triggers[t].instructions;
        for (std::size_t k = 0; k < instructions.size(); ++k) {
          all.push_back({s, t, k});
          if (IsNear(instructions[k])) near.push_back(all.back());
        }
      }
    }
    if (all.empty()) return false;
    spot = !near.empty() && Below(4) > 0 ? near[Below(near.size())] : all[Below(all.size())];
    return true;
  }

  // In one place, or wherever the same instruction is issued.
  void Apply(const Spot& spot, bool everywhere, const Change& change) {
    const Instruction found = plan().steps[spot.step].triggers[spot.trigger].instructions[spot.instruction];
    for (std::size_t s = 0; s < plan().steps.size(); ++s) {
      for (std::size_t t = 0; t < plan().steps[s].triggers.size(); ++t) {
        std::vector<Instruction>& all = plan().steps[s].triggers[t].instructions.Edit();
        for (std::size_t k = all.size(); k-- > 0;) {
          const bool is_it = s == spot.step && t == spot.trigger && k == spot.instruction;
          if (is_it || (everywhere && all[k] == found)) change(all, k);
        }
      }
    }
  }

  std::string EditInstruction() {
    Spot spot;
    if (!Choose(spot)) return EditTable();
    const Trigger& trigger = plan().steps[spot.step].triggers[spot.trigger];
    const Instruction found = trigger.instructions[spot.instruction];
    std::string how;
    const Change change = Below(2) == 0 ? Rearrange(how) : Alter(found, how);
    if (!change) return {};
    const bool everywhere = Below(2) == 0;
    const std::string what =
        fmt::format("step {}, {}: {} ({}{})", plan().steps[spot.step].name, Describe(plan(), trigger),
                    Describe(plan(), found), how, everywhere ? ", everywhere" : "");
    Apply(spot, everywhere, change);
    Count(fmt::format("{}: {}", Name(found.kind), how.substr(0, how.find(' '))));
    buffer_ = found.dst >= 0 ? found.dst : found.src;
    partner_ = found.src;
    event_ = found.event;
    segment_ = found.segment;
    return what;
  }

  Change Rearrange(std::string& how) {
    const std::size_t far = 1 + Below(6);
    switch (Below(5)) {
      case 0:
      case 1:
        how = "removed";
        return [](auto& all, std::size_t at) { all.erase(all.begin() + static_cast<std::ptrdiff_t>(at)); };
      case 2:
        how = fmt::format("doubled {} later", far);
        return [far](auto& all, std::size_t at) {
          const Instruction again = all[at];
          all.insert(all.begin() + static_cast<std::ptrdiff_t>(std::min(at + far, all.size())), again);
        };
      case 3:
        how = fmt::format("moved {} later", far);
        return [far](auto& all, std::size_t at) {
          for (std::size_t k = at; k + 1 < all.size() && k < at + far; ++k) std::swap(all[k], all[k + 1]);
        };
      default:
        how = fmt::format("moved {} earlier", far);
        return [far](auto& all, std::size_t at) {
          for (std::size_t k = at; k > 0 && k + far > at; --k) std::swap(all[k], all[k - 1]);
        };
    }
  }

  template <typename T>
  static Change Set(T Instruction::*member, T value) {
    return [member, value](auto& all, std::size_t at) { all[at].*member = value; };
  }

  // A buffer that could be meant: of the same role or unit.
  BufferId OtherBuffer(BufferId than) {
    std::vector<BufferId> alike;
    const Buffer& buffer = plan().buffers[than];
    for (std::size_t b = 0; b < plan().buffers.size(); ++b) {
      const Buffer& other = plan().buffers[b];
      const bool could_be = other.role == buffer.role || (other.unit == buffer.unit && Below(3) == 0);
      if (could_be && static_cast<BufferId>(b) != than) alike.push_back(static_cast<BufferId>(b));
    }
    return alike.empty() ? -1 : alike[Below(alike.size())];
  }

  Change Alter(const Instruction& found, std::string& how) {
    const bool reduces = found.kind == kReduceScatter || found.kind == kAllReduce;
    switch (Below(10)) {
      case 0:
        if (found.src < 0) return {};
        how = "src";
        return Set(&Instruction::src, OtherBuffer(found.src));
      case 1:
        if (found.dst < 0) return {};
        how = "dst";
        return Set(&Instruction::dst, OtherBuffer(found.dst));
      case 2:
        how = "stream";
        return Set(&Instruction::stream, Other(plan().streams.size(), found.stream));
      case 3:
        if (found.event < 0) return {};
        how = "event";
        return Set(&Instruction::event, Other(plan().events.size(), found.event));
      case 4:
        if (found.communicator < 0) return {};
        how = "communicator";
        return Set(&Instruction::communicator, Other(plan().communicators.size(), found.communicator));
      case 5:
        if (found.kind != kCompute) return {};
        how = "microbatch";
        return Set(&Instruction::microbatch_offset, static_cast<std::int32_t>(Below(3)));
      case 6:
        if (found.kind != kCompute) return {};
        how = "segment";
        return Set(&Instruction::segment, static_cast<SegmentId>(Below(plan().segments.size())));
      case 7:
        return reduces ? Redivide(found, how) : Scale(found, how);
      case 8:
        return AlterKind(found, how);
      default:
        return AlterFree(found, how);
    }
  }

  // `sum` for `average`, with the divisor that makes it good or without.
  Change Redivide(const Instruction& found, std::string& how) {
    const bool sum = found.reduce_op == ReduceOp::kSum;
    const double ranks =
        found.communicator < 0 ? 1.0 : static_cast<double>(plan().communicators[found.communicator].size);
    const double divisor = sum ? found.divisor / ranks : (Below(2) == 0 ? ranks : 1.0);
    how = sum ? "average" : "sum";
    return [sum, divisor](auto& all, std::size_t at) {
      all[at].reduce_op = sum ? ReduceOp::kAverage : ReduceOp::kSum;
      all[at].divisor = sum ? 1.0 : divisor;
    };
  }

  // Another divisor, or a division more behind what brings a gradient.
  Change Scale(const Instruction& found, std::string& how) {
    const double factor = Below(2) == 0 ? 2.0 : 0.5;
    if (found.kind == kGradScale) {
      how = "divisor";
      return Set(&Instruction::divisor, found.divisor * factor);
    }
    if (found.kind != kGradCopyIn && found.kind != kGradCast) return {};
    how = "division";
    const Instruction scale{.kind = kGradScale, .stream = found.stream, .src = found.dst, .divisor = factor};
    return [scale](auto& all, std::size_t at) {
      all.insert(all.begin() + static_cast<std::ptrdiff_t>(at) + 1, scale);
    };
  }

  Change AlterKind(const Instruction& found, std::string& how) {
    static const std::vector<std::pair<InstructionKind, InstructionKind>> kAlike = {
        {kGradAccumulate, kGradCast},
        {kGradCast, kGradAccumulate},
        {kGradCopyIn, kGradCast},
        {kCopyOut, kCopyIn},
        {kBindUnsharded, kBindSharded},
        {kBindSharded, kBindUnsharded},
        {kWait, kHostWait},
        {kHostWait, kWait},
        {kOptimizerStep, kZeroGrad},
        {kZeroGrad, kOptimizerStep},
        {kReshardPostForward, kCopyIn},
        {kCopyToHost, kGradAccumulate},
        {kReduceScatter, kGradCast},
        {kCopyIn, kReshardPostForward},
        {kGradCast, kGradCopyIn}};
    std::vector<InstructionKind> kinds;
    for (const auto& [from, to] : kAlike) {
      if (from == found.kind) kinds.push_back(to);
    }
    if (kinds.empty()) return {};
    how = "kind";
    return Set(&Instruction::kind, kinds[Below(kinds.size())]);
  }

  Change AlterFree(const Instruction& found, std::string& how) {
    if (found.kind == kOptimizerStep || found.kind == kZeroGrad) {
      how = "unit";
      const auto unit = static_cast<UnitId>(Below(plan().units.size() + 1)) - 1;
      return Set(&Instruction::unit, unit);
    }
    if (found.kind != kFree || found.src < 0) return {};
    const std::size_t parts = plan().buffers[found.src].parts_bytes.size();
    if (Below(2) == 0 && parts > 1) {
      how = "parts";
      std::vector<std::int32_t> some;
      for (std::size_t k = 0; k < parts; ++k) {
        if (Below(2) == 0) some.push_back(static_cast<std::int32_t>(k));
      }
      return Set(&Instruction::parts, IdList(some));
    }
    how = "safe_after";
    std::vector<StreamId> streams;
    for (std::size_t s = 0; s < plan().streams.size(); ++s) {
      if (Below(3) == 0) streams.push_back(static_cast<StreamId>(s));
    }
    return Set(&Instruction::safe_after, IdList(streams));
  }

  // ---- tables ----

  std::string EditTable() {
    switch (Below(6)) {
      case 0:
        return SwapStreams();
      case 1:
        return EditSegment();
      case 2: {
        const auto step = static_cast<std::int32_t>(Below(plan().steps.size()));
        if (step == plan().steady_step) return {};
        plan().steady_step = step;
        Count("plan: steady_step");
        return fmt::format("steady_step {}", step);
      }
      default:
        return EditBuffer();
    }
  }

  std::string SwapStreams() {
    const std::size_t streams = plan().streams.size();
    if (streams < 2) return {};
    const auto a = static_cast<StreamId>(Below(streams));
    const auto b = static_cast<StreamId>(Below(streams));
    if (a == b) return {};
    const bool only_here = Below(2) == 0;
    const std::size_t step = Below(plan().steps.size());
    for (std::size_t s = 0; s < plan().steps.size(); ++s) {
      if (only_here && s != step) continue;
      for (Trigger& trigger : plan().steps[s].triggers) {
        for (Instruction& i : trigger.instructions.Edit()) {
          if (i.stream == a || i.stream == b) i.stream = i.stream == a ? b : a;
        }
      }
    }
    Count("plan: streams");
    return fmt::format("streams {} and {} swapped{}", a, b, only_here ? " in one step" : "");
  }

  // The reads of a segment are facts of the model, which nothing in a plan proves: they stay as they are.
  std::string EditSegment() {
    if (plan().segments.empty()) return {};
    segment_ = static_cast<SegmentId>(Below(plan().segments.size()));
    Segment& segment = plan().segments[segment_];
    if (segment.entries.size() < 2) return {};
    const std::size_t at = Below(segment.entries.size() - 1);
    std::swap(segment.entries[at], segment.entries[at + 1]);
    Count("segment: entries");
    return fmt::format("segment {} (entries swapped)", segment.name);
  }

  std::string EditBuffer() {
    const BufferId near = Below(2) == 0 ? buffer_ : partner_;
    const BufferId id =
        near >= 0 && Below(3) > 0 ? near : static_cast<BufferId>(Below(plan().buffers.size()));
    Buffer& buffer = plan().buffers[id];
    std::string field;
    switch (Below(8)) {
      case 0:
        field = "persistent";
        buffer.persistent = !buffer.persistent;
        break;
      case 1:
        field = "memory";
        buffer.memory = buffer.memory == MemoryKind::kDevice ? MemoryKind::kPinnedHost : MemoryKind::kDevice;
        break;
      case 2:
        field = "pool";
        buffer.pool = Other(plan().communicators.size(), buffer.pool);
        break;
      case 3:
        field = "role";
        buffer.role = plan().buffers[Below(plan().buffers.size())].role;
        break;
      case 4:
        field = "unit";
        buffer.unit = static_cast<UnitId>(Below(plan().units.size()));
        break;
      case 5:
        field = "parameters";
        if (buffer.parameters.size() < 2) return {};
        buffer.parameters.erase(buffer.parameters.begin() +
                                static_cast<std::ptrdiff_t>(Below(buffer.parameters.size())));
        break;
      default:
        field = "dtype";
        Retype(id);
    }
    buffer_ = id;
    partner_ = -1;
    Count(fmt::format("buffer: {}", field));
    return fmt::format("buffer {} ({})", buffer.name, field);
  }

  // With its size; alone, or with all that lie between the same two copies.
  void Retype(BufferId id) {
    static constexpr std::array kDTypes = {DType::kFloat64, DType::kFloat32, DType::kBFloat16,
                                           DType::kFloat16};
    const DType dtype = kDTypes[Below(kDTypes.size())];
    const Buffer found = plan().buffers[id];
    const bool chain = Below(2) == 0;
    for (Buffer& buffer : plan().buffers) {
      const bool alike =
          chain && buffer.unit == found.unit && buffer.dtype == found.dtype && !buffer.persistent;
      if (buffer.name != found.name && !alike) continue;
      for (Bytes& part : buffer.parts_bytes)
        part.value = part.value / SizeBytes(buffer.dtype) * SizeBytes(dtype);
      buffer.dtype = dtype;
    }
  }

  FieldMutation mutation_;
  std::mt19937_64 random_;
  BufferId buffer_ = -1, partner_ = -1;  // that the latest edit is about
  EventId event_ = -1;
  SegmentId segment_ = -1;
};

}  // namespace

FieldMutation RandomEdits(const Plan& plan, std::uint64_t seed, int edits) {
  return Editor(plan, seed).Edit(edits);
}

}  // namespace shardplan::test
