// Gloo process groups for a plan's communicators: the only file that needs ProcessGroupGloo and gloo's
// headers.
#include <fmt/format.h>

#include <exception>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include "shardplan/executor/cpu_backend.h"

namespace shardplan::executor {

Result<std::vector<c10::intrusive_ptr<c10d::ProcessGroup>>> MakeGlooGroups(const Plan& plan,
                                                                           std::int64_t rank,
                                                                           const GlooOptions& options) {
  if (Status status = CheckCommunicators(plan); !status) return std::unexpected(std::move(status.error()));
  std::vector<c10::intrusive_ptr<c10d::ProcessGroup>> groups(plan.communicators.size());
  try {
    for (std::size_t c = 0; c < plan.communicators.size(); ++c) {
      const Communicator& communicator = plan.communicators[c];
      if (communicator.size == 1) continue;
      const std::int64_t first = GroupOf(communicator, rank).front();
      auto store = c10::make_intrusive<c10d::PrefixStore>(fmt::format("shardplan/gloo/{}/{}", c, first),
                                                          options.store);
      auto gloo = c10d::ProcessGroupGloo::Options::create(options.timeout);
      gloo->devices.push_back(c10d::ProcessGroupGloo::createDeviceForHostname(options.address));
      const auto group_rank = static_cast<int>(RankInGroup(communicator, rank));
      const auto group_size = static_cast<int>(communicator.size);
      groups[c] = c10::make_intrusive<c10d::ProcessGroup>(group_rank, group_size);
      groups[c]->setBackend(c10::kCPU, c10d::ProcessGroup::BackendType::GLOO,
                            c10::make_intrusive<c10d::ProcessGroupGloo>(store, group_rank, group_size, gloo));
    }
  } catch (const std::exception& exception) {
    const std::string what = exception.what();
    return MakeError(ErrorCode::kEnvironment, fmt::format("rank {}: the ranks could not connect: {}", rank,
                                                          what.substr(0, what.find('\n'))));
  }
  return groups;
}

}  // namespace shardplan::executor
