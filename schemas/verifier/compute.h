// SPDX-License-Identifier: Apache-2.0
// The model's own compute: which segments run, in which order, for which micro-batch. A plan says it three
// times over, and the three have to agree. They are the place in the model and the calls of the user, the
// storages that a segment reads, makes and frees (by micro-batch), and the triggers that the host passes.
#pragma once

#include <cstdint>
#include <map>
#include <utility>
#include <vector>

#include "shardplan/schemas/plan.h"
#include "shardplan/schemas/pytorch_rules.h"
#include "verifier/clocks.h"
#include "verifier/state.h"
#include "verifier/words/report.h"
#include "verifier/words/words.h"

namespace shardplan::verifier {

class Compute {
 public:
  // `plan` has passed CheckTables.
  Compute(const Plan& plan, const Clocks& clocks, Words& words, Reporter& reporter);

  // Once: what the steps say of each other, and segments that none runs.
  void CheckSteps();

  void BeginStep();
  void Pass(const Trigger& trigger);
  // The segment runs.
  void Pass(const Instruction& compute, const Trigger& trigger, Position at);
  // ... as `work`: what it reads of the model's tensors is written by then, and what it writes or frees is
  // not in use.
  void Use(SegmentId id, std::int32_t microbatch, const Work& work);
  // These storages of the micro-batch are there from here on, or gone: by an instruction, and not by a
  // segment.
  void Take(const std::vector<StorageId>& storages, std::int32_t microbatch, bool there);
  // Whether the user's calls of the step may run the micro-batch with the model in evaluation.
  bool MayEvaluate(std::int32_t microbatch, Position at) const;

 private:
  enum class Life : std::uint8_t { kAbsent, kThere };

  // The step runs what the user's calls make the model do, in its order.
  void CheckOrder(std::int32_t step);
  void CheckGradients(SegmentId id, std::int32_t microbatch, Position at);
  void CheckStorages(SegmentId id, std::int32_t microbatch, Position at);
  void Add(Position at, SegmentId segment, std::string what);
  Life* Of(StorageId storage, std::int32_t microbatch);

  // The latest uses of a tensor of the model.
  struct Uses {
    Work written;
    std::vector<Work> read;  // since then
  };
  void Read(Uses& uses, StorageId storage, const Work& work);
  void Write(Uses& uses, StorageId storage, const Work& work);

  const Plan& plan_;
  const Clocks& clocks_;
  Words& words_;
  Reporter& reporter_;
  const PyTorchRules rules_;
  std::vector<UnitId> entered_;             // units whose forward is under way, innermost last
  std::vector<Life> lives_;                 // by storage and micro-batch
  std::vector<char> from_outside_;          // by storage: an input, a buffer of the model, a gradient
  std::vector<char> is_gathered_;           // by unit: for the model
  std::vector<std::int32_t> read_in_step_;  // by unit and micro-batch: by a forward
  std::int32_t microbatches_ = 1;
  std::int32_t step_ = 0;            // counted as run
  bool joins_microbatches_ = false;  // a backward of several, and its segments say one
  std::vector<char> forwards_say_;   // by unit: forwards say where they read it
  bool follows_storages_ = true;
  bool on_several_streams_ = false;                          // else the one stream orders them
  std::map<std::pair<StorageId, std::int32_t>, Uses> uses_;  // by storage and micro-batch
};

}  // namespace shardplan::verifier
