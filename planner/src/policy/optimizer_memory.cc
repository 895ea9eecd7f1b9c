// SPDX-License-Identifier: Apache-2.0
#include "policy/optimizer_memory.h"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <set>
#include <utility>

#include "shardplan/schemas/io.h"
#include "shardplan/schemas/precision.h"

namespace shardplan {

OptimizerMemory::OptimizerMemory(const Trace& trace, const Strategy& strategy, const Partition& partition,
                                 ProgramBuilder& builder)
    : optimizer_(strategy.optimizer),
      use_orig_params_(strategy.fsdp1.use_orig_params),
      comm_hook_(strategy.fsdp1.comm_hook),
      partition_(partition),
      builder_(builder),
      muon_(trace, strategy, partition, builder) {
  for (const UnitChoice& choice : partition.units) {
    state_.has_states.emplace_back(choice.unit.parameters.size(), false);
  }
}

Status OptimizerMemory::Check() const {
  const bool offloads = std::ranges::any_of(partition_.units, &UnitChoice::cpu_offload);
  if (Status s = CheckGradDTypes(); !s) return s;
  if (Status s = muon_.Check(); !s) return s;
  if (!optimizer_.capturable || !offloads) return {};
  return MakeInputError("/optimizer/capturable",
                        "a capturable optimizer does not step parameters in host memory", "true",
                        "no cpu_offload");
}

// torch's Adam and AdamW interpolate between a state in the parameter's dtype and the gradient; fused kernels
// take one dtype.
Status OptimizerMemory::CheckGradDTypes() const {
  const OptimizerDescription& is = DescriptionOf(optimizer_.kind);
  const bool one_dtype = is.gradients == GradientDType::kOfParameter;
  const bool fused = ImplementationOf(optimizer_) == OptimizerImplementation::kFused;
  if (optimizer_.kind == OptimizerKind::kNone || (!one_dtype && !fused)) return {};
  for (const UnitChoice& choice : partition_.units) {
    const bool flat = choice.unit.layout == LayoutKind::kFlat;
    for (const UnitParameter& parameter : choice.unit.parameters) {
      const DType found = flat ? FlatGradDType(choice) : ShardedGradDType(parameter);
      if (!parameter.requires_grad || parameter.muon || found == parameter.dtype) continue;
      return MakeInputError(
          "/optimizer",
          fmt::format(
              "PyTorch fails here (expected dtype {} for `end` but got dtype {}): {} has gradients of "
              "another dtype than its own ({})",
              Name(parameter.dtype), Name(found), parameter.fqn,
              flat ? "keep_low_precision_grads" : "grad_dtype"),
          one_dtype ? std::string(is.name) : "a fused kernel", "sgd or adafactor, not fused; or none");
    }
  }
  return {};
}

// The dtype of .grad when the backward is over (_post_backward_hook, prepare_gradient_for_optim).
DType OptimizerMemory::FlatGradDType(const UnitChoice& choice) const {
  const Unit& unit = choice.unit;
  const bool compresses =
      comm_hook_ == Fsdp1CommHook::kFp16Compress || comm_hook_ == Fsdp1CommHook::kBf16Compress;
  if (!choice.mixed_precision.keep_low_precision_grads) return unit.orig_dtype;
  if (choice.shard_size > 1) return unit.param_dtype;
  return compresses ? unit.orig_dtype : unit.reduce_dtype;
}

std::vector<OptimizerShard> OptimizerMemory::ShardsOf(const SteppedUnit& stepped) const {
  const Unit& unit = partition_.units[stepped.unit].unit;
  const std::int64_t ranks = unit.shard_communicator < 0 ? 1 : partition_.units[stepped.unit].shard_size;
  std::vector<OptimizerShard> shards = OptimizerShardsOf(unit, ranks, use_orig_params_);
  if (unit.layout == LayoutKind::kPerParameter) {
    std::erase_if(shards, [&](const OptimizerShard& shard) {
      return !std::ranges::binary_search(stepped.parameters, shard.parameter);
    });
  }
  return shards;
}

// Offloaded shards are stepped on the host.
MemoryKind OptimizerMemory::MemoryOf(UnitId unit) const {
  return partition_.units[unit].cpu_offload ? MemoryKind::kHost : MemoryKind::kDevice;
}

void OptimizerMemory::AllocateStates(UnitId unit, const std::vector<OptimizerShard>& shards,
                                     StreamId stream) {
  std::vector<Bytes> parts;
  std::int32_t first = 0;  // parameter; the unit's others may have states in a buffer of their own
  for (const OptimizerShard& shard : shards) {
    std::vector<bool>::reference made = state_.has_states[unit][static_cast<std::size_t>(shard.parameter)];
    const std::vector<Bytes> states = OptimizerStates(optimizer_, shard);
    if (made || states.empty()) continue;
    made = true;
    if (parts.empty()) first = shard.parameter;
    parts.insert(parts.end(), states.begin(), states.end());
  }
  if (parts.empty()) return;
  builder_.SetUnit(unit);
  builder_.Allocate(
      builder_.UnitBuffer(unit, BufferRole::kOptimizerState, partition_.units[unit].unit.orig_dtype,
                          std::move(parts), {}, first > 0 ? fmt::format("p{}", first) : std::string(),
                          MemoryOf(unit)),
      MemoryOf(unit) == MemoryKind::kDevice ? stream : kHost);
}

// Shards that the optimizer steps at once, in the order of the model's parameters. Flat parameters are those
// of the modules that were wrapped: their units' order.
std::vector<OptimizerMemory::Stepped> OptimizerMemory::InModelOrder(
    const std::vector<SteppedUnit>& units) const {
  std::vector<Stepped> shards;
  for (const SteppedUnit& stepped : units) {
    const UnitChoice& choice = partition_.units[stepped.unit];
    const bool flat = choice.unit.layout == LayoutKind::kFlat && !use_orig_params_;
    for (OptimizerShard& shard : ShardsOf(stepped)) {
      const ParameterId id = choice.parameter_ids[static_cast<std::size_t>(shard.parameter)];
      shards.push_back({flat ? stepped.unit : id, stepped.unit, std::move(shard)});
    }
  }
  std::ranges::stable_sort(shards, {}, &Stepped::place);
  return shards;
}

void OptimizerMemory::Reduced(const SteppedUnit& unit, EventId reduced) {
  reduced_[unit.unit] = {unit, reduced};
  std::set<UnitId> all;
  for (const auto& [id, gradients] : reduced_) all.insert(id);
  builder_.SetReason("optimizer");
  for (const MuonStep::ReadyExchange& ready : muon_.Ready(all)) {
    std::set<EventId> events;
    for (const UnitId of : ready.units) {
      AllocateStates(of, ShardsOf(reduced_[of].unit), kCompute);
      events.insert(reduced_[of].reduced);
    }
    muon_.Begin(ready.exchange, events);
  }
}

// Muon's matrices come before the rest, as torch's documentation steps them.
void OptimizerMemory::Step(const std::vector<SteppedUnit>& units) {
  builder_.SetReason("optimizer");
  const bool on_host = !units.empty() && std::ranges::all_of(units, [&](const SteppedUnit& stepped) {
    return MemoryOf(stepped.unit) != MemoryKind::kDevice;
  });
  const StreamId stream = on_host ? kHost : kCompute;
  const std::vector<Stepped> ordered = InModelOrder(units);
  std::vector<OptimizerShard> stepped_together;
  for (auto first = ordered.begin(); first != ordered.end();) {
    const auto last = std::ranges::find_if(
        first, ordered.end(), [&](const Stepped& stepped) { return stepped.unit != first->unit; });
    std::vector<OptimizerShard> run;
    std::transform(first, last, std::back_inserter(run),
                   [](const Stepped& stepped) { return stepped.shard; });
    AllocateStates(first->unit, run, kCompute);
    // Takes the shards in device memory, or those in host memory if all units are offloaded.
    if (on_host || MemoryOf(first->unit) == MemoryKind::kDevice)
      stepped_together.insert(stepped_together.end(), run.begin(), run.end());
    first = last;
  }
  std::vector<MuonStep::Matrix> matrices;
  for (const Stepped& stepped : ordered) {
    if (stepped.shard.muon) matrices.push_back({stepped.unit, stepped.shard.parameter});
  }
  muon_.Step(matrices);
  reduced_.clear();
  builder_.SetUnit(-1);
  // The rest has nothing to do where Muon steps all.
  if (!matrices.empty() && matrices.size() == ordered.size()) return;
  BufferId temporary = -1;
  std::vector<Bytes> parts = OptimizerTemporaries(optimizer_, stepped_together);
  if (!parts.empty()) {
    temporary = builder_.AddBuffer({.name = "optimizer.temp",
                                    .role = BufferRole::kOptimizerTemp,
                                    .dtype = partition_.units[units.front().unit].unit.orig_dtype,
                                    .parts_bytes = std::move(parts),
                                    .memory = on_host ? MemoryKind::kHost : MemoryKind::kDevice});
    builder_.Allocate(temporary, stream);
  }
  if (optimizer_.kind != OptimizerKind::kNone) builder_.Emit(InstructionKind::kOptimizerStep, stream);
  if (temporary >= 0) builder_.Free(temporary, stream);
}

}  // namespace shardplan
