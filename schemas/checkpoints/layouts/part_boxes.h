// SPDX-License-Identifier: Apache-2.0
// The boxes of a tensor that ranks hold.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "shardplan/schemas/reshard.h"

namespace shardplan {

using BoxCoordinates = std::array<std::int64_t, kMostTensorDims>;

// Elements of the tensor that lie at equal strides in a rank's storage.
struct PartBox {
  BoxCoordinates low = {}, high = {};
  BoxCoordinates strides = {};  // in the storage, elements
  std::int64_t at = 0;          // of `low` there
};

// The same elements on several ranks.
struct HeldPart {
  std::vector<std::int64_t> ranks;  // ascending
  std::vector<PartBox> boxes;
};

// All parts of a tensor that hold anything.
std::vector<HeldPart> HeldPartsOf(const StateLayout& layout, const StateTensor& tensor);

// The boxes of parts, to find those that meet a box.
class BoxIndex {
 public:
  BoxIndex(const std::vector<HeldPart>& parts, std::size_t dims);

  struct Entry {
    std::int32_t part = 0, box = 0;
  };
  // Calls visit(entry) for boxes that may meet `box`, in a fixed order.
  template <typename Visit>
  void ForEachNear(const PartBox& box, const Visit& visit) const {
    // All that begin before the box ends, back to where none reaches it any more.
    std::size_t last = Before(box.high[dim_]);
    while (last-- > 0) {
      if (reach_[last] <= box.low[dim_]) return;
      if (highs_[last] > box.low[dim_]) visit(entries_[last]);
    }
  }

 private:
  std::size_t Before(std::int64_t high) const;

  std::size_t dim_ = 0;  // the dimension that is cut most
  std::vector<Entry> entries_;
  std::vector<std::int64_t> lows_, highs_;
  std::vector<std::int64_t> reach_;  // the highest end of an entry and all before it
};

// The copy of what two boxes share, without ranks; false: nothing.
bool Meet(const PartBox& source, const PartBox& target, std::size_t dims, std::int64_t element_bytes,
          ReshardCopy& copy);

}  // namespace shardplan
