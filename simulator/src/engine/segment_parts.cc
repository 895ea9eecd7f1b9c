// SPDX-License-Identifier: Apache-2.0
#include "engine/segment_parts.h"

#include <algorithm>
#include <map>

#include "shardplan/schemas/collective_kinds.h"

namespace shardplan::internal {
namespace {

bool CutsSegment(const SegmentEntry& entry) {
  const auto* op = std::get_if<OperatorEvent>(&entry);
  return std::holds_alternative<CollectiveWaitEvent>(entry) || (op != nullptr && op->collective.has_value());
}

// NCCL runs the sends and receives of a group as one kernel, both directions at once.
void JoinTransfers(const std::vector<SegmentEntry>& entries, std::vector<SegmentPart>& parts) {
  struct Group {
    SegmentPart* first = nullptr;
    Bytes sent, received;
  };
  std::map<std::int32_t, Group> groups;
  for (SegmentPart& part : parts) {
    const auto* op = std::get_if<OperatorEvent>(&entries[static_cast<std::size_t>(part.entry)]);
    if (part.operators > 0 || op == nullptr) continue;
    const ModelCollective& collective = *op->collective;
    part.size_bytes = collective.size_bytes;
    if (collective.batch < 0 || DescriptionOf(collective.kind).movement != CollectiveMovement::kTransfer)
      continue;
    Group& group = groups[collective.batch];
    (collective.kind == CollectiveKind::kSend ? group.sent : group.received) += collective.size_bytes;
    part.joined = group.first != nullptr;
    if (group.first == nullptr) group.first = &part;
  }
  for (const auto& [batch, group] : groups) group.first->size_bytes = std::max(group.sent, group.received);
}

}  // namespace

std::vector<SegmentPart> PartsOf(const Segment& segment) {
  std::vector<SegmentPart> parts;
  if (std::ranges::none_of(segment.entries, CutsSegment)) return parts;
  bool in_run = false;
  for (std::int32_t e = 0; e < std::ssize(segment.entries); ++e) {
    const SegmentEntry& entry = segment.entries[static_cast<std::size_t>(e)];
    if (CutsSegment(entry)) {
      parts.push_back({.entry = e});
      in_run = false;
    } else if (std::holds_alternative<OperatorEvent>(entry)) {
      if (!in_run) parts.push_back({.entry = e});
      in_run = true;
      ++parts.back().operators;
    }
  }
  JoinTransfers(segment.entries, parts);
  return parts;
}

}  // namespace shardplan::internal
