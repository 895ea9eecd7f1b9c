// SPDX-License-Identifier: Apache-2.0
// A collective goes at the least of the rates that its ranks offer it: these are few different ones, so it
// counts how many ranks offer each.
#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <numeric>
#include <utility>
#include <vector>

#include "cost/group_placement.h"
#include "engine/owners.h"
#include "engine/rank_clock.h"
#include "engine/step_runner.h"
#include "shardplan/schemas/assert.h"
#include "shardplan/simulator/engine.h"
#include "text/format.h"

namespace shardplan {
namespace {

using internal::CollectiveTimes;
using internal::kFullRate;
using internal::kNever;
using internal::RankTraits;
using internal::StepRunner;

__extension__ using Wide = __int128;
constexpr std::int64_t kMostRanksApart = 1 << 16;

// A collective of one group: of its communicator one is under way at a time.
struct Joined {
  struct Member {
    std::int32_t rank = -1;
    std::size_t stream = 0;
    std::int64_t came_ns = 0;
  };
  std::int32_t instruction = -1;
  std::vector<Member> members;  // those that have come
  std::int64_t size = 0;        // of the group
  bool begun = false;
  std::vector<std::pair<std::int64_t, std::int32_t>> offers;  // rates, and how many ranks offer each
  std::int64_t rate = 0;
  Wide remaining = 0;  // rate x nanoseconds
  std::int64_t updated_ns = 0;
  std::int64_t finish_ns = kNever;
};

class Apart final : public internal::Joins {
 public:
  // `ranks`, ascending: those that are simulated; a collective joins those of them that are in its group.
  Apart(const std::vector<Communicator>& communicators, const EngineProgram& program, const EngineStep& step,
        const std::vector<std::int32_t>& ranks, const RanksApartOptions& options,
        const RunOptions& run_options = {})
      : step_(step) {
    groups_of_.resize(communicators.size());
    for (std::size_t c = 0; c < communicators.size(); ++c) MakeGroups(communicators[c], ranks, c);
    place_.resize(static_cast<std::size_t>(ranks.back()) + 1, -1);
    clock_.Reserve(ranks.size());
    for (const std::int32_t r : ranks) {
      place_[Index(r)] = clock_.size();
      RankTraits traits{.rank = r, .jitter_ppm = options.jitter_ppm, .seed = options.seed};
      for (const Straggler& straggler : options.stragglers) {
        if (straggler.rank == r) traits.kernels_ppm = straggler.kernels_ppm;
      }
      clock_.Emplace(program, step_, nullptr, run_options, this, traits);
    }
    waited_ns_.assign(ranks.size(), 0);
    times_.assign(step.code.size(), {});
  }

  // By instruction: of the collective's groups the one that began last.
  const std::vector<CollectiveTimes>& times() const { return times_; }

  Result<RanksApart> Run() {
    clock_.Run([this](std::int32_t index, std::int64_t time_ns) {
      if (joined_[Index(index)].finish_ns == time_ns) End(joined_[Index(index)], time_ns);
    });
    return Results();
  }

  void Come(std::int32_t of_rank, std::size_t stream, std::int32_t instruction) override {
    const std::int32_t rank = place_[Index(of_rank)];
    Joined& joined = JoinedOf(rank, instruction);
    const std::int64_t now_ns = Runner(rank).now_ns();
    if (joined.members.empty()) joined.instruction = instruction;
    SHARDPLAN_ASSERT(joined.instruction == instruction, "all ranks issue the same");
    joined.members.push_back({rank, stream, now_ns});
    if (std::ssize(joined.members) == joined.size) Begin(joined, now_ns, rank);
  }

  void Offer(std::int32_t of_rank, std::int32_t instruction, std::int64_t old_rate,
             std::int64_t rate) override {
    const std::int32_t rank = place_[Index(of_rank)];
    Joined& joined = JoinedOf(rank, instruction);
    Add(joined, old_rate, -1);
    Add(joined, rate, 1);
    const std::int64_t least = std::ranges::min_element(joined.offers)->first;
    if (least != joined.rate) SetRate(joined, least, Runner(rank).now_ns());
  }

 private:
  static std::size_t Index(std::int32_t i) { return static_cast<std::size_t>(i); }
  StepRunner& Runner(std::int32_t rank) { return clock_.Runner(rank); }

  void MakeGroups(const Communicator& communicator, const std::vector<std::int32_t>& ranks, std::size_t c) {
    std::vector<std::int32_t> group_of_leader(static_cast<std::size_t>(ranks.back()) + 1, -1);
    for (const std::int32_t rank : ranks) {
      std::int32_t& group = group_of_leader[static_cast<std::size_t>(internal::LeaderOf(communicator, rank))];
      if (group < 0) {
        group = static_cast<std::int32_t>(joined_.size());
        joined_.emplace_back();
      }
      ++joined_[Index(group)].size;
      groups_of_[c].push_back(group);
    }
  }

