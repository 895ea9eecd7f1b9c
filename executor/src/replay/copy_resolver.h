// SPDX-License-Identifier: Apache-2.0
// Which element of one buffer is which element of another: turns a plan's copies into runs of elements.
#pragma once

#include <cstdint>
#include <vector>

#include "shardplan/executor/device.h"
#include "shardplan/schemas/buffer_roles.h"
#include "shardplan/schemas/error.h"
#include "shardplan/schemas/plan.h"

namespace shardplan::executor {

// Elements of a buffer's part.
std::int64_t PartNumel(const Buffer& buffer, std::int32_t part);

// The dtype of the elements in a buffer's part: a unit may hold parameters of several dtypes, each with a
// part of its own.
DType DTypeOfPart(const Plan& plan, const Buffer& buffer, std::int32_t part);

// Makes the copies of one plan. Errors are kBadInput with a pointer into the plan.
class CopyResolver {
 public:
  CopyResolver(const Plan& plan, std::int64_t rank) : plan_(plan), rank_(rank) {}

  // The copy that an instruction means. `slots`: into how many pieces the gathered buffer of the two is cut
  // (the shard communicator's or the post-forward communicator's size); `slot`: this rank's.
  Result<CopySpec> Copy(const Instruction& instruction, std::int64_t slots, std::int64_t slot) const;

  // The number of slots of the gathered buffer that a copy_in of this shard fills one of.
  std::int64_t SlotsForShard(const Buffer& shard) const;

 private:
  // One parameter's piece or whole in a buffer. Further tensors of an all-gather extension lie behind it.
  struct Place {
    std::int32_t parameter = -1;
    std::int32_t part = 0;
    std::int64_t offset_bytes = 0;
    std::int64_t numel = 0;
    std::int64_t bytes = 0;  // with all tensors of an extension
    DType dtype = DType::kFloat32;
  };
  // Like CopyRun, with offsets and strides in bytes.
  struct Stretch {
    std::int32_t src_part = 0;
    std::int32_t dst_part = 0;
    std::int64_t src_bytes = 0;
    std::int64_t dst_bytes = 0;
    std::int64_t rows = 1;
    std::int64_t row_numel = 0;
    std::int64_t src_stride_bytes = 0;
    std::int64_t dst_stride_bytes = 0;
    DType src_dtype = DType::kFloat32;
    DType dst_dtype = DType::kFloat32;
  };
  struct Zeros {
    std::int32_t part = 0;
    std::int64_t bytes_before = 0;
    std::int64_t bytes = 0;
  };
  struct Moves {
    std::vector<Stretch> stretches;
    std::vector<Zeros> zeros;
  };

  std::int64_t PiecesOf(const Buffer& buffer, std::int64_t slots) const;
  Place PlaceOf(const Buffer& buffer, std::int32_t parameter, std::int64_t pieces) const;
  Result<std::vector<Place>> Places(BufferId buffer, std::int64_t slots) const;
  Result<CopySpec> JoinGradients(const Instruction& instruction) const;
  Result<CopySpec> FlatCopy(const Instruction& instruction, std::int64_t slots, std::int64_t slot) const;
  void AddMovement(const Instruction& instruction, const Place& src, const Place& dst, std::int64_t slots,
                   std::int64_t slot, Moves& movement) const;
  void Gather(const UnitParameter& parameter, const Place& src, const Place& dst, std::int64_t slots,
              std::int64_t slot_bytes, bool by_rows, Moves& movement) const;
  void Scatter(const UnitParameter& parameter, const Place& src, const Place& dst, std::int64_t slots,
               std::int64_t first_level, std::int64_t slot_bytes, Moves& movement) const;
  Result<CopySpec> InElements(const Instruction& instruction, const Moves& movement) const;

  const Plan& plan_;
  std::int64_t rank_;
};

}  // namespace shardplan::executor
