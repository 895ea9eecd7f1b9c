// SPDX-License-Identifier: Apache-2.0
#include "tests/schemas/verifier/rules.h"

namespace shardplan::test {

std::set<std::string> RulesOf(const std::vector<Violation>& violations) {
  std::set<std::string> rules;
  for (const Violation& v : violations) rules.emplace(Name(v.rule));
  return rules;
}
std::set<std::string> RulesOf(const Plan& plan) { return RulesOf(Verify(plan)); }

BufferId BufferNamed(const Plan& plan, const std::string& name) {
  for (std::size_t b = 0; b < plan.buffers.size(); ++b) {
    if (plan.buffers[b].name == name) return static_cast<BufferId>(b);
  }
  ADD_FAILURE() << "no buffer " << name;
  return -1;
}
StreamId StreamNamed(const Plan& plan, const std::string& name) {
  for (std::size_t s = 0; s < plan.streams.size(); ++s) {
    if (plan.streams[s].name == name) return static_cast<StreamId>(s);
  }
  ADD_FAILURE() << "no stream " << name;
  return -1;
}

std::vector<Spot> Steady(const Plan& plan, InstructionKind kind, const std::string& buffer) {
  std::vector<Spot> spots = SpotsOf(plan, kind);
  std::erase_if(spots, [&](Spot spot) {
    if (spot.step != 1) return true;
    if (buffer.empty()) return false;
    const Instruction& i = InstructionAt(plan, spot);
    const BufferId id = BufferNamed(plan, buffer);
    return i.src != id && i.dst != id;
  });
  EXPECT_FALSE(spots.empty()) << Name(kind) << " " << buffer;
  return spots;
}

Spot WaitBefore(const Plan& plan, Spot spot, StreamId stream) {
  Spot found = spot;
  for (const Spot s : SpotsOf(plan, InstructionKind::kWait)) {
    const bool before =
        s.step == spot.step &&
        (s.trigger < spot.trigger || (s.trigger == spot.trigger && s.instruction < spot.instruction));
    if (before && InstructionAt(plan, s).stream == stream) found = s;
  }
  EXPECT_TRUE(found.trigger != spot.trigger || found.instruction != spot.instruction);
  return found;
}

}  // namespace shardplan::test
