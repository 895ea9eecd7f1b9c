// SPDX-License-Identifier: Apache-2.0
// A training state in memory as a torch.distributed.checkpoint directory (docs/guide/checkpoints.md): every
// rank writes what it holds to a file of its own, and reads boxes of tensors from any checkpoint.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "shardplan/checkpoints/checkpoint.h"
#include "shardplan/checkpoints/state_layout.h"
#include "shardplan/schemas/error.h"

namespace shardplan {

// A box of a tensor that a rank writes. Its elements lie side by side in the rank's memory.
struct StateBox {
  std::int32_t tensor = 0;
  std::int64_t rank = 0;
  std::vector<std::int64_t> low, size;
  std::int64_t offset_bytes = 0;  // in the rank's storage of the tensor, or of its flat buffer
  bool operator==(const StateBox&) const = default;
};

// The same on all ranks.
struct StateDescription {
  std::vector<CheckpointTensor> tensors;  // without pieces
  std::vector<StateBox> boxes;  // those of a tensor side by side; each element is in one, none is empty
  std::vector<CheckpointObject> objects;                        // rank 0 writes them
  std::map<std::string, std::vector<CheckpointKey>> keys = {};  // as Checkpoint::keys
};

// One rank writes what several hold: the one with the fewest bytes so far.
StateDescription DescribeState(const StateLayout& layout);

// The boxes of a rank's part of a tensor, in the order of its storage.
std::vector<StateBox> BoxesOf(const StateLayout& layout, std::int32_t tensor, std::int64_t rank);

// Writing, in this order. `path` is whole or absent (with `replaces`: old or new): until FinishState the
// files lie beside it, in .shardplan-<name>.partial.
//
// On one rank, before the others: kUsage: `path` is there; kEnvironment: it cannot be written.
Status BeginState(const std::string& path, bool replaces);
// On every rank: its file, on the disk. `bytes(box)`: of StateDescription::boxes, by index; asked for once,
// in order, and used before the next is asked for. kInternal: of another size than the box has.
using BoxBytes = std::function<Result<std::span<const std::byte>>(std::size_t box)>;
Status WriteStateOfRank(const StateDescription& state, const std::string& path, std::int64_t rank,
                        const BoxBytes& bytes);
// On one rank, when all have written.
Status FinishState(const StateDescription& state, const std::string& path, bool replaces);
// In its place, when one could not.
void GiveUpState(const std::string& path);

// Boxes of the tensors of a checkpoint, which outlives it.
class StateReader {
 public:
  // kBadInput: a file is another one than when the checkpoint was read.
  static Result<StateReader> Open(const Checkpoint& checkpoint);
  StateReader(StateReader&&) noexcept;
  StateReader& operator=(StateReader&&) noexcept;
  ~StateReader();

  // Index of a tensor; -1: there is none.
  std::int32_t Find(const std::string& name) const;
  // The elements of the box in row-major order; `to` has room for just these. kBadInput: a damaged file.
  Status Read(std::int32_t tensor, const std::vector<std::int64_t>& low,
              const std::vector<std::int64_t>& size, std::span<std::byte> to);
  // kBadInput: a file has changed since.
  Status CheckUnchanged() const;

 private:
  struct Impl;
  explicit StateReader(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace shardplan
