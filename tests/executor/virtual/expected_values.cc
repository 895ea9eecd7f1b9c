// SPDX-License-Identifier: Apache-2.0
#include "tests/executor/virtual/expected_values.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "executor/src/replay/host_kernels.h"
#include "shardplan/executor/collectives.h"
#include "shardplan/schemas/exchanges.h"

namespace shardplan::test {
namespace {

std::uint64_t Hash(std::initializer_list<std::int64_t> numbers) {
  std::uint64_t hash = 0x9E3779B97F4A7C15u;
  for (const std::int64_t number : numbers) {
    hash = (hash ^ static_cast<std::uint64_t>(number)) * 0xD6E8FEB86659FD93u;
    hash ^= hash >> 32;
  }
  return hash;
}

// To [-8, 8].
double Wrap(double value) { return value - 17 * std::floor((value + 8) / 17); }

// The smallest number that `divisor` divides without a remainder.
double Multiple(double divisor) {
  double multiple = 1;
  while (std::fmod(multiple, divisor) != 0) ++multiple;
  return multiple;
}

std::int64_t Numel(const UnitParameter& parameter) {
  return std::accumulate(parameter.shape.begin(), parameter.shape.end(), std::int64_t{1},
                         std::multiplies<>());
}

}  // namespace

ExpectedValues::ExpectedValues(const Plan& plan, const Trace& trace, std::int64_t steps)
    : plan_(plan),
      trace_(trace),
      steps_(steps),
      of_(plan.units.size()),
      reads_(static_cast<std::size_t>(steps)),
      syncs_(plan.units.size(), true),
      all_reduces_(plan.units.size(), true) {
  MakeGroups();
  MakeShards();
  RunProgram();
}

// Shards, replicas, what the user's all-reduce hook reduces over, and other dimensions of the mesh that leave
// the parameter whole and its gradient a partial sum.
std::vector<Communicator> ExpectedValues::ReducedOver(const Unit& unit,
                                                      const UnitParameter& parameter) const {
  std::vector<Communicator> over;
  for (const CommunicatorId id :
       {unit.shard_communicator, unit.replicate_communicator, unit.hook_communicator}) {
    if (id >= 0) over.push_back(plan_.communicators[id]);
  }
  for (const ParameterPlacement& placement : parameter.placements) {
    if (!placement.grad_partial) continue;
    Communicator dim = {placement.mesh_dim, placement.size, 1};
    for (auto of = plan_.mesh.rbegin(); of != plan_.mesh.rend() && of->name != placement.mesh_dim; ++of) {
      dim.stride *= of->size;
    }
    over.push_back(dim);
  }
  return over;
}

void ExpectedValues::MakeGroups() {
  for (const Unit& unit : plan_.units) {
    auto& of_unit = groups_.emplace_back();
    for (const UnitParameter& parameter : unit.parameters) {
      auto& of_parameter = of_unit.emplace_back();
      for (std::int64_t rank = 0; rank < plan_.world_size; ++rank) {
        std::set<std::int64_t> group = {rank};
        for (const Communicator& communicator : ReducedOver(unit, parameter)) {
          const std::set<std::int64_t> before = group;
          for (const std::int64_t member : before) {
            const std::vector<std::int64_t> others = executor::GroupOf(communicator, member);
            group.insert(others.begin(), others.end());
          }
        }
        of_parameter.emplace_back(group.begin(), group.end());
      }
    }
  }
}

// per_parameter: as torch.chunk cuts along shard_dim, every piece padded at its end. flat: equal pieces of
// the flat parameter.
void ExpectedValues::MakeShards() {
  for (const Unit& unit : plan_.units) {
    std::vector<std::vector<ShardRun>>& of_unit = shards_.emplace_back();
    for (std::int64_t rank = 0; rank < plan_.world_size; ++rank) {
      std::vector<ShardRun>& runs = of_unit.emplace_back();
      const bool sharded = unit.shard_communicator >= 0;
      const std::int64_t pieces = sharded ? plan_.communicators[unit.shard_communicator].size : 1;
      const std::int64_t piece =
          sharded ? executor::RankInGroup(plan_.communicators[unit.shard_communicator], rank) : 0;
      for (std::size_t p = 0; p < unit.parameters.size(); ++p) {
        const UnitParameter& parameter = unit.parameters[p];
        const std::int64_t numel = Numel(parameter);
        const auto id = static_cast<std::int32_t>(p);
        if (unit.layout == LayoutKind::kFlat) {
          const std::int64_t shard_numel = unit.flat_numel / pieces;
          const std::int64_t first = std::max(parameter.flat_offset, piece * shard_numel);
          const std::int64_t end = std::min(parameter.flat_offset + numel, (piece + 1) * shard_numel);
          if (first < end) {
            runs.push_back({id, first - parameter.flat_offset, first - piece * shard_numel, end - first});
          }
          continue;
        }
        const auto dim = static_cast<std::size_t>(parameter.shard_dim);
        const std::int64_t rows = parameter.shape[dim];
        if (numel == 0) continue;
        const std::int64_t outer = std::accumulate(parameter.shape.begin(),
                                                   parameter.shape.begin() + static_cast<std::ptrdiff_t>(dim),
                                                   std::int64_t{1}, std::multiplies<>());
        const std::int64_t inner = numel / outer / rows;
        const std::int64_t most = (rows + pieces - 1) / pieces;
        const std::int64_t first = std::min(rows, piece * most);
        const std::int64_t count = std::min(rows, first + most) - first;
        for (std::int64_t o = 0; o < outer && count > 0; ++o) {
          runs.push_back({id, (o * rows + first) * inner, o * count * inner, count * inner});
        }
      }
    }
  }
}

bool ExpectedValues::IsUnder(UnitId unit, const std::string& module) const {
  return std::ranges::any_of(plan_.units[unit].modules, [&](const std::string& own) {
    return module.empty() || own == module || own.starts_with(module + ".");
  });
}

double ExpectedValues::DivisorOf(UnitId id) const {
  const Unit& unit = plan_.units[id];
  const Strategy& strategy = plan_.strategy;
  double ranks = 1;
  for (const CommunicatorId communicator : {unit.shard_communicator, unit.replicate_communicator}) {
    if (communicator >= 0) ranks *= static_cast<double>(plan_.communicators[communicator].size);
  }
  if (strategy.policy == "fsdp1") {
    const Fsdp1Knobs& knobs = strategy.fsdp1;
    if (!knobs.gradient_predivide_factor && !knobs.gradient_postdivide_factor) return ranks;
    return knobs.gradient_predivide_factor.value_or(1) * knobs.gradient_postdivide_factor.value_or(1);
  }
  const std::optional<double>& factor =
      unit.gradient_divide_factor ? unit.gradient_divide_factor : strategy.fsdp2.gradient_divide_factor;
  return factor.value_or(ranks) * unit.hook_divisor;
}

void ExpectedValues::RunProgram() {
  for (std::size_t u = 0; u < plan_.units.size(); ++u) {
    for (const UnitParameter& parameter : plan_.units[u].parameters) {
      of_[u].push_back({.numel = Numel(parameter), .divisor = DivisorOf(static_cast<UnitId>(u))});
    }
  }
  static const std::vector<StepProgram> kDefault = {
      {ForwardCall{}, BackwardCall{}, OptimizerStepCall{}, ZeroGradCall{}}};
  const std::vector<StepProgram>& program =
      plan_.strategy.program.empty() ? kDefault : plan_.strategy.program;
  const Optimizer& optimizer = plan_.strategy.optimizer;
  for (const ModuleCall& call : plan_.strategy.setup) Call(call);
  for (std::int64_t step = 0; step < steps_; ++step) {
    for (const ProgramCall& call : program[std::min<std::size_t>(step, program.size() - 1)]) {
      if (const auto* forward = std::get_if<ForwardCall>(&call)) {
        RunForward(*forward, step);
      } else if (const auto* backward = std::get_if<BackwardCall>(&call)) {
        RunBackward(*backward);
      } else if (const auto* setter = std::get_if<ModuleCall>(&call)) {
        Call(*setter);
      } else if (std::holds_alternative<ZeroGradCall>(call)) {
        for (std::vector<OfParameter>& unit : of_) {
          for (OfParameter& parameter : unit) parameter.arrived.clear();
        }
      } else if (optimizer.kind != OptimizerKind::kNone && !optimizer.in_backward) {
        for (std::vector<OfParameter>& unit : of_) {
          for (OfParameter& parameter : unit) parameter.reduced.push_back(parameter.arrived);
        }
      }
    }
  }
}

void ExpectedValues::RunForward(const ForwardCall& call, std::int64_t step) {
  const auto reads = [&](ParameterId parameter, ModuleId) {
    for (std::size_t u = 0; u < plan_.units.size(); ++u) {
      for (const UnitParameter& own : plan_.units[u].parameters) {
        if (own.fqn == trace_.parameters[parameter].fqn && trace_.parameters[parameter].shared_with.empty()) {
          reads_[step].insert({call.microbatch, static_cast<UnitId>(u)});
        }
      }
    }
  };
  const std::vector<TraceEvent>& events = trace_.forwards[call.trace].events;
  const bool has_operators = std::ranges::any_of(
      events, [](const TraceEvent& e) { return std::holds_alternative<OperatorEvent>(e); });
  for (const TraceEvent& event : events) {
    if (const auto* op = std::get_if<OperatorEvent>(&event)) {
      for (const ParameterId parameter : op->parameters) reads(parameter, op->module);
    } else if (const auto* enter = std::get_if<EnterEvent>(&event); enter != nullptr && !has_operators) {
      for (const NamedParameter& named : trace_.modules[enter->module].parameters) {
        reads(named.parameter, enter->module);
      }
    }
  }
}

// A parameter that several units hold gets a gradient in each of which a module has run that names it.
bool ExpectedValues::GetsGradient(const UnitParameter& own, const shardplan::Parameter& traced,
                                  const Pass& backward) const {
  if (traced.shared_with.empty()) return own.fqn == traced.fqn;
  std::vector<std::string> names = own.shared_with;
  names.push_back(own.fqn);
  const auto is_one = [&](const std::string& name) {
    return name == traced.fqn || std::ranges::find(traced.shared_with, name) != traced.shared_with.end();
  };
  if (!std::ranges::all_of(names, is_one)) return false;
  for (const std::int32_t f : backward.forwards) {
    for (const TraceEvent& event : trace_.forwards[f].events) {
      const auto* enter = std::get_if<EnterEvent>(&event);
      if (enter == nullptr) continue;
      const Module& module = trace_.modules[enter->module];
      for (const NamedParameter& named : module.parameters) {
        const std::string name = module.fqn.empty() ? named.name : module.fqn + "." + named.name;
        if (std::ranges::find(names, name) != names.end()) return true;
      }
    }
  }
  return false;
}

void ExpectedValues::RunBackward(const BackwardCall& call) {
  std::set<UnitId> with_gradients;
  for (const TraceEvent& event : trace_.backwards[call.trace].events) {
    const auto* grad = std::get_if<ParameterGradEvent>(&event);
    if (grad == nullptr) continue;
    for (std::size_t u = 0; u < plan_.units.size(); ++u) {
      for (std::size_t p = 0; p < plan_.units[u].parameters.size(); ++p) {
        if (!GetsGradient(plan_.units[u].parameters[p], trace_.parameters[grad->parameter],
                          trace_.backwards[call.trace])) {
          continue;
        }
        with_gradients.insert(static_cast<UnitId>(u));
        of_[u][p].waiting.push_back(of_[u][p].made++);
      }
    }
  }
  // Frozen parts of a flat parameter that trains get gradients, which the trace of the plain model has not.
  std::set<std::pair<UnitId, std::int32_t>> of_frozen;
  for (const Segment& segment : plan_.segments) {
    for (const SegmentGrad& grad : segment.grads) {
      if (!plan_.units[grad.unit].parameters[grad.parameter].requires_grad) {
        of_frozen.insert({grad.unit, grad.parameter});
      }
    }
  }
  for (const auto& [unit, parameter] : of_frozen) {
    with_gradients.insert(unit);
    of_[unit][parameter].waiting.push_back(of_[unit][parameter].made++);
  }
  const bool fsdp1 = plan_.strategy.policy == "fsdp1";
  for (std::size_t u = 0; u < plan_.units.size(); ++u) {
    const auto unit = static_cast<UnitId>(u);
    const bool replicates = plan_.units[u].replicate_communicator >= 0;
    if (!syncs_[u] || (replicates && !all_reduces_[u])) continue;
    if (fsdp1 && !with_gradients.contains(unit)) continue;  // only its own post-backward hook reduces
    for (std::size_t p = 0; p < of_[u].size(); ++p) {
      OfParameter& parameter = of_[u][p];
      parameter.arrived.insert(parameter.arrived.end(), parameter.waiting.begin(), parameter.waiting.end());
      parameter.waiting.clear();
      // Stepped, and its gradient dropped, as soon as it is there.
      if (!plan_.strategy.optimizer.in_backward || parameter.arrived.empty()) continue;
      parameter.reduced.push_back(std::exchange(parameter.arrived, {}));
    }
  }
}

void ExpectedValues::Call(const ModuleCall& call) {
  const bool value = call.value.value_or(true);
  for (std::size_t u = 0; u < plan_.units.size(); ++u) {
    const bool meant = call.recurse ? IsUnder(static_cast<UnitId>(u), call.module)
                                    : std::ranges::count(plan_.units[u].modules, call.module) > 0;
    if (!meant) continue;
    if (call.method == "set_requires_gradient_sync") {
      syncs_[u] = all_reduces_[u] = value;
    } else if (call.method == "set_requires_all_reduce") {
      all_reduces_[u] = value;
    } else if (call.method == "no_sync") {
      syncs_[u] = !value;
    }
  }
}

ExpectedValues::Numbers ExpectedValues::MadeNumbers(UnitId unit, std::int32_t parameter, std::int64_t rank,
                                                    std::int64_t index) const {
  const OfParameter& of = of_[unit][parameter];
  const double multiple = Multiple(of.divisor);
  Numbers numbers(static_cast<std::size_t>(of.numel));
  for (std::size_t e = 0; e < numbers.size(); ++e) {
    const std::uint64_t hash = Hash({unit, parameter, static_cast<std::int64_t>(e), rank, index, 1});
    numbers[e] = multiple * static_cast<double>(1 + hash % 3);
  }
  return numbers;
}

ExpectedValues::Numbers ExpectedValues::ReducedNumbers(UnitId unit, std::int32_t parameter, std::int64_t rank,
                                                       std::int64_t version) const {
  const OfParameter& of = of_[unit][parameter];
  Numbers sum(static_cast<std::size_t>(of.numel));
  for (const std::int64_t index : of.reduced[version]) {
    for (const std::int64_t member : groups_[unit][parameter][rank]) {
      const Numbers made = MadeNumbers(unit, parameter, member, index);
      for (std::size_t e = 0; e < sum.size(); ++e) sum[e] += made[e];
    }
  }
  for (double& number : sum) number /= of.divisor;
  return sum;
}

ExpectedValues::Numbers ExpectedValues::UpdatedNumbers(UnitId unit, std::int32_t parameter, std::int64_t rank,
                                                       std::int64_t version) const {
  Numbers numbers = ReducedNumbers(unit, parameter, rank, version);
  for (const Exchange& exchange : plan_.exchanges) {
    for (const ExchangedMatrix& matrix : exchange.matrices) {
      if (matrix.unit != unit || matrix.parameter != parameter) continue;
      const UnitParameter& own = plan_.units[unit].parameters[parameter];
      const auto begin = numbers.begin() + matrix.first_row * ColumnsOf(own);
      std::reverse(begin, begin + RowsOf(own, matrix) * ColumnsOf(own));
    }
  }
  return numbers;
}

const ExpectedValues::Numbers& ExpectedValues::ParameterNumbers(UnitId unit, std::int32_t parameter,
                                                                std::int64_t rank, std::int64_t version) {
  const std::int64_t first = groups_[unit][parameter][rank].front();
  const auto [entry, added] = parameters_.try_emplace({unit, parameter, first, version});
  Numbers& numbers = entry->second;
  if (!added) return numbers;
  numbers.resize(static_cast<std::size_t>(of_[unit][parameter].numel));
  if (version == 0) {
    for (std::size_t e = 0; e < numbers.size(); ++e) {
      numbers[e] =
          Wrap(static_cast<double>(Hash({unit, parameter, static_cast<std::int64_t>(e), first, 0, 0}) % 17));
    }
    return numbers;
  }
  const Numbers& before = ParameterNumbers(unit, parameter, rank, version - 1);
  const Numbers gradient = UpdatedNumbers(unit, parameter, rank, version - 1);
  for (std::size_t e = 0; e < numbers.size(); ++e) numbers[e] = Wrap(before[e] - gradient[e]);
  return numbers;
}

std::span<const std::byte> ExpectedValues::Bytes(const Key& key, const Numbers& numbers) {
  const DType dtype = std::get<DType>(key);
  std::vector<std::byte>& bytes = bytes_[key];
  bytes.resize(numbers.size() * static_cast<std::size_t>(SizeBytes(dtype)));
  for (std::size_t e = 0; e < numbers.size(); ++e) {
    executor::StoreElement(bytes.data(), dtype, static_cast<std::int64_t>(e), numbers[e]);
  }
  return bytes;
}

std::span<const std::byte> ExpectedValues::Parameter(UnitId unit, std::int32_t parameter, std::int64_t rank,
                                                     std::int64_t version, DType dtype) {
  const Key key = {What::kParameter, unit, parameter, groups_[unit][parameter][rank].front(), version, dtype};
  if (const auto found = bytes_.find(key); found != bytes_.end()) return found->second;
  return Bytes(key, ParameterNumbers(unit, parameter, rank, version));
}

std::span<const std::byte> ExpectedValues::Reduced(UnitId unit, std::int32_t parameter, std::int64_t rank,
                                                   std::int64_t version, DType dtype) {
  if (of_[unit][parameter].reduced[version].empty()) return {};
  const Key key = {What::kReduced, unit, parameter, groups_[unit][parameter][rank].front(), version, dtype};
  if (const auto found = bytes_.find(key); found != bytes_.end()) return found->second;
  return Bytes(key, ReducedNumbers(unit, parameter, rank, version));
}

std::span<const std::byte> ExpectedValues::Updated(UnitId unit, std::int32_t parameter, std::int64_t rank,
                                                   std::int64_t version, DType dtype) {
  if (of_[unit][parameter].reduced[version].empty()) return {};
  const Key key = {What::kUpdated, unit, parameter, groups_[unit][parameter][rank].front(), version, dtype};
  if (const auto found = bytes_.find(key); found != bytes_.end()) return found->second;
  return Bytes(key, UpdatedNumbers(unit, parameter, rank, version));
}

std::span<const std::byte> ExpectedValues::Made(UnitId unit, std::int32_t parameter, std::int64_t rank,
                                                std::int64_t index, DType dtype) {
  const Key key = {What::kMade, unit, parameter, rank, index, dtype};
  if (const auto found = bytes_.find(key); found != bytes_.end()) return found->second;
  return Bytes(key, MadeNumbers(unit, parameter, rank, index));
}

}  // namespace shardplan::test
