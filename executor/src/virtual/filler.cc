// SPDX-License-Identifier: Apache-2.0
// A replay without a model: does the schedule hold when the streams run in the worst order?
#include <fmt/format.h>

#include <algorithm>
#include <memory>
#include <set>
#include <vector>

#include "replay/host_kernels.h"
#include "shardplan/executor/replayer.h"
#include "shardplan/schemas/exchanges.h"
#include "virtual/machine.h"

namespace shardplan::executor {
namespace {

// A part's memory as one value: zero, or poison somewhere.
class FillerPart {
 public:
  FillerPart(Place place, Bytes bytes) : place_(place), bytes_(bytes.value) {}

  bool IsPoisoned() const {
    if (place_.block->data) {
      return std::any_of(place_.data(), place_.data() + bytes_,
                         [](std::byte b) { return b != std::byte{0}; });
    }
    bool poisoned = false;
    place_.block->marks.ForEach(place_.offset, place_.offset + bytes_,
                                [&](std::int64_t, std::int64_t) { poisoned = true; });
    return poisoned;
  }

  void Fill(bool poisoned) const {
    PoisonMarks& marks = place_.block->marks;
    if (place_.block->data) {
      std::fill_n(place_.data(), bytes_, poisoned ? std::byte{0xFF} : std::byte{0});
    } else if (poisoned) {
      marks.Mark(place_.offset, place_.offset + bytes_);
    } else {
      marks.Clear(place_.offset, place_.offset + bytes_);
    }
  }

 private:
  Place place_;
  std::int64_t bytes_;
};
using FillerParts = std::vector<FillerPart>;

// Poison in any of `from` comes to all of `to`; without any, what is written anew is zero.
void Spread(const FillerParts& from, const FillerParts& to, bool anew) {
  const bool poisoned = std::ranges::any_of(from, &FillerPart::IsPoisoned);
  for (const FillerPart& part : to) {
    if (poisoned || anew) part.Fill(poisoned);
  }
}

// Computes zeros from zeros; poison stays poison.
class ZeroModel final : public Model {
 public:
  ZeroModel(const Plan& plan, VirtualMachineImpl& machine, std::int64_t rank)
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
  Status Compute(const ComputeCall& call) override;
  Status OptimizerStep(UnitId unit, std::int32_t parameter, StreamId stream) override;
  Status Update(const Instruction& instruction) override;

  // The first buffer of parameters with poison in it, -1: none.
  BufferId PoisonedShard() const;

 private:
  FillerPart Part(BufferId buffer, std::int32_t part) const {
    return {machine_.PlaceOf(rank_, buffer, part), plan_.buffers[buffer].parts_bytes[part]};
  }
  FillerParts Parts(BufferId buffer) const {
    FillerParts parts;
    for (std::size_t p = 0; p < plan_.buffers[buffer].parts_bytes.size(); ++p) {
      const auto part = static_cast<std::int32_t>(p);
      if (machine_.PlaceOf(rank_, buffer, part).block != nullptr) parts.push_back(Part(buffer, part));
    }
    return parts;
  }

  // This rank's part of a buffer of an exchange, which is as large as the largest rank's.
  FillerPart OwnPart(const Exchange& exchange, BufferId buffer) const {
    const ExchangeLayout layout(plan_, exchange);
    const std::int64_t rank = RankInGroup(plan_.communicators[exchange.communicator], rank_);
    const bool whole = plan_.buffers[buffer].role == BufferRole::kUpdateWhole;
    const std::int64_t numel = whole ? layout.WholeNumel(rank) : layout.PiecesNumel(rank);
    return {machine_.PlaceOf(rank_, buffer, 0), Bytes{numel * SizeBytes(exchange.dtype)}};
  }

