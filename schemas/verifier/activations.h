// SPDX-License-Identifier: Apache-2.0
// Activations that leave for host memory and come back: buffers that are storages of the model. Segments make
// the storages and free them, instructions copy, free and allocate all of a buffer's at once; both have to
// agree.
#pragma once

#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "shardplan/schemas/alive_buffers.h"
#include "shardplan/schemas/plan.h"

namespace shardplan::verifier {

// ---- rules: "" where they hold ----

// Rule reference: a buffer has storages if its role says so, one a part, as large as a segment makes it; no
// storage is in two.
std::string WhatIsWrongWithStorages(const Plan& plan, const Buffer& buffer);
// Rule layout: activations are copied to host memory of the same storages and back, and nothing else is.
std::string LayoutOfActivations(const Plan& plan, const Instruction& copy);

// Which micro-batch of which step (as run) was copied to a host buffer last; {-1, -1}: none.
struct CopiedActivations {
  std::int32_t step = -1;
  std::int32_t microbatch = -1;
  bool operator==(const CopiedActivations&) const = default;
};
// Activations are copied, and freed, as a whole: the storages that are not there.
std::vector<StorageId> ComputeOrderOfStorages(const Buffer& activation, const std::set<StorageId>& there);
// The storages that come back are not those that went in the step's micro-batch.
bool ComputeOrderOfBroughtBack(CopiedActivations copied, CopiedActivations wanted);

// The activation buffers as segments use them, and the storages that are there.
class Activations {
 public:
  explicit Activations(const Plan& plan);

  // The buffers of which the segment makes, uses or frees a storage.
  const std::vector<ActivationTouch>& TouchedBy(SegmentId segment) const;

  // The segment has run.
  void Pass(const ActivationTouch& touch);
  // All storages are there now, or none.
  void Make(BufferId buffer);
  void Drop(BufferId buffer) { there_[buffer].clear(); }
  bool IsEmpty(BufferId buffer) const;
  const std::set<StorageId>& There(BufferId buffer) { return there_[buffer]; }

  void CopyOut(BufferId host, CopiedActivations what) { copied_[host] = what; }
  CopiedActivations CopiedTo(BufferId host) const;

 private:
  const Plan& plan_;
  std::vector<std::vector<ActivationTouch>> touched_;  // by segment
  std::map<BufferId, std::set<StorageId>> there_;
  std::map<BufferId, CopiedActivations> copied_;
};

}  // namespace shardplan::verifier
