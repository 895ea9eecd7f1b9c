// SPDX-License-Identifier: Apache-2.0
#include "verifier/words/report.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <utility>

#include "shardplan/schemas/assert.h"
#include "shardplan/schemas/plan_text.h"
#include "shardplan/schemas/printable.h"

namespace shardplan {

std::string_view Name(Rule rule) {
  static constexpr std::array<std::string_view, 21> kNames = {"reference",
                                                              "use_before_unshard",
                                                              "read_before_write",
                                                              "use_unallocated",
                                                              "use_after_free",
                                                              "free_before_last_use",
                                                              "double_free",
                                                              "double_allocate",
                                                              "leak",
                                                              "write_race",
                                                              "grad_not_reduced",
                                                              "grad_division",
                                                              "wait_before_record",
                                                              "deadlock",
                                                              "collective_order",
                                                              "steady_state",
                                                              "layout",
                                                              "wrong_value",
                                                              "compute_order",
                                                              "optimizer_step",
                                                              "tables"};
  const auto index = static_cast<std::size_t>(rule);
  return index < kNames.size() ? kNames[index] : "?";
}

namespace verifier {
namespace {

// The text of `names[id]`, or the bare number where a plan refers to something that does not exist.
template <typename List, typename Id, typename Text>
std::string NameOr(const List& list, Id id, Text&& text) {
  if (id < 0 || static_cast<std::size_t>(id) >= list.size()) return fmt::format("#{}", id);
  return text(list[id]);
}

bool Exists(const Plan& plan, Position at) {
  if (at.step < 0 || at.step >= std::ssize(plan.steps)) return false;
  const std::vector<Trigger>& triggers = plan.steps[at.step].triggers;
  if (at.trigger < 0 || at.trigger >= std::ssize(triggers)) return false;
  return at.instruction >= 0 && at.instruction < std::ssize(triggers[at.trigger].instructions);
}

}  // namespace

void Reporter::Add(Rule rule, Position at, std::int64_t subject, std::string message,
                   std::vector<std::string> chain) {
  if (!reported_.emplace(rule, at, subject).second) return;
  violations_.push_back({rule, at.step, at.trigger, at.instruction, std::move(message), std::move(chain)});
}

void Reporter::Forget(std::size_t count) { violations_.resize(count); }

std::vector<Violation> Reporter::Take() {
  std::ranges::stable_sort(violations_, {}, [](const Violation& v) {
    return std::tuple(v.step, v.trigger, v.instruction, v.rule);
  });
  return std::exchange(violations_, {});
}

std::string Reporter::BufferName(BufferId buffer) const {
  return NameOr(plan_.buffers, buffer, [](const Buffer& b) { return b.name; });
}

std::string Reporter::UnitName(UnitId unit) const {
  return NameOr(plan_.units, unit, [](const Unit& u) { return u.fqn.empty() ? "the root" : u.fqn; });
}

std::string Reporter::StreamName(std::int32_t stream) const {
  if (stream == static_cast<std::int32_t>(plan_.streams.size())) return "the host";
  return NameOr(plan_.streams, stream, [](const PlanStream& s) { return "stream " + s.name; });
}

std::string Reporter::Instruction(Position at) const {
  if (at.instruction < 0) return "the start of the plan";
  SHARDPLAN_ASSERT(Exists(plan_, at), "a position is that of an instruction, or before the first");
  const Trigger& trigger = plan_.steps[at.step].triggers[at.trigger];
  shardplan::Instruction i = AsWritten(trigger, trigger.instructions[at.instruction]);
  i.reason.clear();
  i.unit = i.src = i.dst = i.communicator = -1;
  i.safe_after.clear();
  i.parts.clear();
  i.reduce_op = {};
  return shardplan::Describe(plan_, i);
}

std::string Reporter::Describe(Position at) const {
  if (at.instruction < 0) return "the start of the plan";
  SHARDPLAN_ASSERT(Exists(plan_, at), "a position is that of an instruction, or before the first");
  const PlanStep& step = plan_.steps[at.step];
  const Trigger& trigger = step.triggers[at.trigger];
  shardplan::Instruction i = AsWritten(trigger, trigger.instructions[at.instruction]);
  if (i.src >= 0 || i.dst >= 0) i.unit = -1;  // the buffers say it
  std::string text = shardplan::Describe(plan_, i) + ", at " + shardplan::Describe(plan_, trigger);
  if (plan_.steps.size() > 1) text += " (step " + step.name + ")";
  return text;
}

}  // namespace verifier

std::string Explain(const Plan& plan, const Violation& violation) {
  std::string text = fmt::format("{}: {}\n", Name(violation.rule), Printable(violation.message));
  const verifier::Position at = {violation.step, violation.trigger, violation.instruction};
  if (verifier::Exists(plan, at)) {
    const std::string where = verifier::Reporter(plan).Describe(at);
    const bool in_chain =
        std::ranges::any_of(violation.chain, [&](const std::string& link) { return link.ends_with(where); });
    if (!in_chain) text += fmt::format("  at: {}\n", Printable(where));
  }
  for (const std::string& link : violation.chain) text += fmt::format("  {}\n", Printable(link));
  return text;
}

}  // namespace shardplan
