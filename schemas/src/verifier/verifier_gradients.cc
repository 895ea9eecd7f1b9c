#include "verifier/verifier_gradients.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

namespace shardplan::verifier {
namespace {

bool IsLong(const Plan& plan, CommunicatorId communicator) {
  return communicator >= 0 && plan.communicators[communicator].size > 1;
}

bool SameGroups(const Plan& plan, CommunicatorId a, CommunicatorId b) {
  return a >= 0 && b >= 0 && SameRanks(plan.communicators[a], plan.communicators[b]);
}

bool Near(double a, double b) { return std::abs(a - b) <= 1e-9 * std::max(std::abs(a), std::abs(b)); }

bool IsFinal(BufferRole role) { return role == BufferRole::kGradSharded || role == BufferRole::kGradHost; }

}  // namespace

Gradients::Gradients(const Plan& plan, Memory& memory, Reporter& reporter)
    : plan_(plan), memory_(memory), reporter_(reporter) {}

Gradients::Value& Gradients::At(BufferId buffer) {
  const std::size_t slot = memory_.Slot(buffer);
  if (slot >= values_.size()) values_.resize(slot + 1);
  return values_[slot];
}

std::vector<std::int32_t> Gradients::ParametersOf(BufferId buffer, UnitId unit) const {
  const Buffer& b = plan_.buffers[buffer];
  if (!b.parameters.empty() && b.unit == unit) return b.parameters;
  std::vector<std::int32_t> all(plan_.units[unit].parameters.size());
  for (std::size_t i = 0; i < all.size(); ++i) all[i] = static_cast<std::int32_t>(i);
  return all;
}

std::vector<std::string> Gradients::Chain(const Value& value, Position at) const {
  std::vector<std::string> chain;
  for (const Position position : value.history) {
    chain.push_back((chain.empty() ? "made: " : "then: ") + reporter_.Describe(position));
  }
  if (chain.empty() || !(value.history.back() == at)) chain.push_back("then: " + reporter_.Describe(at));
  return chain;
}

void Gradients::Make(const SegmentGrad& grad, BufferId buffer, Position at) {
  Value& value = At(buffer);
  if (value.used_up) {
    reporter_.Add(
        Rule::kGradNotReduced, at, buffer,
        fmt::format("{} adds a gradient to {}, whose earlier gradient is already on its way to be reduced "
                    "and would be reduced again",
                    reporter_.Instruction(at), reporter_.BufferName(buffer)),
        Chain(value, at));
    value = {};
  }
  if (value.unit < 0) {
    value = {};
    value.unit = grad.unit;
    value.count.assign(plan_.units[grad.unit].parameters.size(), 0);
  }
  ++value.count[grad.parameter];
  if (value.history.empty() || !(value.history.back() == at)) value.history.push_back(at);
}

void Gradients::CheckMade(const Value& value, const std::vector<std::int32_t>& parameters, BufferId buffer,
                          Position at) {
  const Unit& unit = plan_.units[value.unit];
  if (unit.layout == LayoutKind::kFlat || value.used_up)
    return;  // a flat gradient is one tensor, zeros included
  for (const std::int32_t p : parameters) {
    if (value.count[p] > 0) continue;
    reporter_.Add(
        Rule::kReadBeforeWrite, at, buffer,
        fmt::format("{} reads the gradient of {} in {}, but nothing has put it there",
                    reporter_.Instruction(at), unit.parameters[p].fqn, reporter_.BufferName(buffer)),
        Chain(value, at));
  }
}

// The part of `source` that the instruction takes: the parameters that both buffers hold. What is taken is
// used up.
Gradients::Value Gradients::Select(Value& source, const Instruction& instruction, Position at) {
  if (source.used_up) {
    reporter_.Add(Rule::kGradNotReduced, at, instruction.src,
                  fmt::format("{} takes the gradient in {} a second time", reporter_.Instruction(at),
                              reporter_.BufferName(instruction.src)),
                  Chain(source, at));
  }
  std::vector<std::int32_t> parameters = ParametersOf(instruction.src, source.unit);
  const std::vector<std::int32_t> held = ParametersOf(instruction.dst, source.unit);
  std::erase_if(parameters, [&](std::int32_t p) { return !std::ranges::binary_search(held, p); });
  CheckMade(source, parameters, instruction.src, at);
  Value taken = source;
  taken.used_up = false;
  taken.checked = false;
  taken.count.assign(source.count.size(), 0);
  std::vector<std::int32_t> left = source.count;
  for (const std::int32_t p : parameters) std::swap(taken.count[p], left[p]);
  source.history.push_back(at);
  const bool all_taken = std::ranges::all_of(left, [](std::int32_t n) { return n == 0; });
  source.used_up = source.used_up || all_taken;
  if (!all_taken) source.count = std::move(left);
  return taken;
}

// A second copy-in may fill the parameters that the first one left.
bool Gradients::JoinOther(Value& into, const Value& value) const {
  if (into.unit != value.unit || into.used_up || into.sharded != value.sharded ||
      into.replicated != value.replicated || !Near(into.divisor, value.divisor)) {
    return false;
  }
  for (std::size_t p = 0; p < into.count.size(); ++p) {
    if (into.count[p] > 0 && value.count[p] > 0) return false;
  }
  for (std::size_t p = 0; p < into.count.size(); ++p) into.count[p] += value.count[p];
  into.history.insert(into.history.end(), value.history.begin(), value.history.end());
  return true;
}

// A reduction that is not one of FSDP's own two: the user's all-reduce hook, or the partial sums that tensor
// parallelism leaves.
bool Gradients::IsForeign(const Unit& unit, const Instruction& instruction) const {
  const CommunicatorId used = instruction.communicator;
  if (instruction.kind != InstructionKind::kAllReduce ||
      SameGroups(plan_, used, unit.replicate_communicator) ||
      SameGroups(plan_, used, unit.shard_communicator)) {
    return false;
  }
  if (SameGroups(plan_, used, unit.hook_communicator)) return true;
  for (const std::int32_t p : ParametersOf(instruction.src, plan_.buffers[instruction.src].unit)) {
    for (const ParameterPlacement& placement : unit.parameters[p].placements) {
      if (placement.grad_partial && placement.size == plan_.communicators[used].size) return true;
    }
  }
  return false;
}

void Gradients::Reduce(Value& value, const Instruction& instruction, Position at) {
  const Unit& unit = plan_.units[value.unit];
  value.divisor *= instruction.divisor;
  if (instruction.reduce_op == ReduceOp::kAverage) {
    value.divisor *= static_cast<double>(plan_.communicators[instruction.communicator].size);
  }
  if (IsForeign(unit, instruction)) return;
  const bool scatter = instruction.kind == InstructionKind::kReduceScatter;
  const bool over_shards =
      scatter || (SameGroups(plan_, instruction.communicator, unit.shard_communicator) &&
                  !SameGroups(plan_, instruction.communicator, unit.replicate_communicator));
  const CommunicatorId expected = over_shards ? unit.shard_communicator : unit.replicate_communicator;
  bool& done = over_shards ? value.sharded : value.replicated;
  if (done) {
    reporter_.Add(Rule::kGradNotReduced, at, value.unit,
                  fmt::format("{} reduces a gradient of {} that was already reduced over these ranks",
                              reporter_.Instruction(at), reporter_.UnitName(value.unit)),
                  Chain(value, at));
  } else if (!SameGroups(plan_, instruction.communicator, expected)) {
    reporter_.Add(Rule::kGradNotReduced, at, value.unit,
                  fmt::format("{} reduces a gradient of {} over other ranks than the unit's",
                              reporter_.Instruction(at), reporter_.UnitName(value.unit)),
                  Chain(value, at));
  }
  done = true;
}

// Adding to an average over all ranks, which every rank holds, what one rank made: the average of the sums is
// the sum of the averages.
bool Gradients::AddsToAverage(const Value& into, const Value& value) const {
  const Unit& unit = plan_.units[value.unit];
  if (into.unit != value.unit || into.used_up || IsLong(plan_, unit.shard_communicator)) return false;
  const double ranks = IsLong(plan_, unit.replicate_communicator)
                           ? static_cast<double>(plan_.communicators[unit.replicate_communicator].size)
                           : 1.0;
  return into.replicated && Near(into.divisor, ranks) && !value.replicated && Near(value.divisor, 1.0);
}

void Gradients::Accumulate(Value& into, const Value& value, BufferId dst, Position at) {
  if (AddsToAverage(into, value)) {
    into.replicated = false;
    into.divisor = 1.0;
    into.checked = false;
  }
  if (into.unit != value.unit || into.sharded != value.sharded || into.replicated != value.replicated ||
      into.used_up) {
    reporter_.Add(Rule::kGradNotReduced, at, dst,
                  fmt::format("{} adds gradients that are not reduced alike", reporter_.Instruction(at)),
                  Chain(value, at));
    into = value;
    return;
  }
  if (!Near(into.divisor, value.divisor)) {
    reporter_.Add(Rule::kGradDivision, at, dst,
                  fmt::format("{} adds a gradient divided by {} to one divided by {}",
                              reporter_.Instruction(at), value.divisor, into.divisor),
                  Chain(value, at));
  }
  for (std::size_t p = 0; p < into.count.size(); ++p) into.count[p] += value.count[p];
  into.history.push_back(at);
}

void Gradients::Overwrite(Value& old, BufferId dst, Position at) {
  if (old.unit >= 0 && !old.used_up) {
    reporter_.Add(Rule::kGradNotReduced, at, dst,
                  fmt::format("{} overwrites {}, and the gradient in it is lost", reporter_.Instruction(at),
                              reporter_.BufferName(dst)),
                  Chain(old, at));
  }
  old = {};
}

void Gradients::Move(const Instruction& instruction, Position at) {
  At(instruction.src);  // first: looking one up may grow values_
  At(instruction.dst);
  Value& source = At(instruction.src);
  Value& target = At(instruction.dst);
  if (source.unit < 0) {  // no gradient to follow: either it is none, or memory has said what is wrong
    target = {};
    return;
  }
  Value value = Select(source, instruction, at);
  if (instruction.kind == InstructionKind::kReduceScatter) Reduce(value, instruction, at);
  value.history.push_back(at);
  if (instruction.kind == InstructionKind::kGradAccumulate && target.unit >= 0) {
    Accumulate(target, value, instruction.dst, at);
    return;
  }
  if (instruction.kind == InstructionKind::kGradCopyIn && JoinOther(target, value)) return;
  Overwrite(target, instruction.dst, at);
  target = std::move(value);
}

void Gradients::Change(const Instruction& instruction, Position at) {
  Value& value = At(instruction.src);
  if (value.unit < 0) return;
  if (value.used_up) {
    reporter_.Add(Rule::kGradNotReduced, at, instruction.src,
                  fmt::format("{} changes {} after its gradient went on", reporter_.Instruction(at),
                              reporter_.BufferName(instruction.src)),
                  Chain(value, at));
  }
  value.checked = false;
  if (instruction.kind == InstructionKind::kGradScale) {
    value.divisor *= instruction.divisor;
  } else {
    Reduce(value, instruction, at);
  }
  value.history.push_back(at);
}

void Gradients::Release(BufferId buffer, Position at) {
  if (!IsFinal(plan_.buffers[buffer].role)) return;
  Consume(buffer, at);
  At(buffer).used_up = true;
}

void Gradients::Drop(std::int32_t slot, BufferId buffer, Position at) {
  if (static_cast<std::size_t>(slot) >= values_.size()) return;
  Value& value = values_[slot];
  if (value.unit >= 0 && !value.used_up) {
    reporter_.Add(Rule::kGradNotReduced, at, buffer,
                  fmt::format("{} drops {}, and the gradient in it is lost before it is reduced",
                              reporter_.Instruction(at), reporter_.BufferName(buffer)),
                  Chain(value, at));
  }
  value = {};
}

void Gradients::Consume(BufferId buffer, Position at) {
  Value& value = At(buffer);
  if (value.unit >= 0 && !value.used_up) CheckReduced(value, buffer, at);
}

void Gradients::CheckReduced(Value& value, BufferId buffer, Position at) {
  if (value.checked) return;
  const Unit& unit = plan_.units[value.unit];
  const bool shards_missing = IsLong(plan_, unit.shard_communicator) && !value.sharded;
  const bool replicas_missing = IsLong(plan_, unit.replicate_communicator) && !value.replicated;
  if (shards_missing || replicas_missing) {
    reporter_.Add(
        Rule::kGradNotReduced, at, buffer,
        fmt::format("the gradient of {} in {} is not reduced over the {}", reporter_.UnitName(value.unit),
                    reporter_.BufferName(buffer), shards_missing ? "shards" : "replicas"),
        Chain(value, at));
  } else {
    CheckDivisor(value, buffer, at);
  }
  value.checked = true;
}

double Gradients::ExpectedDivisor(const Unit& unit) const {
  const std::optional<double>& all = plan_.strategy.fsdp2.gradient_divide_factor;
  const std::optional<double> factor = unit.gradient_divide_factor ? unit.gradient_divide_factor : all;
  if (plan_.strategy.policy != "fsdp1" && factor.has_value()) return *factor * unit.hook_divisor;
  double ranks = 1;
  for (const CommunicatorId c : {unit.shard_communicator, unit.replicate_communicator}) {
    if (c >= 0) ranks *= static_cast<double>(plan_.communicators[c].size);
  }
  // FSDP1's two factors: one given changes that one alone; a communication hook has its own.
  const Fsdp1Knobs& flat = plan_.strategy.fsdp1;
  const bool given = flat.gradient_predivide_factor || flat.gradient_postdivide_factor;
  if (plan_.strategy.policy == "fsdp1" && given && flat.comm_hook == Fsdp1CommHook::kNone) {
    double before = 1;
    while (std::fmod(ranks, before) == 0 && ranks / before > before) before *= 2;
    const double after = flat.gradient_postdivide_factor.value_or(ranks / before);
    before = flat.gradient_predivide_factor.value_or(before);
    return std::max(before, 1.0) * std::max(after, 1.0);
  }
  return ranks * unit.hook_divisor;
}

void Gradients::CheckDivisor(Value& value, BufferId buffer, Position at) {
  const double expected = ExpectedDivisor(plan_.units[value.unit]);
  if (Near(value.divisor, expected)) return;
  reporter_.Add(
      Rule::kGradDivision, value.history.back(), buffer,
      fmt::format("the gradient of {} in {} is divided by {} in all, but the strategy asks for {}",
                  reporter_.UnitName(value.unit), reporter_.BufferName(buffer), value.divisor, expected),
      Chain(value, at));
}

void Gradients::CheckNoneUnreduced(UnitId unit, Position at) {
  std::vector<char> is_final(values_.size(), false);  // by slot: has (also) the name of a final gradient
  const auto for_each_value = [&](auto&& visit) {
    for (std::size_t i = 0; i < plan_.buffers.size(); ++i) {
      const BufferId buffer = static_cast<BufferId>(i);
      if (!memory_.IsAlive(buffer)) continue;
      const std::size_t slot = memory_.Slot(buffer);
      if (slot < values_.size() && values_[slot].unit >= 0 && !values_[slot].used_up) visit(buffer, slot);
    }
  };
  for_each_value([&](BufferId buffer, std::size_t slot) {
    if (IsFinal(plan_.buffers[buffer].role)) is_final[slot] = true;
  });
  for_each_value([&](BufferId buffer, std::size_t slot) {
    const Value& value = values_[slot];
    if (is_final[slot] || (unit >= 0 && value.unit != unit)) return;
    reporter_.Add(
        Rule::kGradNotReduced, at, buffer,
        fmt::format("{} runs while the gradient of {} in {} is not reduced", reporter_.Instruction(at),
                    reporter_.UnitName(value.unit), reporter_.BufferName(buffer)),
        Chain(value, at));
  });
}

bool Gradients::IsUsedUp(BufferId buffer) const {
  const std::size_t slot = memory_.Slot(buffer);
  return slot < values_.size() && values_[slot].used_up;
}

std::vector<std::int32_t> Gradients::Contributions(BufferId buffer) const {
  if (!memory_.IsAlive(buffer)) return {};
  const std::size_t slot = memory_.Slot(buffer);
  if (slot >= values_.size() || values_[slot].unit < 0 || values_[slot].used_up) return {};
  return values_[slot].count;
}

}  // namespace shardplan::verifier
