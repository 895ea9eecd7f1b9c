#include "flags/default_cluster.h"

#include <cstdint>
#include <utility>

namespace shardplan::cli {
namespace {

constexpr std::int64_t kRanksOfNode = 8;

}  // namespace

Result<ChosenCluster> ChooseClusterOrDefault(const ClusterFlags& flags, const Strategy& strategy,
                                             const std::string& strategy_path,
                                             const FindClusterFunction& find) {
  Result<Cluster> otherwise = Cluster{};
  if (flags.cluster.empty())
    otherwise = find(WantedRanks(flags, strategy) > kRanksOfNode ? kDefaultNodes : kDefaultNode);
  if (!otherwise) return std::unexpected(otherwise.error());
  Result<ChosenCluster> chosen = ChooseCluster(flags, strategy, std::move(*otherwise), find);
  if (!chosen && !chosen.error().pointer.empty() && chosen.error().file.empty())
    chosen.error().file = strategy_path;
  return chosen;
}

}  // namespace shardplan::cli
