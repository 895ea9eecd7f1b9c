// The toy model on the LibTorch backends.
#pragma once

#include <string>

#include "shardplan/executor/collectives.h"
#include "shardplan/executor/torch_device.h"
#include "tests/executor/toy_model.h"

namespace shardplan::test {

// Work on host memory, at once: in place on the cpu; on a GPU on copies, which go back when the work is done.
// Copies run on the current stream, which is the plan's compute stream, and wait for nothing else.
class TorchStream final : public ToyStream {
 public:
  TorchStream(executor::TorchDevice& device, const Plan& plan) : device_(device), plan_(plan) {}
  void Submit(StreamId stream, std::vector<BufferId> uses,
              std::function<void(const BufferMemory&)> work) override;

 private:
  executor::TorchDevice& device_;
  const Plan& plan_;
};

// Runs `steps` steps of the toy model on one rank and compares its shards with the reference; "" or what is
// wrong.
std::string RunToyModel(const Plan& plan, std::int64_t rank, executor::TorchDevice& device,
                        executor::Collectives& collectives, ToyStream& stream, std::int64_t steps);

}  // namespace shardplan::test
