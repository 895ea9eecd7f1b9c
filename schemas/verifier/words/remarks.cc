// SPDX-License-Identifier: Apache-2.0
// Remarks: what a plan does that is no fault and yet seldom meant.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <map>
#include <optional>

#include "shardplan/schemas/instruction_set.h"
#include "shardplan/schemas/layout.h"
#include "shardplan/verifier/verifier.h"
#include "verifier/words/report.h"

namespace shardplan {
namespace {

using verifier::Position;

class Observer {
 public:
  Observer(const Plan& plan, verifier::Reporter& reporter)
      : plan_(plan), reporter_(reporter), units_(plan.units.size()), outdated_(plan.buffers.size(), 0) {
    for (std::size_t b = 0; b < plan.buffers.size(); ++b) {
      const Buffer& buffer = plan.buffers[b];
      if (buffer.unit < 0 || buffer.role == BufferRole::kParamSharded) continue;
      units_[buffer.unit].copies.push_back(static_cast<BufferId>(b));
    }
  }

  std::vector<Remark> Run() {
    const auto count = static_cast<std::int32_t>(plan_.steps.size());
    for (std::int32_t step = 0; step < count; ++step) RunStep(step);
    for (std::int32_t step = plan_.steady_step; step < count; ++step) RunStep(step);
    for (const auto& [buffer, gathered] : flat_) {
      Add(RemarkKind::kStaysUnsharded, gathered.at, gathered.unit,
          fmt::format("{} is still gathered when step {} is over: nothing frees what {} made",
                      Unit(gathered.unit), plan_.steps.back().name, reporter_.Describe(gathered.at)));
    }
    for (std::size_t u = 0; u < units_.size(); ++u) {
      if (!units_[u].bound || !IsSharded(static_cast<UnitId>(u))) continue;
      Add(RemarkKind::kStaysUnsharded, *units_[u].bound, static_cast<UnitId>(u),
          fmt::format("{} is still unsharded when step {} is over, since {}", Unit(u),
                      plan_.steps.back().name, reporter_.Describe(*units_[u].bound)));
    }
    return std::move(remarks_);
  }

 private:
  struct State {
    std::optional<Position> gathered;  // an all-gather that nothing has copied out yet
    std::optional<Position> bound;
    bool from_gather = false;
    bool read = false;     // since it was bound
    bool updated = false;  // ... by an optimizer
    bool told_stale = false;
    std::vector<BufferId> copies;  // its buffers that are not the shard itself
  };

  // The gathered copy of a flat parameter. It may be used again without a gather while it is alive, whether
  // the modules are bound to the shard in between or not.
  struct FlatCopy {
    UnitId unit = -1;
    Position at;
  };

  std::string Unit(std::size_t unit) const { return reporter_.UnitName(static_cast<UnitId>(unit)); }

  bool IsSharded(UnitId unit) const {
    const CommunicatorId c = plan_.units[unit].shard_communicator;
    return c >= 0 && plan_.communicators[c].size > 1;
  }

  // Once for every unit and place, whichever step it is seen in first.
  void Add(RemarkKind kind, Position at, UnitId unit, std::string message) {
    const Trigger& trigger = plan_.steps[at.step].triggers[at.trigger];
    const bool known = std::ranges::any_of(remarks_, [&](const Remark& other) {
      const Trigger& there = plan_.steps[other.step].triggers[other.trigger];
      return other.kind == kind && other.unit == unit && there.kind == trigger.kind &&
             there.unit == trigger.unit && there.microbatch == trigger.microbatch &&
             there.occurrence == trigger.occurrence;
    });
    if (!known) remarks_.push_back({kind, at.step, at.trigger, unit, std::move(message)});
  }

  void RunStep(std::int32_t step) {
    const std::vector<Trigger>& triggers = plan_.steps[step].triggers;
    for (std::size_t t = 0; t < triggers.size(); ++t) {
      for (std::size_t i = 0; i < triggers[t].instructions.size(); ++i) {
        On(triggers[t].instructions[i], {step, static_cast<std::int32_t>(t), static_cast<std::int32_t>(i)});
      }
    }
  }

  UnitId UnitOf(const Instruction& i, BufferId buffer) const {
    return buffer >= 0 && plan_.buffers[buffer].unit >= 0 ? plan_.buffers[buffer].unit : i.unit;
  }

  // An optimizer has stepped the unit: every copy of its shards is one of what they were.
  void Outdate(UnitId unit) {
    units_[unit].updated = true;
    for (const BufferId copy : units_[unit].copies) outdated_[copy] = 1;
  }

  // The content of dst is as old as that of its source; if it has some of the parameters, as old as the
  // oldest.
  void PassOn(const Instruction& i) {
    if (i.src < 0 || i.dst < 0) return;
    const bool whole = ParametersOf(plan_, plan_.buffers[i.src]) == ParametersOf(plan_, plan_.buffers[i.dst]);
    outdated_[i.dst] = outdated_[i.src] != 0 || (!whole && outdated_[i.dst] != 0) ? 1 : 0;
  }

