// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <algorithm>
#include <unordered_map>
#include <vector>

#include "shardplan/checkpoints/reshard.h"
#include "shardplan/simulator/simulate.h"

namespace shardplan {
namespace {

constexpr double kNsPerSecond = 1e9;

// Traffic of one rank, in a round or in all.
struct RankTraffic {
  std::int64_t node_sent = 0, node_received = 0;
  std::int64_t network_sent = 0, network_received = 0;
  std::int64_t local = 0;
  std::int64_t messages = 0;

  std::int64_t sent() const { return node_sent + network_sent; }
  std::int64_t received() const { return node_received + network_received; }
  void Add(const RankTraffic& other) {
    node_sent += other.node_sent;
    node_received += other.node_received;
    network_sent += other.network_sent;
    network_received += other.network_received;
    local += other.local;
    messages += other.messages;
  }
};

Nanoseconds TimeOf(std::int64_t bytes, std::int64_t bytes_per_second) {
  if (bytes == 0 || bytes_per_second == 0) return {};
  return {static_cast<std::int64_t>(static_cast<double>(bytes) / static_cast<double>(bytes_per_second) *
                                    kNsPerSecond)};
}

class ReshardWalk {
 public:
  ReshardWalk(const ReshardPlan& plan, const Cluster& cluster)
      : plan_(plan),
        node_(cluster.links.front()),
        network_(cluster.links.back()),
        memory_bytes_per_second_(cluster.device.memory_bytes_per_second),
        total_(static_cast<std::size_t>(std::max(RanksOf(plan.source), RanksOf(plan.target)))),
        alive_(total_.size()) {
    for (std::size_t rank = 0; rank < total_.size(); ++rank) {
      const auto at = static_cast<std::int64_t>(rank);
      if (at < RanksOf(plan.source)) alive_[rank] += StorageBytes(plan.source, at).value;
      if (at < RanksOf(plan.target)) alive_[rank] += StorageBytes(plan.target, at).value;
    }
  }

  ReshardSimulation Run() {
    result_.memory_peak_bytes = Bytes{*std::ranges::max_element(alive_)};
    ForEachReshardRound(plan_, [&](ReshardRound round) { Walk(round); });
    std::int64_t bound = 0;
    for (const RankTraffic& rank : total_) {
      result_.local_bytes += Bytes{rank.local};
      result_.node_bytes += Bytes{rank.node_sent};
      result_.network_bytes += Bytes{rank.network_sent};
      result_.most_sent_bytes = std::max(result_.most_sent_bytes, Bytes{rank.sent()});
      result_.most_received_bytes = std::max(result_.most_received_bytes, Bytes{rank.received()});
      bound = std::max(bound, Duration(rank, false).value);
    }
    result_.bound_ns = {bound};
    return result_;
  }

 private:
  void Walk(ReshardRound round) {
    std::unordered_map<std::int64_t, RankTraffic> ranks;
    for (const ReshardPiece& piece : round) {
      const ReshardCopy& copy = piece.copy;
      const std::int64_t bytes = MovedBytes(copy).value;
      if (copy.source_rank == copy.target_rank) {
        ranks[copy.source_rank].local += bytes;
        continue;
      }
      const bool in_node = copy.source_rank / plan_.ranks_per_node == copy.target_rank / plan_.ranks_per_node;
      RankTraffic& sender = ranks[copy.source_rank];
      (in_node ? sender.node_sent : sender.network_sent) += bytes;
      ++sender.messages;
      RankTraffic& receiver = ranks[copy.target_rank];
      (in_node ? receiver.node_received : receiver.network_received) += bytes;
      ++receiver.messages;
    }
    Nanoseconds slowest;
    for (const auto& [rank, traffic] : ranks) {
      const Bytes staging{traffic.sent() + traffic.received()};
      result_.staging_peak_bytes = std::max(result_.staging_peak_bytes, staging);
      result_.memory_peak_bytes =
          std::max(result_.memory_peak_bytes, Bytes{alive_[static_cast<std::size_t>(rank)]} + staging);
      slowest = std::max(slowest, Duration(traffic, true));
      total_[static_cast<std::size_t>(rank)].Add(traffic);
    }
    result_.duration_ns += slowest;
    result_.copies += std::ssize(round);
    ++result_.rounds;
  }

  // Both directions of a link, both classes of links and the rank's own memory work at the same time.
  Nanoseconds Duration(const RankTraffic& rank, bool with_latency) const {
    Nanoseconds time = std::max({TimeOf(rank.node_sent, node_.bytes_per_second),
                                 TimeOf(rank.node_received, node_.bytes_per_second),
                                 TimeOf(rank.network_sent, network_.bytes_per_second),
                                 TimeOf(rank.network_received, network_.bytes_per_second),
                                 TimeOf(2 * rank.local, memory_bytes_per_second_)});
    if (with_latency && rank.messages > 0) {
      const bool network = rank.network_sent + rank.network_received > 0;
      time += (network ? network_ : node_).latency_ns * rank.messages;
    }
    return time;
  }

  const ReshardPlan& plan_;
  const Link& node_;
  const Link& network_;
  const std::int64_t memory_bytes_per_second_;
  std::vector<RankTraffic> total_;
  std::vector<std::int64_t> alive_;
  ReshardSimulation result_;
};

}  // namespace

Result<ReshardSimulation> SimulateReshard(const ReshardPlan& plan, const Cluster& cluster) {
  if (cluster.links.empty())
    return MakeInputError("/links", "the cluster has no links", "none",
                          "one inside a node, one between nodes");
  return ReshardWalk(plan, cluster).Run();
}

std::string ReshardSimulationText(const ReshardSimulation& s) {
  const auto gib = [](Bytes bytes) { return static_cast<double>(bytes.value) / (1 << 30); };
  const auto ms = [](Nanoseconds time) { return static_cast<double>(time.value) / 1e6; };
  std::string text = fmt::format("rounds {}, pieces {}\n", s.rounds, s.copies);
  text +=
      fmt::format("bytes: {:.3f} GiB stay on their rank, {:.3f} GiB inside nodes, {:.3f} GiB between nodes\n",
                  gib(s.local_bytes), gib(s.node_bytes), gib(s.network_bytes));
  text += fmt::format("one rank: sends at most {:.3f} GiB, receives at most {:.3f} GiB\n",
                      gib(s.most_sent_bytes), gib(s.most_received_bytes));
  text += fmt::format("memory of one rank: {:.3f} GiB at most, staging {:.3f} GiB of it\n",
                      gib(s.memory_peak_bytes), gib(s.staging_peak_bytes));
  text += fmt::format("time: {:.3f} ms, at least {:.3f} ms\n", ms(s.duration_ns), ms(s.bound_ns));
  return text;
}

}  // namespace shardplan
