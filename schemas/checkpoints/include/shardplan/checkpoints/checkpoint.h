// SPDX-License-Identifier: Apache-2.0
// Checkpoints in files (docs/guide/checkpoints.md): safetensors, torch.distributed.checkpoint directories and
// torch.save files, read without running anything that they hold, and rewritten in another layout.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "shardplan/checkpoints/reshard.h"
#include "shardplan/schemas/dtype.h"
#include "shardplan/schemas/error.h"
#include "shardplan/schemas/reshard.h"

namespace shardplan {

enum class CheckpointFormat : std::uint8_t { kDistributed, kSafetensors, kTorchSave };

// A box of a tensor in a file: element `low` lies at byte `offset`, its neighbours at `strides` (elements).
struct CheckpointPiece {
  std::int32_t file = 0;
  std::int64_t offset = 0;
  std::vector<std::int64_t> low, size, strides;
  bool operator==(const CheckpointPiece&) const = default;
};

struct CheckpointTensor {
  std::string name;
  DType dtype = DType::kFloat32;
  std::vector<std::int64_t> shape;
  std::vector<CheckpointPiece> pieces;  // each element is in one of them
};

// A value that is no tensor, as the bytes of a torch.save file.
struct CheckpointObject {
  std::string name;
  std::string archive;
};

// A key of the nested dicts, lists and tuples that a name comes from.
struct CheckpointKey {
  enum class Kind : std::uint8_t { kText, kNumber, kIndex, kItem };  // kIndex: of a list; kItem: of a tuple
  Kind kind = Kind::kText;
  std::string text;  // in decimals, unless it is kText
  bool IsPlace() const { return kind == Kind::kIndex || kind == Kind::kItem; }
  bool operator==(const CheckpointKey&) const = default;
};

struct CheckpointFile {
  std::string path;
  std::int64_t size_bytes = 0;
  std::int64_t modified_ns = 0;
};

// The contents of a checkpoint without the tensors' bytes.
struct Checkpoint {
  CheckpointFormat format = CheckpointFormat::kDistributed;
  std::string path;
  std::vector<CheckpointFile> files;
  std::vector<CheckpointTensor> tensors;
  std::vector<CheckpointObject> objects;
  std::map<std::string, std::vector<CheckpointKey>> keys;  // by name; none: the name is the one key
};

// Reads what `path` holds: a folder with .metadata, a folder with safetensors, or a file of torch.save or
// safetensors. kBadInput with file, position, found and expected for whatever is damaged or not supported.
Result<Checkpoint> ReadCheckpoint(const std::string& path);

// Bytes of all tensors.
std::int64_t TensorBytes(const Checkpoint& checkpoint);

// How a checkpoint is written anew.
struct CheckpointRewrite {
  CheckpointFormat format = CheckpointFormat::kDistributed;
  // The layout of every tensor of the checkpoint, by name. Distributed: each rank writes a file with its
  // part; one rank writes what several hold. Otherwise files hold whole tensors: one a rank (safetensors), or
  // one in all (torch.save).
  StateLayout layout;
  bool tensors_only = false;                        // leaves out what is no tensor
  bool verify = false;                              // reads all that was written, and compares its checksums
  std::int64_t budget_bytes = kUsualReshardBudget;  // of tensors' bytes in memory
  std::function<void(std::int64_t done_bytes, std::int64_t total_bytes)> progress = {};
};

struct CheckpointRewritten {
  std::int64_t files = 0;
  std::int64_t bytes = 0;
  std::int64_t kept_bytes = 0;  // of a run that was ended before
  bool was_there = false;       // whole already, of the same checkpoint and layout
};

// Writes `path`, which is whole or absent: until then the files lie beside it, in .shardplan-<name>.partial,
// with the checksums of what is written. A run with the same arguments goes on with them. The checkpoint's
// files are only read. kUsage: `path` is there, or in the checkpoint; kBadInput: a file of the checkpoint is
// damaged or changes; kEnvironment: no space, or another process writes the same.
Result<CheckpointRewritten> RewriteCheckpoint(const Checkpoint& checkpoint, const std::string& path,
                                              const CheckpointRewrite& how);

enum class CheckpointLayout : std::uint8_t { kPerParameter, kFlat, kWhole };

struct CheckpointLayoutOptions {
  CheckpointLayout layout = CheckpointLayout::kPerParameter;
  // "replicate" holds copies, every other dimension shards.
  std::vector<StrategyMeshDim> mesh;
  // kFlat: the modules whose parameters lie together (FQNs or patterns, as unit rules); the rest is the
  // root's.
  std::vector<std::string> units = {};
};

// The places of a checkpoint's tensors on the ranks of a mesh. kPerParameter: rows of each. kFlat: the
// parameters of a unit one behind the other, and likewise each kind of optimizer state that has their shapes;
// what belongs to no parameter is whole on all ranks. A name is a parameter's behind "model.", where any name
// begins so, and a state's behind "state." ("optimizer.state.layers.0.weight.exp_avg").
Result<StateLayout> LayoutOfCheckpoint(const Checkpoint& checkpoint, const CheckpointLayoutOptions& options);

// `layout`, of parameters and states by the names of a plan ("layers.0.weight",
// "state.layers.0.weight.exp_avg"), for the checkpoint's names. kBadInput: it lacks a tensor of the
// checkpoint. `lenient`: that is whole on all ranks then.
Result<StateLayout> LayoutForCheckpoint(const Checkpoint& checkpoint, const StateLayout& layout,
                                        bool lenient);

// A training state in memory as a torch.distributed.checkpoint directory (docs/guide/checkpoints.md): every
// rank writes what it holds to a file of its own, and reads boxes of tensors from any checkpoint.

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
