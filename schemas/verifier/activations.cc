// SPDX-License-Identifier: Apache-2.0
#include "verifier/activations.h"

#include <fmt/format.h>

#include <algorithm>
#include <variant>

#include "shardplan/schemas/layout.h"

namespace shardplan::verifier {

std::string WhatIsWrongWithStorages(const Plan& plan, const Buffer& buffer) {
  if (!IsActivation(buffer.role)) {
    return buffer.storages.empty() ? "" : fmt::format("role {} has no storages", Name(buffer.role));
  }
  if (buffer.unit < 0) return "activations are of a unit";
  if (buffer.storages.empty() || buffer.storages.size() != buffer.parts_bytes.size()) {
    return fmt::format("{} storages and {} parts, and each part is a storage", buffer.storages.size(),
                       buffer.parts_bytes.size());
  }
  const bool on_device = buffer.role == BufferRole::kActivation;
  if (on_device && buffer.persistent) return "the model's segments make activations, in each step";
  std::map<StorageId, Bytes> wanted;
  for (std::size_t p = 0; p < buffer.storages.size(); ++p) {
    if (!wanted.emplace(buffer.storages[p], buffer.parts_bytes[p]).second) {
      return fmt::format("storage {} is two of its parts", buffer.storages[p]);
    }
  }
  for (const Segment& segment : plan.segments) {
    for (const SegmentEntry& entry : segment.entries) {
      const auto* born = std::get_if<AllocateEvent>(&entry);
      const auto found = born == nullptr ? wanted.end() : wanted.find(born->storage);
      if (found == wanted.end()) continue;
      if (found->second != born->size_bytes) {
        return fmt::format("storage {} has {} bytes, and its part {}", born->storage, born->size_bytes.value,
                           found->second.value);
      }
      wanted.erase(found);
    }
  }
  if (!wanted.empty()) return fmt::format("no segment makes storage {}", wanted.begin()->first);
  for (const Buffer& other : plan.buffers) {
    if (!on_device || &other == &buffer || other.role != buffer.role) continue;
    for (const StorageId storage : other.storages) {
      if (std::ranges::find(buffer.storages, storage) == buffer.storages.end()) continue;
      return fmt::format("storage {} is in {}, too", storage, other.name);
    }
  }
  return {};
}

std::string LayoutOfActivations(const Plan& plan, const Instruction& copy) {
  const Buffer& from = plan.buffers[copy.src];
  const Buffer& to = plan.buffers[copy.dst];
  if (!IsActivation(from.role) && !IsActivation(to.role)) return {};
  const bool out = copy.kind == InstructionKind::kCopyToHost && from.role == BufferRole::kActivation &&
                   to.role == BufferRole::kActivationHost;
  const bool back = copy.kind == InstructionKind::kCopyToDevice && from.role == BufferRole::kActivationHost &&
                    to.role == BufferRole::kActivation;
  if (!out && !back) return "activations are copied to their place in host memory, and back";
  return from.storages == to.storages ? std::string() : "they are of different storages";
}

std::vector<StorageId> ComputeOrderOfStorages(const Buffer& activation, const std::set<StorageId>& there) {
  std::vector<StorageId> missing;
  for (const StorageId storage : activation.storages) {
    if (!there.contains(storage)) missing.push_back(storage);
  }
  return missing;
}

bool ComputeOrderOfBroughtBack(CopiedActivations copied, CopiedActivations wanted) {
  return copied.step >= 0 && copied != wanted;
}

Activations::Activations(const Plan& plan) : plan_(plan), touched_(ActivationsTouched(plan)) {}

const std::vector<ActivationTouch>& Activations::TouchedBy(SegmentId segment) const {
  return touched_[static_cast<std::size_t>(segment)];
}

void Activations::Pass(const ActivationTouch& touch) {
  std::set<StorageId>& there = there_[touch.buffer];
  there.insert(touch.made.begin(), touch.made.end());
  for (const StorageId storage : touch.freed) there.erase(storage);
}

void Activations::Make(BufferId buffer) {
  const std::vector<StorageId>& storages = plan_.buffers[buffer].storages;
  there_[buffer] = {storages.begin(), storages.end()};
}

bool Activations::IsEmpty(BufferId buffer) const {
  const auto there = there_.find(buffer);
  return there == there_.end() || there->second.empty();
}

CopiedActivations Activations::CopiedTo(BufferId host) const {
  const auto found = copied_.find(host);
  return found == copied_.end() ? CopiedActivations{} : found->second;
}

}  // namespace shardplan::verifier
