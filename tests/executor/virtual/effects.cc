// SPDX-License-Identifier: Apache-2.0
#include "tests/executor/virtual/effects.h"

#include <algorithm>
#include <map>
#include <set>
#include <tuple>
#include <vector>

namespace shardplan::test {
namespace {

using Place = std::tuple<std::size_t, std::size_t, std::size_t>;  // step, trigger, instruction

bool MovesParameters(const Instruction& i) {
  using enum InstructionKind;
  return i.kind == kCopyIn || i.kind == kAllGather || i.kind == kCopyOut || i.kind == kCopyToDevice;
}

// Buffers that the ranks of fsdp1 compare: counts and indices that the model does not look at.
bool IsOrderCheck(const Plan& plan, const Instruction& i) {
  const auto is_one = [&](BufferId id) {
    return id >= 0 && plan.buffers[id].role == BufferRole::kOrderCheck;
  };
  return is_one(i.src) || is_one(i.dst);
}

bool IsAloneInPlace(const Plan& plan, const Instruction& i) {
  using enum InstructionKind;
  const bool collective = i.kind == kAllGather || i.kind == kReduceScatter || i.kind == kAllReduce;
  if (!collective || plan.communicators[i.communicator].size > 1) return false;
  return i.dst < 0 || i.dst == i.src;
}

// Walks the steps in host order, the steady ones twice, and notes which moves somebody reads.
class Readers {
 public:
  Readers(const Plan& plan, const std::set<Place>& idle)
      : plan_(plan), idle_(idle), bound_(plan.units.size(), -1) {
    for (std::size_t s = 0; s < plan.steps.size(); ++s) Walk(s);
    for (auto s = static_cast<std::size_t>(plan.steady_step); s < plan.steps.size(); ++s) Walk(s);
    while (!written_.empty()) Read(written_.begin()->first);  // of what is left nobody knows
  }
  bool AnyReads(const Place& place) const { return read_.contains(place); }

 private:
  void Walk(std::size_t s) {
    for (std::size_t t = 0; t < plan_.steps[s].triggers.size(); ++t) {
      const std::vector<Instruction>& instructions = plan_.steps[s].triggers[t].instructions;
      for (std::size_t i = 0; i < instructions.size(); ++i) {
        if (!idle_.contains({s, t, i})) Visit(instructions[i], {s, t, i});
      }
    }
  }
  void Visit(const Instruction& i, const Place& place) {
    if (i.kind == InstructionKind::kFree) {
      written_.erase(i.src);
    } else if (i.kind == InstructionKind::kBindUnsharded) {
      bound_[plan_.buffers[i.src].unit] = i.src;
    } else if (i.kind == InstructionKind::kBindSharded) {
      bound_[plan_.buffers[i.src].unit] = -1;
    } else if (i.kind == InstructionKind::kCompute) {
      for (const UnitId unit : plan_.segments[i.segment].reads) Read(bound_[unit]);
    } else if (MovesParameters(i)) {
      if (i.src != i.dst) Read(i.src);
      written_[i.dst].push_back(place);
    } else if (i.src >= 0) {
      Read(i.src);
    }
  }
  void Read(BufferId buffer) {
    const auto found = written_.find(buffer);
    if (found == written_.end()) return;
    read_.insert(found->second.begin(), found->second.end());
    written_.erase(found);
  }

  const Plan& plan_;
  const std::set<Place>& idle_;
  std::vector<BufferId> bound_;
  std::map<BufferId, std::vector<Place>> written_;  // moves into a buffer since it was read
  std::set<Place> read_;
};

}  // namespace

Plan WithoutIdleWork(Plan plan, bool unread_moves) {
  std::set<Place> idle;
  std::size_t known = 0;
  do {
    known = idle.size();
    const Readers readers(plan, idle);
    for (std::size_t s = 0; s < plan.steps.size(); ++s) {
      for (std::size_t t = 0; t < plan.steps[s].triggers.size(); ++t) {
        const std::vector<Instruction>& instructions = plan.steps[s].triggers[t].instructions;
        for (std::size_t i = 0; i < instructions.size(); ++i) {
          const Place place = {s, t, i};
          const bool unread = unread_moves && MovesParameters(instructions[i]) && !readers.AnyReads(place);
          if (unread || IsAloneInPlace(plan, instructions[i]) || IsOrderCheck(plan, instructions[i]))
            idle.insert(place);
        }
      }
    }
  } while (idle.size() > known);
  for (auto place = idle.rbegin(); place != idle.rend(); ++place) {
    const auto [s, t, i] = *place;
    std::vector<Instruction>& instructions = plan.steps[s].triggers[t].instructions.Edit();
    instructions.erase(instructions.begin() + static_cast<std::ptrdiff_t>(i));
  }
  return plan;
}

}  // namespace shardplan::test