  Joined& JoinedOf(std::int32_t rank, std::int32_t instruction) {
    const EngineInstruction& code = step_.code[Index(instruction)];
    const CommunicatorId communicator = step_.groups[Index(code.operand)].communicator;
    return joined_[Index(groups_of_[Index(communicator)][Index(rank)])];
  }

  // Ranks are places in what is simulated from here on.
  //
  // `last`: who came last, and is being settled.
  void Begin(Joined& joined, std::int64_t now_ns, std::int32_t last) {
    joined.begun = true;
    Nanoseconds& begin_ns = times_[Index(joined.instruction)].begin_ns;
    begin_ns = std::max(begin_ns, Nanoseconds{now_ns});
    joined.remaining = Wide{step_.code[Index(joined.instruction)].duration_ns.value} * kFullRate;
    joined.updated_ns = now_ns;
    joined.rate = 0;
    joined.offers = {{0, static_cast<std::int32_t>(joined.size)}};
    for (const Joined::Member& member : joined.members) {
      waited_ns_[Index(member.rank)] += now_ns - member.came_ns;
      if (member.rank != last) clock_.BringTo(member.rank, now_ns);
      Runner(member.rank).BeginJoined(member.stream);
    }
    if (joined.remaining == 0) Schedule(joined, now_ns);
  }

  void End(Joined& joined, std::int64_t now_ns) {
    const std::vector<Joined::Member> members = std::exchange(joined.members, {});
    joined.begun = false;
    joined.finish_ns = kNever;
    Nanoseconds& end_ns = times_[Index(joined.instruction)].end_ns;
    end_ns = std::max(end_ns, Nanoseconds{now_ns});
    for (const Joined::Member& member : members) {
      clock_.BringTo(member.rank, now_ns);
      Runner(member.rank).FinishJoined(member.stream);
    }
  }

  static void Add(Joined& joined, std::int64_t rate, std::int32_t change) {
    const auto found = std::ranges::find(joined.offers, rate, &std::pair<std::int64_t, std::int32_t>::first);
    if (found == joined.offers.end()) {
      joined.offers.emplace_back(rate, change);
    } else if ((found->second += change) == 0) {
      *found = joined.offers.back();
      joined.offers.pop_back();
    }
  }

  void SetRate(Joined& joined, std::int64_t rate, std::int64_t now_ns) {
    joined.remaining -= Wide{joined.rate} * (now_ns - joined.updated_ns);
    joined.updated_ns = now_ns;
    joined.rate = rate;
    if (joined.remaining <= 0) return Schedule(joined, now_ns);
    if (rate == 0) {
      joined.finish_ns = kNever;
      return;
    }
    Schedule(joined, now_ns + static_cast<std::int64_t>((joined.remaining + rate - 1) / rate));
  }

  void Schedule(Joined& joined, std::int64_t finish_ns) {
    if (joined.finish_ns == finish_ns) return;
    joined.finish_ns = finish_ns;
    clock_.Schedule(finish_ns, static_cast<std::int32_t>(&joined - joined_.data()));
  }

  Result<RanksApart> Results() {
    RanksApart apart;
    for (std::int32_t r = 0; r < clock_.size(); ++r) {
      if (const std::int32_t stuck = Runner(r).StuckAt(); stuck >= 0) return StepRunner::Stuck(stuck);
      const Nanoseconds end_ns = Runner(r).TakeResult().end_ns;
      apart.ranks.push_back({end_ns, {waited_ns_[Index(r)]}});
      apart.step_ns = std::max(apart.step_ns, end_ns);
    }
    return apart;
  }

