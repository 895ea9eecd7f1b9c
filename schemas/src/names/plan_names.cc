// SPDX-License-Identifier: Apache-2.0
#include "names/plan_names.h"

namespace shardplan {

PlanNames::PlanNames(const Plan& plan) {
  const auto table = [this](RefKind kind) -> NameTable& { return tables_[static_cast<std::size_t>(kind)]; };
  for (const Unit& unit : plan.units) table(RefKind::kUnit).Add(unit.fqn);
  for (const Buffer& buffer : plan.buffers) table(RefKind::kBuffer).Add(buffer.name);
  for (const PlanStream& stream : plan.streams) table(RefKind::kStream).Add(stream.name);
  for (const std::string& event : plan.events) table(RefKind::kEvent).Add(event);
  for (const Communicator& communicator : plan.communicators)
    table(RefKind::kCommunicator).Add(communicator.name);
  for (const Segment& segment : plan.segments) table(RefKind::kSegment).Add(segment.name);
  for (const Exchange& exchange : plan.exchanges) table(RefKind::kExchange).Add(exchange.name);
}

void PlanNames::NameTable::Add(std::string_view name) {
  const auto id = static_cast<std::int32_t>(names.size());
  const auto [entry, added] = first.emplace(name, id);
  if (!added) unique[static_cast<std::size_t>(entry->second)] = false;
  names.push_back(name);
  unique.push_back(added);
}

std::string_view PlanNames::Name(RefKind kind, std::int64_t id) const {
  const auto& names = Table(kind).names;
  return id >= 0 && id < static_cast<std::int64_t>(names.size()) ? names[static_cast<std::size_t>(id)] : "";
}

bool PlanNames::IsUnique(RefKind kind, std::int64_t id) const {
  const auto& unique = Table(kind).unique;
  return id >= 0 && id < static_cast<std::int64_t>(unique.size()) && unique[static_cast<std::size_t>(id)];
}

std::optional<std::int32_t> PlanNames::Find(RefKind kind, std::string_view name) const {
  const auto& first = Table(kind).first;
  const auto entry = first.find(name);
  return entry == first.end() ? std::nullopt : std::optional(entry->second);
}

}  // namespace shardplan
