// SPDX-License-Identifier: Apache-2.0
// A plan read part by part: the memory is that of the plan and of one part of its text, not of the whole
// text and all of its values.
//
// [Note: two readers] This one reads canonical documents that are right. Whatever it does not know, or finds
// wrong, is read again as a whole (JsonTape), which says what is wrong and where.
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "shardplan/schemas/plan.h"

namespace shardplan {

// The bytes of a document, in memory or in a file.
class DocumentBytes {
 public:
  virtual ~DocumentBytes() = default;
  virtual std::size_t size() const = 0;
  // [begin, end) of them, valid until the next call; shorter where they cannot be read.
  virtual std::string_view Read(std::size_t begin, std::size_t end) = 0;
};

// nullopt: not a plan, or not one that this reader reads.
std::optional<Plan> ReadPlanByParts(DocumentBytes& bytes);
std::optional<Plan> ReadPlanByParts(std::string_view text);

}  // namespace shardplan