  const Plan& plan_;
  VirtualMachineImpl& machine_;
  std::int64_t rank_;
  std::vector<BufferId> bound_;
  std::vector<std::vector<BufferId>> gradients_;
};

Status ZeroModel::Compute(const ComputeCall& call) {
  std::vector<BufferId> uses;
  FillerParts from;
  for (const UnitId unit : plan_.segments[call.segment].reads) {
    if (bound_[unit] < 0) continue;
    uses.push_back(bound_[unit]);
    std::ranges::copy(Parts(bound_[unit]), std::back_inserter(from));
  }
  FillerParts fresh;
  FillerParts added;
  for (const ActivationUse& use : call.activations) {
    uses.push_back(use.buffer);
    std::ranges::copy(Parts(use.buffer), std::back_inserter(use.made > 0 ? fresh : from));
  }
  for (const GradTarget& grad : call.grads) {
    uses.push_back(grad.buffer);
    (grad.adds ? added : fresh).push_back(Part(grad.buffer, grad.part));
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

// Gradients come into the pieces, these into the whole matrices and back, and the pieces into the parameters.
Status ZeroModel::Update(const Instruction& instruction) {
  const Exchange& exchange = plan_.exchanges[instruction.exchange];
  const bool applies = instruction.kind == InstructionKind::kUpdateApply;
  const BufferId buffer = applies ? instruction.src : instruction.dst;
  const FillerParts own = {OwnPart(exchange, buffer)};
  std::vector<BufferId> uses = {buffer};
  if (instruction.kind == InstructionKind::kOrthogonalize) {
    machine_.Enqueue(rank_, instruction.stream, uses, [own] { Spread(own, own, false); });
    return {};
  }
  std::set<UnitId> units;
  for (const ExchangedMatrix& matrix : exchange.matrices) units.insert(matrix.unit);
  FillerParts shards;
  FillerParts gradients;
  for (const UnitId unit : units) {
    for (const BufferId gradient : gradients_[unit]) {
      if (applies) continue;
      uses.push_back(gradient);
      std::ranges::copy(Parts(gradient), std::back_inserter(gradients));
    }
    for (std::size_t b = 0; b < plan_.buffers.size() && applies; ++b) {
      const auto shard = static_cast<BufferId>(b);
      if (plan_.buffers[b].role != BufferRole::kParamSharded || plan_.buffers[b].unit != unit) continue;
      uses.push_back(shard);
      std::ranges::copy(Parts(shard), std::back_inserter(shards));
    }
  }
  machine_.Enqueue(rank_, instruction.stream, uses, [applies, own, shards, gradients] {
    if (applies) return Spread(own, shards, false);
    Spread(gradients, own, true);
  });
  return {};
}

BufferId ZeroModel::PoisonedShard() const {
  for (std::size_t b = 0; b < plan_.buffers.size(); ++b) {
    const auto buffer = static_cast<BufferId>(b);
    if (plan_.buffers[b].role != BufferRole::kParamSharded) continue;
    if (std::ranges::any_of(Parts(buffer), &FillerPart::IsPoisoned)) return buffer;
  }
  return -1;
}

}  // namespace

Status ReplayFiller(const Plan& plan, std::uint64_t seed, std::int64_t steps, VirtualContent content) {
  VirtualMachineImpl machine(plan, seed, content);
  std::vector<std::unique_ptr<ZeroModel>> models;
  std::vector<std::unique_ptr<Replayer>> replayers;
  std::vector<Replayer*> pointers;
  for (std::int64_t rank = 0; rank < plan.world_size; ++rank) {
    models.push_back(std::make_unique<ZeroModel>(plan, machine, rank));
    auto replayer =
        Replayer::Create(plan, rank, machine.device(rank), machine.collectives(rank), models.back().get());
    if (!replayer) return std::unexpected(replayer.error());
    replayers.push_back(std::move(*replayer));
    pointers.push_back(replayers.back().get());
  }
  if (Status status = ReplayOnVirtual(machine, pointers, steps); !status) return status;
  for (std::int64_t rank = 0; rank < plan.world_size; ++rank) {
    const BufferId poisoned = models[rank]->PoisonedShard();
    if (poisoned < 0) continue;
    return MakeError(ErrorCode::kNegative,
                     fmt::format("rank {}: {} was overwritten: a wait is missing, or a free comes too early",
                                 rank, plan.buffers[poisoned].name));
  }
  return {};
}

}  // namespace shardplan::executor
