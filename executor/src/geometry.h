// Which element of one buffer is which element of another: turns a plan's copies into runs of elements.
#pragma once

#include <cstdint>
#include <vector>

#include "shardplan/executor/device.h"
#include "shardplan/schemas/error.h"
#include "shardplan/schemas/plan.h"

namespace shardplan::executor {

// How the parameters of a unit lie in a buffer.
//   kShard: one padded piece per parameter.          kGathered: `slots` times what a rank's shard holds.
//   kWhole: parameters in their original order (padding, if any, at the end of each).
enum class Arrangement : std::uint8_t { kShard, kGathered, kWhole };
Arrangement ArrangementOf(BufferRole role);

// Elements of a buffer's part.
std::int64_t PartNumel(const Buffer& buffer, std::int32_t part);

// Makes the copies of one plan. Errors are kBadInput with a pointer into the plan.
class Geometry {
 public:
  Geometry(const Plan& plan, std::int64_t rank) : plan_(plan), rank_(rank) {}

  // The copy that an instruction means. `slots`: into how many pieces the gathered buffer of the two is cut
  // (the shard communicator's or the post-forward communicator's size); `slot`: this rank's.
  Result<CopySpec> Copy(const Instruction& instruction, std::int64_t slots, std::int64_t slot) const;

  // The number of slots of the gathered buffer that a copy_in of this shard fills one of.
  std::int64_t SlotsForShard(const Buffer& shard) const;

 private:
  // One parameter's piece or whole in a buffer.
  struct Place {
    std::int32_t parameter = -1;
    std::int32_t part = 0;
    std::int64_t offset = 0;
    std::int64_t numel = 0;
  };

  std::int64_t PiecesOf(const Buffer& buffer, std::int64_t slots) const;
  Result<std::vector<Place>> Places(BufferId buffer, std::int64_t slots) const;
  Result<CopySpec> JoinGradients(const Instruction& instruction) const;
  Result<CopySpec> FlatCopy(const Instruction& instruction, std::int64_t slots, std::int64_t slot) const;
  void AddRuns(const Instruction& instruction, const Place& src, const Place& dst, std::int64_t slots,
               std::int64_t slot, CopySpec& copy) const;
  void Gather(const UnitParameter& parameter, const Place& src, const Place& dst, std::int64_t slots,
              std::int64_t slot_numel, bool by_rows, CopySpec& copy) const;
  void Scatter(const UnitParameter& parameter, const Place& src, const Place& dst, std::int64_t slots,
               std::int64_t slot_numel, CopySpec& copy) const;

  const Plan& plan_;
  std::int64_t rank_;
};

}  // namespace shardplan::executor
