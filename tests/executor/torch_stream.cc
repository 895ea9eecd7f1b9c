#include "tests/executor/torch_stream.h"

#include <vector>

#include "shardplan/executor/engine.h"

namespace shardplan::test {

void TorchStream::Submit(StreamId, std::vector<BufferId> uses,
                         std::function<void(const BufferMemory&)> work) {
  BufferMemory memory;
  std::vector<std::pair<at::Tensor, at::Tensor>> copies;  // on the device, on the host
  for (const BufferId buffer : uses) {
    std::vector<std::byte*>& parts = memory.emplace_back();
    for (std::size_t i = 0; i < plan_.buffers[buffer].parts_bytes.size(); ++i) {
      at::Tensor part = device_.Part(buffer, static_cast<std::int32_t>(i));
      if (!part.is_cpu()) {
        copies.emplace_back(part, part.to(at::kCPU));
        part = copies.back().second;
      }
      parts.push_back(static_cast<std::byte*>(part.mutable_data_ptr()));
    }
  }
  work(memory);
  for (auto& [on_device, on_host] : copies) on_device.copy_(on_host);
}

std::string RunToyModel(const Plan& plan, std::int64_t rank, executor::TorchDevice& device,
                        executor::Collectives& collectives, ToyStream& stream, std::int64_t steps) {
  ToyModel model(plan, rank, stream);
  auto engine = executor::Engine::Create(plan, rank, device, collectives, &model);
  if (!engine) return ToString(engine.error());
  model.SetInitialShards();
  while ((*engine)->steps_completed() < steps) {
    const executor::TriggerKey trigger = (*engine)->Expected();
    if (Status status = (*engine)->Fire(trigger); !status) return ToString(status.error());
  }
  if (Result<bool> done = device.Synchronize(); !done) return ToString(done.error());
  if (Status status = collectives.Check(); !status) return ToString(status.error());
  const ToyParameters expected = ToyReference(plan, steps);
  for (const BufferId shard : ShardBuffers(plan)) {
    std::vector<at::Tensor> tensors;
    std::vector<const std::byte*> parts;
    for (std::size_t i = 0; i < plan.buffers[shard].parts_bytes.size(); ++i) {
      tensors.push_back(device.Part(shard, static_cast<std::int32_t>(i)).to(at::kCPU));
      parts.push_back(static_cast<const std::byte*>(tensors.back().const_data_ptr()));
    }
    const std::string difference = CompareShard(plan, shard, parts, rank, expected);
    if (!difference.empty()) return difference;
  }
  return {};
}

}  // namespace shardplan::test
