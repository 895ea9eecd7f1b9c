#include "tests/executor/virtual_runner.h"

#include <memory>
#include <vector>

#include "shardplan/executor/engine.h"
#include "shardplan/executor/virtual_backend.h"
#include "tests/executor/toy_model.h"

namespace shardplan::test {
namespace {

class VirtualStream final : public ToyStream {
 public:
  VirtualStream(executor::VirtualMachine& machine, const Plan& plan, std::int64_t rank)
      : machine_(machine), plan_(plan), rank_(rank) {}

  void Submit(StreamId stream, std::vector<BufferId> uses,
              std::function<void(const BufferMemory&)> work) override {
    BufferMemory memory;
    for (const BufferId buffer : uses) {
      std::vector<std::byte*>& parts = memory.emplace_back();
      for (std::size_t i = 0; i < plan_.buffers[buffer].parts_bytes.size(); ++i) {
        parts.push_back(machine_.Memory(rank_, buffer, static_cast<std::int32_t>(i)).data());
      }
    }
    machine_.Enqueue(rank_, stream, uses, [memory, work = std::move(work)] { work(memory); });
  }

 private:
  executor::VirtualMachine& machine_;
  const Plan& plan_;
  std::int64_t rank_;
};

struct Rank {
  std::unique_ptr<VirtualStream> stream;
  std::unique_ptr<ToyModel> model;
  std::unique_ptr<executor::Engine> engine;
};

}  // namespace

std::string RunOnVirtual(const Plan& plan, std::uint64_t seed, std::int64_t steps,
                         const Plan* last_rank_plan) {
  const auto machine = executor::VirtualMachine::Create(plan, seed);
  std::vector<Rank> ranks(static_cast<std::size_t>(plan.world_size));
  std::vector<executor::Engine*> engines;
  for (std::int64_t r = 0; r < plan.world_size; ++r) {
    Rank& rank = ranks[r];
    rank.stream = std::make_unique<VirtualStream>(*machine, plan, r);
    rank.model = std::make_unique<ToyModel>(plan, r, *rank.stream);
    const Plan& own = last_rank_plan != nullptr && r + 1 == plan.world_size ? *last_rank_plan : plan;
    auto engine =
        executor::Engine::Create(own, r, machine->device(r), machine->collectives(r), rank.model.get());
    if (!engine) return ToString(engine.error());
    rank.engine = std::move(*engine);
    rank.model->SetInitialShards();
    engines.push_back(rank.engine.get());
  }
  if (Status status = machine->Drain(); !status) return ToString(status.error());
  if (Status status = executor::ReplayOnVirtual(*machine, engines, steps); !status)
    return ToString(status.error());
  const ToyParameters expected = ToyReference(plan, steps);
  for (std::int64_t r = 0; r < plan.world_size; ++r) {
    for (const BufferId shard : ShardBuffers(plan)) {
      std::vector<const std::byte*> parts;
      for (std::size_t i = 0; i < plan.buffers[shard].parts_bytes.size(); ++i) {
        parts.push_back(machine->Memory(r, shard, static_cast<std::int32_t>(i)).data());
      }
      const std::string difference = CompareShard(plan, shard, parts, r, expected);
      if (!difference.empty()) return difference;
    }
  }
  return {};
}

}  // namespace shardplan::test
