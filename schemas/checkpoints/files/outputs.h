// SPDX-License-Identifier: Apache-2.0
// The files that a checkpoint will have in a format and a layout.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "checkpoints/files/output_file.h"
#include "shardplan/checkpoints/checkpoint.h"

namespace shardplan {

class CheckpointOutput {
 public:
  virtual ~CheckpointOutput() = default;
  virtual std::int32_t files() const = 0;
  // The same each time. All files before have to be made once before one that says where they have what.
  virtual Result<OutputFile> Make(std::int32_t file) = 0;
};

// kUsage, kBadInput: the layout is not that of the checkpoint, or the format cannot say it.
Result<std::unique_ptr<CheckpointOutput>> MakeDistributedOutput(const Checkpoint& checkpoint,
                                                                const CheckpointRewrite& how);
// Ranks that write nothing have no file. The last one is .metadata.
class StateOutput : public CheckpointOutput {
 public:
  virtual std::int32_t FileOf(std::int64_t rank) const = 0;  // -1: none
};
std::unique_ptr<StateOutput> MakeStateOutput(StateDescription state);
// `name`: of the one file; empty: files in a folder.
Result<std::unique_ptr<CheckpointOutput>> MakeSafetensorsOutput(const Checkpoint& checkpoint,
                                                                const CheckpointRewrite& how,
                                                                const std::string& name);
Result<std::unique_ptr<CheckpointOutput>> MakeTorchSaveOutput(const Checkpoint& checkpoint,
                                                              const CheckpointRewrite& how,
                                                              const std::string& name);

}  // namespace shardplan
