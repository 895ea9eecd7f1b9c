// SPDX-License-Identifier: Apache-2.0
// The readers of the formats, and what they share.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "checkpoints/files/input_file.h"
#include "checkpoints/files/torch_archive.h"
#include "shardplan/checkpoints/checkpoint.h"

namespace shardplan {

Result<Checkpoint> ReadTorchSave(const std::string& path);
// A folder with a file .metadata.
Result<Checkpoint> ReadDistributed(const std::string& folder);
// Files whose names are given with or without an index (path of the index, empty: none).
Result<Checkpoint> ReadSafetensors(const std::string& path);

// "a.0.b" as torch.distributed.checkpoint joins keys.
std::string JoinKeys(const std::vector<CheckpointKey>& keys);
// Adds a file to the checkpoint; its index.
std::int32_t AddFile(Checkpoint& checkpoint, const InputFile& file);
// Strides of a contiguous tensor.
std::vector<std::int64_t> RowMajorStrides(const std::vector<std::int64_t>& size);
// -1: more than numbers hold, or a negative extent.
std::int64_t CheckedNumel(const std::vector<std::int64_t>& shape, DType dtype);

}  // namespace shardplan
