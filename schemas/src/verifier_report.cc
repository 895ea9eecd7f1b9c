#include "verifier_report.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <utility>

namespace shardplan {

std::string_view Name(Rule rule) {
  static constexpr std::array<std::string_view, 16> kNames = {
      "reference",          "use_before_unshard", "read_before_write",
      "use_unallocated",    "use_after_free",     "free_before_last_use",
      "double_free",        "double_allocate",    "leak",
      "write_race",         "grad_not_reduced",   "grad_division",
      "wait_before_record", "deadlock",           "collective_order",
      "steady_state"};
  return kNames[static_cast<std::size_t>(rule)];
}

namespace verifier {
namespace {

// The text of `names[id]`, or the bare number where a plan refers to something that does not exist.
template <typename List, typename Id, typename Text>
std::string NameOr(const List& list, Id id, Text&& text) {
  if (id < 0 || static_cast<std::size_t>(id) >= list.size()) return fmt::format("#{}", id);
  return text(list[id]);
}

std::string TriggerText(const Trigger& trigger, const std::string& unit) {
  std::string text(Name(trigger.kind));
  if (trigger.unit >= 0) text += " of " + unit;
  if (trigger.microbatch > 0) text += fmt::format(", micro-batch {}", trigger.microbatch);
  if (trigger.occurrence > 0) text += fmt::format(", occurrence {}", trigger.occurrence);
  return text;
}

}  // namespace

void Reporter::Add(Rule rule, Position at, std::int64_t subject, std::string message,
                   std::vector<std::string> chain) {
  if (!reported_.emplace(rule, at, subject).second) return;
  violations_.push_back({rule, at.step, at.trigger, at.instruction, std::move(message), std::move(chain)});
}

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
  const shardplan::Instruction& i = plan_.steps[at.step].triggers[at.trigger].instructions[at.instruction];
  std::string text(Name(i.kind));
  if (i.segment >= 0) {
    text += NameOr(plan_.segments, i.segment, [](const Segment& s) { return " '" + s.name + "'"; });
  }
  if (i.src >= 0) text += " " + BufferName(i.src);
  if (i.dst >= 0) text += (i.src >= 0 ? " -> " : " ") + BufferName(i.dst);
  if (i.event >= 0) {
    text += NameOr(plan_.events, i.event, [](const std::string& name) { return " event " + name; });
  }
  if (i.communicator >= 0) {
    text +=
        NameOr(plan_.communicators, i.communicator, [](const Communicator& c) { return " via " + c.name; });
  }
  if (i.stream >= 0) text += " on " + StreamName(i.stream);
  return text;
}

std::string Reporter::Describe(Position at) const {
  if (at.instruction < 0) return "the start of the plan";
  const PlanStep& step = plan_.steps[at.step];
  const Trigger& trigger = step.triggers[at.trigger];
  std::string text = Instruction(at) + ", at " + TriggerText(trigger, UnitName(trigger.unit));
  if (plan_.steps.size() > 1) text += " (step " + step.name + ")";
  return text;
}

}  // namespace verifier
}  // namespace shardplan
