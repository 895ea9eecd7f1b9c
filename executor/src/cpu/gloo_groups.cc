// SPDX-License-Identifier: Apache-2.0
// Gloo process groups for a plan's communicators: the only file that needs ProcessGroupGloo and gloo's
// headers.
#include <fmt/format.h>

#include <exception>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include "shardplan/executor/backends.h"
#include "torch/arrivals.h"
#include "torch/bounded_store.h"

namespace shardplan::executor {
namespace {

using Store = c10::intrusive_ptr<c10d::Store>;

// The store at which the ranks of one group meet.
Store StoreOfGroup(const Store& store, std::size_t communicator, std::int64_t first_rank) {
  return c10::make_intrusive<c10d::PrefixStore>(fmt::format("shardplan/gloo/{}/{}", communicator, first_rank),
                                                store);
}

std::string HereKey(std::int64_t place) { return fmt::format("here/{}", place); }

c10::intrusive_ptr<c10d::ProcessGroup> Connect(const Store& store, std::int64_t place, std::int64_t size,
                                               const GlooOptions& options) {
  auto gloo = c10d::ProcessGroupGloo::Options::create(options.timeout);
  gloo->devices.push_back(options.address.empty()
                              ? c10d::ProcessGroupGloo::createDefaultDevice()
                              : c10d::ProcessGroupGloo::createDeviceForHostname(options.address));
  const auto group_rank = static_cast<int>(place);
  const auto group_size = static_cast<int>(size);
  auto group = c10::make_intrusive<c10d::ProcessGroup>(group_rank, group_size);
  group->setBackend(c10::kCPU, c10d::ProcessGroup::BackendType::GLOO,
                    c10::make_intrusive<c10d::ProcessGroupGloo>(store, group_rank, group_size, gloo));
  return group;
}

// A rank whose own connections are there may fail at what comes next, and end. Others would find them closed
// while they still connect, and tell that in place of its error.
void AwaitConnected(const Store& store, std::int64_t size, const GlooOptions& options) {
  const std::string all = "connected/all";
  if (store->add("connected/ranks", 1) == size) store->set(all, "1");
  store->wait({all}, options.timeout);
}

// After the group did not come about: "rank 2 did not arrive: it has died: ", "" where nothing is known.
std::string Absent(const Store& store, const std::vector<std::int64_t>& group, const GlooOptions& options) {
  std::string cause = AwaitCulprit(options.peers.get(), kPatience);
  std::vector<std::int64_t> silent;
  try {
    for (std::size_t place = 0; cause.empty() && place < group.size(); ++place) {
      if (!store->check({HereKey(static_cast<std::int64_t>(place))})) silent.push_back(group[place]);
    }
  } catch (const std::exception&) {
    if (options.peers) cause = options.peers->SilentStore().value_or("");
  }
  if (cause.empty() && !silent.empty()) cause = DidNotArrive(silent);
  return cause.empty() ? cause : cause + ": ";
}

}  // namespace

Result<std::vector<c10::intrusive_ptr<c10d::ProcessGroup>>> MakeGlooGroups(const Plan& plan,
                                                                           std::int64_t rank,
                                                                           const GlooOptions& options) {
  if (Status status = CheckCommunicators(plan); !status) return std::unexpected(std::move(status.error()));
  std::vector<c10::intrusive_ptr<c10d::ProcessGroup>> groups(plan.communicators.size());
  // Gloo waits for the others through the store: not for one that is known to be dead.
  const GiveUp give_up = [peers = options.peers] {
    return peers ? peers->Dead() : std::optional<std::string>();
  };
  for (std::size_t c = 0; c < plan.communicators.size(); ++c) {
    const Communicator& communicator = plan.communicators[c];
    if (communicator.size == 1) continue;
    const std::vector<std::int64_t> group = GroupOf(communicator, rank);
    const Store store =
        StoreOfGroup(MakeBoundedStore(options.store, options.timeout, give_up), c, group.front());
    const std::int64_t place = RankInGroup(communicator, rank);
    try {
      store->set(HereKey(place), "1");
      groups[c] = Connect(store, place, communicator.size, options);
      AwaitConnected(store, communicator.size, options);
    } catch (const std::exception& exception) {
      const std::string what = exception.what();
      return MakeError(ErrorCode::kEnvironment,
                       fmt::format("rank {}: the ranks could not connect: {}{}", rank,
                                   Absent(store, group, options), what.substr(0, what.find('\n'))));
    }
  }
  return groups;
}

}  // namespace shardplan::executor