  void On(const Instruction& i, Position at) {
    switch (DescriptionOf(i.kind).family) {
      case InstructionFamily::kMemory:
        return DescriptionOf(i.kind).lifetime == LifetimeEffect::kBegins ? Begin(i.dst) : OnFree(i);
      case InstructionFamily::kBind:
        return i.kind == InstructionKind::kBindUnsharded ? OnBind(UnitOf(i, i.src), i.src, at)
                                                         : OnShard(UnitOf(i, i.src));
      case InstructionFamily::kCopy:
      case InstructionFamily::kCollective:
      case InstructionFamily::kScale:
        return OnMove(i, at);
      case InstructionFamily::kCompute:
        for (const UnitId unit : plan_.segments[i.segment].reads) OnRead(unit, at);
        return;
      case InstructionFamily::kOptimizer:
        return OnOptimizer(i);
      case InstructionFamily::kOrder:
        return;
    }
  }

  void Begin(BufferId buffer) { outdated_[buffer] = 0; }

  void OnMove(const Instruction& i, Position at) {
    const ValueEffect value = DescriptionOf(i.kind).value;
    if (value == ValueEffect::kUnshards || value == ValueEffect::kMovesMemory) PassOn(i);
    if (value != ValueEffect::kUnshards || !IsCollective(i.kind)) return;
    const UnitId unit = UnitOf(i, i.dst);
    if (unit < 0) return;
    units_[unit].gathered = at;
    if (plan_.units[unit].layout == LayoutKind::kFlat) flat_.insert_or_assign(i.dst, FlatCopy{unit, at});
  }

  void OnOptimizer(const Instruction& i) {
    if (DescriptionOf(i.kind).value != ValueEffect::kSteps) return;
    if (i.exchange >= 0) {
      if (i.kind != InstructionKind::kUpdateApply) return;
      for (const ExchangedMatrix& matrix : plan_.exchanges[i.exchange].matrices) Outdate(matrix.unit);
      return;
    }
    for (std::size_t u = 0; u < units_.size(); ++u) {
      const bool trains = std::ranges::any_of(plan_.units[u].parameters, &UnitParameter::requires_grad);
      if (trains && (i.unit < 0 || i.unit == static_cast<UnitId>(u))) Outdate(static_cast<UnitId>(u));
    }
  }

  void OnBind(UnitId unit, BufferId buffer, Position at) {
    State& state = units_[unit];
    state.from_gather = state.gathered.has_value();
    state.gathered.reset();
    state.bound = at;
    state.read = state.told_stale = false;
    state.updated = outdated_[buffer] != 0;
  }

  void OnShard(UnitId unit) {
    State& state = units_[unit];
    if (state.bound && state.from_gather && !state.read) {
      Add(RemarkKind::kGatherForNothing, *state.bound, unit,
          fmt::format("{} is unsharded by {}, and resharded before anything reads it", Unit(unit),
                      reporter_.Describe(*state.bound)));
    }
    state.bound.reset();
  }

  void OnFree(const Instruction& i) {
    const Buffer& buffer = plan_.buffers[i.src];
    flat_.erase(i.src);
    if (buffer.role != BufferRole::kAllGatherOutput || buffer.unit < 0) return;
    State& state = units_[buffer.unit];
    // A unit that gathers again while its last output is still kept frees that one here.
    if (!state.gathered || plan_.steps[state.gathered->step]
                                   .triggers[state.gathered->trigger]
                                   .instructions[state.gathered->instruction]
                                   .dst != i.src) {
      return;
    }
    Add(RemarkKind::kGatherForNothing, *state.gathered, buffer.unit,
        fmt::format("the result of {} is dropped: nothing copies it out",
                    reporter_.Describe(*state.gathered)));
    state.gathered.reset();
  }

  void OnRead(UnitId unit, Position at) {
    State& state = units_[unit];
    state.read = true;
    if (!state.bound || !state.updated || state.told_stale || !IsSharded(unit)) return;
    state.told_stale = true;
    Add(RemarkKind::kStaleParameters, at, unit,
        fmt::format(
            "{} reads the parameters of {} from before the optimizer's step: they were gathered in {}",
            reporter_.Describe(at), Unit(unit), reporter_.Describe(*state.bound)));
  }

  const Plan& plan_;
  verifier::Reporter& reporter_;
  std::map<BufferId, FlatCopy> flat_;  // by param_unsharded buffer that is alive
  std::vector<State> units_;
  std::vector<char>
      outdated_;  // by buffer: an optimizer has stepped its unit since what is in it was a shard
  std::vector<Remark> remarks_;
};

constexpr std::array<std::string_view, 3> kNames = {"gather_for_nothing", "stays_unsharded",
                                                    "stale_parameters"};

}  // namespace

std::string_view Name(RemarkKind kind) {
  const auto index = static_cast<std::size_t>(kind);
  return index < kNames.size() ? kNames[index] : "?";
}

std::vector<Remark> Remarks(const Plan& plan) {
  if (plan.steps.empty()) return {};
  verifier::Reporter reporter(plan);
  return Observer(plan, reporter).Run();
}

}  // namespace shardplan