  const EngineStep& step_;
  internal::RankClock clock_;
  std::vector<std::vector<std::int32_t>> groups_of_;  // by communicator and rank: index into joined_
  std::vector<Joined> joined_;
  std::vector<std::int32_t> place_;  // by rank, among those that are simulated
  std::vector<std::int64_t> waited_ns_;
  std::vector<CollectiveTimes> times_;  // by instruction
};

std::vector<std::int32_t> AllRanks(std::int64_t world_size) {
  std::vector<std::int32_t> ranks(static_cast<std::size_t>(world_size));
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

}  // namespace

// [Note: ranks that own different work]
// Ranks that own the same work do the same at the same time. So of each such set the first rank is simulated,
// and a collective begins when the last of these has come to it.
Result<std::vector<internal::CollectiveTimes>> internal::TimesOfCollectives(const EngineProgram& program,
                                                                            const EngineStep& step,
                                                                            const RunOptions& options) {
  std::int64_t world_size = 1;
  for (const Communicator& group : program.groups) world_size = std::max(world_size, RanksSpanned(group));
  std::map<std::vector<std::int32_t>, std::int32_t> first_with;
  for (std::int32_t rank = 0; rank < world_size; ++rank) {
    std::vector<std::int32_t> own;
    for (const auto& [instruction, work] : step.owned) {
      const Communicator& group = program.groups[static_cast<std::size_t>(work.communicator)];
      if (PlaceInGroup(group, rank) == work.owner) own.push_back(instruction);
    }
    first_with.emplace(std::move(own), rank);
  }
  std::vector<std::int32_t> ranks;
  for (const auto& [own, rank] : first_with) ranks.push_back(rank);
  std::ranges::sort(ranks);
  Apart apart(program.groups, program, step, ranks, {}, options);
  if (Result<RanksApart> run = apart.Run(); !run) return std::unexpected(std::move(run.error()));
  return apart.times();
}

bool internal::IsOthers(const EngineProgram& program, const EngineStep& step, std::int32_t instruction) {
  const auto work = step.owned.find(instruction);
  if (work == step.owned.end()) return false;
  const Communicator& group = program.groups[static_cast<std::size_t>(work->second.communicator)];
  return PlaceInGroup(group, program.rank) != work->second.owner;
}

// Groups of a communicator own alike, each matrices of its own: experts of expert parallelism, say, or those
// of a replica. A rank has the work of its places in all of them.
std::vector<internal::OwnedWork> internal::OwnedByRank(const EngineProgram& program, const EngineStep& step) {
  std::map<CommunicatorId, std::map<std::int64_t, OwnedWork>> by_place;
  for (const auto& [instruction, work] : step.owned) {
    const EngineInstruction& code = step.code[static_cast<std::size_t>(instruction)];
    const EngineSegment& segment = program.segments[static_cast<std::size_t>(code.operand)];
    OwnedWork& of = by_place[work.communicator][work.owner];
    ++of.matrices;
    if (segment.count > 0) of.time_ns += program.operators[static_cast<std::size_t>(segment.first)].rest_ns;
  }
  std::int64_t world_size = 1;
  for (const Communicator& group : program.groups) world_size = std::max(world_size, RanksSpanned(group));
  std::vector<OwnedWork> by_rank(static_cast<std::size_t>(world_size));
  for (const auto& [id, places] : by_place) {
    const Communicator& group = program.groups[static_cast<std::size_t>(id)];
    for (std::int64_t rank = 0; rank < world_size; ++rank) {
      const auto found = places.find(PlaceInGroup(group, rank));
      if (found == places.end()) continue;
      by_rank[static_cast<std::size_t>(rank)].matrices += found->second.matrices;
      by_rank[static_cast<std::size_t>(rank)].time_ns += found->second.time_ns;
    }
  }
  return by_rank;
}

OwnedTimes TimesOfOwners(const EngineProgram& program, const EngineStep& step) {
  OwnedTimes times;
  if (step.owned.empty()) return times;
  for (const internal::OwnedWork& of : internal::OwnedByRank(program, step)) {
    ++times.ranks;
    times.owners += of.matrices > 0 ? 1 : 0;
    times.matrices += of.matrices;
    times.most_ns = std::max(times.most_ns, of.time_ns);
    times.in_all_ns += of.time_ns;
  }
  return times;
}

Result<RanksApart> RunRanksApart(const Plan& plan, const EngineProgram& program,
                                 const RanksApartOptions& options) {
  const auto bad = [](std::string message, std::string found, std::string expected) {
    return std::unexpected(
        Error{ErrorCode::kBadInput, std::move(message), "", "", std::move(found), std::move(expected)});
  };
  if (plan.world_size > kMostRanksApart)
    return bad("too many ranks to simulate each", std::to_string(plan.world_size),
               fmt::format("{} at most", kMostRanksApart));
  for (const Communicator& communicator : plan.communicators) {
    if (!Divides(communicator, plan.world_size))
      return bad("a communicator does not divide the ranks", communicator.name, "groups that are all there");
  }
  for (const Straggler& straggler : options.stragglers) {
    if (straggler.rank < 0 || straggler.rank >= plan.world_size)
      return bad("a slow rank is none of the plan's", std::to_string(straggler.rank),
                 fmt::format("0 to {}", plan.world_size - 1));
  }
  return Apart(plan.communicators, program, program.steps.back(), AllRanks(plan.world_size), options).Run();
}

std::string RanksApartText(const RanksApart& apart, Nanoseconds alike_ns) {
  Nanoseconds waited;
  std::size_t least = 0;
  for (std::size_t r = 0; r < apart.ranks.size(); ++r) {
    waited += apart.ranks[r].waited_ns;
    if (apart.ranks[r].waited_ns < apart.ranks[least].waited_ns) least = r;
  }
  const auto count = static_cast<std::int64_t>(apart.ranks.size());
  return fmt::format(
      "{} ranks apart: step {}, {} when all are alike; a rank waits {} for others, rank {} the least ({})\n",
      count, internal::Milliseconds(apart.step_ns), internal::Milliseconds(alike_ns),
      internal::Milliseconds({waited.value / count}), least,
      internal::Milliseconds(apart.ranks[least].waited_ns));
}

}  // namespace shardplan
