// SPDX-License-Identifier: Apache-2.0
#include "verifier/words/rank_words.h"

#include <fmt/format.h>

#include "shardplan/schemas/assert.h"
#include "verifier/words/report.h"

namespace shardplan::verifier {
namespace {

Violation Make(Rule rule, std::int64_t rank, Position at, std::string_view message,
               std::vector<std::string> chain) {
  return {.rule = rule,
          .step = at.step,
          .trigger = at.trigger,
          .instruction = at.instruction,
          .message = fmt::format("rank {}: {}", rank, message),
          .chain = std::move(chain),
          .rank = static_cast<std::int32_t>(rank)};
}

std::string DescribeLink(const RankPrograms& programs, const WaitLink& link) {
  const Reporter words(programs.plans[link.rank]);
  const std::string where = words.Describe(link.at);
  switch (link.kind) {
    case WaitLink::For::kStream:
      return fmt::format("rank {}: {} waits for {}", link.rank, where,
                         words.StreamName(static_cast<std::int32_t>(link.target)));
    case WaitLink::For::kRank:
      return fmt::format("rank {}: {} waits for rank {}", link.rank, where, link.target);
    case WaitLink::For::kHost:
      return fmt::format("rank {}: the host is still at {}", link.rank, where);
  }
  return {};
}

}  // namespace

Violation OtherWorldSize(const std::vector<Plan>& plans_by_rank, std::size_t rank) {
  return Make(Rule::kReference, static_cast<std::int64_t>(rank), {},
              fmt::format("the plan is for {} ranks, but there are {}", plans_by_rank[rank].world_size,
                          plans_by_rank.size()),
              {});
}

Violation DifferentCollective(const RankPrograms& programs, const OrderFault& fault) {
  const auto call = [&](std::int64_t rank) -> const CollectiveCall* {
    const std::vector<std::int32_t>& own = programs.by_group[rank][fault.group];
    return fault.number < own.size() ? &programs.calls[rank][own[fault.number]] : nullptr;
  };
  std::vector<std::string> chain;
  for (const std::int64_t rank : {fault.first, fault.rank}) {
    const CollectiveCall* issued = call(rank);
    chain.push_back(issued == nullptr ? fmt::format("rank {}: nothing", rank)
                                      : fmt::format("rank {}: {} ({} bytes)", rank,
                                                    Reporter(programs.plans[rank]).Describe(issued->at),
                                                    issued->size_bytes.value));
  }
  const std::int64_t speaker = call(fault.rank) != nullptr ? fault.rank : fault.first;
  SHARDPLAN_ASSERT(call(speaker) != nullptr, "one of two ranks that differ issues something");
  return Make(Rule::kCollectiveOrder, speaker, call(speaker)->at,
              fmt::format("collective number {} on communicator {} differs between rank {} and rank {}",
                          fault.number, std::get<0>(programs.groups[fault.group]), fault.first, fault.rank),
              std::move(chain));
}

Violation CircleOfWaits(const RankPrograms& programs, const std::vector<WaitLink>& circle) {
  SHARDPLAN_ASSERT(!circle.empty(), "a circle has a link");
  std::vector<std::string> chain;
  for (const WaitLink& link : circle) chain.push_back(DescribeLink(programs, link));
  return Make(Rule::kDeadlock, circle.front().rank, circle.front().at,
              "ranks wait for each other in a circle, and none of them can go on", std::move(chain));
}

}  // namespace shardplan::verifier
