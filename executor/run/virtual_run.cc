// `shardplan run --device virtual`: does the schedule hold when the streams run in the worst order?
#include <fmt/format.h>

#include <cstdio>
#include <memory>
#include <vector>

#include "shardplan/executor/replayer.h"
#include "shardplan/executor/virtual_backend.h"
#include "worker.h"

namespace shardplan::run {
namespace {

// The first parameter element of a shard that is not what it was: nothing is computed, so nothing may change.
// Wrong synchronisation shows as NaN in what is reduced, which the sum below carries into the shards.
Status CheckShards(const Plan& plan, executor::VirtualMachine& machine) {
  for (std::int64_t rank = 0; rank < plan.world_size; ++rank) {
    for (std::size_t b = 0; b < plan.buffers.size(); ++b) {
      if (plan.buffers[b].role != BufferRole::kParamSharded) continue;
      for (std::size_t p = 0; p < plan.buffers[b].parts_bytes.size(); ++p) {
        for (const std::byte byte :
             machine.Memory(rank, static_cast<BufferId>(b), static_cast<std::int32_t>(p))) {
          if (byte == std::byte{0}) continue;
          return MakeError(
              ErrorCode::kNegative,
              fmt::format("rank {}: {} was overwritten: a wait is missing, or a free comes too early", rank,
                          plan.buffers[b].name));
        }
      }
    }
  }
  return {};
}

// Computes zeros from zeros; poison stays poison.
class ZeroModel final : public executor::Model {
 public:
  ZeroModel(const Plan& plan, executor::VirtualMachine& machine, std::int64_t rank)
      : plan_(plan),
        machine_(machine),
        rank_(rank),
        bound_(plan.units.size(), -1),
        gradients_(plan.units.size()) {}

  Status BindUnsharded(UnitId unit, BufferId buffer) override {
    bound_[unit] = buffer;
    return {};
  }
  Status ShardedGradientsReady(UnitId unit, BufferId buffer) override {
    gradients_[unit].push_back(buffer);
    return {};
  }
  Status ZeroGrad(UnitId) override {
    for (std::vector<BufferId>& buffers : gradients_) buffers.clear();
    return {};
  }
  Status Compute(const executor::ComputeCall& call) override;
  Status OptimizerStep(UnitId unit, std::int32_t parameter, StreamId stream) override;

 private:
  using Spans = std::vector<std::span<std::byte>>;
  Spans Parts(BufferId buffer) {
    Spans spans;
    for (std::size_t p = 0; p < plan_.buffers[buffer].parts_bytes.size(); ++p) {
      spans.push_back(machine_.Memory(rank_, buffer, static_cast<std::int32_t>(p)));
    }
    return spans;
  }
  // to = to | from, byte by byte: zero stays zero, poison spreads to all of `to`.
  static void Spread(const Spans& from, const Spans& to, bool clear) {
    std::byte any{0};
    for (const auto& span : from) {
      for (const std::byte byte : span) any |= byte;
    }
    for (const auto& span : to) {
      for (std::byte& byte : span) byte = clear ? any : byte | any;
    }
  }

  const Plan& plan_;
  executor::VirtualMachine& machine_;
  std::int64_t rank_;
  std::vector<BufferId> bound_;
  std::vector<std::vector<BufferId>> gradients_;
};

Status ZeroModel::Compute(const executor::ComputeCall& call) {
  std::vector<BufferId> uses;
  Spans from;
  for (const UnitId unit : plan_.segments[call.segment].reads) {
    if (bound_[unit] < 0) continue;
    uses.push_back(bound_[unit]);
    for (const auto& span : Parts(bound_[unit])) from.push_back(span);
  }
  Spans fresh;
  Spans added;
  for (const executor::GradTarget& grad : call.grads) {
    uses.push_back(grad.buffer);
    (grad.adds ? added : fresh).push_back(Parts(grad.buffer)[grad.part]);
  }
  machine_.Enqueue(rank_, call.stream, uses, [from, fresh, added] {
    Spread(from, fresh, true);
    Spread(from, added, false);
  });
  return {};
}

Status ZeroModel::OptimizerStep(UnitId unit, std::int32_t, StreamId stream) {
  for (std::size_t b = 0; b < plan_.buffers.size(); ++b) {
    const Buffer& shard = plan_.buffers[b];
    if (shard.role != BufferRole::kParamSharded || (unit >= 0 && shard.unit != unit) || shard.unit < 0)
      continue;
    for (const BufferId gradient : gradients_[shard.unit]) {
      const std::vector<BufferId> uses = {static_cast<BufferId>(b), gradient};
      machine_.Enqueue(rank_, stream, uses, [from = Parts(gradient), to = Parts(static_cast<BufferId>(b))] {
        Spread(from, to, false);
      });
    }
  }
  return {};
}

}  // namespace

Status RunVirtual(const Plan& plan, const RunOptions& options) {
  const auto machine = executor::VirtualMachine::Create(plan, options.seed);
  std::vector<std::unique_ptr<ZeroModel>> models;
  std::vector<std::unique_ptr<executor::Replayer>> replayers;
  std::vector<executor::Replayer*> pointers;
  for (std::int64_t rank = 0; rank < plan.world_size; ++rank) {
    models.push_back(std::make_unique<ZeroModel>(plan, *machine, rank));
    auto replayer = executor::Replayer::Create(plan, rank, machine->device(rank), machine->collectives(rank),
                                               models.back().get());
    if (!replayer) return std::unexpected(replayer.error());
    replayers.push_back(std::move(*replayer));
    pointers.push_back(replayers.back().get());
  }
  if (Status status = executor::ReplayOnVirtual(*machine, pointers, options.steps); !status) return status;
  if (Status status = CheckShards(plan, *machine); !status) return status;
  std::printf(
      "%s %s: %lld ranks on virtual, %lld steps, seed %llu: every instruction ran, nothing was overwritten\n",
      plan.model.c_str(), plan.policy.c_str(), static_cast<long long>(plan.world_size),
      static_cast<long long>(options.steps), static_cast<unsigned long long>(options.seed));
  return {};
}

}  // namespace shardplan::run
