#include "tests/executor/toy_model.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "executor/src/host_kernels.h"
#include "shardplan/executor/layout.h"

namespace shardplan::test {
namespace {

using executor::ChunkRows;
using executor::LoadElement;
using executor::StoreElement;

double Modulo(double value, double n) { return value - n * std::floor(value / n); }

double InitialState(std::int64_t rank, std::int64_t step, std::int32_t microbatch) {
  return static_cast<double>(rank + 2 * step + 3 * microbatch);
}

double Fold(double h, double value, std::int64_t element) {
  return Modulo(3 * h + value * static_cast<double>(element % 5 + 1), 97);
}

double Gradient(double value, double h, std::int64_t element, std::int64_t rank, double ranks) {
  const std::int64_t of_element = 3 * element + rank * (element % 4 + 1);
  return ranks * (Modulo(2 * value + h + static_cast<double>(of_element), 5) - 2);
}

// Elements of a parameter that a rank's piece holds: calls visit(element in the parameter, element in the
// piece).
template <typename Visit>
void ForEachOfShard(const UnitParameter& p, std::int64_t pieces, std::int64_t index, Visit&& visit) {
  const std::int64_t rows = p.shape[p.shard_dim];
  const executor::RowRange range = ChunkRows(rows, pieces, index);
  std::int64_t outer = 1;
  for (std::int32_t d = 0; d < p.shard_dim; ++d) outer *= p.shape[d];
  const std::int64_t inner = executor::Numel(p) / rows / outer;
  std::int64_t in_piece = 0;
  for (std::int64_t o = 0; o < outer; ++o) {
    for (std::int64_t i = 0; i < range.count * inner; ++i) {
      visit((o * rows + range.first) * inner + i, in_piece++);
    }
  }
}

// A flat unit's shard: calls visit(parameter, element in it, element in the shard).
template <typename Visit>
void ForEachOfFlatShard(const Unit& unit, std::int64_t pieces, std::int64_t index, Visit&& visit) {
  const std::int64_t shard = unit.flat_numel / pieces;
  for (std::size_t p = 0; p < unit.parameters.size(); ++p) {
    const UnitParameter& parameter = unit.parameters[p];
    for (std::int64_t e = 0; e < executor::Numel(parameter); ++e) {
      const std::int64_t at = parameter.flat_offset + e - index * shard;
      if (at >= 0 && at < shard) visit(p, e, at);
    }
  }
}

std::int64_t ShardIndex(const Plan& plan, const Unit& unit, std::int64_t rank) {
  if (unit.shard_communicator < 0) return 0;
  return executor::RankInGroup(plan.communicators[unit.shard_communicator], rank);
}

// Visits every element of a rank's shard: (parameter, element, part, element in the part).
template <typename Visit>
void ForEachShardElement(const Plan& plan, const Buffer& buffer, std::int64_t rank, Visit&& visit) {
  const Unit& unit = plan.units[buffer.unit];
  const std::int64_t pieces = executor::ShardCount(plan, unit);
  const std::int64_t index = ShardIndex(plan, unit, rank);
  if (unit.layout == LayoutKind::kFlat) {
    ForEachOfFlatShard(unit, pieces, index, [&](std::size_t p, std::int64_t e, std::int64_t at) {
      visit(p, e, std::size_t{0}, at);
    });
    return;
  }
  for (std::size_t p = 0; p < unit.parameters.size(); ++p) {
    ForEachOfShard(unit.parameters[p], pieces, index,
                   [&](std::int64_t e, std::int64_t at) { visit(p, e, p, at); });
  }
}

}  // namespace

double ToyInitialValue(UnitId unit, std::int32_t parameter, std::int64_t element) {
  return Modulo(static_cast<double>(unit * 7 + parameter * 3 + element * 5), 9) - 4;
}

ToyModel::ToyModel(const Plan& plan, std::int64_t rank, ToyStream& stream)
    : plan_(plan),
      rank_(rank),
      stream_(stream),
      bound_(plan.units.size(), -1),
      gradients_(plan.units.size()),
      h_(std::make_shared<std::vector<double>>(16)) {}

void ToyModel::SetInitialShards() {
  for (const BufferId id : ShardBuffers(plan_)) {
    stream_.Submit(0, {id}, [this, id](const BufferMemory& memory) {
      const Buffer& buffer = plan_.buffers[id];
      ForEachShardElement(plan_, buffer, rank_,
                          [&](std::size_t p, std::int64_t e, std::size_t part, std::int64_t at) {
                            StoreElement(memory[0][part], buffer.dtype, at,
                                         ToyInitialValue(buffer.unit, static_cast<std::int32_t>(p), e));
                          });
    });
  }
}

Status ToyModel::BindUnsharded(UnitId unit, BufferId buffer) {
  bound_[unit] = buffer;
  return {};
}

Status ToyModel::BindSharded(UnitId unit, BufferId) {
  bound_[unit] = -1;
  return {};
}

Status ToyModel::ShardedGradientsReady(UnitId unit, BufferId buffer) {
  if (std::ranges::find(gradients_[unit], buffer) == gradients_[unit].end())
    gradients_[unit].push_back(buffer);
  return {};
}

Status ToyModel::ZeroGrad(UnitId) {
  for (std::vector<BufferId>& buffers : gradients_) buffers.clear();
  return {};
}

Status ToyModel::Compute(const executor::ComputeCall& call) {
  const Segment& segment = plan_.segments[call.segment];
  std::vector<BufferId> uses;
  for (const UnitId unit : segment.reads) {
    if (bound_[unit] < 0) return MakeError(ErrorCode::kInternal, plan_.units[unit].fqn + " is not bound");
    uses.push_back(bound_[unit]);
  }
  const std::vector<executor::GradTarget> grads(call.grads.begin(), call.grads.end());
  for (const executor::GradTarget& grad : grads) uses.push_back(grad.buffer);
  const bool starts = grads.empty() && !segment.reads.empty() && segment.reads[0] == 0;
  const double initial = InitialState(rank_, call.step, call.microbatch);
  stream_.Submit(
      call.stream, uses,
      [this, uses, grads, &segment, starts, initial, h = h_,
       microbatch = call.microbatch](const BufferMemory& memory) {
        double& state = (*h)[microbatch];
        if (starts) state = initial;
        // Element of a unit's parameter, wherever its layout puts it.
        const auto value = [&](std::size_t position, std::size_t p, std::int64_t e) {
          const Unit& unit = plan_.units[segment.reads[position]];
          const bool flat = unit.layout == LayoutKind::kFlat;
          return LoadElement(memory[position][flat ? 0 : p], plan_.buffers[uses[position]].dtype,
                             flat ? unit.parameters[p].flat_offset + e : e);
        };
        if (grads.empty()) {
          for (std::size_t r = 0; r < segment.reads.size(); ++r) {
            const Unit& unit = plan_.units[segment.reads[r]];
            for (std::size_t p = 0; p < unit.parameters.size(); ++p) {
              for (std::int64_t e = 0; e < executor::Numel(unit.parameters[p]); ++e)
                state = Fold(state, value(r, p, e), e);
            }
          }
          return;
        }
        for (std::size_t g = 0; g < grads.size(); ++g) {
          const executor::GradTarget& grad = grads[g];
          const Unit& unit = plan_.units[grad.unit];
          const UnitParameter& parameter = unit.parameters[grad.parameter];
          const auto position =
              static_cast<std::size_t>(std::ranges::find(segment.reads, grad.unit) - segment.reads.begin());
          std::byte* to = memory[segment.reads.size() + g][grad.part];
          const DType dtype = plan_.buffers[grad.buffer].dtype;
          const bool joined =
              unit.layout == LayoutKind::kFlat && plan_.buffers[grad.buffer].parts_bytes.size() == 1;
          const std::int64_t first = joined ? parameter.flat_offset : 0;
          for (std::int64_t e = 0; e < executor::Numel(parameter); ++e) {
            const double v = value(position, static_cast<std::size_t>(grad.parameter), e);
            const double before = grad.adds ? LoadElement(to, dtype, first + e) : 0;
            StoreElement(to, dtype, first + e,
                         before + Gradient(v, state, e, rank_, static_cast<double>(plan_.world_size)));
          }
        }
      });
  return {};
}

// SGD with learning rate 1.
Status ToyModel::OptimizerStep(UnitId, std::int32_t, StreamId stream) {
  for (const BufferId shard : ShardBuffers(plan_)) {
    for (const BufferId gradient : gradients_[plan_.buffers[shard].unit]) {
      stream_.Submit(stream, {shard, gradient}, [this, shard, gradient](const BufferMemory& memory) {
        const Buffer& to = plan_.buffers[shard];
        const Buffer& from = plan_.buffers[gradient];
        ForEachShardElement(
            plan_, to, rank_, [&](std::size_t, std::int64_t, std::size_t part, std::int64_t at) {
              const double value =
                  LoadElement(memory[0][part], to.dtype, at) - LoadElement(memory[1][part], from.dtype, at);
              StoreElement(memory[0][part], to.dtype, at, value);
            });
      });
    }
  }
  return {};
}

ToyParameters ToyReference(const Plan& plan, std::int64_t steps) {
  ToyParameters values(plan.units.size());
  for (std::size_t u = 0; u < plan.units.size(); ++u) {
    for (std::size_t p = 0; p < plan.units[u].parameters.size(); ++p) {
      std::vector<double>& value = values[u].emplace_back(executor::Numel(plan.units[u].parameters[p]));
      for (std::size_t e = 0; e < value.size(); ++e) {
        value[e] = ToyInitialValue(static_cast<UnitId>(u), static_cast<std::int32_t>(p),
                                   static_cast<std::int64_t>(e));
      }
    }
  }
  const double ranks = static_cast<double>(plan.world_size);
  for (std::int64_t step = 0; step < steps; ++step) {
    ToyParameters sums = values;
    for (auto& unit : sums) {
      for (auto& parameter : unit) std::ranges::fill(parameter, 0.0);
    }
    const std::int64_t index = std::min<std::int64_t>(step, std::ssize(plan.steps) - 1);
    for (std::int64_t rank = 0; rank < plan.world_size; ++rank) {
      std::vector<double> h(16);
      for (const Trigger& trigger : plan.steps[index].triggers) {
        for (const Instruction& i : trigger.instructions) {
          if (i.kind != InstructionKind::kCompute) continue;
          const Segment& segment = plan.segments[i.segment];
          double& state = h[i.microbatch];
          const bool starts = segment.grads.empty() && !segment.reads.empty() && segment.reads[0] == 0;
          if (starts) state = InitialState(rank, step, i.microbatch);
          if (segment.grads.empty()) {
            for (const UnitId u : segment.reads) {
              for (const std::vector<double>& value : values[u]) {
                for (std::size_t e = 0; e < value.size(); ++e) {
                  state = Fold(state, value[e], static_cast<std::int64_t>(e));
                }
              }
            }
          }
          for (const SegmentGrad& grad : segment.grads) {
            const std::vector<double>& value = values[grad.unit][grad.parameter];
            for (std::size_t e = 0; e < value.size(); ++e) {
              sums[grad.unit][grad.parameter][e] +=
                  Gradient(value[e], state, static_cast<std::int64_t>(e), rank, ranks);
            }
          }
        }
      }
    }
    for (std::size_t u = 0; u < values.size(); ++u) {
      for (std::size_t p = 0; p < values[u].size(); ++p) {
        for (std::size_t e = 0; e < values[u][p].size(); ++e) values[u][p][e] -= sums[u][p][e] / ranks;
      }
    }
  }
  return values;
}

std::string CompareShard(const Plan& plan, BufferId param_sharded, const std::vector<const std::byte*>& parts,
                         std::int64_t rank, const ToyParameters& expected) {
  const Buffer& buffer = plan.buffers[param_sharded];
  std::string difference;
  ForEachShardElement(plan, buffer, rank,
                      [&](std::size_t p, std::int64_t e, std::size_t part, std::int64_t at) {
                        const double found = LoadElement(parts[part], buffer.dtype, at);
                        const double wanted = expected[buffer.unit][p][static_cast<std::size_t>(e)];
                        if (found == wanted || !difference.empty()) return;
                        difference = fmt::format("rank {}: element {} of {} is {} instead of {}", rank, e,
                                                 plan.units[buffer.unit].parameters[p].fqn, found, wanted);
                      });
  return difference;
}

std::vector<BufferId> ShardBuffers(const Plan& plan) {
  std::vector<BufferId> buffers;
  for (std::size_t b = 0; b < plan.buffers.size(); ++b) {
    if (plan.buffers[b].role == BufferRole::kParamSharded) buffers.push_back(static_cast<BufferId>(b));
  }
  return buffers;
}

}  // namespace shardplan::test
