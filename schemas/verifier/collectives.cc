// SPDX-License-Identifier: Apache-2.0
#include "verifier/collectives.h"

#include <algorithm>

#include "shardplan/schemas/assert.h"
#include "shardplan/schemas/instruction_set.h"

namespace shardplan::verifier {
namespace {

GroupKey KeyOf(const Communicator& c, std::int64_t rank) {
  std::vector<std::pair<std::int64_t, std::int64_t>> digits;
  for (const auto& [size, stride] : c.dims) digits.emplace_back(size, stride);
  if (digits.empty()) digits.emplace_back(c.size, c.stride);
  for (const auto& [size, stride] : digits) rank -= rank / stride % size * stride;
  return {c.name, std::move(digits), rank};
}

CollectiveCall MakeCall(const Plan& plan, const Instruction& i, Position at) {
  const BufferId full = FullTensorOf(i);
  const Exchange* exchange = i.exchange < 0 ? nullptr : &plan.exchanges[i.exchange];
  return {.at = at,
          .kind = *DescriptionOf(i.kind).collective,
          .reduce_op =
              *DescriptionOf(i.kind).collective == CollectiveKind::kAllGather ? ReduceOp::kSum : i.reduce_op,
          .divisor = i.divisor,
          .dtype = plan.buffers[full].dtype,
          .size_bytes = SizeBytes(plan.buffers[full]),
          .exchange = exchange};
}

bool Match(const CollectiveCall& a, const CollectiveCall& b) {
  return a.kind == b.kind && a.reduce_op == b.reduce_op && a.divisor == b.divisor && a.dtype == b.dtype &&
         a.size_bytes == b.size_bytes && a.peer == b.peer && (a.batch < 0) == (b.batch < 0) &&
         (a.exchange == nullptr || b.exchange == nullptr || *a.exchange == *b.exchange);
}

CollectiveCall MakeCall(const OperatorEvent& op, std::int32_t entry, Position at) {
  const ModelCollective& issued = *op.collective;
  return {.at = at,
          .kind = issued.kind,
          .dtype = op.dtype,
          .size_bytes = issued.size_bytes,
          .entry = entry,
          .work = issued.work,
          .peer = issued.peer,
          .batch = issued.batch};
}

}  // namespace

RankPrograms::RankPrograms(const std::vector<Plan>& plans_by_rank) : plans(plans_by_rank) {
  std::size_t executions = 0;
  for (const Plan& plan : plans) {
    SHARDPLAN_ASSERT(plan.steady_step >= 0 && plan.steady_step <= std::ssize(plan.steps),
                     "CheckTables lets only steps of the plan through");
  }
  for (const Plan& plan : plans) {
    executions = std::max(executions, 2 * plan.steps.size() - static_cast<std::size_t>(plan.steady_step));
  }
  std::map<GroupKey, std::int32_t> ids;
  for (std::size_t rank = 0; rank < plans.size(); ++rank) {
    for (const Communicator& c : plans[rank].communicators) {
      const auto [entry, is_new] = ids.emplace(KeyOf(c, static_cast<std::int64_t>(rank)), groups.size());
      if (is_new) groups.push_back(entry->first);
    }
  }
  for (std::size_t rank = 0; rank < plans.size(); ++rank) {
    const Plan& plan = plans[rank];
    std::vector<std::int32_t> group_of;
    for (const Communicator& c : plan.communicators) {
      group_of.push_back(ids.at(KeyOf(c, static_cast<std::int64_t>(rank))));
    }
    std::vector<std::int32_t>& order = steps.emplace_back();
    std::vector<CollectiveCall>& own = calls.emplace_back();
    std::vector<std::vector<std::int32_t>>& own_by_group = by_group.emplace_back(groups.size());
    const std::size_t cycle = plan.steps.size() - static_cast<std::size_t>(plan.steady_step);
    for (std::size_t k = 0; k < executions && cycle > 0; ++k) {
      const std::size_t past = k < plan.steps.size() ? 0 : (k - plan.steps.size()) % cycle;
      order.push_back(static_cast<std::int32_t>(k < plan.steps.size() ? k : plan.steady_step + past));
    }
    for (const std::int32_t step : order) {
      const std::vector<Trigger>& triggers = plan.steps[step].triggers;
      for (std::size_t t = 0; t < triggers.size(); ++t) {
        for (std::size_t n = 0; n < triggers[t].instructions.size(); ++n) {
          const Instruction& i = triggers[t].instructions[n];
          const Position at = {step, static_cast<std::int32_t>(t), static_cast<std::int32_t>(n)};
          const auto add = [&](CollectiveCall call, CommunicatorId communicator) {
            call.group = group_of[communicator];
            call.number = static_cast<std::int32_t>(own_by_group[call.group].size());
            own_by_group[call.group].push_back(static_cast<std::int32_t>(own.size()));
            own.push_back(call);
          };
          if (IsCollective(i.kind)) add(MakeCall(plan, i, at), i.communicator);
          if (!DescriptionOf(i.kind).segment) continue;
          const std::vector<SegmentEntry>& entries = plan.segments[i.segment].entries;
          for (std::int32_t e = 0; e < std::ssize(entries); ++e) {
            const auto* op = std::get_if<OperatorEvent>(&entries[e]);
            if (op != nullptr && op->collective) add(MakeCall(*op, e, at), op->collective->communicator);
          }
        }
      }
    }
  }
}

std::vector<std::int64_t> RankPrograms::Members(std::int32_t group) const {
  const auto& [name, digits, first] = groups[group];
  std::vector<std::int64_t> members = {first};
  for (const auto& [size, stride] : digits) {
    const std::vector<std::int64_t> bases = std::exchange(members, {});
    for (const std::int64_t base : bases) {
      for (std::int64_t k = 0; k < size; ++k) members.push_back(base + k * stride);
    }
  }
  std::ranges::sort(members);
  SHARDPLAN_ASSERT(members.back() < std::ssize(plans),
                   "CheckTables lets only communicators that divide the ranks through");
  return members;
}

std::vector<OrderFault> CollectiveOrder(const RankPrograms& programs) {
  std::vector<OrderFault> faults;
  for (std::int32_t group = 0; group < std::ssize(programs.groups); ++group) {
    const std::vector<std::int64_t> members = programs.Members(group);
    const std::int64_t first = members.front();
    const std::vector<std::int32_t>& expected = programs.by_group[first][group];
    for (const std::int64_t rank : members) {
      if (rank == first) continue;
      const std::vector<std::int32_t>& own = programs.by_group[rank][group];
      const auto [differs, expected_differs] =
          std::ranges::mismatch(own, expected, [&](std::int32_t a, std::int32_t b) {
            return Match(programs.calls[rank][a], programs.calls[first][b]);
          });
      if (differs == own.end() && expected_differs == expected.end()) continue;
      faults.push_back({group, first, rank, static_cast<std::size_t>(differs - own.begin())});
    }
  }
  return faults;
}

}  // namespace shardplan::verifier
